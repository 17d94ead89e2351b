"""config.json of a saved drafter, edited by hand: every fault is one line, at load."""

import json
import shutil

import helpers as h
import pytest

from specjax import load_drafter
from specjax.drafters import facts, files, mtp
from specjax.models.layers import RopeScaling
from specjax.models.load import LM

K = 3
TARGET_LM = LM(h.TARGET, h.target_params(), None, h.CONFIG)
LAYERED = ("parallel_heads", "mtp")
SCALING = [4.0, 1.0, 4.0, 8192, None]


def loaded(name, directory, config):
    """What loads with these facts changed; text in place of facts is the whole file."""
    shutil.copytree(h.saved(name), directory, dirs_exist_ok=True)
    file = directory / "config.json"
    now = config if isinstance(config, str) else json.dumps({**json.loads(file.read_text()), **config})
    file.write_text(now)
    return load_drafter(name.split(",")[0], TARGET_LM, num_draft=K, weights=str(directory))


TREES = [
    5,
    "x",
    {"0": [1]},
    [0, 1],
    [["a"]],
    [[0], [1.7]],
    [[0], [True]],
    [[-1]],
    [[0], [2**40]],
    [[]],
    [[0], [0]],
    [[1], [2, 5]],
]
SCALINGS = [5, [], [0], ["x"], [4.0, 1.0], [1] * 7, [4.0, None, None, None, 1.0], [4.0, *[None] * 3, [1.0]]]
PREFIXES = ["no", [1], 1, {"heads": 0}, {"heads": "4"}, {"rope_scaling": [1, 2]}, {"kv_heads": 3}]
HEADS = ("medusa", "blockwise", "hydra", "mtp", "parallel_heads")
LISTS = [5, "abc", True, 0, {}, [[1], [2]], ["a", "b"], [True, False], [1.5, 2.5], [2**70], [-1]]
CASES = [
    *((name, {"vocabulary": x}) for name in HEADS for x in ([[1], [2]], True)),
    *(("medusa", {"vocabulary": x}) for x in [*LISTS, [], [9, 5, 7], [0, 61]]),
    *(("medusa", {"tree": x}) for x in TREES),
    *((name, {"tree": [[0], [h.V]]}) for name in ("medusa", "hydra", "parallel_heads")),
    *((name, {key: x}) for name in LAYERED for key in ("width", "heads", "kv_heads", "head_dim", "hidden")
      for x in (0, "4", 1.5, None, True, [4])),
    *((name, {key: x}) for name in LAYERED for key in ("norm_eps", "rope_theta") for x in ("x", [1], None, float("nan"), 0)),
    *((name, {key: "no"}) for name in LAYERED for key in ("attention_bias", "qk_norm")),
    *((name, {"rope_scaling": x}) for name in LAYERED for x in SCALINGS),
    *((name, {"kv_heads": 3}) for name in LAYERED), *((name, {"head_dim": 7}) for name in LAYERED),
    ("mtp", {"embedding_first": 1}), ("mtp", {"recycle_normed": "true"}),
    *(("hydra, prefix", {"prefix": x}) for x in PREFIXES),
    *((name, {key: 99}) for name in HEADS for key in ("vocab_size", "width")),
    *(("medusa", text) for text in ("[1]", '"medusa"', "null", "5", "[" * 100_000, '{"a":' * 100_000, "{")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "config"), CASES, ids=lambda x: str(x)[:50])
def test_a_fault_is_one_line(name, config, tmp_path):
    with pytest.raises(ValueError) as error:
        loaded(name, tmp_path, config)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_what_lacks_a_width_takes_the_targets(tmp_path):
    """As for layers; where the target has no config, what is lacking is named."""
    config = json.dumps({"method": "mtp", "qk_norm": True})
    expected = load_drafter("mtp", TARGET_LM, num_draft=K, weights=h.saved("mtp")).drafter
    assert loaded("mtp", tmp_path, config).drafter is expected
    with pytest.raises(ValueError, match="does not say width, heads, kv_heads, head_dim, hidden of its layers"):
        load_drafter("mtp", TARGET_LM._replace(config=None), num_draft=K, weights=str(tmp_path))


@pytest.mark.parametrize("scaling", [SCALING, [4.0, None, None, None, [1.0, 2.0, 3.0, 4.0]], [2.0]])
def test_a_scaling_is_as_it_was_saved(scaling, tmp_path):
    """JSON has lists where the config has tuples, by which what is built for it is found again."""
    found = loaded("mtp", tmp_path, {"rope_scaling": scaling}).drafter
    whole = RopeScaling(*(tuple(x) if isinstance(x, list) else x for x in scaling))
    assert found is mtp.mtp(h.TARGET, num_draft=K, config=h.MTP_CONFIG._replace(rope_scaling=whole))


def test_what_means_nothing_may_be_null(tmp_path):
    plain = loaded("medusa", tmp_path / "a", {"tree": []}).drafter
    assert loaded("medusa", tmp_path / "b", {"tree": None, "vocabulary": None, "prefix": None}).drafter is plain
    assert facts.check("", {"rope_scaling": None, "tree": None}) == {"rope_scaling": None}
    sizes = {"vocab_size": h.V, "width": h.TARGET.width}
    assert loaded("medusa", tmp_path / "c", {"tree": [], **sizes}).drafter is plain
    assert files.read_config(tmp_path / "c", "medusa")["vocab_size"] == h.V
