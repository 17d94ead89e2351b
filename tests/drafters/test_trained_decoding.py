"""Drafters trained after the target, decoding: plain's tokens, and an exact law."""

import functools

import helpers as h
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafters import hydra, layer, medusa, mtp, parallel_heads
from specjax.drafters.dflash import dflash2, dspark
from specjax.drafters.dflash.config import dflash_config
from specjax.drafters.eagle import drafter as eagle
from specjax.drafters.eagle import head as eagle_head
from specjax.drafters.siblings import SIBLINGS
from specjax.models.transformer import TransformerConfig, language_model
from specjax.types import Params


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("small, trunk", "rejection"),
        ("blockwise", "rejection"),
        ("medusa", "target_match"),
        ("hydra", "recursive"),
        ("hydra, prefix", "recursive"),
        ("parallel_heads", "rejection"),
        ("mtp", "rejection"),
        ("eagle1", "rejection"),
        ("eagle1, static", "recursive"),
        ("eagle3", "rejection"),
        ("eagle3, dynamic", "target_match"),
        ("eagle3.1", "rejection"),
        ("peagle", "rejection"),
        ("dflash", "block"),
        ("dflash, point", "target_match"),
        ("dspark", "rejection"),
        ("dflash2", "rejection"),
    ],
)
def test_tokens_are_those_of_plain_decoding(name, rule):
    """Greedily under its own rule, and under `coupled` at any temperature; some drafts are accepted and some are not."""
    result = h.mixed(name, rule)
    assert result.tokens[:5] == h.reference().tokens[:5]
    assert 0 < result.accepted.sum() < result.drafted.sum()
    assert h.mixed(name, "coupled").tokens == h.reference().tokens


LITTLE = TransformerConfig(4, 8, 1, 2, 1, 4, 16, 16)
ROWS, CRITICAL = 20_000, 131.4  # chi-square of 63 degrees of freedom at 1e-6: at 20k rows it detects sum (p' - p)^2 / p >= 6e-3
BRANCHES = ((0,), (1,), (0, 0), (0, 1), (1, 0))
LAYER = layer.config_of(LITTLE)
SPARK, MARKOV = dflash_config(LITTLE, anchor_first=True), dspark.DSparkConfig(2, "gated")
FLASH, SELECTOR = dflash2.dflash2_config(LITTLE), dflash2.SelectorConfig(2, 3)
LAWS = {
    "medusa": ("traversal", medusa.recipe, medusa.medusa, {"paths": BRANCHES, "siblings": SIBLINGS["iid"]}),
    "hydra": ("recursive", hydra.recipe, hydra.hydra, {"paths": BRANCHES}),
    "hydra, prefix": ("recursive", functools.partial(hydra.recipe, prefix=LAYER), hydra.hydra,
                      {"paths": BRANCHES, "prefix": LAYER}),
    "parallel_heads": ("block", functools.partial(parallel_heads.recipe, config=LAYER), parallel_heads.parallel_heads,
                       {"paths": medusa.chain_paths(2), "config": LAYER}),
    "mtp": ("block", functools.partial(mtp.recipe, config=mtp.config_of(LITTLE)), mtp.mtp,
            {"num_draft": 2, "config": mtp.config_of(LITTLE)}),
    "eagle1, static": ("recursive", functools.partial(eagle.recipe, config=eagle_head.eagle1(LITTLE)), eagle.eagle,
                       {"paths": BRANCHES, "config": eagle_head.eagle1(LITTLE)}),
    "eagle3, dynamic": ("target_match", functools.partial(eagle.recipe, config=eagle_head.eagle3(LITTLE)), eagle.eagle2,
                        {"num_draft": 2, "top_k": 2, "nodes": 4, "config": eagle_head.eagle3(LITTLE)}),
    "dspark": ("block", functools.partial(dspark.recipe, config=SPARK, heads=MARKOV), dspark.dspark,
               {"num_draft": 2, "config": SPARK, "heads": MARKOV}),
    "dflash2": ("rejection", functools.partial(dflash2.recipe, config=FLASH, selector=SELECTOR), dflash2.dflash2,
                {"num_draft": 2, "config": FLASH, "selector": SELECTOR}),
}  # fmt: skip


@pytest.mark.parametrize("name", LAWS)
def test_the_law_of_three_tokens(name):
    """Joint chi-square of 64 cells at temperature 1, from a prompt of two tokens."""
    rule, make, build, options = LAWS[name]
    target = language_model(LITTLE)
    own = h.peaked(jax.jit(target.init)(jax.random.key(0)), 0.3)
    params = jax.jit(make(target, num_draft=2).init)(jax.random.key(1), own)
    params = jax.tree.map(lambda x: x + 0.5 * jax.random.normal(jax.random.key(x.size), x.shape), params)
    result = h.generate(
        build(target, **options), rule, [[0, 1]] * ROWS, params=Params(own, params), target=target, temperature=1.0, longest=5,
        new=3,
    )  # fmt: skip
    every = np.asarray(list(np.ndindex(4, 4, 4)), np.int32)
    rows = jnp.asarray(np.concatenate([np.tile([[0, 1]], (64, 1)), every], 1).astype(np.int32))
    logits = target.apply(own, rows, target.init_cache(64, 5))[0].logits
    log_p = np.asarray(jax.nn.log_softmax(logits, -1), np.float64)[:, 1:4]
    expected = ROWS * np.exp(np.take_along_axis(log_p, every[:, :, None], 2).sum((1, 2)))
    counts = np.bincount(np.asarray(result.tokens) @ [16, 4, 1], minlength=64)
    assert expected.min() > 5
    assert ((counts - expected) ** 2 / expected).sum() < CRITICAL
    assert 0 < result.accepted.sum() < result.drafted.sum()
