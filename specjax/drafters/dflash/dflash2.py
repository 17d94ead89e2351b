r"""DFlash 2: DFlash with convolutions in its blocks (see `conv`), and a selector of a path through each row's best tokens.

    h_k of the backbone ──► vocabulary head ──► U_k, its C best tokens b ──► S_k(b) = U_k(b) + <A[x_{k-1}] * W h_k, B[b]>
                                                                              law of x_k: softmax of S_k over these C

Lossless: q is that law of C points, zero elsewhere, drawn from left to right at the request's temperature.  Beside DFlash's
pass a round costs the C best of each row and K C products of width r.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import linen as nn

from specjax.drafters import objectives
from specjax.drafters.dflash import backbone, start
from specjax.drafters.dflash import loss as block_loss
from specjax.drafters.dflash.config import DFlashConfig, dflash_config
from specjax.drafters.dflash.drafter import Head, built
from specjax.drafters.recipe import Batch, Recipe
from specjax.drafters.siblings import SIBLINGS, Siblings
from specjax.drafters.vocabulary import Ids, draft_size
from specjax.models.layers import Linear
from specjax.types import Array, Drafter, LanguageModel, Params


class SelectorConfig(NamedTuple):
    """Facts of the selector."""

    rank: int = 256  # r
    top_k: int = 16  # C, or all tokens that are drafted where they are fewer


def dflash2_config(target_config: Any, **flags) -> DFlashConfig:
    """DFlash 2's backbone: a DFlash with convolutions over 2 rows, 16 channels a group; `flags` replace fields."""
    group = math.gcd(flags.get("width", target_config.width), 16)
    return dflash_config(target_config, **{"conv_taps": 2, "conv_group": group, "causal": False, **flags})


class Selector(nn.Module):
    """What the token before adds to the candidates of a row; `size` ids are drafted of V."""

    rank: int
    vocab_size: int
    size: int

    def setup(self):
        self.before = self.param("before", nn.initializers.normal(self.rank**-0.5), (self.vocab_size, self.rank))  # A
        self.after = self.param("after", nn.initializers.zeros, (self.size, self.rank))  # B
        self.project = Linear((self.rank,))  # W

    def __call__(self, token: Array, h: Array, candidates: Array) -> Array:
        """token [..], h [.., D], candidates [.., C] by their places in the draft vocabulary -> [.., C]."""
        context = self.before[token].astype(jnp.float32) * self.project(h)
        return (context[..., None, :] * self.after[candidates].astype(jnp.float32)).sum(-1)


def selector_of(target: LanguageModel, selector: SelectorConfig, vocabulary: Ids | None) -> Selector:
    """The module for a target."""
    return Selector(selector.rank, target.vocab_size, draft_size(target, vocabulary))


def selecting_head(target: LanguageModel, config: DFlashConfig, selector: SelectorConfig, vocabulary: Ids | None) -> Head:
    """DFlash 2's: each token one of its row's best, after the one before it."""
    module = selector_of(target, selector, vocabulary)

    def prepare(params: Params, hidden: Array):
        logits = backbone.few_logits(target, config, vocabulary, params.target, hidden)
        best, candidates = jax.lax.top_k(logits, min(selector.top_k, module.size))
        return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), (best, candidates, hidden))

    def step(params: Params, carried, token: Array, row):
        best, candidates, h = row
        score = best + cast(Array, module.apply({"params": params.drafter["selector"]}, token, h, candidates))
        nothing = jnp.full(module.size, -jnp.inf)
        return jax.vmap(lambda at, x: nothing.at[at].set(x))(candidates, score), None, carried

    return Head(prepare, lambda batch: (), step)


@functools.cache  # the same drafter for the same arguments: a rebuilt closure would recompile
def dflash2(
    target: LanguageModel, *, config: DFlashConfig, selector: SelectorConfig, num_draft: int,
    siblings: Siblings = SIBLINGS["iid"], vocabulary: Ids | None = None,
) -> Drafter:  # fmt: skip
    """A chain of `num_draft` tokens from one pass, a path of its rows' best; arguments and errors as `dflash`'s."""
    head = selecting_head(target, config, selector, vocabulary)
    return built(target, config, head, num_draft=num_draft, siblings=siblings, vocabulary=vocabulary)


def scores(
    target: LanguageModel, config: DFlashConfig, selector: SelectorConfig, params: Params, batch: Batch,
    blocks: block_loss.Blocks, *, num_draft: int, vocabulary: Ids | None, objective: objectives.Objective, path: float,
) -> list[objectives.Scored]:  # fmt: skip
    """DFlash's objective of each row + path x cross-entropy of the text among the row's candidates, after the text before it.

    A row whose candidates lack the text's token teaches the selector nothing.
    """
    module = selector_of(target, selector, vocabulary)

    def judge(part: block_loss.Rows):
        logits = backbone.few_logits(target, config, vocabulary, params.target, part.hidden)
        full = target.unembed(params.target, part.states)
        nats, _ = block_loss.by_law(objective, logits, full, part.goal, vocabulary, target.vocab_size)
        best, candidates = jax.lax.top_k(logits, min(selector.top_k, module.size))
        own = {"params": params.drafter["selector"]}
        score = best + cast(Array, module.apply(own, part.before, part.hidden, candidates))
        right = candidates == part.goal[..., None]
        picked = jnp.where(right, score, 0).sum(-1)
        nats = nats + path * jnp.where(right.any(-1), jax.nn.logsumexp(score, -1) - picked, 0)
        chosen = jnp.take_along_axis(right, score.argmax(-1)[..., None], -1)[..., 0]
        return nats, chosen.astype(jnp.float32), ()

    hidden = block_loss.given(target, config, params, batch, blocks, num_draft=num_draft)
    return [scored for scored, _ in block_loss.judged(judge, target, batch, hidden, blocks, vocabulary)]


def params_init(
    target: LanguageModel, config: DFlashConfig, selector: SelectorConfig, vocabulary: Ids | None, key, target_params: Any
) -> dict[str, Any]:  # fmt: skip
    """Parameters as training begins: DFlash's, convolutions that change nothing, and a selector that adds nothing."""
    own = module_init(selector_of(target, selector, vocabulary), config, key)
    return {**start.params_init(target, config, key, target_params), "selector": own}


def module_init(module: Selector, config: DFlashConfig, key) -> dict[str, Any]:
    """The selector's parameters as flax draws them."""
    inputs = jnp.zeros(1, jnp.int32), jnp.zeros((1, config.width)), jnp.zeros((1, 1), jnp.int32)
    return cast(Any, module.init(key, *inputs)["params"])


def recipe(
    target: LanguageModel, *, num_draft: int, config: DFlashConfig, selector: SelectorConfig, vocabulary: Ids | None = None,
    decay: float | None = None, objective: objectives.Objective = objectives.hard, path: float = 1.0,
    blocks: int = 64,
) -> Recipe:  # fmt: skip
    """sum_k decay^(k-1) (`scores` of the token k after an anchor), weights that sum to 1; the target is frozen.

    Args:
      target: the model to draft for.
      num_draft: K, tokens of a block that are learnt.
      config: of the backbone.
      selector: of the selector.
      vocabulary: the ids that the drafter proposes; all unless given.
      decay: the weight of a token relative to the one before; DFlash's for blocks of this size unless given.
      objective: of the rows by themselves, one of `objectives`.
      path: the weight of the selector's cross-entropy.
      blocks: how many blocks of each row are learnt from, drawn at random.
    """
    shares = block_loss.shares(num_draft, decay)
    how: dict[str, Any] = dict(num_draft=num_draft, vocabulary=vocabulary, objective=objective, path=path)

    def loss(trainable, target_params, batch: Batch, key):
        params, chosen = Params(target_params, trainable), block_loss.drawn(key, batch, num_draft, blocks)
        return objectives.pool(scores(target, config, selector, params, batch, chosen, **how), shares)

    drawn: Any = {"num_draft": num_draft, "siblings": SIBLINGS["iid"], "vocabulary": vocabulary}
    drafter = dflash2(target, config=config, selector=selector, **drawn)
    init = functools.partial(params_init, target, config, selector, vocabulary)
    return Recipe(init, loss, drafter, config.taps)
