"""What is data compiles nothing new: cases P01, P03, E11."""

import helpers as h
import jax
import jax.numpy as jnp
import numpy as np

import specjax
from specjax import api
from specjax.drafters.base import LoadedDrafter
from specjax.sampling import SamplingParams

TRACED = []
TABLE = jax.nn.log_softmax(2 * jax.random.normal(jax.random.key(0), (33, 32)), -1)


def counting():
    """An LM whose `apply` counts its traces."""
    lm = h.text_lm(TABLE)

    def apply(*args, **settings):
        TRACED.append(1)
        return lm.model.apply(*args, **settings)

    return lm._replace(model=lm.model._replace(apply=apply))


LM = counting()
DRAFTER = specjax.load_drafter("small", LM, model=LM, num_draft=3)
LOOKUP = specjax.load_drafter("ngram", LM, num_draft=3, min_order=1)


def call(drafter, *, seed=0, prompts=("abc", "de"), max_new_tokens=20, rule="rejection", lm=LM, **sampling):
    sampling = SamplingParams(**{"temperature": 0.5, "top_p": 0.9, **sampling})
    return specjax.generate(
        lm, drafter, list(prompts), key=jax.random.key(seed), max_new_tokens=max_new_tokens, rule=rule, sampling=sampling
    )


def test_P01_P03_nothing_compiles_twice():
    """Seeds, temperatures, prompts, budgets, end tokens, biases, weights of drafter and target: one compilation in all.

    Acceptance differs from call to call.  `run` and `prefill` are jitted: no Python runs for a round.
    """
    for drafter in (DRAFTER, LOOKUP, None):
        first = call(drafter)
        traces, sizes = len(TRACED), [f._cache_size() for f in (api.start, api.prefill, api.run)]
        outputs = {str(first)}
        for change in (
            dict(seed=1),
            dict(seed=2, temperature=1.3, top_p=0.4),
            dict(temperature=0.0),
            dict(prompts=("x", "a longer prompt " * 8)),
            dict(prompts=("yyyyyyyyy", "z"), max_new_tokens=100),
            dict(max_new_tokens=1),
            dict(lm=LM._replace(params=TABLE[:, ::-1])),
            dict(lm=LM._replace(tokenizer=h.tokenizer(eos_ids=(4,)))),
        ):
            outputs.add(str(call(drafter, **change)))
        if drafter is DRAFTER:
            outputs.add(str(call(drafter._replace(params=TABLE[::-1]), seed=3)))
        assert len(outputs) >= 8
        assert len(TRACED) == traces and [f._cache_size() for f in (api.start, api.prefill, api.run)] == sizes


def test_E11_no_budget_compiles():
    call(DRAFTER)
    before = len(TRACED)
    for budget in range(1, 18):
        assert [len(c.tokens) for c in call(DRAFTER, max_new_tokens=budget) if c.finish_reason == "length"] in (
            [budget] * 2,
            [budget],
            [],
        )
    assert len(TRACED) == before


def test_streaming_compiles_once_for_all_strides():
    pieces = lambda **k: list(specjax.stream(LM, DRAFTER, "abc", key=jax.random.key(0), max_new_tokens=30, **k))
    pieces()
    before = len(TRACED)
    pieces(stride=2)
    pieces(stride=5, stop=["qq"])
    assert len(TRACED) == before


def test_what_does_compile():
    """The counter counts: another batch, rule, K or field of the sampling parameters is another program."""
    call(DRAFTER)
    for change in (dict(prompts=("a",)), dict(rule="block"), dict(top_k=3)):
        before = len(TRACED)
        call(DRAFTER, **change)
        assert len(TRACED) > before
    before = len(TRACED)
    call(specjax.load_drafter("small", LM, model=LM, num_draft=2))
    assert len(TRACED) > before


def test_params_are_arguments_not_constants():
    """Weights folded into a program would double the memory and compile for each checkpoint."""
    lowered = api.run.lower(
        *run_arguments(), target=LM.model, drafter=DRAFTER.drafter, rule=specjax.RULES["rejection"], max_rounds=4
    )
    assert "dense<" not in lowered.as_text() or max(len(line) for line in lowered.as_text().splitlines()) < 20_000


def run_arguments():
    from specjax import keys, sampling
    from specjax.types import Params

    assert isinstance(DRAFTER, LoadedDrafter)
    params = Params(TABLE, DRAFTER.params)
    one = jnp.ones(1, jnp.int32)
    state = api.start(
        params,
        jnp.zeros((1, 64), jnp.int32),
        one,
        9 * one,
        -jnp.ones((1, 1), jnp.int32),
        keys.request_keys(jax.random.key(0), jnp.arange(1)),
        sampling.stack([SamplingParams()], 32),
        target=LM.model,
        drafter=DRAFTER.drafter,
    )
    return params, state, jnp.asarray(np.int32(4))
