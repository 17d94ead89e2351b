"""The command line, in process, on a tiny random model: what goes where, and one line with exit status 2 for bad input."""

import json
import re

import jax
import pytest
import tiny_model
from jax.experimental.compilation_cache import compilation_cache

from specjax import METHODS, RULES, SamplingParams, cli, demo, load_drafter
from specjax.api import generate
from specjax.commands import common
from specjax.drafters.base import parse_options
from specjax.drafters.siblings import SIBLINGS
from specjax.flags import COMMANDS, flags, parse, settings
from specjax.models import load as loading
from specjax.models.load import load

LOOP = "w5 w7 w9 w5 w7 w9 w5 w7"
WIDE = {"temperature", "top_k", "top_p", "min_p", "logit_bias", "repetition_penalty", "presence_penalty", "frequency_penalty"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_model.save(tmp_path_factory.mktemp("cli") / "model"))


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    """The commands' own compilation cache, in a place of its own: programs are shared between these tests."""
    folder = tmp_path_factory.mktemp("cache")
    before = {n: getattr(jax.config, n) for n in ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECJAX_CACHE", str(folder))
        compilation_cache.reset_cache()  # jax looks for a cache once a process
        yield folder
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def run(capsys, *arguments):
    """(exit status, stdout, stderr)"""
    status = cli.main([str(a) for a in arguments])
    return status, *capsys.readouterr()


def fails(capsys, *arguments):
    """The one line on stderr of a command that must fail."""
    status, out, err = run(capsys, *arguments)
    assert status == 2 and out == "" and err.startswith("specjax: ") and err.count("\n") == 1, (status, out, err)
    return err.removeprefix("specjax: ").strip()


def test_generate(capsys, tmp_path, model):
    """Text on stdout equals the library's; JSON holds what was asked, what was used, and what came of it."""
    goal = tmp_path / "out.json"
    flags = ["--model", model, "--num-draft", 3, "--max-new-tokens", 20, "--temperature", 0.8, "--top-p", 0.9, "--seed", 5]
    status, out, err = run(capsys, "generate", LOOP, "w8", "--raw", "--json", goal, *flags)
    assert status == 0 and "[0]" in err and "mean acceptance length" in err
    lm = load(model)
    law = SamplingParams(temperature=0.8, top_p=0.9)
    options = dict(key=jax.random.key(5), max_new_tokens=20, sampling=law, rule="rejection")
    expected = generate(lm, load_drafter("ngram", lm, num_draft=3), [LOOP, "w8"], **options)
    assert out == "".join(c.text + "\n" for c in expected)
    written = json.loads(goal.read_text())
    assert list(written) == ["summary", "prompts"]
    for item, c, name in zip(written["prompts"], expected, "01", strict=True):
        facts = (item["id"], item["prompt_tokens"], item["tokens"], item["text"], item["finish_reason"])
        assert facts == (name, len(c.prompt_tokens), c.tokens, c.text, c.finish_reason)
        assert item["stats"]["acceptance_histogram"] == list(c.stats.acceptance_histogram)
    summary = written["summary"]
    assert summary["command"].startswith("specjax generate 'w5 w7") and summary["seed"] == 5
    assert set(summary["versions"]) >= {"python", "jax", "flax", "specjax"}
    assert summary["device"]["platform"] == "cpu" and summary["device"]["cores"] >= 1 and summary["device"]["kind"]
    assert set(summary["settings"]["sampling"]) == WIDE and summary["settings"]["sampling"]["top_p"] == 0.9
    used = {name: summary["settings"][name] for name in ("method", "rule", "num_draft", "chat", "max_new_tokens")}
    assert used == {"method": "ngram", "rule": "rejection", "num_draft": 3, "chat": False, "max_new_tokens": 20}
    assert summary["drafter"]["method"] == "ngram" and summary["stats"]["num_draft_tokens"] > 0


def test_json_on_stdout_is_one_object(capsys, model):
    status, out, err = run(
        capsys, "generate", "w8", "--model", model, "--method", "plain", "--max-new-tokens", 4, "--json", "-"
    )
    written = json.loads(out)
    assert status == 0 and len(written["prompts"]) == 1
    assert written["summary"]["settings"]["chat"] is True and written["summary"]["settings"]["num_draft"] == 0
    assert written["prompts"][0]["prompt_tokens"] == 3  # w3 w8 w4: the chat template


def test_prompt_files(capsys, tmp_path, model):
    file = tmp_path / "questions.jsonl"
    rows = [{"question_id": i, "category": c, "turns": ["w5 w6", "w7"][: i + 1]} for i, c in enumerate(["qa", "rag", "qa"])]
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    flags = ["--model", model, "--method", "plain", "--max-new-tokens", 3, "--raw", "--json", "-"]
    status, out, err = run(capsys, "generate", "--prompts", file, "--categories", "qa", "--limit", 2, *flags)
    assert status == 0 and [p["id"] for p in json.loads(out)["prompts"]] == ["0", "2"]
    assert "1 of 2 prompts have several turns" in err


def test_stop_strings_and_methods_with_options(capsys, model):
    """Every flag reaches what it is for: two stop strings, a small model, layers, a rule, penalties."""
    common = ["generate", LOOP, "--model", model, "--raw", "--max-new-tokens", 12, "--json", "-"]
    ask = lambda *more: json.loads(run(capsys, *common, *more)[1])
    plain = ask("--method", "plain")["prompts"][0]
    words = [f"w{t}" for t in plain["tokens"]]
    stopped = ask("--method", "plain", "--stop", "never", "--stop", words[3])["prompts"][0]
    assert stopped["finish_reason"] == "stop" and words[3] not in stopped["text"]
    small = ask("--method", "small", "--draft-model", model, "--rule", "block")
    assert small["prompts"][0]["tokens"] == plain["tokens"] and small["summary"]["settings"]["rule"] == "block"
    assert small["summary"]["drafter"]["extra_parameters"] > 0 and small["summary"]["stats"]["draft_acceptance_rate"] > 0.8
    early = ask("--method", "early_exit", "--exit-layers", 2)  # all layers: every draft is right, but the end cuts one off
    assert early["prompts"][0]["tokens"] == plain["tokens"] and early["summary"]["stats"]["draft_acceptance_rate"] > 0.8
    assert "2 of 2 layers" in early["summary"]["drafter"]["note"]
    penalised = ask("--method", "plain", "--repetition-penalty", 1.5, "--presence-penalty", 4.0, "--frequency-penalty", 4.0)
    assert len(set(penalised["prompts"][0]["tokens"])) > len(set(plain["tokens"]))


def test_options_reach_the_methods_that_take_them(capsys, model):
    """A tree of two models by --option; of two methods side by side each is given what it takes."""
    tree = ["--draft-model", f"{model},{model}", "--option", "expansion=2,1", "--option", "children=point", "--num-draft", 2]
    common = [LOOP, "--model", model, "--raw", "--max-new-tokens", 6, "--json", "-"]
    status, out, _ = run(capsys, "bench", *common, "--methods", "specinfer,ngram", "--option", "min_order=1", *tree)
    both = json.loads(out)
    specinfer, ngram = both["methods"][1:]
    assert status == 0 and specinfer["same_tokens_as_plain"] is ngram["same_tokens_as_plain"] is True
    assert (specinfer["rule"], ngram["rule"]) == ("target_match", "rejection") and specinfer["num_draft"] == 2
    assert specinfer["mean_acceptance_length"] == 3  # the models are the target: every path is right
    assert both["summary"]["settings"]["option"] == ["min_order=1", "expansion=2,1", "children=point"]
    message = fails(capsys, "generate", *common[:4], "--method", "specinfer", *tree, "--option", "children=iiid")
    assert message == "no way to draw children 'iiid': did you mean 'iid'? known: " + ", ".join(SIBLINGS)


def test_values_of_options_have_the_types_of_their_loader():
    def load(
        lm, *, num_draft, model, n: int, x: float | None = None, on: bool = True, sizes: tuple[int, ...] = (), text: str = ""
    ):
        pass

    read = lambda *words: parse_options(load, words)
    assert read("n=-3", "x=1e-2", "on=false", "sizes=1,2", "text=a=b") == dict(n=-3, x=0.01, on=False, sizes=(1, 2), text="a=b")
    assert read("sizes=4", "text=") == {"sizes": (4,), "text": ""}
    for word, message in (
        ("n=1.5", "'n=1.5': n is a whole number"),
        ("on=yes", "on is true or false"),
        ("sizes=1,", "sizes is whole numbers with commas"),
        ("nn=1", "no option 'nn': did you mean 'n'"),
        ("model=x", "no option 'model'"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            read(word)


def test_bench(capsys, model):
    """Every method with every K, plain first; the sampling parameters in force are written (case M07)."""
    flags = ["--methods", "plain,ngram", "--num-draft", "2,3", "--rule", "coupled", "--temperature", 0.7, "--raw"]
    status, out, err = run(capsys, "bench", LOOP, "--model", model, "--max-new-tokens", 16, *flags, "--json", "-")
    written = json.loads(out)
    assert status == 0 and list(written) == ["summary", "methods"]
    assert [(m["method"], m["num_draft"]) for m in written["methods"]] == [("plain", 0), ("ngram", 2), ("ngram", 3)]
    for item in written["methods"]:
        assert item["rule"] == "coupled" and item["temperature"] == 0.7 and item["lossless"] is True
        assert item["same_tokens_as_plain"] is True and item["tokens_per_second"] > 0 and item["t_verify_ms"] > 0
        assert len(item["per_position_acceptance_rate"]) == item["num_draft"] and set(item["speedup"]) == {
            "mean",
            "low",
            "high",
        }
        assert (
            item["mean_acceptance_length"] >= 1 and item["itl_ms"] > 0 and (item["t_draft_ms"] > 0) == (item["num_draft"] > 0)
        )
    assert written["summary"]["settings"]["sampling"]["top_k"] is None and written["summary"]["settings"]["chat"] is False
    assert "same tokens?" in err and err.count("ngram") >= 2


def test_bench_ceiling(capsys, model):
    """Acceptance beside its ceiling, in the table and in the file."""
    flags = ["--methods", "ngram", "--option", "min_order=1", "--raw", "--ceiling"]
    status, out, err = run(capsys, "bench", LOOP, "--model", model, "--max-new-tokens", 16, *flags, "--json", "-")
    plain, ngram = json.loads(out)["methods"]
    assert status == 0 and "accepted a round" in err and "a bug" not in err
    held = ngram["ceiling"]
    assert "ceiling" not in plain and held["accepted"] == pytest.approx(held["ceiling"]) and held["rounds"] > 0  # greedy


def test_methods(capsys, model):
    status, out, err = run(capsys, "methods", "--json", "-")
    written = json.loads(out)
    assert status == 0 and [m["method"] for m in written["methods"]] == list(METHODS)
    assert [r["rule"] for r in written["summary"]["rules"]] == list(RULES)
    by_name = {m["method"]: m for m in written["methods"]}
    assert by_name["ngram"]["extra_parameters"] == 0 and by_name["ngram"]["options"] == ["num_draft", "min_order", "max_order"]
    assert by_name["small"]["extra_parameters"] is None and by_name["small"]["kind"] == "same family"
    assert all(name in err for name in [*METHODS, *RULES])
    _, out, _ = run(capsys, "methods", "--json", "-", "--model", model, "--draft-model", model)
    small = {m["method"]: m for m in json.loads(out)["methods"]}["small"]
    assert small["extra_bytes"] == 4 * small["extra_parameters"] > 0


def test_demo(capsys, model, monkeypatch):
    rows = (demo.PromptRow("loop", "copy", (LOOP,)), demo.PromptRow("one", "chat", ("w8",)))
    monkeypatch.setattr(demo, "PROMPTS", rows)
    status, out, err = run(capsys, "demo", "--model", model, "--max-new-tokens", 16, "--num-draft", 2)
    assert status == 0 and f"> {LOOP}" in out and "speed-up" in err
    lines = {line.split()[0]: line.split() for line in err.splitlines() if line.startswith(("loop", "one", "all"))}
    assert lines["loop"][2] == lines["one"][2] == lines["all"][1] == "yes"


BAD = {
    "command": (["gnerate", "w5"], "no command 'gnerate': did you mean 'generate'"),
    "no command": ([], "Expected one of"),
    "nothing to train": (["train"], "Expected one of {testbed, corpus, drafter}"),
    "no such thing to train": (["train", "drafters", "medusa"], "no command 'train drafters': did you mean 'drafter'"),
    "nowhere": (["train", "corpus"], "Missing from specjax train corpus: --out"),
    "flag of a run": (["train", "drafter", "mtp", "--out", "x", "--stps", "3"], "train drafter has no '--stps': did you mean"),
    "recipe": (["train", "drafter", "medsua", "--out", "x"], "no recipe 'medsua': did you mean 'medusa'"),
    "option of a recipe": (["train", "drafter", "mtp", "--out", "x", "--option", "layers=2"], "no option 'layers'"),
    "steps": (["train", "drafter", "mtp", "--out", "x", "--steps", "0"], "steps 0 < 1"),
    "steps of the testbed": (["train", "testbed", "--out", "x", "--steps", "0"], "--steps 0: ask for at least 1"),
    "numbers of weights": (["train", "drafter", "small", "--out", "x", "--dtype", "int8"], "'int8' is not one that small"),
    "no text": (["train", "drafter", "mtp", "--out", "x", "--model", "some/model"], "--corpus is needed for some/model"),
    "no corpus": (["train", "drafter", "mtp", "--out", "x", "--corpus", "/no/such"], "/no/such: no finished corpus"),
    "nothing to export": (["train", "testbed", "--out", "/no/such", "--export", "x"], "nothing has been trained in /no/such"),
    "temperatures": (["train", "corpus", "--out", "x", "--temperatures", "0,hot"], "'0,hot' is not FLOAT[,FLOAT...]"),
    "turns": (["train", "corpus", "--out", "x", "--turns", "0"], "--turns 0: ask for at least 1"),
    "faster by what": (["train", "corpus", "--out", "x", "--drafter", "n-gram"], "no method 'n-gram': did you mean 'ngram'"),
    "flag": (["generate", "w5", "--temperture", "1"], "has no '--temperture': did you mean '--temperature'"),
    "value": (["generate", "w5", "--temperature", "warm"], "--temperature"),
    "method": (["generate", "w5", "--method", "ngramm"], "no method 'ngramm': did you mean 'ngram'"),
    "methods": (["bench", "--methods", "ngram,eagel"], "no method 'eagel'"),
    "rule": (["generate", "w5", "--rule", "rejecton"], "no rule 'rejecton': did you mean 'rejection'"),
    "K": (["generate", "w5", "--num-draft", "0"], "--num-draft 0: draft at least 1"),
    "Ks": (["bench", "--num-draft", "4,-1"], "--num-draft -1"),
    "K of plain": (["generate", "w5", "--method", "plain", "--num-draft", "4"], "--num-draft 4 means nothing"),
    "K is no number": (["bench", "--num-draft", "4,x"], "'4,x'"),
    "temperature": (["generate", "w5", "--temperature", "-1"], "temperature=-1.0 is not 0"),
    "NaN": (["bench", "--temperature", "nan"], "temperature=nan is not"),
    "top_p": (["generate", "w5", "--top-p", "1.5"], r"top_p=1.5 is not a number in (0, 1]"),
    "top_p 0": (["generate", "w5", "--top-p", "0"], "top_p=0.0"),
    "new tokens": (["generate", "w5", "--max-new-tokens", "0"], "--max-new-tokens 0"),
    "no prompt": (["generate"], "no prompt: give one"),
    "empty": (["generate", ""], "prompt 0 is empty"),
    "two sources": (["generate", "w5", "--prompts", "x.jsonl"], "give one or the other"),
    "no file": (["generate", "--prompts", "x.jsonl"], "no file x.jsonl"),
    "limit": (["bench", "--limit", "0"], "limit=0"),
    "category": (["bench", "--categories", "cpoy"], "no category 'cpoy': did you mean 'copy'"),
    "small without model": (["generate", "w5", "--model", "x.gguf", "--method", "small"], "give --draft-model"),
    "draft model of none": (
        ["generate", "w5", "--draft-model", "x"],
        "--draft-model x is of the method small or specinfer, not",
    ),
    "specinfer without model": (["bench", "--methods", "specinfer"], "specinfer needs small models"),
    "two small models": (["generate", "w5", "--method", "small", "--draft-model", "x,y"], "--draft-model, which names 2"),
    "option": (["generate", "w5", "--option", "min_oder=1"], "no option of ngram 'min_oder': did you mean 'min_order'"),
    "option of none": (["bench", "--option", "children=iid"], "no option of ngram 'children': known: max_order, min_order"),
    "option without value": (["generate", "w5", "--option", "min_order"], "'min_order': min_order is a whole number"),
    "value of an option": (["generate", "w5", "--option", "min_order=two"], "'min_order=two': min_order is a whole number"),
    "layers of none": (["bench", "--exit-layers", "2"], "--exit-layers 2 is of the method early_exit"),
    "two ways": (["generate", "w5", "--chat", "--raw"], "--chat and --raw"),
    "json": (["methods", "--json", "/no/such/folder/x.json"], "--json /no/such/folder/x.json cannot be written"),
    "model": (["generate", "w5", "--model", "smollm"], "no model 'smollm'"),
    "draft model alone": (["methods", "--draft-model", "x"], "give --model too"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_found_before_anything_is_loaded(capsys, monkeypatch, name):
    arguments, message = BAD[name]
    if name != "model":
        monkeypatch.setattr(common, "load", lambda *a, **k: pytest.fail("a model was loaded"))
    assert message in fails(capsys, *arguments)


def test_bad_input_that_needs_the_model(capsys, tmp_path, model):
    goal = tmp_path / "never.json"
    ask = ["generate", "--model", model, "--json", goal, "--raw"]
    assert "prompt 0 has 600 tokens, the context holds 512" in fails(capsys, *ask, "w5 " * 600)
    assert "prompt 0 is empty" in fails(capsys, *ask, " ")
    other = tiny_model.save(tmp_path / "other", words=50)
    message = fails(capsys, *ask, "w5", "--method", "small", "--draft-model", other)
    assert "tokenizer is not the target's" in message
    assert "9 layers" in fails(capsys, *ask, "w5", "--method", "early_exit", "--exit-layers", 9)
    assert "weights_dtype 'float16'" in fails(capsys, *ask, "w5", "--weights-dtype", "float16")
    bare = tiny_model.save(tmp_path / "bare", template=None)
    assert "chat template" in fails(capsys, "generate", "w5", "--model", bare, "--chat")
    assert {path.name for path in tmp_path.iterdir()} == {"other", "bare"}


@pytest.mark.parametrize("command", ["generate", "bench"])
def test_a_target_without_a_law(capsys, tmp_path, command):
    """NaN logits: an error, not a text; nothing is written."""
    path, goal = tiny_model.save(tmp_path / "broken", broken=True), tmp_path / "never.json"
    status, _, err = run(capsys, command, "w5 w6", "--model", path, "--max-new-tokens", 4, "--json", goal)
    assert status == 2 and "logits held NaN or inf" in err.splitlines()[-1] and not goal.exists()


def test_help(capsys):
    for arguments in (["--help"], *([*name.split(), "--help"] for name in [*COMMANDS, "train"])):
        status, out, err = run(capsys, *arguments)
        assert status == 0 and "usage: specjax" in out and err == ""


def test_every_flag_has_a_value_in_the_settings():
    for name, command in COMMANDS.items():
        known = [flag.removeprefix("--").replace("-", "_") for flag in flags(command)]
        required = ["--out", "x"] * name.startswith("train") + ["medusa"] * (name == "train drafter")
        required += ["config.json"] * (name in ("latency", "serve-sim"))
        assert set(known) <= set(settings(parse([*name.split(), *required]))) and len(known) == len(set(known))


def test_compiled_programs_are_kept_in_the_users_cache(capsys, model, cache):
    run(capsys, "generate", "w5", "--model", model, "--method", "plain", "--max-new-tokens", 1)
    assert any(path.name.startswith("jit_run") for path in (cache / "compiled").iterdir())


def test_a_bar_shows_the_download(monkeypatch, capsys, model):
    def fetched(progress):
        for part in (1, 50, 100):
            progress(part * 10**6, 10**8)
        return loading.Path(model)

    monkeypatch.setitem(loading.NAMES, "smollm2-135m", fetched)
    status, _, err = run(capsys, "generate", "w5", "--method", "plain", "--max-new-tokens", 1)
    assert status == 0 and "/100M" in err


@pytest.mark.model
def test_demo_model(capsys):
    """The newcomer's command, cut short: same tokens, and copying is what n-grams speed up."""
    status, out, err = run(capsys, "demo", "--max-new-tokens", 12, "--json", "-")
    plain, ngram = json.loads(out)["methods"]
    assert status == 0 and ngram["same_tokens_as_plain"] is True and ngram["mean_acceptance_length"] > 1.1
    assert "> Why is the sky blue?" not in out and plain["num_tokens"] == ngram["num_tokens"] == 72
