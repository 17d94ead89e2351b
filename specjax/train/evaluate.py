"""What a run is judged by while it trains: held-out loss, and tau in real decoding through `decode.run`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode, keys, sampling, trees
from specjax.drafters import objectives
from specjax.drafters.recipe import Recipe, labels, with_output
from specjax.metrics import cut, statistics
from specjax.sampling import SamplingParams
from specjax.schedule.confidence import Outcomes, law_margins, outcomes
from specjax.train.loop import Evaluate
from specjax.train.packing import Batches
from specjax.types import Drafter, LanguageModel, Params, RoundInfo, Rule


def held_out(recipe: Recipe, batches: Batches, *, steps: int, target: LanguageModel | None = None) -> Evaluate:
    """The recipe's loss and metrics on the first `steps` batches, pooled over their labels, as "held_out_...".

    The same rows and keys every time, without a recipe's noise; accuracy is teacher-forced.
    """
    judge = recipe.loss if recipe.clean is None else recipe.clean

    @jax.jit
    def one(params, target_params, batch, key):
        loss, metrics = judge(params, target_params, with_output(batch, target, target_params, recipe.features), key)
        return {**metrics, "loss": loss}

    def run(params, target_params):
        parts = [one(params, target_params, batches.at(n), jax.random.key(n)) for n in range(steps)]
        weight = np.asarray([float(part["weight"]) for part in parts])
        names = [name for name in parts[0] if name != "weight"]
        return {f"held_out_{n}": float(weight @ [float(p[n]) for p in parts]) / max(weight.sum(), 1) for n in names}

    return run


def kept_mass(target: LanguageModel, target_params: Any, ids: Sequence[int], batches: Batches, *, steps: int) -> float:
    """The probability that the target leaves within a draft vocabulary, at temperature 1; a mean over what is to predict.

    No drafter of these ids is accepted more often: sum min(p, q) is at most the mass of p where q has any.

    Args:
      target: the model that is drafted for.
      target_params: its parameters.
      ids: the draft vocabulary.
      batches: rows to look at, the first `steps` batches of them.
      steps: how many.
    """

    @jax.jit
    def one(params, batch):
        few = jnp.asarray(ids, jnp.int32)
        within = lambda hidden: jnp.exp(jax.nn.log_softmax(target.unembed(params, hidden), -1)[:, few]).sum(-1)
        hidden, weights = with_output(batch, target, params).output.hidden, labels(batch)[1]
        return objectives.total(objectives.chunked(within, hidden), weights), weights.sum()

    found = np.asarray([one(target_params, batches.at(n)) for n in range(steps)], np.float64).sum(0)
    return float(found[0] / max(found[1], 1))


def acceptance(
    recipe: Recipe,
    prompts: Sequence[Sequence[int]],
    *,
    target: LanguageModel,
    rule: Rule,
    new_tokens: int = 64,
    temperatures: Sequence[float] = (0.0,),
    eos_ids: Sequence[int] = (),
    seed: int = 0,
) -> Evaluate:
    """tau and acceptance by position of `recipe.drafter` on prompts, decoded as users decode them, at each temperature.

    Names carry the temperature: "tau_t0", "accepted_t0_1" (the share of rounds that accepted the first token), ...

    Raises:
      ValueError: the recipe has no drafter, target, drafter and rule do not fit, or a temperature is out of range.
    """
    drafter = recipe.drafter
    if drafter is None:
        raise ValueError("this recipe trains nothing that drafts: leave acceptance out")
    for temperature in temperatures:  # now, and not when something has been trained
        sampling.check(SamplingParams(temperature=temperature), target.vocab_size)
    decoded = decoding(prompts, target=target, drafter=drafter, rule=rule, new_tokens=new_tokens, eos_ids=eos_ids, seed=seed)

    def at(both: Params, temperature: float) -> dict[str, float]:
        log, name = decoded(both, temperature), f"t{temperature:g}"
        rows = [RoundInfo(*(np.asarray(x)[row] for x in log[:3])) for row in range(len(prompts))]
        stats = statistics([cut(row, new_tokens) for row in rows], drafter.depth)
        rates = {f"accepted_{name}_{k + 1}": x for k, x in enumerate(stats.per_position_acceptance_rate)}
        return {f"tau_{name}": stats.mean_acceptance_length, **rates}

    def run(params, target_params):
        both = recipe.assemble(params, target_params)
        return {name: x for temperature in temperatures for name, x in at(both, temperature).items()}

    return run


def decoding(
    prompts: Sequence[Sequence[int]],
    *,
    target: LanguageModel,
    drafter: Drafter,
    rule: Rule,
    new_tokens: int,
    eos_ids: Sequence[int] = (),
    seed: int = 0,
    probe: Callable | None = None,
) -> Callable[[Params, float], RoundInfo]:
    """(params, temperature) -> the rounds [B, R] of decoding all prompts together; compiled once.

    Raises:
      ValueError: target, drafter and rule do not fit.
    """
    decode.check(target, drafter, rule)
    lengths = np.asarray([len(p) for p in prompts], np.int32)
    capacity = decode.capacity_for(int(lengths.max()) + new_tokens, drafter)
    tokens = np.zeros((len(prompts), capacity), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    eos = np.asarray([(*eos_ids, -1)] * len(prompts), np.int32)
    static: dict[str, Any] = {"target": target, "drafter": drafter}

    @jax.jit
    def go(params, tokens, lengths, eos, key, law):
        state = decode.start(params, tokens, lengths, lengths + new_tokens, eos, key, law, **static)
        state = decode.prefill(params, state, chunk=64, **static)
        rounds = jnp.asarray(new_tokens)
        return decode.run(params, state, rounds, rule=rule, max_rounds=new_tokens, probe=probe, **static)[1]

    request = keys.request_keys(jax.random.key(seed), jnp.arange(len(prompts)))
    inputs = [jnp.asarray(x) for x in (tokens, lengths, eos)]

    def run(params, temperature):
        law = sampling.stack([SamplingParams(temperature=temperature)] * len(prompts), target.vocab_size)
        return go(params, *inputs, request, law)

    return run


def comb(depth: int, ranks: int) -> tuple[tuple[int, ...], ...]:
    """Rank paths of a chain of best candidates, with the `ranks` best below each of its nodes: a tree that measures ranks.

    >>> comb(2, 2)
    ((0,), (1,), (0, 0), (0, 1))
    """
    return tuple((0,) * level + (rank,) for level in range(depth) for rank in range(ranks))


def rank_rates(
    drafter: Drafter, params: Params, prompts: Sequence[Sequence[int]], *, ranks: int, temperature: float, **settings
) -> np.ndarray:  # fmt: skip
    """How often the candidate of each rank is accepted, given that its parent was: [depth, ranks], from real decoding.

    What `trees.best_first` builds a static tree from (its mean over depths, `trees.sequoia`).  Measure on prompts that are
    neither trained on nor reported.

    Args:
      drafter: with the tree `comb(depth, ranks)`.
      params: of target and drafter.
      prompts: token ids.
      ranks: candidates at each depth.
      temperature: of all prompts.
      **settings: of `decoding`: target, rule, new_tokens.

    Raises:
      ValueError: the drafter's tree is another: a node more or less, or one that hangs elsewhere.
    """
    expected = trees.from_paths(comb(drafter.depth, ranks)).parents
    another = f"a tree of {drafter.num_nodes} nodes is not comb({drafter.depth}, {ranks}): build the drafter with it"
    if drafter.num_nodes != len(expected):
        raise ValueError(another)
    log = decoding(prompts, drafter=drafter, probe=_accepted_rows, **settings)(params, temperature)
    path, accepted, parents = (np.asarray(x)[np.asarray(log.emitted) > 0] for x in log.probed)  # each [rounds, ..]
    if not ((parents == expected) | (parents == -2)).all():
        raise ValueError(another)
    rates = np.zeros((drafter.depth, ranks))
    for level in range(drafter.depth):
        best = level * ranks + 1  # block row of the best candidate; those of the level follow it
        there = np.ones(len(path), bool) if level == 0 else (accepted >= level) & (path[:, level] == best - ranks)
        rank = path[there & (accepted > level), level + 1] - best
        rates[level] = np.bincount(rank, minlength=ranks) / max(there.sum(), 1)
    return rates


class Watched(NamedTuple):
    """What a drafter said of its chains [R, K] and what became of them, in rounds that were verified whole."""

    confidence: np.ndarray | None  # as it gave it; None where it has none
    margins: np.ndarray | None  # of its logits, see `confidence.law_margins`; None where tokens were drawn from no law
    outcomes: Outcomes


def watched(drafter: Drafter, params: Params, prompts: Sequence[Sequence[int]], *, temperature: float, **settings) -> Watched:
    """Rounds of real decoding for calibrating confidences; a request's last round is left out, for its end is no refusal.

    Args:
      drafter: of chains.
      params: of target and drafter.
      prompts: token ids.
      temperature: of all requests.
      **settings: of `decoding`: target, rule, new_tokens.
    """

    def look(draft, log_p, verdict):
        heat = jnp.full(draft.tokens.shape[0], temperature)
        margins = None if draft.log_q is None else law_margins(draft.log_q, heat)
        return verdict.num_accepted, (draft.parents >= -1).sum(1), draft.confidence, margins

    log = decoding(prompts, drafter=drafter, probe=look, **settings)(params, temperature)
    ran = np.asarray(log.emitted) > 0
    ran &= np.cumsum(ran, 1) < ran.sum(1, keepdims=True)
    accepted, drafted, confidence, margins = (None if x is None else np.asarray(x)[ran] for x in log.probed)
    return Watched(confidence, margins, outcomes(cast(Any, accepted), cast(Any, drafted), drafter.num_nodes))


def _accepted_rows(draft, log_p, verdict) -> tuple:
    return verdict.path, verdict.num_accepted, draft.parents
