r"""DSpark (arXiv 2607.05147): DFlash's block, a cheap head that gives it back its order, and a head that foretells acceptance.

    h_k of the backbone ──► vocabulary head ──► U_k ──► + W_2 m(W_1[x_{k-1}], h_k) ──► law of x_k, drawn from left to right
    [h_k; W_1[x_{k-1}]] ──► confidence: P(x_k accepted | those before it were)

Lossless.  Beside DFlash's pass a round costs K products of width r with the vocabulary.  `Draft.confidence` is conditional, as
`types` has it, not the survival of the whole prefix, and looks at tokens before x_k alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import linen as nn

from specjax.drafters import objectives
from specjax.drafters.dflash import backbone, start
from specjax.drafters.dflash import loss as block_loss
from specjax.drafters.dflash.config import DFlashConfig
from specjax.drafters.dflash.drafter import Head, built
from specjax.drafters.recipe import Batch, Recipe
from specjax.drafters.siblings import SIBLINGS, Siblings
from specjax.drafters.vocabulary import Ids, draft_size
from specjax.models.layers import Linear, matmul
from specjax.names import unknown
from specjax.types import Array, Drafter, LanguageModel, Params


class DSparkConfig(NamedTuple):
    """Facts of the two heads."""

    rank: int = 256  # r
    markov: str = "vanilla"  # a key of MARKOV
    confidence: bool = True  # whether there is a confidence head
    confidence_markov: bool = True  # whether it reads the token before, too


class Markov(NamedTuple):
    """How what a token was drawn after becomes the r numbers that correct its logits."""

    outputs: int  # r of its linear map's outputs; 0: it has none
    step: Callable  # (linear map, state [.., r], e = W_1[token before] [.., r], h [.., D]) -> (m [.., r], next state)


def vanilla(mix: Callable, state: Array, e: Array, h: Array) -> tuple[Array, Array]:
    """m = e."""
    del mix, h
    return e, state


def gated(mix: Callable, state: Array, e: Array, h: Array) -> tuple[Array, Array]:
    """m = sigmoid(W [h; e] + b) * e."""
    return jax.nn.sigmoid(mix(jnp.concatenate([h, e], -1))) * e, state


def recurrent(mix: Callable, state: Array, e: Array, h: Array) -> tuple[Array, Array]:
    """(g, c, o) = W [s; e; h] + b; m = tanh(o), next s = sigmoid(g) s + (1 - sigmoid(g)) tanh(c); s begins as zero."""
    g, c, o = jnp.split(mix(jnp.concatenate([state, e, h], -1)), 3, -1)
    keep = jax.nn.sigmoid(g)
    return jnp.tanh(o), keep * state + (1 - keep) * jnp.tanh(c)


MARKOV: dict[str, Markov] = {"vanilla": Markov(0, vanilla), "gated": Markov(1, gated), "rnn": Markov(3, recurrent)}


def checked(heads: DSparkConfig) -> DSparkConfig:
    """The config; ValueError names the nearest Markov head where there is none of that name."""
    if heads.markov not in MARKOV:
        raise ValueError(unknown("Markov head", heads.markov, MARKOV))
    return heads


class Heads(nn.Module):
    """The two heads; `size` ids are drafted of V."""

    config: DSparkConfig
    vocab_size: int
    size: int

    def setup(self):
        c, markov = self.config, MARKOV[self.config.markov]
        self.before = self.param("before", nn.initializers.normal(c.rank**-0.5), (self.vocab_size, c.rank))  # W_1
        self.after = self.param("after", nn.initializers.zeros, (c.rank, self.size))  # W_2
        if markov.outputs:
            self.mix = Linear((markov.outputs * c.rank,), bias=True)
        if c.confidence:
            self.sure = Linear((1,), bias=True)

    def embed(self, tokens: Array) -> Array:
        """W_1 of the tokens before: [.., r]."""
        return self.before[tokens].astype(jnp.float32)

    def step(self, state: Array, e: Array, h: Array) -> tuple[Array, Array]:
        """One step of the Markov head."""
        return MARKOV[self.config.markov].step(self.mix if MARKOV[self.config.markov].outputs else None, state, e, h)

    def correction(self, m: Array) -> Array:
        """W_2 m: [.., n]."""
        return matmul(m, self.after)

    def confidence(self, e: Array, h: Array) -> Array | None:
        """The confidence's logit [..]."""
        if not self.config.confidence:
            return None
        return self.sure(jnp.concatenate([h, e], -1) if self.config.confidence_markov else h)[..., 0]

    def along(self, before: Array, h: Array) -> tuple[Array, Array | None]:
        """Corrections [C, K, n] and confidence logits [C, K] of blocks whose tokens are known: before [C, K], h [C, K, D]."""
        e, state, made = self.embed(before), jnp.zeros((len(before), self.config.rank)), []
        for k in range(before.shape[1]):
            m, state = self.step(state, e[:, k], h[:, k])
            made.append(m)
        return self.correction(jnp.stack(made, 1)), self.confidence(e, h)

    def one(self, state: Array, token: Array, h: Array):
        """(correction [B, n], confidence logit [B], next state) of the next token of each block."""
        e = self.embed(token)
        m, state = self.step(state, e, h)
        return self.correction(m), self.confidence(e, h), state


def heads_of(target: LanguageModel, heads: DSparkConfig, vocabulary: Ids | None) -> Heads:
    """The module for a target."""
    return Heads(checked(heads), target.vocab_size, draft_size(target, vocabulary))


def ordered_head(target: LanguageModel, config: DFlashConfig, heads: DSparkConfig, vocabulary: Ids | None) -> Head:
    """DSpark's: each token after the one before it."""
    module = heads_of(target, heads, vocabulary)

    def prepare(params: Params, hidden: Array):
        logits = backbone.few_logits(target, config, vocabulary, params.target, hidden)
        return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), (logits, hidden))

    def step(params: Params, state: Array, token: Array, row):
        logits, h = row
        found = module.apply({"params": params.drafter["heads"]}, state, token, h, method="one")
        more, sure, state = cast(Any, found)
        return logits + more, None if sure is None else jax.nn.sigmoid(sure), state

    return Head(prepare, lambda batch: jnp.zeros((batch, heads.rank)), step)


@functools.cache  # the same drafter for the same arguments: a rebuilt closure would recompile
def dspark(
    target: LanguageModel, *, config: DFlashConfig, heads: DSparkConfig, num_draft: int, siblings: Siblings = SIBLINGS["iid"],
    vocabulary: Ids | None = None,
) -> Drafter:  # fmt: skip
    """A chain of `num_draft` tokens from one pass, drawn from left to right; arguments and errors as `dflash`'s."""
    head = ordered_head(target, config, heads, vocabulary)
    return built(target, config, head, num_draft=num_draft, siblings=siblings, vocabulary=vocabulary)


def scores(
    target: LanguageModel, config: DFlashConfig, heads: DSparkConfig, params: Params, batch: Batch, blocks: block_loss.Blocks,
    *, num_draft: int, vocabulary: Ids | None, text: float, law: float, confidence: float,
) -> list[tuple[objectives.Scored, Array]]:  # fmt: skip
    """text x cross-entropy + law x |p - q|_1 + confidence x binary cross-entropy to 1 - |p - q|_1 / 2, which is data.

    And beside each how far the confidence was off.  Corrections follow the text.  q is zero outside of a draft vocabulary, so
    that confidence learns the acceptance that drafting will have.
    """
    module, ids = heads_of(target, heads, vocabulary), None if vocabulary is None else jnp.asarray(vocabulary, jnp.int32)
    flat = lambda x: x.reshape(-1, *x.shape[2:])

    def judge(part: block_loss.Rows):
        own = {"params": params.drafter["heads"]}
        more, sure = cast(Any, module.apply(own, part.before, part.hidden, method="along"))
        logits = backbone.few_logits(target, config, vocabulary, params.target, part.hidden) + more
        p = jax.nn.softmax(jax.lax.stop_gradient(target.unembed(params.target, part.states)), -1)
        p = p if ids is None else p[..., ids]
        kept = jnp.minimum(p, jax.nn.softmax(logits, -1)).sum(-1)  # of both whole laws, 1 - |p - q|_1 / 2
        surprise = objectives.hard(flat(logits), flat(part.goal)).reshape(kept.shape)
        nats, off = text * surprise + law * 2 * (1 - kept), jnp.zeros_like(kept)
        if sure is not None:
            true = jnp.clip(jax.lax.stop_gradient(kept), 0, 1)
            nats = nats + confidence * (jax.nn.softplus(sure) - true * sure)
            off = jnp.abs(jax.nn.sigmoid(sure) - true)
        return nats, objectives.correct(flat(logits), flat(part.goal)).reshape(kept.shape), off

    hidden = block_loss.given(target, config, params, batch, blocks, num_draft=num_draft)
    return block_loss.judged(judge, target, batch, hidden, blocks, vocabulary)


def params_init(
    target: LanguageModel, config: DFlashConfig, heads: DSparkConfig, vocabulary: Ids | None, key, target_params: Any
) -> dict[str, Any]:  # fmt: skip
    """Parameters as training begins: DFlash's, no correction, and a confidence of one half."""
    own = module_init(heads_of(target, heads, vocabulary), config, key)
    own |= {name: jax.tree.map(jnp.zeros_like, own[name]) for name in ("sure",) if name in own}
    return {**start.params_init(target, config, key, target_params), "heads": own}


def module_init(module: Heads, config: DFlashConfig, key) -> dict[str, Any]:
    """The heads' parameters as flax draws them."""
    inputs = jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1, config.width))
    return cast(Any, module.init(key, *inputs, method="along")["params"])


def recipe(
    target: LanguageModel, *, num_draft: int, config: DFlashConfig, heads: DSparkConfig, vocabulary: Ids | None = None,
    decay: float = math.exp(-1 / 4), text: float = 0.1, law: float = 0.9, confidence: float = 1.0,
    blocks: int = 64,
) -> Recipe:  # fmt: skip
    """sum_k decay^(k-1) (`scores` of the token k after an anchor), weights that sum to 1; the target is frozen.

    Args:
      target: the model to draft for.
      num_draft: K, tokens of a block that are learnt.
      config: of the backbone.
      heads: of the two heads.
      vocabulary: the ids that the drafter proposes; all unless given.
      decay: the weight of a token relative to the one before.
      text: the weight of cross-entropy to the text.
      law: of the distance to the target's law.
      confidence: of the confidence's cross-entropy.
      blocks: how many blocks of each row are learnt from, drawn at random.

    Metrics: beside the usual, "confidence_error", how far off the confidence is, on average.
    """
    shares = block_loss.shares(num_draft, decay)
    how: dict[str, Any] = dict(num_draft=num_draft, vocabulary=vocabulary, text=text, law=law, confidence=confidence)

    def loss(trainable, target_params, batch: Batch, key):
        chosen = block_loss.drawn(key, batch, num_draft, blocks)
        found = scores(target, config, heads, Params(target_params, trainable), batch, chosen, **how)
        value, metrics = objectives.pool([scored for scored, _ in found], shares)
        off, weights = (jnp.stack(x) for x in zip(*((off, scored.weights) for scored, off in found), strict=True))
        return value, {**metrics, **({"confidence_error": objectives.mean(off, weights)} if heads.confidence else {})}

    drawn: Any = {"num_draft": num_draft, "siblings": SIBLINGS["iid"], "vocabulary": vocabulary}
    drafter = dspark(target, config=config, heads=heads, **drawn)
    init = functools.partial(params_init, target, config, heads, vocabulary)
    return Recipe(init, loss, drafter, config.taps)
