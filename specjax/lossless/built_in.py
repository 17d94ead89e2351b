"""Subjects that run anywhere, within seconds: a table of known law, and a tiny transformer for what needs layers."""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.drafters import METHODS, blockwise, files, hydra, layer, medusa, mtp, parallel_heads
from specjax.drafters.base import options
from specjax.drafters.dflash import dflash2, dspark
from specjax.drafters.dflash import drafter as dflash
from specjax.drafters.dflash.config import dflash_config
from specjax.drafters.eagle import drafter as eagle
from specjax.drafters.eagle import head as eagle_head
from specjax.drafters.eagle import parallel
from specjax.lossless.subject import Subject, of_model
from specjax.models.load import LM
from specjax.models.table import table
from specjax.models.transformer import TransformerConfig, language_model
from specjax.sampling import SamplingParams

VOCABULARY = 8
CONFIG = TransformerConfig(12, 16, 2, 4, 2, 8, 32, 128, window=6, sliding=(True, False))
"""Grouped queries, a sliding window shorter than the prompts, a full layer."""

TABLE_PROMPTS = ((1, 2, 3, 1, 2, 3, 1, 2), (5,))
TINY_PROMPTS = ((3, 4, 5, 3, 4), (7,), (9, 8, 7, 6, 9, 8, 7), tuple([5, 11] * 11 + [5]))

ON_A_TABLE = ("plain", "ngram", "small", "specinfer")
"""Methods that a table can carry; the others read layers and get the tiny transformer."""

HEAD_TREE = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
"""Rank paths of the tree that built-in heads draft."""

FEW = (0, 1, 2, 4, 5, 7, 8, 9, 11)
"""A draft vocabulary: what lies outside has to come from the residual."""

OF_FEW = ("eagle1", "dspark")
"""Drafters of such a vocabulary, a tree drawn without replacement and a chain."""

EAGLES = {"eagle1": eagle_head.eagle1(CONFIG), "eagle3": eagle_head.eagle3(CONFIG), "eagle3.1": eagle_head.eagle31(CONFIG)}
PEAGLE = eagle_head.peagle(CONFIG, layers=2)

BLOCKS = {
    "dflash": dflash_config(CONFIG, sliding=(True,), window=6),
    "dspark": dflash_config(CONFIG, anchor_first=True),
    "dflash2": dflash2.dflash2_config(CONFIG),
}
MARKOV, SELECTOR = dspark.DSparkConfig(4, "gated"), dflash2.SelectorConfig(4, 5)

HEADS = {
    "blockwise": functools.partial(blockwise.recipe, hidden=16),
    "medusa": medusa.recipe,
    "hydra": hydra.recipe,
    "parallel_heads": functools.partial(parallel_heads.recipe, config=layer.config_of(CONFIG)),
    "mtp": functools.partial(mtp.recipe, config=mtp.config_of(CONFIG)),
    **{name: functools.partial(eagle.recipe, config=config) for name, config in EAGLES.items()},
    "peagle": functools.partial(parallel.recipe, config=PEAGLE),
    "dflash": functools.partial(dflash.recipe, config=BLOCKS["dflash"]),
    "dspark": functools.partial(dspark.recipe, config=BLOCKS["dspark"], heads=MARKOV),
    "dflash2": functools.partial(dflash2.recipe, config=BLOCKS["dflash2"], selector=SELECTOR),
}
"""Recipes of the methods that are trained after the target."""


def built_in(
    method: str, rule: str | None = None, *, target: str = "table", num_draft: int = 3, children: str | None = None,
    weights: str | None = None, sampling: SamplingParams = SamplingParams(temperature=1.0),
) -> Subject:  # fmt: skip
    """The built-in subject of a drafting method: its drafter is built by the method's own loader.

    Args:
      method: a key of METHODS.
      rule: a key of RULES; None is the method's usual one.
      target: "table" or "tiny", a transformer of two layers; a method that reads layers always gets the latter.
      num_draft: K.
      children: how specinfer, medusa, hydra and eagle1 draw them; None is the loader's own way.
      weights: the directory of a drafter that was trained for "tiny"; untrained heads, see `save_heads`, unless given.
      sampling: of every request.

    Raises:
      ValueError: a method for which no drafter comes built in, or weights that do not fit.
    """
    lm, smaller = _models("table" if target == "table" and method in ON_A_TABLE else "tiny")
    wide = (2,) * min(2, num_draft) + (1,) * (num_draft - 2)
    own: dict[str, dict[str, Any]] = {
        "plain": {}, "ngram": {"min_order": 1}, "early_exit": {"layers": 1}, "small": {"model": smaller},
        "specinfer": {"models": smaller, "expansion": wide, "children": "without_replacement"}, **{name: {} for name in HEADS},
        "eagle3": {"tree": "dynamic", "top_k": 2, "nodes": 2 * num_draft},
    }  # fmt: skip
    if method not in own:
        raise ValueError(f"no drafter of method {method!r} comes built in: use one of {', '.join(own)}, or a real model")
    given = {**own[method], **({"children": children} if children and "children" in options(METHODS[method].load) else {})}
    with tempfile.TemporaryDirectory() as directory:
        if method in HEADS:
            given["weights"] = save_heads(directory, method, num_draft) if weights is None else weights
        loaded = METHODS[method].load(lm, num_draft=num_draft, **given)
    kind, prompts = ("table", TABLE_PROMPTS) if lm.model is _models("table")[0].model else ("tiny", TINY_PROMPTS)
    return of_model(lm, loaded, prompts, target=kind, rule=rule, sampling=sampling)


def save_heads(directory: str, method: str, num_draft: int) -> str:
    """Write heads for "tiny" that nobody trained, the same ones each time, and return the directory.

    They are what training begins with, the target's own prediction, disturbed so that nothing in them is zero: each is right
    sometimes.  Nothing is learnt, for to be lossless is no matter of skill.
    """
    lm, _ = _models("tiny")
    few = {"vocabulary": FEW} if method in OF_FEW else {}
    params = jax.jit(HEADS[method](lm.model, num_draft=num_draft, **few).init)(jax.random.key(0), lm.params)
    leaves, treedef = jax.tree.flatten(params)
    rng = np.random.default_rng(0)
    disturbed = [x + jnp.asarray(0.1 * rng.standard_normal(x.shape), x.dtype) for x in leaves]
    about = {"medusa": {"tree": HEAD_TREE}, "hydra": {"tree": HEAD_TREE}, "mtp": mtp.config_of(CONFIG)._asdict()}
    about |= {name: config._asdict() for name, config in EAGLES.items()}
    about["eagle1"] |= {"tree": HEAD_TREE}  # so that a static tree, a dynamic one and a chain are looked at
    about |= {"peagle": PEAGLE._asdict()}
    about |= {name: config._asdict() for name, config in BLOCKS.items()}
    about["dspark"] |= MARKOV._asdict()
    about["dflash2"] |= SELECTOR._asdict()
    about["parallel_heads"] = layer.config_of(CONFIG)._asdict()
    files.save(directory, treedef.unflatten(disturbed), {"method": method, **about.get(method, {}), **few})
    return directory


@functools.cache
def _models(kind: str) -> tuple[LM, LM]:
    """The target and a model that agrees with it sometimes; random from fixed keys, peaked, far from degenerate."""
    return _tables() if kind == "table" else _transformers()


def _tables() -> tuple[LM, LM]:
    model, rng = table(VOCABULARY, order=2), np.random.default_rng(0)
    logits = 1.3 * rng.normal(size=(VOCABULARY + 1, VOCABULARY + 1, VOCABULARY))
    near = logits + rng.normal(size=logits.shape)
    law = lambda x: jax.nn.log_softmax(jnp.asarray(x, jnp.float32), -1)
    config = CONFIG._replace(vocab_size=VOCABULARY)  # nothing reads it
    return LM(model, law(logits), None, config), LM(model, law(near), None, config)  # type: ignore[arg-type]


def _transformers() -> tuple[LM, LM]:
    """The smaller one is the target's first layer, disturbed."""
    model, small = language_model(CONFIG), language_model(CONFIG._replace(layers=1, sliding=(), window=None))
    params = jax.jit(model.init)(jax.random.key(0))
    params = {**params, "head": params["head"] * 4}
    own = jax.jit(small.init)(jax.random.key(1))
    near = jax.tree.map(lambda noise, x: x + 0.1 * noise, own, {name: params[name] for name in own})
    return LM(model, params, None, CONFIG), LM(small, near, None, CONFIG)  # type: ignore[arg-type]
