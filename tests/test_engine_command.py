"""`specjax engine` on a tiny random model: made requests, a file of them, what is said and what is counted."""

import json

import pytest
import tiny_model

from specjax import cli


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_model.save(tmp_path_factory.mktemp("engine") / "model"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("specjax.cli.keep_compiled", lambda directory: None)


SMALL = ["--slots", "2", "--capacity", "64", "--chunk", "16", "--max-new-tokens", "6", "--raw"]


def run(capsys, model, *arguments):
    status = cli.main(["engine", "--model", model, *map(str, arguments), "--json", "-"])
    out, err = capsys.readouterr()
    return status, json.loads(out) if out else None, err


def test_requests_are_made_served_and_served_again_from_their_file(capsys, model, tmp_path):
    """The same requests give the same tokens, whatever their times; those that make no sense are counted and said."""
    prompts, kept = tmp_path / "prompts.txt", tmp_path / "made.jsonl"
    prompts.write_text("w5 w7 w9 w5")
    made = ["--poisson", 200, "--count", 5, "--prompts", prompts, "--temperature", 0.8, "--save-requests", kept]
    status, first, said = run(capsys, model, *SMALL, *made)
    assert status == 0 and "5 finished, 0 cancelled, 0 failed, 0 invalid, 0 refused; 30 tokens" in said
    rows = [json.loads(line) for line in kept.read_text().splitlines()]
    assert len(rows) == 5 and [r["seed"] for r in rows] == [0, 1, 2, 3, 4] and rows[0]["arrival"] > 0
    assert [r["arrival"] for r in rows] == sorted(r["arrival"] for r in rows)
    served = first["summary"]["served"]
    assert served["finished"] == 5 and served["tokens"] == 30 and 0 < served["time_to_first"]["p50"] < 60
    assert len({tuple(r["tokens"]) for r in first["requests"]}) > 1, "each has its own seed"

    bad = [
        {"prompt": ""},
        {"prompt": "w1", "temperature": -1},
        {"prompt": "w1", "seed": "x"},
        {"prompt": [1], "max_new_tokens": 0},
    ]
    gone = {"id": "gone", "prompt": "w3", "cancel_after": 0.0, "stop": ["w60"]}
    lines = [json.dumps(row) for row in [{**r, "arrival": 0} for r in rows] + bad + [gone]]
    kept.write_text("\n\n".join(lines))
    status, second, said = run(capsys, model, *SMALL, "--requests", kept)
    assert status == 0 and [r["tokens"] for r in second["requests"][:5]] == [r["tokens"] for r in first["requests"]]
    reasons = [r["finish_reason"] for r in second["requests"]]
    assert (
        set(reasons[:5]) <= {"length", "eos"}
        and reasons[5:] == ["invalid"] * 4 + ["cancelled"]
        and second["requests"][-1]["id"] == "gone"
    )
    assert "temperature=-1" in second["requests"][6]["error"] and "temperature=-1" in said and "[11]" in said


@pytest.mark.slow  # compiles rounds with drafts, and two kinds without
def test_a_policy_measures_first_and_decides(capsys, model):
    """With n-gram drafts under a budget: the same greedy tokens as plain decoding."""
    made = [*SMALL, "--poisson", 500, "--count", 3]
    _, plain, _ = run(capsys, model, *made)
    status, budget, _ = run(capsys, model, *made, "--method", "ngram", "--num-draft", 2, "--policy", "fixed_budget")
    assert status == 0 and [r["tokens"] for r in budget["requests"]] == [r["tokens"] for r in plain["requests"]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give --requests FILE, or --poisson RATE"),
        (["--poisson", "3", "--requests", "x"], "one of them"),
        (["--requests", "nowhere.jsonl"], "no such file"),
        (["--poisson", "0"], "positive rate"),
        (["--poisson", "1", "--policy", "fixd", "--method", "ngram"], "did you mean 'fixed'"),
        (["--poisson", "1", "--policy", "fixed_budget"], "the method plain makes none"),
        (["--poisson", "1", "--method", "ngrm"], "did you mean 'ngram'"),
        (["--poisson", "1", "--slots", "0"], "slots=0"),
    ],
)
def test_bad_input_is_one_line(capsys, model, arguments, words):
    status, found, said = run(capsys, model, *arguments)
    said = said.replace("64 requests, 0 slots: compiling\n", "")
    assert status == 2 and found is None and words in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 1 is broken JSON"),
        ('{"arrival": 1}', "line 1 has no prompt"),
        ('{"prompt": "w1", "temprature": 1}', "did you mean 'temperature'"),
        ('{"prompt": "w1", "arrival": -1}', "arrival is -1"),
        ("", "holds no request"),
    ],
)
def test_a_file_that_is_none_is_one_line(capsys, model, tmp_path, line, words):
    path = tmp_path / "requests.jsonl"
    path.write_text(line)
    status, found, said = run(capsys, model, "--requests", path)
    assert status == 2 and found is None and words in said and said.count("\n") == 1
