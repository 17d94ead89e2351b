"""Planted faults of the laws: a drafter that reports another q than it drew from, a target whose verified rows are not p."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode, sampling
from specjax.lossless.bias import bias
from specjax.lossless.faults.planting import Mutant, in_draft, in_module, in_noise, in_pass


def law_changed(f):
    """f(log_q [B,N,V]) in place of the law that the drafter reports."""
    return in_draft(lambda draft: draft._replace(log_q=f(draft.log_q)))


def warped(change):
    """change(warp, sampling, logits, history) in place of `warp`, for verified rows only."""
    return in_module(sampling, "warp", lambda warp: lambda s, logits, history: change(warp, s, logits, history))


def late_temperature(warp, s, logits, history):
    """Top-p on the law at temperature 1, temperature afterwards."""
    log_p = warp(s._replace(temperature=jnp.ones_like(s.temperature)), logits, history)
    hot = s.temperature > 0
    return jnp.where(hot, jax.nn.log_softmax(log_p / jnp.where(hot, s.temperature, 1), -1), warp(s, logits, history))


def rows_of_p(shift, axis):
    """log_p [B, N+1, V] rolled."""
    return in_module(decode, "log_probs", lambda f: lambda *a: jnp.roll(f(*a), shift, axis))


def rounded(apply):
    """Logits in bfloat16."""

    def faulty(*args, **rest):
        out, cache = apply(*args, **rest)
        return out._replace(logits=out.logits.astype(jnp.bfloat16).astype(jnp.float32)), cache

    return faulty


MUTANTS = (
    Mutant("argmax draft, softmax q", "wrong q", "transformers #32867, jaymody #3", "chain", in_noise(jnp.zeros_like)),
    Mutant("q at another temperature", "wrong q", "drawn colder than reported (transformers #47932)", "chain",
           in_noise(lambda g: g * 0.6)),
    Mutant("q of another request", "wrong q", "row mapping (1Cat-vLLM #656)", "chain",
           law_changed(lambda q: jnp.roll(q, 1, 0))),
    Mutant("q of another position", "wrong q", "off by one along the draft", "chain", law_changed(lambda q: jnp.roll(q, 1, 1))),
    Mutant("q quantised", "wrong q", "drawn with full precision, verified with log q in steps of 1/2 (DeepSpec #31, coarser)",
           "chain", law_changed(lambda q: jnp.round(2 * q) / 2)),
    Mutant("log q clipped", "float", "a floor under small probabilities", "chain",
           law_changed(lambda q: jnp.maximum(q, np.log(0.05)))),
    Mutant("point mass reported soft", "wrong q", "a greedy draft with the law of the sampled one at T = 1/2", "chain",
           law_changed(lambda q: jax.nn.log_softmax(2 * q, -1))),
    Mutant("no top-p on verified rows", "wrong p", "vLLM #42744 with min-p", "warped",
           warped(lambda warp, s, x, h: warp(s._replace(top_p=None), x, h))),
    Mutant("temperature after top-p", "wrong p", "tpu-inference, _compute_probs", "warped", warped(late_temperature)),
    Mutant("default temperature", "wrong p", "vLLM #9834", "warped",
           warped(lambda warp, s, x, h: warp(s._replace(temperature=jnp.sign(s.temperature)), x, h))),
    Mutant("penalties ignored", "wrong p", "vLLM #18902", "warped",
           warped(lambda warp, s, x, h: warp(s._replace(presence_penalty=None), x, h))),
    Mutant("penalties without drafts", "wrong p", "rows of a block do not count the tokens drafted before them", "warped",
           warped(lambda warp, s, x, h: warp(s, x, h._replace(seen=h.seen & (jnp.arange(h.seen.shape[1]) == 0)[None])))),
    Mutant("p of the row before", "wrong p", "off by one (TensorRT-LLM #15098)", "chain", rows_of_p(1, 1)),
    Mutant("p of another request", "wrong p", "row mapping", "chain", rows_of_p(1, 0)),
    Mutant("logits in bfloat16", "float", "verified rows rounded, plain ones not", "tiny", in_pass(rounded)),
    Mutant("bias of TV .02", "control", "top becomes runner-up", "chain", lambda subject: bias(subject, 0.02)),
)  # fmt: skip
