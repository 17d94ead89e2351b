"""Boost-tuning: what a model says is what it would write, each learns from the rest, and a kill changes nothing."""

import functools
import json

import helpers as h
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import load_drafter
from specjax.models.load import LM
from specjax.train import boost, corpus
from specjax.train.settings import Settings
from specjax.types import Params

ANSWER, SHARE = 6, 0.6
SETTINGS = Settings(steps=4, peak=3e-2, warmup=1, evaluate_every=100, log_every=1, save_seconds=0.0)


@functools.cache
def answers(model):
    """Greedy answers of "target" or "small" to prompts of 2 to 7 tokens."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, h.V, n).tolist() for n in rng.integers(2, 8, 12)]
    target, params = {"target": (h.TARGET, h.target_params()), "small": (h.SMALL, h.small_params())}[model]
    found = h.generate(h.drafter("plain"), "rejection", prompts, params=Params(params), target=target, new=ANSWER)
    return [(prompt, answer) for prompt, answer in zip(prompts, found.tokens, strict=True)]


def build(directory, talks):
    items = [corpus.Document([*p, *a], [False] * len(p) + [True] * len(a)) for p, a in talks]
    return corpus.build(directory, len(items), lambda n: [items[i] for i in n], provenance={})


@jax.jit
def full(params, line):
    """Logits [T, V] of one line, padded on the right."""
    return h.SMALL.apply(params, line[None], h.SMALL.init_cache(1, len(line)))[0].logits[0]


def by_hand(params, text, n):
    """(right, asked) of one document: token by token from its own logits."""
    line = np.asarray(text.tokens[text.starts[n] : text.starts[n + 1]], np.int32)
    mask = np.asarray(text.mask[text.starts[n] : text.starts[n + 1]])
    logits = np.asarray(full(params, jnp.asarray(np.pad(line, (0, 24 - len(line))))))
    goals = [t for t in range(1, len(line)) if mask[t]]
    return sum(int(logits[t - 1].argmax()) == line[t] for t in goals), len(goals)


def test_what_it_says_is_what_it_writes(tmp_path):
    """Its own greedy answers, with one token changed in some: exactly those are not said, wherever the change is."""
    changed = {1: 0, 4: 2, 6: ANSWER - 1, 9: 3}
    talks = [(p, list(a)) for p, a in answers("small")]
    for n, at in changed.items():
        talks[n][1][at] = (talks[n][1][at] + 1) % h.V
    text = build(tmp_path, talks)
    right, asked = boost.agreement(h.SMALL, h.small_params(), text, length=24, batch=5)
    assert (asked == ANSWER).all()
    assert [n for n, whole in enumerate(boost.said(right, asked, 1.0)) if not whole] == sorted(changed)


def test_selection_by_hand(tmp_path):
    """Counts of every document, packed several to a row; what is left by share; a document that asks for nothing goes."""
    text = build(tmp_path, [*answers("target"), ([3, 1, 2], [])])
    right, asked = boost.agreement(h.SMALL, h.small_params(), text, length=24, batch=4)
    expected = [by_hand(h.small_params(), text, n) for n in range(text.documents)]
    assert list(zip(right.tolist(), asked.tolist(), strict=True)) == expected
    for share in (0.5, 1.0):
        wanted = [n for n, (r, a) in enumerate(expected) if r < share * a]
        assert np.flatnonzero(~boost.said(right, asked, share)).tolist() == wanted
    some = np.asarray([2, 5, 12])
    part = boost.select(text, some)
    assert part.documents == 3 and part.tokens.dtype == text.tokens.dtype
    for n, of in enumerate(some):
        for name in ("tokens", "mask"):
            one, other = getattr(part, name), getattr(text, name)
            np.testing.assert_array_equal(
                one[part.starts[n] : part.starts[n + 1]], other[text.starts[of] : text.starts[of + 1]]
            )


def run(text, directory, **settings):
    return boost.boost(
        (h.SMALL, h.SMALL), text, directory=directory, target=h.TARGET, length=24, batch=4,
        **{"settings": SETTINGS, "target_params": h.target_params(), "share": SHARE, **settings},
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Text, its directory, and two models trained without a stop."""
    directory = tmp_path_factory.mktemp("boost")
    text = build(directory / "text", answers("target"))
    return text, directory, run(text, directory / "whole")


def left(directory, model):
    return json.loads((directory / f"model_{model}" / "left.json").read_text())["left"]


def same_bits(a, b):
    return all(jax.tree.leaves(jax.tree.map(lambda x, y: np.asarray(x).tobytes() == np.asarray(y).tobytes(), a, b)))


def test_each_learns_what_the_ones_before_it_have_not(whole):
    text, directory, found = whole
    kept = list(range(text.documents))
    for i, params in enumerate(found.params):
        assert found.learnt_from[i] == len(kept) > 0
        counts = [by_hand(params, text, n) for n in kept]
        kept = [n for n, (right, asked) in zip(kept, counts, strict=True) if right < SHARE * asked]
        assert left(directory / "whole", i) == kept
    assert found.learnt_from[0] > found.learnt_from[1] > found.left == len(kept) > 0
    assert kept != list(range(len(kept)))  # so that numbers counted within the second model's documents would be others
    assert not same_bits(*found.params)


@pytest.mark.parametrize(("model", "step"), [(0, 2), (1, 3)])
def test_killed_and_resumed(whole, tmp_path, model, step):
    """While either model learns: the same parameters and counts, and what was finished is not done again."""
    text, directory, expected = whole

    def kill(number, report):
        if (number, report.step) == (model, step):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(text, tmp_path, progress=kill)
    assert (tmp_path / "model_0" / "left.json").exists() == (model == 1) and not (tmp_path / "model_1" / "left.json").exists()
    steps = []
    again = run(text, tmp_path, progress=lambda number, report: steps.append((number, report.step)))
    assert same_bits(again.params, expected.params) and again[1:] == expected[1:]
    assert min(steps) == (model, step)
    assert [left(tmp_path, i) for i in range(2)] == [left(directory / "whole", i) for i in range(2)]


def test_another_beginning_is_refused(whole):
    text, directory, _ = whole
    with pytest.raises(ValueError, match="was begun with another share: choose an empty directory"):
        run(text, directory / "whole", share=0.75)


def test_other_text_of_the_same_size_is_refused(whole):
    """One token; the target; the seed: by digest, before a model is trained."""
    text, directory, _ = whole
    tokens = np.array(text.tokens)
    tokens[1] += 1
    with pytest.raises(ValueError, match="was begun with another text: choose an empty directory"):
        run(text._replace(tokens=tokens), directory / "whole")
    with pytest.raises(ValueError, match="was begun with another target"):
        run(text, directory / "whole", target_params=jax.tree.map(lambda x: 2 * x, h.target_params()))
    with pytest.raises(ValueError, match="was begun with another settings"):
        run(text, directory / "whole", settings=SETTINGS._replace(seed=1))


def test_a_part_of_a_corpus(whole):
    """Counts are its own documents', though its tokens begin further on."""
    text, how = whole[0], dict(length=24, batch=4)
    all_of_it, part = (
        boost.agreement(h.SMALL, h.small_params(), some, **how) for some in (text, text._replace(starts=text.starts[5:]))
    )
    for a, b in zip(all_of_it, part, strict=True):
        np.testing.assert_array_equal(a[5:], b)
    assert part[1].all() and (all_of_it[0][5:] != all_of_it[0][:-5]).any()


def test_nothing_left(whole, tmp_path):
    with pytest.raises(ValueError, match="0 documents are left for model 1: 1 models say all 12"):
        run(whole[0], tmp_path, share=0.0)


def test_text_without_answers_is_cut_to_rows(whole, tmp_path):
    """Stretches of 24 tokens stand for documents; two models that learn from the same ones are two all the same."""
    plain = whole[0]._replace(mask=None, starts=np.asarray([0, len(whole[0].tokens)]))
    found = run(plain, tmp_path, share=1.0)
    assert found.learnt_from == (-(-len(plain.tokens) // 24),) * 2 and found.left == found.learnt_from[0]
    assert not same_bits(*found.params)


def test_specinfer_decodes_with_both(whole):
    """Plain decoding's tokens, from the merged trees of the two."""
    models = [LM(h.SMALL, params, None, None) for params in whole[2].params]
    loaded = load_drafter("specinfer", LM(h.TARGET, h.target_params(), None, h.CONFIG), num_draft=2, models=models)
    result = h.generate(
        loaded.drafter, loaded.rule, h.MIXED, params=Params(h.target_params(), loaded.params), temperature=h.MIXED_HEAT
    )
    assert result.tokens[:5] == h.reference().tokens[:5]
    assert 0 < result.accepted.sum() < result.drafted.sum()
