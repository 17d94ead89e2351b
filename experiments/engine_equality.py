"""Is a request in a busy engine the request alone?

Question: 200 requests with Poisson arrivals, mixed sampling, a tenth cancelled and 2 % invalid, in 8 slots, by a planner that
drafts, drafts less and stops drafting at random, and lets requests in with and without a drafter: is every output that of its
solo run?

Command:    python experiments/engine_equality.py
            ... --requests 20                                                              # smaller
Run time:   5 minutes of one core beside other work
Expected:   the figures of README.md beside this file
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from engine_case import engine_of, kept, loaded_case, prompt, source

import specjax
from specjax import keys
from specjax.engine import Plan
from specjax.engine.replay import Asked, replay, summary
from specjax.sampling import SamplingParams

SAMPLINGS = (
    SamplingParams(),
    SamplingParams(0.7),
    SamplingParams(1.0),
    SamplingParams(1.0, top_p=0.9),
    SamplingParams(0.8, top_k=40, repetition_penalty=1.1),
)
INVALID = ({"prompt": []}, {"max_new_tokens": 0}, {"sampling": SamplingParams(-1.0)}, {"prompt": [1, 1 << 20]})


class Roving:
    """A planner that draws what to do: whole drafts, part of them, none, and none with the drafter left behind."""

    def __init__(self, seed, num_draft):
        self.rng, self.num_draft = np.random.default_rng(seed), num_draft

    def admit(self, slots, rows):
        return self.rng.random(len(slots)) < 0.8

    def plan(self, rows):
        kind = self.rng.integers(0, 6)
        lengths = self.rng.integers(0, self.num_draft + 1, len(rows.active)) if kind < 4 else None
        return Plan(lengths, keep_up=kind != 5 or self.rng.random() < 0.8)

    def learn(self, drafted, accepted):
        pass


def drawn(lm, count, rate, seed):
    """Requests with their arrivals, and the indices of those that make no sense."""
    rng = np.random.default_rng(seed)
    asked, invalid = [], set(rng.choice(count, max(1, count // 50), replace=False).tolist())
    for i, at in enumerate(np.cumsum(rng.exponential(1 / rate, count))):
        request = dict(
            prompt=prompt(lm, i, rng), sampling=SAMPLINGS[int(rng.integers(len(SAMPLINGS)))], key=jax.random.key(i),
            max_new_tokens=int(rng.choice([1, 8, 24, 48])),
        )  # fmt: skip
        cancel = float(rng.exponential(0.1)) if i not in invalid and rng.random() < 0.1 else None
        broken = INVALID[i % len(INVALID)] if i in invalid else {}
        asked.append(Asked(float(at), {**request, **broken}, cancel))
    return asked, invalid


def compared(case, asked, served):
    """Requests whose tokens are not those that they have alone."""
    differ = []
    for i, (one, was) in enumerate(zip(asked, served, strict=True)):
        if was.request is None:
            continue
        own, result = one.request, was.request.result
        alone = specjax.generate(
            case.lm, case.loaded, [own["prompt"]], key=own["key"][None], max_new_tokens=own["max_new_tokens"],
            rule="coupled", sampling=own["sampling"],
        )[0]  # fmt: skip
        n = len(result.tokens) if result.finish_reason == "cancelled" else len(alone.tokens)
        if result.tokens != alone.tokens[:n]:
            differ.append({"request": i, **margin(case.lm, own, alone.tokens, result.tokens)})
    return differ


def margin(lm, own, alone, other):
    """At the first difference: by how much what each took is apart, logit over temperature plus the request's noise."""
    text = list(own["prompt"])
    at = next((i for i, (a, b) in enumerate(zip(alone, other, strict=False)) if a != b), min(len(alone), len(other)))
    if at >= min(len(alone), len(other)):
        return {"at": at, "margin": None}
    tokens = jnp.asarray([text + alone[:at]])
    logits = lm.model.apply(lm.params, tokens, lm.model.init_cache(1, tokens.shape[1]))[0].logits[0, -1]
    heat = own["sampling"].temperature
    noise = keys.gumbel_at(own["key"][None], jnp.asarray([tokens.shape[1]]), lm.model.vocab_size)[0]
    score = np.asarray(logits / heat + noise if heat else logits)
    return {"at": at, "margin": float(abs(score[alone[at]] - score[other[at]])), "temperature": heat}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source(parser, "engine_equality.json")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rate", type=float, default=40.0, help="arrivals a second")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    case = loaded_case(args)
    asked, invalid = drawn(case.lm, args.requests, args.rate, args.seed)
    engine = engine_of(case, rule="coupled", planner=Roving(args.seed, case.num_draft))
    served = replay(engine, asked)
    total = summary(served)
    counts = {name: getattr(total, name) for name in ("finished", "cancelled", "failed", "invalid", "refused")}
    found = {"requests": len(asked), "accounted": sum(counts.values()), **counts, "expected_invalid": len(invalid)}
    kept(args.out, {**found, "tau": total.tau, "different": compared(case, asked, served)})


if __name__ == "__main__":
    main()
