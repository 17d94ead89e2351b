"""Strictness for every test: silent rank or dtype promotion, key reuse and legacy keys are errors."""

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_legacy_prng_key", "error")
jax.config.update("jax_debug_key_reuse", True)
jax.config.update("jax_default_matmul_precision", "highest")


@pytest.fixture(autouse=True, scope="module")
def free_compiled_programs():
    """About 80 compiled loops in one process exhaust memory maps."""
    yield
    jax.clear_caches()
