"""Rates by rank, measured in decoding, from which trees are built."""

from types import SimpleNamespace

import helpers as h
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafters.medusa import medusa
from specjax.drafters.recipe import Batch
from specjax.train.evaluate import comb, decoding, kept_mass, rank_rates, watched
from specjax.types import Params
from specjax.verify import RULES

PARAMS = Params(h.target_params(), h.trained("medusa"))


def rates(depth, ranks, drafter=None, **settings):
    drafter = drafter or medusa(h.TARGET, paths=comb(depth, ranks))
    settings = {"rule": RULES["target_match"], "new_tokens": 12, "temperature": 0.0, **settings}
    return rank_rates(drafter, PARAMS, h.PROMPTS, ranks=ranks, target=h.TARGET, **settings)


def test_the_candidate_of_some_rank_is_right():
    """With every token a candidate, one of them is accepted at each depth, and the ranks say which: the tokens themselves."""
    found = rates(2, h.V)
    assert found.shape == (2, h.V)
    np.testing.assert_allclose(found.sum(1), 1)

    # By hand: the target's greedy text, and where each of its tokens stands among the logits of the first head.
    drafter = medusa(h.TARGET, paths=comb(2, h.V))
    decoded = h.generate(drafter, "target_match", h.PROMPTS, params=PARAMS, new=12)
    ranks = []
    for prompt, new, emitted in zip(h.PROMPTS, decoded.tokens, decoded.emitted, strict=True):
        line, at = jnp.asarray([[*prompt, *new]]), len(prompt)
        hidden = h.TARGET.apply(PARAMS.target, line, h.TARGET.init_cache(1, line.shape[1]))[0].hidden[0]
        for count in emitted[emitted > 0].tolist():
            state = hidden[at - 2] if at > 1 else jnp.zeros(h.TARGET.width)  # the last token itself has not been run
            logits = (state + head(PARAMS.drafter, 0, state)) @ PARAMS.drafter["head"][0]
            ranks.append(int((-logits).argsort().tolist().index(int(line[0, at]))))
            at += count
    np.testing.assert_allclose(np.bincount(ranks, minlength=h.V) / len(ranks), found[0], atol=1e-12)


def head(heads, i, state):
    """What the blocks of one head add to a state [D]."""
    x = state
    for kernel, bias in zip(heads["kernel"][i], heads["bias"][i], strict=True):
        x = x + jax.nn.silu(x @ kernel + bias)
    return x - state


def test_one_candidate_is_a_chain():
    found = rates(3, 1, rule=RULES["rejection"])
    chain = h.generate(medusa(h.TARGET, paths=comb(3, 1)), "rejection", h.PROMPTS, params=PARAMS, new=12)
    accepted = chain.accepted[chain.emitted > 0]
    # rounds that an end cut short count what was accepted before the cut: at most one a prompt
    rounds = len(accepted)
    assert abs(found[0, 0] - (accepted > 0).mean()) <= len(h.PROMPTS) / rounds


def test_another_tree_is_refused():
    with pytest.raises(ValueError, match=r"8 nodes is not comb\(3, 2\)"):
        rates(3, 2, medusa(h.TARGET, paths=h.HEAD_TREE))
    binary = ((0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1))
    with pytest.raises(ValueError, match=r"6 nodes is not comb\(2, 3\)"):  # as many nodes, which hang elsewhere
        rates(2, 3, medusa(h.TARGET, paths=binary))


def test_the_mass_that_a_draft_vocabulary_keeps():
    """By hand, over the labels alone: a masked token's law does not count, nor one across a border of documents."""
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, h.V, (2, 8)), jnp.int32)
    mask = jnp.asarray([[False] * 4 + [True] * 4, [True] * 8])
    segments = jnp.asarray([[0] * 8, [0] * 5 + [1] * 3], jnp.int32)
    ids = (0, 3, 4, 9)
    rows = SimpleNamespace(at=lambda n: Batch(tokens, mask, segments))
    found = kept_mass(h.TARGET, h.target_params(), ids, rows, steps=2)
    laws = []
    for row, first, last in ((0, 0, 8), (1, 0, 5), (1, 5, 8)):
        line = tokens[row : row + 1, first:last]
        logits = h.TARGET.apply(h.target_params(), line, h.TARGET.init_cache(1, 8))[0].logits[0]
        kept = jax.nn.softmax(logits, -1)[:, jnp.asarray(ids)].sum(-1)
        laws += [float(kept[t]) for t in range(last - first - 1) if mask[row, first + t + 1]]
    np.testing.assert_allclose(found, np.mean(laws), rtol=1e-5)


def test_watched_rounds_are_those_of_decoding():
    """Confidences of a drafter that gives them, margins of its laws, and what became of each; no request's last round."""
    drafter, params = h.drafter("dspark", 3), Params(h.target_params(), h.drafter_params("dspark"))
    how = dict(target=h.TARGET, drafter=drafter, rule=RULES["rejection"], new_tokens=16)
    rounds = decoding(h.PROMPTS, **how)(params, 1.0)
    how["temperature"] = 1.0
    seen = watched(params=params, prompts=h.PROMPTS, **how)
    ran = np.asarray(rounds.emitted) > 0
    accepted = np.concatenate([np.asarray(a)[on][:-1] for a, on in zip(rounds.accepted, ran, strict=True)])
    assert seen.outcomes.accepted.sum(1).tolist() == accepted.tolist() and accepted.any()
    assert seen.confidence.shape == seen.margins.shape == (len(accepted), 3)
    assert ((seen.confidence > 0) & (seen.confidence < 1)).all() and (seen.margins >= 0).all()
    point = h.drafter("dflash, point", 3)
    how |= dict(drafter=point, rule=RULES["target_match"])
    seen = watched(params=Params(h.target_params(), h.drafter_params("dflash")), prompts=h.PROMPTS, **how)
    assert seen.confidence is None and seen.margins is None
