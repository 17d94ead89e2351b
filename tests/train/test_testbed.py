"""The testbed: prepared twice alike, rows short then long; and what is packaged loads."""

from pathlib import Path

import jax
import numpy as np
import pytest

import specjax
from specjax import text, zoo
from specjax.models.transformer import language_model
from specjax.train import stdlib, testbed
from specjax.train.stdlib import Source

PACKAGED = (Path(zoo.__file__).parent / "testbed" / "config.json").is_file()


@pytest.fixture
def few(monkeypatch):
    """A standard library of four modules."""
    texts = [Source(f"m{i}.py", f"def f{i}(x):\n    return x + {i}\n" * 400) for i in range(4)]
    monkeypatch.setattr(stdlib, "sources", lambda: (texts[:3], texts[3:]))
    return texts


def test_prepare(few, tmp_path):
    bed, again = testbed.prepare(tmp_path), testbed.prepare(tmp_path)
    assert bed.train.documents == 3 and bed.held_out.documents == 1
    assert np.array_equal(bed.train.tokens, again.train.tokens)
    first = bed.train.tokens[: bed.train.starts[1]].tolist()
    assert first[-1] == 0 == bed.tokenizer.eos_ids[0] and bed.tokenizer.decode(first) == few[0].text
    assert bed.train.provenance["modules"] == 3 and len(bed.train.provenance["sha256"]) == 64


def test_another_tokenizer_is_refused(few, tmp_path):
    """A corpus of the same modules in other ids is another corpus, with as many ids or not."""
    made = testbed.prepare(tmp_path)
    backend = testbed.train_tokenizer([few[0].text], 300)
    assert testbed.prepare(tmp_path, tokenizer=made.tokenizer).train.tokens.tolist() == made.train.tokens.tolist()
    with pytest.raises(ValueError, match="train was begun with another vocabulary: choose an empty directory"):
        testbed.prepare(tmp_path, tokenizer=text.from_tokenizers(backend, eos_ids=(0,)))


def test_rows_are_short_then_long(few, tmp_path):
    rows = testbed.rows(testbed.prepare(tmp_path), testbed.SETTINGS._replace(steps=10))
    shapes = [rows.at(step).tokens.shape for step in (0, 6, 7, 9)]
    assert shapes == [(4, 512), (4, 512), (2, 1024), (2, 1024)]


def test_the_model_is_as_small_as_it_says():
    shapes = jax.eval_shape(language_model(testbed.CONFIG).init, jax.random.key(0))
    assert sum(x.size for x in jax.tree.leaves(shapes)) == 1_967_808


def test_no_such_package():
    with pytest.raises(FileNotFoundError, match="no packaged weights 'nothing': there are"):
        zoo.path("nothing")


def test_the_packaged_testbed():
    """Loads by name and continues Python."""
    lm = specjax.load("testbed")
    assert lm.config == testbed.CONFIG and lm.tokenizer.eos_ids == (0,)
    text = "class Reader:\n    def __init__(self, stream):\n        self.stream ="
    (out,) = specjax.generate(lm, None, [text], key=jax.random.key(0), max_new_tokens=1)
    assert out.text.startswith(" stream")
    assert (Path(zoo.path("testbed")) / "card.md").is_file()


@pytest.mark.parametrize(
    "method", ["small", "blockwise", "medusa", "hydra", "mtp", "eagle1", "eagle3", "eagle3.1", "dflash", "dspark", "dflash2"]
)
def test_the_packaged_drafters(method):
    """Found by the target's name; they draft well above chance, and the text is plain decoding's."""
    lm = specjax.load("testbed")
    loaded = specjax.load_drafter(method, lm, num_draft=3)
    plain, fast = (
        specjax.generate(
            lm, d, ["import os\n\n\ndef walk(", "class Reader:\n    def __init__"], key=jax.random.key(0), max_new_tokens=32
        )
        for d in (None, loaded)
    )
    assert [c.tokens for c in fast] == [c.tokens for c in plain]
    assert sum(c.stats.num_accepted_draft_tokens for c in fast) >= 3
    assert (zoo.path(f"testbed/{method}") / "card.md").is_file()
