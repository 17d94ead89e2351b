"""What a run is judged by while it trains: held-out loss, and tau in real decoding through `decode.run`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode, keys, sampling
from specjax.drafters.recipe import Recipe, with_output
from specjax.metrics import cut, statistics
from specjax.sampling import SamplingParams
from specjax.train.loop import Evaluate
from specjax.train.packing import Batches
from specjax.types import LanguageModel, RoundInfo, Rule


def held_out(recipe: Recipe, batches: Batches, *, steps: int, target: LanguageModel | None = None) -> Evaluate:
    """The recipe's loss and metrics on the first `steps` batches, pooled over their labels, as "held_out_...".

    The same rows and keys every time; accuracy is teacher-forced.
    """

    @jax.jit
    def one(params, target_params, batch, key):
        loss, metrics = recipe.loss(params, target_params, with_output(batch, target, target_params, recipe.features), key)
        return {**metrics, "loss": loss}

    def run(params, target_params):
        parts = [one(params, target_params, batches.at(n), jax.random.key(n)) for n in range(steps)]
        weight = np.asarray([float(part["weight"]) for part in parts])
        names = [name for name in parts[0] if name != "weight"]
        return {f"held_out_{n}": float(weight @ [float(p[n]) for p in parts]) / max(weight.sum(), 1) for n in names}

    return run


def acceptance(
    recipe: Recipe,
    prompts: Sequence[Sequence[int]],
    *,
    target: LanguageModel,
    rule: Rule,
    new_tokens: int = 64,
    temperature: float = 0.0,
    eos_ids: Sequence[int] = (),
    seed: int = 0,
) -> Evaluate:
    """tau and acceptance by position of `recipe.drafter` on prompts, decoded as users decode them.

    Names carry the temperature: "tau_t0", "accepted_t0_1" (the share of rounds that accepted the first token), ...

    Raises:
      ValueError: the recipe has no drafter, or target, drafter and rule do not fit.
    """
    drafter = recipe.drafter
    if drafter is None:
        raise ValueError("this recipe trains nothing that drafts: leave acceptance out")
    decode.check(target, drafter, rule)
    lengths = np.asarray([len(p) for p in prompts], np.int32)
    capacity = decode.capacity_for(int(lengths.max()) + new_tokens, drafter)
    tokens = np.zeros((len(prompts), capacity), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    eos = np.asarray([(*eos_ids, -1)] * len(prompts), np.int32)
    static: dict[str, Any] = {"target": target, "drafter": drafter}

    @jax.jit
    def go(params, tokens, lengths, eos, key, params_of_sampling):
        state = decode.start(params, tokens, lengths, lengths + new_tokens, eos, key, params_of_sampling, **static)
        state = decode.prefill(params, state, chunk=64, **static)
        return decode.run(params, state, jnp.asarray(new_tokens), rule=rule, max_rounds=new_tokens, **static)[1]

    request = keys.request_keys(jax.random.key(seed), jnp.arange(len(prompts)))
    each = sampling.stack([SamplingParams(temperature=temperature)] * len(prompts), target.vocab_size)
    inputs = [jnp.asarray(x) for x in (tokens, lengths, eos)]

    def run(params, target_params):
        log = go(recipe.assemble(params, target_params), *inputs, request, each)
        rows = [RoundInfo(*(np.asarray(x)[row] for x in log[:3])) for row in range(len(prompts))]
        stats = statistics([cut(row, new_tokens) for row in rows], drafter.depth)
        name = f"t{temperature:g}"
        rates = {f"accepted_{name}_{k + 1}": x for k, x in enumerate(stats.per_position_acceptance_rate)}
        return {f"tau_{name}": stats.mean_acceptance_length, **rates}

    return run
