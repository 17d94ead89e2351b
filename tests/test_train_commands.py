"""`specjax train` in process, on tiny models; and drafters that lie in the package, found by the name of their target."""

import inspect
import json
import re

import jax
import pytest
import tiny_model

from specjax import cli, generate, load, load_drafter, zoo
from specjax.commands import train
from specjax.flags.train import Drafter
from specjax.models.transformer import TransformerConfig
from specjax.train import corpus, recipes, stdlib, testbed
from specjax.train.stdlib import Source

LITTLE = TransformerConfig(2048, 16, 2, 2, 1, 8, 32, 64, tied=True)
WORDS = " ".join(f"w{i}" for i in range(5, 60))


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECJAX_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr("specjax.cli.keep_compiled", lambda directory: None)
        yield


@pytest.fixture(autouse=True)
def library(monkeypatch):
    """A standard library of four modules."""
    texts = [Source(f"m{i}.py", f"{WORDS} w{i} " * 8) for i in range(4)]
    monkeypatch.setattr(stdlib, "sources", lambda: (texts[:3], texts[3:]))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A zoo with a tiny model by the testbed's name, and drafters of it: one made by the command, one that is the model."""
    home = tmp_path_factory.mktemp("zoo")
    tiny_model.save(home / "testbed")
    tiny_model.save(home / "testbed" / "small")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zoo, "HOME", home)
        yield home


def run(capsys, *arguments):
    """(exit status, stdout, stderr)"""
    status = cli.main([str(a) for a in arguments])
    return status, *capsys.readouterr()


def test_help_names_every_recipe():
    said = inspect.getsource(Drafter).split('"""What is trained: ')[1].split('."""')[0]
    assert set(re.split(r",\s+|\s+or\s+", said)) == set(recipes.RECIPES)


def test_a_drafter_and_its_way_into_the_package(capsys, home, tmp_path):
    """Trained on the testbed's own text, put beside the testbed, and then `bench` and `methods` need no flags."""
    words = ["train", "drafter", "medusa", "--out", tmp_path, "--option", "layers=2", "--smoke", "--num-draft", 2]
    status, out, err = run(capsys, *words, "--json", tmp_path / "said.json")
    assert status == 0 and f"written to {tmp_path}/drafter" in out and out.startswith("medusa: tau 1") and out.count("\n") == 1
    assert "step 0/4" in err and "step 4/4  loss" in err and "tau_t1" in err
    said = json.loads((tmp_path / "said.json").read_text())
    assert said["drafter"]["metrics"]["step"] == 4 and said["summary"]["settings"]["recipe"] == "medusa"
    built = corpus.read(tmp_path / "corpus" / "train")
    assert built.documents == 3 and built.tokens[0] == 5  # w5, in the model's own tokens
    card = (tmp_path / "drafter" / "card.md").read_text()
    line = f"`specjax train drafter medusa --out {tmp_path} --num-draft 2 --option layers=2 --smoke --json"
    assert line in card and "layers 2" in card and "# medusa for testbed" in card
    (tmp_path / "drafter").rename(home / "testbed" / "medusa")
    ask = ["--model", "testbed", "--methods", "small,medusa", "--num-draft", 2, "--max-new-tokens", 8, "--raw", "--json", "-"]
    status, out, _ = run(capsys, "bench", "w5 w6 w7", *ask)
    plain, small, medusa = json.loads(out)["methods"]
    assert status == 0 and small["same_tokens_as_plain"] is medusa["same_tokens_as_plain"] is True
    assert small["mean_acceptance_length"] > 2.5 > medusa["mean_acceptance_length"]  # it is the target


def test_what_the_package_holds(capsys, home, tmp_path):
    """Found for a target loaded by its name, never for one loaded from a path; what is given comes first."""
    lm, elsewhere = load("testbed"), load(home / "testbed")
    assert (lm.name, elsewhere.name) == ("testbed", "")
    assert load_drafter("small", lm, num_draft=2).card.extra_parameters > 0
    for method, message in (("small", "needs `model`"), ("mtp", "needs weights made for this target")):
        with pytest.raises(ValueError, match=message):
            load_drafter(method, elsewhere if method == "small" else lm)
    other = tiny_model.save(tmp_path / "other", words=50)
    with pytest.raises(ValueError, match="tokenizer is not the target's"):
        load_drafter("small", lm, model=str(other))
    assert zoo.drafter("testbed", "small") == home / "testbed" / "small"
    assert zoo.drafter("testbed", "mtp") is zoo.drafter("", "small") is None
    _, out, _ = run(capsys, "methods", "--model", "testbed", "--json", "-")
    found = {m["method"]: m["extra_parameters"] for m in json.loads(out)["methods"]}
    assert found["small"] > found["medusa"] > 0 and found["mtp"] is None and found["ngram"] == 0
    _, out, _ = run(capsys, "methods", "--model", home / "testbed", "--json", "-")
    assert {m["method"]: m["extra_parameters"] for m in json.loads(out)["methods"]}["small"] is None
    status, _, err = run(capsys, "generate", "w5", "--model", home / "testbed", "--method", "small")
    assert status == 2 and "needs a small model" in err


def test_corpus(capsys, home, tmp_path):
    """Answers of the target, the same with n-gram drafts; a question that is barred is left out."""
    rows = [{"messages": [{"role": "user", "content": f"w{i} w{i + 1}"}]} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "barred.txt").write_text("w2  W3")
    words = ["train", "corpus", "--model", "testbed", "--prompts", tmp_path / "rows.jsonl", "--smoke", "--temperatures", "0"]
    words += ["--forbid", tmp_path / "barred.txt"]
    status, out, err = run(capsys, *words, "--out", tmp_path / "a", "--json", "-")
    made = json.loads(out)["corpus"]
    assert (
        status == 0 and made["counts"]["success"] == 5 and made["counts"]["reasons"]["skipped"] == {"an evaluation prompt": 1}
    )
    assert "⟦" in err and made["answers"]["temperatures"] == [0.0]
    status, out, _ = run(capsys, *words, "--out", tmp_path / "b", "--drafter", "ngram")
    assert status == 0 and "(5 success, 1 skipped, 0 errors)" in out
    a, b = (corpus.read(tmp_path / name) for name in "ab")
    assert a.tokens.tolist() == b.tokens.tolist() and a.mask.sum() == made["counts"]["to_predict"] > 0


def test_testbed(capsys, monkeypatch, tmp_path):
    """Trained, written as a model with its card, and not trained again; other numbers are refused there."""
    monkeypatch.setattr(testbed, "CONFIG", LITTLE)
    monkeypatch.setattr(testbed, "TOKENS", 128)
    words = ["train", "testbed", "--out", tmp_path / "bed"]
    status, out, err = run(capsys, *words, "--smoke")
    assert status == 0 and "after 512 tokens" in out and "step 4/4" in err
    assert {path.name for path in (tmp_path / "bed").iterdir()} == {"corpus", "run", "model"}
    card = (tmp_path / "bed" / "model" / "card.md").read_text()
    assert "4 of 4 updates of 128 tokens: 512 tokens seen" in card and "nats a token as shipped in float16" in card
    lm = load(tmp_path / "bed" / "model")
    assert lm.config == LITTLE and lm.tokenizer.eos_ids == (0,)
    monkeypatch.setattr(train, "fit", lambda *a, **k: pytest.fail("it trained"))
    status, out, _ = run(capsys, *words, "--smoke", "--export", tmp_path / "copy")
    assert status == 0 and f"written to {tmp_path}/copy" in out and (tmp_path / "copy" / "card.md").read_text() == card
    status, _, err = run(capsys, *words, "--steps", 5)
    assert status == 2 and "was begun with another steps" in err and err.count("\n") == 1


def test_a_testbed_with_its_module(capsys, monkeypatch, tmp_path):
    """The module that was trained inside the target's own run drafts for that target."""
    monkeypatch.setattr(testbed, "CONFIG", LITTLE)
    monkeypatch.setattr(testbed, "TOKENS", 128)
    words = ["train", "testbed", "--out", tmp_path / "bed", "--joint-mtp", "--smoke"]
    status, _, err = run(capsys, *words)
    assert status == 0 and "tau_t0 " in err and "tau_t1 " in err
    lm, module = load(tmp_path / "bed" / "model"), tmp_path / "bed" / "model" / "drafter"
    loaded = load_drafter("mtp", lm, num_draft=4, weights=str(module))
    plain, fast = (generate(lm, d, ["import os"], key=jax.random.key(0), max_new_tokens=8)[0] for d in (None, loaded))
    assert fast.tokens == plain.tokens
    status, _, err = run(capsys, *words[:-2], "--smoke")
    assert status == 2 and "was begun with another joint_mtp" in err
