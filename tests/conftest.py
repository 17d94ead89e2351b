"""Strictness for every test: silent rank or dtype promotion, key reuse and legacy keys are errors."""

import importlib.metadata
import os

# Tests compile much and run little.  Set before jax is imported; XLA aborts at a flag it does not know, so by version.
_known = importlib.metadata.version("jaxlib").startswith("0.10.")
_flags = " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1" * _known  # 4.3 s -> 1.8 s a program
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0" + _flags)

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_legacy_prng_key", "error")
jax.config.update("jax_debug_key_reuse", True)
jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_traceback_in_locations_limit", 1)  # lowering writes less; scopes' names, which tests read, stay


@pytest.fixture(autouse=True, scope="module")
def free_compiled_programs():
    """About 80 compiled loops in one process exhaust memory maps."""
    yield
    jax.clear_caches()
