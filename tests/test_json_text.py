"""Files of JSON that strangers wrote: one line says what is wrong, whoever reads them."""

import pytest

from specjax import json_text, prompts, trees
from specjax.drafters import files
from specjax.models.load import read_config
from specjax.text.tokenizer import from_directory
from specjax.train import chat

BROKEN = {"cut off": b"{", "deep": b"[" * 100_000, "a long number": b"1" * 5_000, "no text": b'"\xff"'}
READERS = {
    "json_text": lambda path: json_text.read_json(path / "config.json", "mend it"),
    "model": lambda path: read_config(path / "config.json"),
    "drafter": lambda path: files.read_config(path, "medusa", None),
    "tree": lambda path: trees.read_paths(path / "config.json"),
}


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("reader", READERS)
def test_broken_files(reader, broken, tmp_path):
    (tmp_path / "config.json").write_bytes(BROKEN[broken])
    with pytest.raises(ValueError, match=r"config.json is broken JSON \(.*\): ") as error:
        READERS[reader](tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("broken", ["cut off", "deep", "a long number"])
def test_broken_rows(broken, tmp_path):
    """Lines of prompts and of conversations; a list of conversations may be cut off after a whole one."""
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(b'{"question": "x"}\n' + BROKEN[broken])
    with pytest.raises(ValueError, match=r"rows.jsonl, line 2 is broken JSON"):
        prompts.load_prompts(rows)
    with pytest.raises(ValueError, match=r"rows.jsonl, line 2 is broken JSON"):
        chat.parse_rows(rows.read_text(), rows.name)
    whole = '[{"a": 1}, ' + BROKEN[broken].decode()
    if broken == "cut off":
        assert chat.parse_rows(whole, "rows") == [{"a": 1}]
    else:
        with pytest.raises(ValueError, match="row 2 is broken JSON"):
            chat.parse_rows(whole, "rows")


def test_what_is_no_object(tmp_path):
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="config.json holds a JSON list, not an object: download it again"):
        read_config(tmp_path / "config.json")
    (tmp_path / "tokenizer_config.json").write_text("[" * 100_000)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}')
    with pytest.raises(ValueError, match="tokenizer_config.json is broken JSON"):
        from_directory(tmp_path)
