"""Corpora on disk, killed and resumed; rows and batches made of them."""

import json

import numpy as np
import pytest
import tokenizers

from specjax.drafters.recipe import labels
from specjax.train import corpus, stdlib, testbed
from specjax.train.corpus import Document, Skipped
from specjax.train.packing import batches, pack, then

COUNT = 23


def make(numbers):
    """Item i is i tokens long; every seventh is refused, item 5 fails."""
    return [one(i) for i in numbers]


def one(i):
    if i == 5:
        return Skipped("broken", error=True)
    if i % 7 == 0:
        return Skipped("empty")
    return Document([(i + k) % 300 for k in range(i)], [k % 2 == 0 for k in range(i)])


def whole(directory, **settings):
    return corpus.build(directory, COUNT, make, provenance={"from": "a test"}, shard=4, **settings)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return whole(tmp_path_factory.mktemp("corpus"))


def test_what_is_stored(built):
    kept = [i for i in range(COUNT) if i != 5 and i % 7]
    assert built.documents == len(kept) and built.tokens.dtype == np.uint16
    for place, i in enumerate(kept):
        part = slice(built.starts[place], built.starts[place + 1])
        assert built.tokens[part].tolist() == list(one(i).tokens) and built.mask[part].tolist() == list(one(i).mask)
    counts = built.provenance["counts"]
    assert (counts["success"], counts["errors"], counts["skipped"]) == (len(kept), 1, 4)
    assert counts["reasons"] == {"skipped": {"empty": 4}, "errors": {"broken": 1}}
    assert counts["tokens"] == sum(kept) and counts["to_predict"] == int(built.mask.sum())


@pytest.mark.parametrize("killed_at", [0, 3, 9, 22])
def test_a_kill_loses_nothing_and_doubles_nothing(built, tmp_path, killed_at):
    done = []

    def dying(numbers):
        if killed_at in numbers:
            raise KeyboardInterrupt
        return make(numbers)

    with pytest.raises(KeyboardInterrupt):
        corpus.build(tmp_path, COUNT, dying, provenance={"from": "a test"}, shard=4)
    with pytest.raises(FileNotFoundError, match="no finished corpus"):
        corpus.read(tmp_path)
    counting = lambda numbers: done.extend(numbers) or make(numbers)
    again = corpus.build(tmp_path, COUNT, counting, provenance={"from": "a test"}, shard=4)
    assert done == list(range(killed_at // 4 * 4, COUNT))
    assert again.tokens.tolist() == built.tokens.tolist() and again.mask.tolist() == built.mask.tolist()
    assert again.starts.tolist() == built.starts.tolist() and again.provenance == built.provenance


def test_what_is_there_so_far(built, tmp_path):
    """Of a run killed in its fourth shard: three shards as a corpus, and the run goes on to the whole."""

    def dying(numbers):
        if 13 in numbers:
            raise KeyboardInterrupt
        return make(numbers)

    with pytest.raises(FileNotFoundError, match="no shard"):
        corpus.so_far(tmp_path / "part", tmp_path / "goal")
    with pytest.raises(KeyboardInterrupt):
        corpus.build(tmp_path / "part", COUNT, dying, provenance={"from": "a test"}, shard=4)
    part = corpus.so_far(tmp_path / "part", tmp_path / "goal")
    assert part.provenance["items"] == 12 and part.provenance["counts"]["success"] == part.documents == 9
    n = len(part.tokens)
    assert part.tokens.tolist() == built.tokens[:n].tolist() and part.mask.tolist() == built.mask[:n].tolist()
    assert whole(tmp_path / "part").tokens.tolist() == built.tokens.tolist()


def test_a_kill_while_writing_leaves_no_half_shard(tmp_path, monkeypatch):
    def broken(file, **arrays):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez", broken)
    with pytest.raises(OSError, match="disk full"):
        whole(tmp_path)
    assert list((tmp_path / "shards").iterdir()) == []


def test_a_plan_is_whole_or_not_there(tmp_path, monkeypatch):
    """Killed before it is renamed: nothing is left that a later run could take for a plan."""

    def kill(*paths):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", kill)
        with pytest.raises(KeyboardInterrupt):
            corpus.keep_to(tmp_path / "run", {"seed": 1})
    assert list((tmp_path / "run").iterdir()) == []
    corpus.keep_to(tmp_path / "run", {"seed": (1, 2)})
    corpus.keep_to(tmp_path / "run", {"seed": [1, 2]})
    with pytest.raises(ValueError, match="was begun with another seed"):
        corpus.keep_to(tmp_path / "run", {"seed": [2, 1]})


def test_another_plan_is_refused(tmp_path):
    whole(tmp_path)
    assert whole(tmp_path).documents == whole(tmp_path).documents  # finished: nothing is done again
    with pytest.raises(ValueError, match="begun with another from"):
        corpus.build(tmp_path, COUNT, make, provenance={"from": "elsewhere"}, shard=4)


def test_large_ids_and_no_mask(tmp_path):
    found = corpus.build(tmp_path, 2, lambda n: [Document([1 << 17, 3]) for _ in n], provenance={})
    assert found.tokens.dtype == np.uint32 and found.mask is None and found.tokens.tolist() == [1 << 17, 3] * 2


def test_nothing_at_all(tmp_path):
    with pytest.raises(ValueError, match="not one of 3 items"):
        corpus.build(tmp_path, 3, lambda n: [Skipped("empty") for _ in n], provenance={})


@pytest.mark.parametrize("length", [2, 5, 8, 64])
def test_every_token_is_a_label_once(built, length):
    """All but the first of each document, over one epoch; nothing else is."""
    table = pack(built.starts, length)
    rows = batches(built, length=length, batch=1)
    seen = []
    for step in range(len(table)):
        batch, pieces = rows.at(step), table[rows.rows(step)[0]]
        place = np.concatenate([np.arange(a, b) for a, b in pieces])
        where = np.flatnonzero(labels(batch._replace(mask=np.ones_like(batch.mask)))[1][0]) + 1
        seen += place[where].tolist()
        assert np.asarray(batch.tokens[0])[: len(place)].tolist() == built.tokens[place].tolist()
        assert np.asarray(batch.mask[0])[: len(place)].tolist() == built.mask[place].tolist()
        assert np.asarray(batch.segments[0])[len(place) :].tolist() == [-1] * (length - len(place))
    firsts = set(built.starts[:-1].tolist())
    assert sorted(seen) == [i for i in range(len(built.tokens)) if i not in firsts]


def test_a_batch_depends_on_seed_and_step_alone(built):
    same = lambda a, b: all(np.array_equal(x, y) for x, y in zip(a[:3], b[:3], strict=True))
    first, again, other = (batches(built, length=8, batch=3, seed=s) for s in (0, 0, 1))
    assert same(first.at(50), again.at(50)) and not same(first.at(50), other.at(50))
    two_epochs = np.concatenate([first.rows(n) for n in range(2 * first.count)])[: 2 * first.count]
    for epoch in np.split(two_epochs, 2):
        assert sorted(epoch.tolist()) == list(range(first.count))
    later = then(first, 10, other)
    assert same(later.at(9), first.at(9)) and same(later.at(10), other.at(10))
    assert first.name(0).startswith("rows [") and "documents" in first.name(0)


def test_the_standard_library(tmp_path):
    """Sorted, without tests and generated files, each text once, held-out modules by name."""
    for name, text in {"a.py": "x = 1", "b/c.py": "y = 2", "b/d.py": "x = 1", "test/e.py": "z", "encodings/f.py": "w"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "_sysconfigdata_x.py").write_text("a path of this machine")
    train, held = stdlib.sources(tmp_path)
    assert [s.name for s in sorted(train + held)] == ["a.py", "b/c.py"]
    real_train, real_held = stdlib.sources()
    assert 300 < len(real_train) and 0.02 < len(real_held) / len(real_train) < 0.09
    assert not {s.text for s in real_train} & {s.text for s in real_held}
    assert json.dumps(stdlib.provenance(real_held[:2]))


def test_a_tokenizer_of_any_text():
    backend = testbed.train_tokenizer(["def f(x):\n    return x\n"] * 3, vocab_size=270)
    assert backend.token_to_id(testbed.EOS) == 0 and backend.get_vocab_size() == 270
    for text in ("naïve π\t\x00 def f(x):\r\n", "def f(x):\n    return x\n"):
        assert backend.decode(backend.encode(text).ids) == text
    assert isinstance(backend, tokenizers.Tokenizer)
