"""One table: every method of METHODS x what a drafter promises.  A new method needs one line in `SETTINGS`."""

import functools

import helpers as h
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import decode, keys, sampling, trees
from specjax.drafters import METHODS
from specjax.drafters.base import KINDS, options
from specjax.models.load import LM
from specjax.sampling import SamplingParams
from specjax.types import Params, Sequences
from specjax.verify import RULES

K = 3
TARGET_LM = LM(h.TARGET, h.target_params(), None, h.CONFIG)
SMALL_LM = LM(h.SMALL, h.small_params(), None, None)
SETTINGS = {
    "plain": {},
    "ngram": {"min_order": 1},
    "small": {"model": SMALL_LM},
    "specinfer": {"models": SMALL_LM, "expansion": (2, 2, 1)},
    "blockwise": {"weights": h.saved("blockwise")},
    "medusa": {"weights": h.saved("medusa")},
    "hydra": {"weights": h.saved("hydra")},
    "parallel_heads": {"weights": h.saved("parallel_heads")},
    "mtp": {"weights": h.saved("mtp")},
    "eagle1": {"weights": h.saved("eagle1")},
    "eagle3": {"weights": h.saved("eagle3")},
    "eagle3.1": {"weights": h.saved("eagle3.1")},
    "peagle": {"weights": h.saved("peagle")},
    **{name: {"weights": h.saved(name)} for name in h.BLOCKS},
    "early_exit": {"layers": 1},
}
NAMES = {"ngram": "ngram, order 1", "early_exit": "early_exit, 1 layer"}
"""What helpers call them, where it is not the method's own name."""
HEAT = [0.0, 1.0, 0.7, 0.0, 1.0]
each_method = pytest.mark.parametrize("method", METHODS)


@functools.cache
def loaded(method):
    return specjax.load_drafter(method, TARGET_LM, num_draft=K, **SETTINGS[method])


@functools.cache
def prepared(method):
    """State after prefill of five ragged prompts at mixed temperatures."""
    drafter, params = loaded(method).drafter, Params(h.target_params(), loaded(method).params)
    capacity = decode.capacity_for(30, drafter)
    tokens = np.zeros((5, capacity), np.int32)
    for row, prompt in enumerate(h.PROMPTS):
        tokens[row, : len(prompt)] = prompt
    lengths = jnp.asarray([len(p) for p in h.PROMPTS], jnp.int32)
    stacked = sampling.stack([SamplingParams(temperature=t) for t in HEAT], h.V)
    key = keys.request_keys(jax.random.key(1), jnp.arange(5))
    static = dict(target=h.TARGET, drafter=drafter)

    @jax.jit
    def prepare(params, tokens):
        state = decode.start(params, tokens, lengths, lengths + 7, jnp.full((5, 1), -1, jnp.int32), key, stacked, **static)
        return decode.prefill(params, state, chunk=8, **static)

    return prepare(params, jnp.asarray(tokens)), params


def noise(depth, width=1):
    return jax.random.gumbel(jax.random.fold_in(jax.random.key(2), depth), (5, width, h.V))


@functools.cache
def proposal(method):
    state, params = prepared(method)
    sequences = Sequences(state.tokens, state.length, state.cache, state.sampling)
    return jax.jit(lambda p, d, s: loaded(method).drafter.propose(noise, p, d, s))(params, state.drafter, sequences)


def test_the_table_covers_every_method():
    assert set(SETTINGS) == set(METHODS)


@each_method
def test_entry(method):
    entry, card, drafter = METHODS[method], loaded(method).card, loaded(method).drafter
    assert entry.kind in KINDS and entry.rule in RULES and entry.summary
    assert set(SETTINGS[method]) <= set(options(entry.load))
    assert card.method == method
    assert card.extra_parameters == sum(x.size for x in jax.tree.leaves(loaded(method).params))
    assert (card.extra_parameters == 0) == (entry.kind in ("none", "training-free"))
    decode.check(h.TARGET, drafter, RULES[entry.rule])
    assert drafter.children in ("point", "iid", "without_replacement")
    assert drafter.depth <= drafter.num_nodes and all(0 < w <= drafter.num_nodes for w in drafter.widths)
    assert drafter.vocab_size in (None, h.V)
    hash(drafter)  # it is a static argument


@each_method
def test_num_draft_is_the_depth(method):
    drafter = loaded(method).drafter
    assert drafter.depth == (0 if method == "plain" else K)
    if drafter.chain:
        assert drafter.num_nodes == drafter.depth


@each_method
def test_a_draft_is_a_tree_of_tokens(method):
    """Shapes and types; parents before children; absent nodes have no children; a chain is a chain."""
    drafter, (draft, _) = loaded(method).drafter, proposal(method)
    n = drafter.num_nodes
    assert draft.tokens.shape == draft.parents.shape == (5, n)
    assert draft.tokens.dtype == draft.parents.dtype == jnp.int32
    parents, tokens = np.asarray(draft.parents), np.asarray(draft.tokens)
    for row in range(5):
        for i in range(n):
            assert -2 <= parents[row, i] < i
            assert parents[row, i] < 0 or parents[row, parents[row, i]] >= -1
    live = parents >= -1
    assert (tokens[live] >= 0).all() and (tokens[live] < h.V).all()
    if drafter.chain:
        assert (parents[live] == np.broadcast_to(trees.chain(n), (5, n))[live]).all()
    assert draft.confidence is None or draft.confidence.shape == (5, n)


@each_method
def test_S01_S03_q_is_what_was_drawn(method):
    """A law that sums to 1, one-hot at temperature 0, and from it exactly this noise draws exactly these tokens."""
    drafter, (draft, _) = loaded(method).drafter, proposal(method)
    if draft.log_q is None:
        assert drafter.children == "point"
        return
    q, live = np.exp(np.asarray(draft.log_q, np.float64)), np.asarray(draft.parents) >= -1
    assert draft.log_q.shape == (5, drafter.num_nodes, h.V)
    np.testing.assert_allclose(q.sum(-1)[live], 1, atol=1e-5)
    for row, heat in enumerate(HEAT):
        if heat == 0:
            assert set(np.unique(q[row][live[row]])) == {0.0, 1.0}
    for depth in range(1, drafter.depth + 1):
        if drafter.children == "iid" and drafter.chain:
            expected = (np.asarray(draft.log_q)[:, depth - 1] + np.asarray(noise(depth))[:, 0]).argmax(-1)
            here = live[:, depth - 1]
            assert (np.asarray(draft.tokens)[:, depth - 1] == expected)[here].all()


@each_method
def test_a_proposal_is_a_function_of_what_it_is_given(method):
    """Twice the same; hot rows follow the noise, greedy rows do not."""
    state, params = prepared(method)
    sequences = Sequences(state.tokens, state.length, state.cache, state.sampling)
    go = jax.jit(
        lambda n1, n2, n3: loaded(method).drafter.propose(
            lambda d, w=1: jnp.stack([n1, n2, n3])[d - 1][:, :w], params, state.drafter, sequences
        )
    )
    a, b = [[jax.random.gumbel(jax.random.fold_in(jax.random.key(s), i), (5, 8, h.V)) for i in range(3)] for s in (1, 2)]
    one, other = go(*a)[0], go(*b)[0]
    greedy = np.asarray(HEAT) == 0
    np.testing.assert_array_equal(np.asarray(one.tokens)[greedy], np.asarray(other.tokens)[greedy])
    if one.log_q is not None:
        assert (np.asarray(one.tokens)[~greedy] != np.asarray(other.tokens)[~greedy]).any()


@each_method
def test_the_state_keeps_its_form_and_has_the_batch_first(method):
    """init, absorb, propose and commit all return what they take, so the state can be carried, frozen and exchanged by row."""
    drafter, (state, params) = loaded(method).drafter, prepared(method)
    form = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    empty = jax.eval_shape(lambda: drafter.init(params, 5, state.tokens.shape[1]))
    assert form(empty) == form(state.drafter) == form(proposal(method)[1])
    assert all(x.shape[0] == 5 for x in jax.tree.leaves(empty))
    after = jax.eval_shape(lambda: decode.round(params, state, target=h.TARGET, drafter=drafter, rule=RULES["coupled"])[0])
    assert form(after) == form(state)


@each_method
@pytest.mark.parametrize("coupled", [False, True])
def test_a_drafter_of_nan_changes_no_token(method, coupled):
    """Every weight of the drafter's own is NaN: nothing is drafted, or nothing of it is read."""
    name, rule = NAMES.get(method, method), "coupled" if coupled else METHODS[method].rule
    broken = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), h.drafter_params(name))
    result = h.generate(h.drafter(name), rule, h.MIXED, params=Params(h.target_params(), broken), temperature=h.MIXED_HEAT)
    rows = range(10) if coupled else range(5)
    assert [result.tokens[i] for i in rows] == [h.reference().tokens[i] for i in rows]
    if jax.tree.leaves(broken):
        assert result.drafted.sum() == 0


@each_method
def test_a_proposal_does_not_depend_on_what_lies_past_the_length(method):
    """Junk tokens and junk K/V in free slots (B03: proposals are those of a clean row)."""
    state, params = prepared(method)
    slot = jnp.arange(state.tokens.shape[1])
    free = slot[None] >= state.cache.length[:, None]
    spoiled = state.cache._replace(
        k=tuple(jnp.where(free[:, None, None], 50.0, x) for x in state.cache.k),
        v=tuple(jnp.where(free[:, None, :, None], 50.0, x) for x in state.cache.v),
    )
    tokens = jnp.where(slot[None] >= state.length[:, None], 5, state.tokens)
    sequences = Sequences(tokens, state.length, spoiled, state.sampling)
    got = jax.jit(lambda p, d, s: loaded(method).drafter.propose(noise, p, d, s))(params, state.drafter, sequences)[0]
    expected = proposal(method)[0]
    live = np.asarray(expected.parents) >= -1
    np.testing.assert_array_equal(got.parents, expected.parents)
    np.testing.assert_array_equal(np.asarray(got.tokens)[live], np.asarray(expected.tokens)[live])
    if got.log_q is not None:
        np.testing.assert_allclose(got.log_q, expected.log_q, atol=1e-5)
