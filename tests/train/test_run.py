"""Recipes by name and runs of them: what is saved loads and is what was trained, and says how it was made."""

import json

import jax
import numpy as np
import pytest
import tiny_model

from specjax import load, load_drafter
from specjax.drafters import objectives
from specjax.train import corpus, recipes, run
from specjax.train.loop import Settings

WORK = run.smoke(run.Work("medusa", 2, Settings(100, peak=1e-2), {"layers": 2}))


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    return load(tiny_model.save(tmp_path_factory.mktemp("run") / "model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Sixty documents of 20 tokens, of which the last 14 are answers."""
    rng = np.random.default_rng(0)
    items = [corpus.Document(rng.integers(3, 61, 20).tolist(), [False] * 6 + [True] * 14) for _ in range(60)]
    goal = tmp_path_factory.mktemp("data")
    corpus.build(goal, 60, lambda numbers: [items[i] for i in numbers], provenance={"prompts": "made up"})
    return run.read_split(goal)


def equal(a, b):
    return jax.tree.all(jax.tree.map(lambda x, y: np.array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32)), a, b))


TREE = {"paths": ((0,), (1,), (0, 0))}
OPTIONS = {"medusa": TREE, "hydra": TREE, "hydra++": TREE, "parallel_heads": TREE, "small": {"layers": 2}}


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_what_is_saved_loads(name, lm, tmp_path):
    """Of every recipe: the parameters as written, and the shape of the draft that the options asked for."""
    entry, options = recipes.find(name), OPTIONS.get(name, {})
    recipe = recipes.build(name, lm, num_draft=2, options=options)
    params = jax.jit(recipe.init)(jax.random.key(0), lm.params)
    params = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), params)
    both, saved = recipe.assemble(params, lm.params), tmp_path / "saved"
    recipes.save(saved, name, lm, both, num_draft=2, options=options, dtype="float16")
    whole, pair = entry.save is recipes.save_model, entry.save is recipes.save_pair
    target = load(saved) if pair else lm
    where = {"model" if whole else "weights": str(saved / "drafter" if pair else saved)}
    loaded = load_drafter(entry.method, target, num_draft=2, **where)
    rounded = lambda tree, every: jax.tree.map(lambda x: x.astype(np.float16) if x.ndim > 1 or every else x, tree)
    assert equal(loaded.params, rounded(both.drafter, whole))
    assert equal(target.params, rounded(both.target, True) if pair else lm.params)
    assert (loaded.drafter.num_nodes, loaded.drafter.depth) == (recipe.drafter.num_nodes, recipe.drafter.depth)


def test_options_come_from_the_recipes_signature(tmp_path):
    (tmp_path / "tree.json").write_text("[[0], [1], [0, 0]]")
    words = ["layers=2", "objective=total_variation", f"paths={tmp_path / 'tree.json'}", "decay=0.5"]
    found = recipes.parse_options("medusa", words)
    assert found == dict(layers=2, objective=objectives.total_variation, paths=((0,), (1,), (0, 0)), decay=0.5)
    for name, word, message in (
        ("medusaa", "layers=2", "no recipe 'medusaa': did you mean 'medusa'"),
        ("mtp", "config=x", "no option 'config'"),
        ("small", "objective=harder", "objective is one of hard, soft"),
    ):
        with pytest.raises(ValueError, match=message):
            recipes.parse_options(name, [word])


def test_a_small_model_has_a_quarter_of_the_layers(lm):
    assert recipes.reduced(lm.config._replace(layers=9, sliding=(True, False) * 4 + (True,))).sliding == (True, False)
    with pytest.raises(ValueError, match="layers=3 does not lie in 1 to 2"):
        recipes.reduced(lm.config, 3)


def test_a_run(lm, data, tmp_path):
    """Parameters as trained are what is saved; the card has the facts; run again it has nothing left to do."""
    reports = []
    done = run.train(lm, WORK, data, tmp_path, command="specjax train ...", progress=reports.append)
    judged = [r for r in reports if "tau_t0" in r.metrics]
    assert [r.step for r in judged] == [0, 4] and {"held_out_loss", "tau_t1"} <= set(judged[-1].metrics)
    assert judged[0].metrics["held_out_loss"] != judged[-1].metrics["held_out_loss"]
    loaded = load_drafter("medusa", lm, num_draft=2, weights=str(done.directory))
    assert equal(loaded.params, done.params)
    card, size = (done.directory / "card.md").read_text(), sum(x.size for x in jax.tree.leaves(done.params))
    for fact in (
        "# medusa for", "`specjax train ...`", "prompts made up: 57 documents, 1,140 tokens", f"{size:,}, written in float32",
        "512 tokens: 4 updates of 2 rows of 64", "layers 2", "specjax 0", "| step | tokens | held-out loss | tau, greedy |",
        "| 0 | 0 |", f"| 4 | 512 | {judged[-1].metrics['held_out_loss']:.4g} | {judged[-1].metrics['tau_t0']:.4g} |",
    ):  # fmt: skip
        assert fact in card, fact
    seconds = [json.loads(line)["seconds"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert min(seconds) > 0 and done.hours == sum(seconds) / 3600
    more = run.train(lm, WORK._replace(dtype="int8"), data, tmp_path, progress=reports.append)
    assert reports[-1].step == 4 and len(reports) == 5 and equal(more.params, done.params) and more.metrics == done.metrics
    assert json.loads((done.directory / "config.json").read_text())["method"] == "medusa"
    with pytest.raises(ValueError, match="was begun with another options, settings: choose an empty directory"):
        run.train(lm, WORK._replace(options={}, settings=WORK.settings._replace(peak=1.0)), data, tmp_path)


def test_what_makes_no_run(lm, data, tmp_path):
    for work, message in (
        (WORK._replace(recipe="medusas"), "no recipe 'medusas'"),
        (WORK._replace(dtype="float8"), "dtype 'float8' is not one"),
        (WORK._replace(num_draft=0), "num_draft 0 < 1"),
        (WORK._replace(settings=WORK.settings._replace(steps=0)), "steps 0 < 1"),
        (WORK._replace(length=1), "length 1 < 2"),
    ):
        with pytest.raises(ValueError, match=message):
            run.train(lm, work, data, tmp_path / "none")
    other = data._replace(train=data.train._replace(tokens=data.train.tokens + 40))
    with pytest.raises(ValueError, match="holds token 100, the target has 61: it was made with another tokenizer"):
        run.train(lm, WORK, other, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_held_out_documents(data, tmp_path):
    """The last twentieth, or those of a directory of their own; prompts are what stands before the first answer."""
    assert (data.train.documents, data.held_out.documents) == (57, 3)
    prompts = run.prompts_of(data.held_out, 2, 4)
    starts = [int(data.held_out.starts[n]) for n in np.random.default_rng(0).permutation(3)[:2]]
    assert prompts == [data.held_out.tokens[s + 2 : s + 6].tolist() for s in starts]
    for name, size in (("train", 5), ("held_out", 2)):
        corpus.build(tmp_path / name, size, lambda numbers: [corpus.Document([1, 2, 3])] * len(numbers), provenance={})
    both = run.read_split(tmp_path)
    assert (both.train.documents, both.held_out.documents) == (5, 2) and run.prompts_of(both.held_out, 1, 2) in (
        [[1, 2]],
        [[2, 3]],
    )
    corpus.build(tmp_path / "one", 1, lambda numbers: [corpus.Document([1, 2], [True, True])], provenance={})
    with pytest.raises(ValueError, match="nothing is left to hold out"):
        run.read_split(tmp_path / "one")
    with pytest.raises(ValueError, match="their first token is one to predict"):
        run.prompts_of(corpus.read(tmp_path / "one")._replace(mask=np.asarray([True, True])), 1, 2)
