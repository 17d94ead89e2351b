"""`specjax latency` and `specjax serve-sim`, from a config.json alone."""

import json

import numpy as np
import pytest

from specjax import cli

LLAMA_3_8B = dict(
    model_type="llama", vocab_size=128256, hidden_size=4096, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, intermediate_size=14336, max_position_embeddings=8192, rms_norm_eps=1e-5, rope_theta=5e5,
    hidden_act="silu", tie_word_embeddings=False,
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(LLAMA_3_8B))
    return str(path)


def run(capsys, *arguments, command="latency"):
    status = cli.main([command, *map(str, arguments), "--json", "-"])
    out, err = capsys.readouterr()
    return status, json.loads(out) if out else None, err


def test_the_best_k_falls_with_the_batch(capsys, model):
    """On an H100 an 8B model drafts long chains for one request and short ones for many; nothing is decided for it."""
    status, found, said = run(capsys, model, "--drafter", "eagle3", "--batch", "1,64,256,1024", "--acceptance", ".8")
    ks = [row["best_k"] for row in found["batches"]]
    assert status == 0 and ks == sorted(ks, reverse=True) and ks[0] > ks[-1]
    assert 290 < found["summary"]["compute_bound_from_tokens"] < 320 and "bound by compute from 303" in said
    one = found["batches"][0]
    assert abs(one["plain_ms"] - (8.03e9 - 128256 * 4096) * 2 / 3.35e12 * 1e3) < 0.1  # every weight but the embedding's, once
    assert abs(one["tau"] - sum(0.8**i for i in range(one["best_k"] + 1))) < 1e-9
    assert "1024 needs more than the 80 GB" in said


def test_drafts_that_are_never_right_are_not_made(capsys, model):
    _, found, _ = run(capsys, model, "--acceptance", "0", "--batch", "1")
    assert found["batches"][0]["best_k"] == 0 and found["batches"][0]["speedup"] == 1


def test_acceptance_by_position(capsys, model):
    """A drafter that is right once and never again drafts one token."""
    _, found, _ = run(capsys, model, "--acceptance", ".9,0,0", "--num-draft", "3", "--batch", "1")
    assert found["batches"][0]["best_k"] == 1 and abs(found["batches"][0]["tau"] - 1.9) < 1e-12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--drafter", "egle3"], "did you mean 'eagle3'"),
        (["--hardware", "h1000"], "is not in the table"),
        (["--hardware", "here", "--parallel", "2"], "one device is measured here"),
        (["--acceptance", "1.2"], "within 0 to 1"),
        (["--acceptance", ".5,.5"], "one a position"),
        (["--batch", "0"], "at least 1"),
    ],
)
def test_bad_input_is_one_line(capsys, model, arguments, message):
    status, found, said = run(capsys, model, *arguments)
    assert status == 2 and found is None and message in said and said.count("\n") == 1


def test_under_load_a_fixed_k_loses_and_a_schedule_does_not(capsys, model, tmp_path):
    """On an H100, prompts eight times as long as answers: one request gains from all seven tokens, 512 from none.

    There reading is what everything waits for.  Algorithm 1 pays for the drafter all the same; a budget gives nothing away.
    """
    common = [model, "--drafter", "dspark", "--num-draft", "7", "--generated", "64", "--concurrency", "1,64,512"]
    status, found, _ = run(capsys, *common, "--policies", "plain,fixed,early_stop,fixed_budget", command="serve-sim")
    speed = {(row["concurrency"], row["policy"]): row["tokens_per_second"] for row in found["loads"]}
    assert status == 0 and speed[1, "fixed"] > 2 * speed[1, "plain"]
    for load in (1, 64, 512):
        assert speed[load, "fixed_budget"] > 0.97 * max(speed[load, "plain"], speed[load, "fixed"])
    assert speed[512, "fixed"] < 0.9 * speed[512, "plain"] and speed[512, "early_stop"] < 0.9 * speed[512, "plain"]

    rng = np.random.default_rng(0)  # measured rounds in which nothing is ever accepted: speculation only costs
    np.savez(tmp_path / "trace.npz", confidence=rng.random((64, 3)), accepted=np.zeros(64, int))
    sizes = ["--num-draft", "3", "--generated", "16", "--concurrency", "4", "--policies", "plain,fixed"]
    _, found, _ = run(capsys, model, *sizes, "--trace", tmp_path / "trace.npz", command="serve-sim")
    plain, fixed = found["loads"]
    assert fixed["tau"] == 1 and fixed["verified_a_request"] == 3 and fixed["tokens_per_second"] < plain["tokens_per_second"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policies", "erly_stop"], "did you mean 'early_stop'"),
        (["--concurrency", "3", "--replicas", "2"], "give multiples of 2"),
        (["--trace", "nowhere.npz"], "no such file"),
        (["--trace", __file__], "no .npz of confidence"),
        (["--generated", "0"], "at least 1"),
    ],
)
def test_what_cannot_be_simulated_is_one_line(capsys, model, arguments, message):
    status, found, said = run(capsys, model, *arguments, command="serve-sim")
    assert status == 2 and found is None and message in said and said.count("\n") == 1
