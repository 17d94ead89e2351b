"""Who may import whom: types <- {keys, cache, sampling, trees, loops} <- {models, verify, drafters, metrics} <- decode."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "specjax"
FILES = sorted(ROOT.rglob("*.py"))

CORE = {"types", "keys", "cache", "sampling", "trees", "loops"}
HEART = CORE | {"metrics", "text", "models", "verify", "drafters", "decode"}
ALL = HEART | {"names", "api", "engine", "latency", "schedule", "train", "lossless", "zoo", "checkpoint", "sharding"}
ALL |= {"distributed", "timing", "json_text"}
TOOLS = {"cli", "commands", "flags", "console", "demo", "bench", "ceilings", "prompts"}
MAY_IMPORT = {
    "types": set(),
    **{room: {"types"} for room in CORE - {"types"}},
    "trees": {"types", "json_text"},
    "metrics": CORE,
    "text": {"json_text"},
    "models": CORE | {"text", "zoo", "sharding", "json_text"},
    "verify": CORE,
    "drafters": CORE | {"models.layers", "names", "json_text"},
    "decode": CORE | {"verify.draw"},
    "engine": CORE | {"decode", "schedule", "latency", "metrics", "text", "sharding"},
    "names": set(),
    "json_text": set(),
    "latency": {"types"},
    "schedule": {"types", "latency"},
    "train": HEART | {"json_text", "checkpoint", "sharding", "distributed", "names", "schedule"},
    "lossless": HEART,
    "sharding": CORE,
    "distributed": set(),
    "checkpoint": CORE | {"distributed"},
    "timing": CORE | {"decode"},
    "zoo": set(),
    "api": HEART | {"names", "zoo", "engine", "sharding"},
    "__init__": ALL,
    "__main__": {"cli"},
    **{tool: ALL | TOOLS for tool in TOOLS},
}


def room(path):
    return path.relative_to(ROOT).with_suffix("").parts[0]


def imports(path):
    """Dotted names that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name, allowed):
    return any(name == a or name.startswith(a + ".") for a in allowed)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path):
    own = room(path)
    assert own in MAY_IMPORT, f"{own} is a new room: say here what it may import"
    for name in imports(path):
        if name.startswith("specjax."):
            inner = name.removeprefix("specjax.")
            assert within(inner, MAY_IMPORT[own] | {own}), f"{own} may not import {inner}"


@pytest.mark.parametrize(
    ("package", "homes"),
    [
        ("flax", ("models", "drafters")),
        ("optax", ("train",)),
        ("orbax", ("checkpoint",)),
        ("torch", ("models", "drafters")),
        ("transformers", ()),
    ],
)
def test_packages_stay_where_they_belong(package, homes):
    users = {room(path) for path in FILES if any(within(name, {package}) for name in imports(path))}
    assert users <= set(homes)


def test_models_is_where_flax_is():
    """The check above can see: flax is found where it should be."""
    assert any(within(name, {"flax"}) for name in imports(ROOT / "models" / "transformer.py"))


def test_only_the_tools_print():
    for path in FILES:
        calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
        if room(path) not in ("cli", "console", "demo") and path.name != "report.py":
            assert not [n.lineno for n in calls if n.func.id in ("print", "input")], path


def test_every_fold_in_is_in_keys():
    for path in FILES:
        names = [n.attr for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)]
        if room(path) not in ("keys", "train", "zoo"):
            assert "fold_in" not in names and "PRNGKey" not in names, path


def test_a_stream_of_randomness_has_one_user():
    """Draft noise, acceptance coins and the emitted token never share a key."""
    names = [
        n.attr
        for path in FILES
        if room(path) != "keys"
        for n in ast.walk(ast.parse(path.read_text()))
        if isinstance(n, ast.Attribute)
    ]
    assert [names.count(stream) for stream in ("DRAFT", "ACCEPT", "EMIT")] == [1, 1, 1]


def test_nothing_below_the_edges_is_jitted():
    for path in FILES:
        if room(path) in CORE | {"metrics", "verify", "drafters", "decode"}:
            tree = ast.parse(path.read_text())
            assert not [n.lineno for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr in ("jit", "pmap")], path


def test_noise_for_drafts_is_given_not_drawn():
    """A drafter gets no key: the only randomness of verification lies in `verify/draw.py`, of models in their `init`."""
    for path in FILES:
        if room(path) in ("drafters", "verify") and path.name != "draw.py":
            drawn = [
                n.attr
                for n in ast.walk(ast.parse(path.read_text()))
                if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Attribute) and n.value.attr == "random"
            ]
            assert not set(drawn) & {"uniform", "gumbel", "categorical", "bernoulli", "split", "key"}, path
