"""Files of prompts: every format as published, and faults that name the file and the line."""

import gzip
import json

import pytest

from specjax.prompts import PromptRow, load_prompts, select

ROWS = {
    "spec_bench": ({"question_id": 81, "category": "writing", "turns": ["a", "b"]}, PromptRow("81", "writing", ("a", "b"))),
    "mt-bench": ({"turns": ["one\u2028line"]}, PromptRow("1", "mt-bench", ("one\u2028line",))),
    "HumanEval": (
        {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f"},
        ("HumanEval/0", "humaneval", ("def f():\n",)),
    ),
    "gsm8k_test": ({"question": "1 + 1?", "answer": "2"}, PromptRow("1", "gsm8k_test", ("1 + 1?",))),
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz"])
def test_formats(tmp_path, name, ending):
    row, expected = ROWS[name]
    text = (json.dumps(row, ensure_ascii=False) + "\n\n").encode()  # a blank line is nothing
    path = tmp_path / (name + ending)
    path.write_bytes(gzip.compress(text) if ending.endswith(".gz") else text)
    assert load_prompts(path) == [expected]


def test_text_is_one_prompt(tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("first line\n\nsecond\n")
    assert load_prompts(str(path)) == [PromptRow("1", "long", ("first line\n\nsecond",))]


GOOD = '{"turns": ["a"]}\n'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", GOOD + "{broken", "a.jsonl, line 2 is broken JSON"),
        ("a.jsonl", GOOD + "\n" + '{"text": "x", "id": 3}', "a.jsonl, line 3 has keys id, text: a row needs `turns`"),
        ("a.jsonl", GOOD + "[1]", "a.jsonl, line 2 has a JSON list"),
        ("a.jsonl", '{"turns": []}', "line 1 has an empty prompt"),
        ("a.jsonl", '{"turns": ["a", " "]}', "line 1 has an empty prompt"),
        ("a.jsonl", '{"question": 3}', "line 1 has an empty prompt"),
        ("a.jsonl", "\n", "a.jsonl holds no prompt"),
        ("a.txt", "\n", "a.txt holds no prompt"),
        ("a.jsonl.gz", GOOD, "cannot read .*a.jsonl.gz"),
        ("a.jsonl", b"\xff\xfe", "cannot read .*a.jsonl"),
        ("a.csv", GOOD, "a.csv is no .jsonl"),
    ],
)
def test_faults_are_named_in_one_line(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message) as caught:
        load_prompts(path)
    assert "\n" not in str(caught.value)


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="no file .*nothing.jsonl: give"):
        load_prompts(tmp_path / "nothing.jsonl")


def test_select():
    rows = [PromptRow(f"{c}{i}", c, ("x",)) for c in ("qa", "math", "rag") for i in range(3)]
    ids = lambda **how: [row.id for row in select(rows, **how)]
    assert ids() == [row.id for row in rows]
    assert ids(limit=4) == ["qa0", "qa1", "math0", "rag0"]  # from every category in turn, in the file's order
    assert ids(categories=("rag", "qa"), limit=2) == ["qa0", "rag0"]
    assert ids(categories=("math",)) == ["math0", "math1", "math2"]
    with pytest.raises(ValueError, match="no category 'maths': did you mean 'math'"):
        select(rows, categories=("maths",))
    with pytest.raises(ValueError, match="limit=0"):
        select(rows, limit=0)
