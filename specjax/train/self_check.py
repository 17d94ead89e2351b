"""Does training see what drafting does?  Drafts of real decoding, put to the loss as labels: each must be its best token.

    decode.run, greedily ──► committed text and each round's draft (prefill, commits and incremental caches, as users have them)
    text + draft as one row, one drafted token its only label ──► recipe.loss ──► accuracy_i: is it what step i predicts?

Where they differ, the loss trains one model and decoding runs another: other positions, other states, labels one off.  The
loss then falls as it should, and acceptance stays near nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode, keys, sampling
from specjax.drafters.recipe import Batch, Recipe, with_output
from specjax.sampling import SamplingParams
from specjax.types import LanguageModel, Rule


def self_check(
    recipe: Recipe, params: Any, target_params: Any, prompts: Sequence[Sequence[int]], *, target: LanguageModel, rule: Rule,
    rounds: int = 8, least: float = 0.98,
) -> dict[str, float]:  # fmt: skip
    """Compare what `recipe.drafter` drafts at temperature 0 with what `recipe.loss` predicts in its place.

    Of a tree, the first child of each node is followed.  Weights are taken as float32 and matrix products run at the highest
    precision, so that what is left to differ are near ties; in bfloat16, where passes of other widths round otherwise, these
    are no rare ones.

    Args:
      recipe: must report accuracy_1 .. accuracy_n, of step i on the i-th token that is drafted.
      params: the trained parameters.
      target_params: the frozen target's, as for `fit`; () where the target itself is trained.
      prompts: token ids of a few, from 2 each; better dozens of tokens than a few, for a wrong rotary shows with distance.
      target: the model that is drafted for.
      rule: a lossless one that fits the drafter.
      rounds: of decoding, each of which is looked at.
      least: the share that must agree at every step.

    Returns:
      "agreement_i", the share of i-th drafted tokens that the loss predicts.

    Raises:
      ValueError: training and drafting differ, there is nothing to compare, or the recipe has no drafter.
    """
    if recipe.drafter is None:
        raise ValueError("this recipe trains nothing that drafts: leave the self-check out")
    short = [i for i, prompt in enumerate(prompts) if len(prompt) < 2]
    if short or not len(prompts):
        raise ValueError(f"{len(prompts)} prompts, {len(short)} of less than 2 tokens: give at least one, each of 2 or more")
    params, target_params = (
        jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, tree)
        for tree in (params, target_params)
    )
    with jax.default_matmul_precision("highest"):
        found = _decoded(recipe, params, target_params, prompts, target=target, rule=rule, rounds=rounds)
        hits = _hits(recipe, params, target_params, found, target=target)
    if not hits:
        raise ValueError("self-check: the recipe's loss reports no accuracy_1: there is nothing to compare drafts with")
    for step, (right, count) in enumerate(hits, 1):
        if not count:
            raise ValueError(f"self-check: no token was drafted at depth {step}: are the parameters finite?")
        if right < least * count:
            raise ValueError(
                f"self-check: of {count} tokens drafted at depth {step} the loss predicts {right:.0f}, fewer than {least:.0%}: "
                "training and drafting differ in positions, states or labels, so these weights will draft badly"
            )
    return {f"agreement_{step}": right / count for step, (right, count) in enumerate(hits, 1)}


class Drafted(NamedTuple):
    """What decoding did, on the host; R rounds."""

    text: np.ndarray  # [B, S]
    length: np.ndarray  # [B, R] committed tokens before each round; 0 where the row was done
    lines: np.ndarray  # [B, R, K] the tokens along the first children; -1 where there was none


def _decoded(recipe: Recipe, params, target_params, prompts, *, target, rule, rounds: int) -> Drafted:
    """Greedy decoding, with its drafts noted by a probe."""
    drafter = recipe.drafter
    assert drafter is not None
    decode.check(target, drafter, rule)
    lengths = np.asarray([len(p) for p in prompts], np.int32)
    new = rounds * (drafter.depth + 1)
    tokens = np.zeros((len(prompts), decode.capacity_for(int(lengths.max()) + new, drafter)), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    each = sampling.stack([SamplingParams()] * len(prompts), target.vocab_size)
    request = keys.request_keys(jax.random.key(0), jnp.arange(len(prompts)))
    static: dict[str, Any] = {"target": target, "drafter": drafter}

    @jax.jit
    def go(both, tokens, lengths, key):
        eos = jnp.full((len(prompts), 1), -1, jnp.int32)
        state = decode.start(both, tokens, lengths, lengths + new, eos, key, each, **static)
        state = decode.prefill(both, state, chunk=64, **static)
        look = lambda draft, log_p, verdict: (draft.tokens, draft.parents)
        return decode.run(both, state, jnp.asarray(rounds), rule=rule, max_rounds=rounds, probe=look, **static)

    state, log = go(recipe.assemble(params, target_params), jnp.asarray(tokens), jnp.asarray(lengths), request)
    emitted = np.asarray(log.emitted)
    before = lengths[:, None] + np.cumsum(emitted, 1) - emitted
    lines = np.full((*emitted.shape, drafter.depth), -1)
    for at in np.ndindex(emitted.shape):
        line = first_line(*(np.asarray(x)[at] for x in log.probed))
        lines[at][: len(line)] = line
    return Drafted(np.asarray(state.tokens), np.where(emitted > 0, before, 0), lines)


def first_line(tokens: np.ndarray, parents: np.ndarray) -> list[int]:
    """Tokens on the way down a draft [N], always by a node's first child.

    >>> first_line(np.array([5, 6, 7, 8]), np.array([-1, -1, 1, 0]))
    [5, 8]
    """
    line, node = [], -1
    while (children := np.flatnonzero(parents == node)).size:
        node = int(children[0])
        line.append(int(tokens[node]))
    return line


def _hits(recipe: Recipe, params, target_params, found: Drafted, *, target: LanguageModel) -> list[tuple[float, int]]:
    """Of each step that the loss tells of: (drafted tokens that it predicts, drafted tokens)."""
    index, depth = np.arange(found.text.shape[1])[None], found.lines.shape[2]
    teacher = target if jax.tree.leaves(target_params) else None  # a target that is trained itself runs within its loss
    run = jax.jit(lambda weights, batch: with_output(batch, teacher, weights, recipe.features))
    loss = recipe.loss if recipe.clean is None else recipe.clean
    score = jax.jit(lambda own, weights, batch: loss(own, weights, batch, jax.random.key(0))[1])
    totals: dict[int, tuple[float, int]] = {}
    for r in range(found.length.shape[1]):
        length, lines = found.length[:, r], found.lines[:, r]
        tokens = found.text.copy()
        for row, n in enumerate(length):
            drafted = lines[row][lines[row] >= 0]
            tokens[row, n : n + len(drafted)] = drafted
        ends = length + (lines >= 0).sum(1)
        segments = np.where((index < ends[:, None]) & (length > 0)[:, None], 0, -1).astype(np.int32)
        batch = run(target_params, Batch(jnp.asarray(tokens), jnp.zeros(tokens.shape, bool), jnp.asarray(segments)))
        for step in range(depth):
            label = (index == (length + step)[:, None]) & (segments >= 0)
            metrics = score(params, target_params, batch._replace(mask=jnp.asarray(label)))
            name, (right, count) = f"accuracy_{step + 1}", totals.get(step, (0.0, 0))
            if name in metrics:
                totals[step] = right + float(metrics[name]) * label.sum(), count + int(label.sum())
    return [totals[step] for step in sorted(totals)]
