"""Recipes by name and runs of them: what is saved loads and is what was trained, and says how it was made."""

import json

import jax
import numpy as np
import pytest
import tiny_model

from specjax import flags, load, load_drafter
from specjax.commands import train as train_commands
from specjax.drafters import objectives
from specjax.drafters.precision import matrices
from specjax.train import cards, checks, corpus, recipes, run, start
from specjax.train.digests import vocabulary
from specjax.train.settings import Settings
from specjax.train.work import Work, read_split, smoke

WORK = smoke(Work("medusa", 2, Settings(100, peak=1e-2), {"layers": 2}))


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
    return read_split(goal)


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
    rounded = lambda tree, every: jax.tree.map(lambda x, m: x.astype(np.float16) if m or every else x, tree, matrices(tree))
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
    about = json.loads((done.directory / "config.json").read_text())
    assert (about["method"], about["vocab_size"], about["width"]) == ("medusa", 61, lm.model.width)
    with pytest.raises(ValueError, match="was begun with another options, settings: choose an empty directory"):
        run.train(lm, WORK._replace(options={}, settings=WORK.settings._replace(peak=1.0)), data, tmp_path)
    begun = WORK._replace(start=str(done.directory), dtype="float32", settings=WORK.settings._replace(steps=1))
    again = run.train(lm, begun, data, tmp_path / "again", progress=reports.append)
    assert reports[5].step == 0 and reports[5].metrics["tau_t0"] == done.metrics["tau_t0"]
    np.testing.assert_allclose(reports[5].metrics["held_out_loss"], done.metrics["held_out_loss"], rtol=0.02)  # int8 since
    card, whole = (again.directory / "card.md").read_text(), cards.spent(again.directory)
    assert f"| begun from | {done.directory}, sha256 " in card and "640 tokens, 512 of them before: 1 updates" in card
    assert card.count("| step | tokens |") == 2 and done.directory.joinpath("card.md").read_text().splitlines()[-1] in card
    assert whole.seen == 640 and abs(whole.hours - done.hours - again.hours) <= 0.01


SETTINGS = [
    ("steps", 0, "steps 0 < 1"),
    ("seed", -1, "seed -1 < 0"),
    ("evaluate_every", 0, "evaluate_every 0 < 1"),
    ("peak", float("nan"), "ask for a finite peak"),
    ("peak", 0.0, "ask for a finite peak"),
    ("clip", 0.0, "a clip above 0"),
    ("compute", "float16", "compute 'float16' is not supported"),
]
OPTIONS_OF_NONE = [
    ("medusa", {"layers": 0}, "option layers=0 < 1"),
    ("blockwise", {"hidden": -5}, "option hidden=-5 < 1"),
    ("mtp", {"steps": 0}, "option steps=0 < 1"),
    ("medusa_2", {"rank": 0}, "option rank=0 < 1"),
    ("medusa", {"decay": float("nan")}, "option decay=nan is no weight"),
    ("medusa", {"decay": 0.0}, "option decay=0.0 is no weight"),
    ("medusa", {"paths": ((0,), (0, 0), (0, 0, 0))}, r"path \[0, 0, 0\] of the tree is out of reach: give at most 2 levels"),
    ("hydra", {"paths": ((0,), (61,))}, r"path \[61\] .* ranks below 61"),
]


def test_what_makes_no_run(lm, data, tmp_path):
    for work, message in (
        (WORK._replace(recipe="medusas"), "no recipe 'medusas'"),
        (WORK._replace(dtype="float8"), "dtype 'float8' is not one"),
        (WORK._replace(num_draft=0), "num_draft 0 < 1"),
        (WORK._replace(length=3), "length 3 < 4"),  # 2 heads: labels stand up to 3 tokens ahead
        (WORK._replace(length=513), "length 513 > 512, the target's context"),
        (WORK._replace(new_tokens=512), "new_tokens 512 leave no room for a prompt in a context of 512"),
        (WORK._replace(draft_vocabulary=62), "draft_vocabulary 62 > 61"),
        *((WORK._replace(settings=WORK.settings._replace(**{name: value})), message) for name, value, message in SETTINGS),
        *((WORK._replace(recipe=name, options=options), message) for name, options, message in OPTIONS_OF_NONE),
        (WORK._replace(recipe="medusa_2", options={}, draft_vocabulary=9), "whose vocabulary head is its own"),
    ):
        with pytest.raises(ValueError, match=message):
            run.train(lm, work, data, tmp_path / "none")
    windowed = lm._replace(config=lm.config._replace(window=8, sliding=(True, False)))
    for name in ("small", "medusa_2"):
        with pytest.raises(ValueError, match="a config.json of llama cannot say all"):
            run.train(windowed, WORK._replace(recipe=name, options={}), data, tmp_path / "none")
    other = data._replace(train=data.train._replace(tokens=data.train.tokens + 40))
    with pytest.raises(ValueError, match="holds token 100, the target has 61: it was made with another tokenizer"):
        run.train(lm, WORK, other, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_another_target_is_refused(lm, data, tmp_path):
    """Of the same name and config: other weights, or the same in fewer bits; and before anything is begun again."""
    corpus.keep_to(tmp_path / "run", run.plan(lm, WORK, data, None))
    half = lambda x: x.astype("bfloat16")
    tuned = {**lm.params, "norm": jax.tree.map(lambda x: x * 1.01, lm.params["norm"])}
    for params in (tuned, jax.tree.map(half, lm.params)):
        with pytest.raises(ValueError, match="was begun with another target: choose an empty directory"):
            run.train(lm._replace(params=params), WORK, data, tmp_path, features=tmp_path / "states")
    assert [path.name for path in tmp_path.rglob("*")] == ["run", "plan.json"]


def masked(length, *ones):
    """A part of 3 documents of some length, of which the tokens `ones` are to be predicted."""
    starts, mask = np.arange(4) * length, np.zeros(3 * length, bool)
    for one in ones:
        mask[starts[:-1] + one] = True
    return corpus.Corpus(np.arange(3 * length, dtype=np.uint16) % 50 + 5, starts, mask, {})


def test_data_without_labels_is_refused(lm, data, tmp_path):
    """Nothing to predict at all, or nothing that a head could: the token after a first one is the target's own to say."""
    for part in (masked(8), masked(8, 0), masked(8, 0, 1), masked(1, 0), masked(2, 1)._replace(mask=None)):
        for split in (data._replace(train=part), data._replace(held_out=part)):
            with pytest.raises(ValueError, match="tokens is one for medusa to predict: look at the mask"):
                run.train(lm, WORK, split, tmp_path / "none")
    checks.check_labels(WORK._replace(recipe="small"), data._replace(train=masked(8, 1)))
    checks.check_labels(WORK, data._replace(train=masked(8, 2)))
    assert not (tmp_path / "none").exists()


def test_a_tokenizer_of_the_same_size_is_another(lm, data, tmp_path):
    """Told by the corpus; one that does not say is judged by its ids."""
    said = lambda name: data._replace(train=data.train._replace(provenance={"vocabulary": name}))
    checks.check_vocabulary(lm, said(vocabulary(lm.tokenizer)))
    checks.check_vocabulary(lm, data)
    with pytest.raises(ValueError, match="made with a tokenizer whose ids are not the target's"):
        run.train(lm, WORK, said("0" * 64), tmp_path / "none")


def test_what_the_self_check_drafts_from():
    """Never less than 2 tokens: the end of a prompt, or of the document where its prompt is shorter."""
    tokens, starts = np.arange(30), np.asarray([0, 10, 20, 21, 30])  # of 10, 10, 1 and 9 tokens
    mask = np.zeros(30, bool)
    mask[[6, 11, 20, 21]] = True  # prompts of 6, 1, 0 and 0 tokens
    for seen, found in (
        (mask, {(3, 4, 5), (17, 18, 19), (27, 28, 29)}),
        (None, {(7, 8, 9), (17, 18, 19), (27, 28, 29)}),
    ):
        assert {tuple(x) for x in run.stretches_of(corpus.Corpus(tokens, starts, seen, {}), 4, 3)} == found
    assert len(run.stretches_of(corpus.Corpus(tokens, starts, mask, {}), 2, 3)) == 2
    with pytest.raises(ValueError, match="no document of 1 held-out ones has 2 tokens"):
        run.stretches_of(corpus.Corpus(tokens, starts[2:4], mask, {}), 4, 3)


def test_held_out_documents(data, tmp_path):
    """The last twentieth, or those of a directory of their own; prompts are what stands before the first answer."""
    assert (data.train.documents, data.held_out.documents) == (57, 3)
    prompts = run.prompts_of(data.held_out, 2, 4)
    starts = [int(data.held_out.starts[n]) for n in np.random.default_rng(0).permutation(3)[:2]]
    assert prompts == [data.held_out.tokens[s + 2 : s + 6].tolist() for s in starts]
    for name, size in (("train", 5), ("held_out", 2)):
        corpus.build(tmp_path / name, size, lambda numbers: [corpus.Document([1, 2, 3])] * len(numbers), provenance={})
    both = read_split(tmp_path)
    assert (both.train.documents, both.held_out.documents) == (5, 2) and run.prompts_of(both.held_out, 1, 2) in (
        [[1, 2]],
        [[2, 3]],
    )
    corpus.build(tmp_path / "one", 1, lambda numbers: [corpus.Document([1, 2], [True, True])], provenance={})
    with pytest.raises(ValueError, match="nothing is left to hold out"):
        read_split(tmp_path / "one")
    with pytest.raises(ValueError, match="their first token is one to predict"):
        run.prompts_of(corpus.read(tmp_path / "one")._replace(mask=np.asarray([True, True])), 1, 2)


def saved(name, lm, directory, ids=None, **options):
    """A drafter of parameters that no recipe begins with, as written in float16; (recipe, trainable parameters)."""
    recipe = recipes.build(name, lm, num_draft=2, options=options, vocabulary=ids)
    params = jax.tree.map(lambda x: x + 1 / 4, jax.jit(recipe.init)(jax.random.key(0), lm.params))
    both = recipe.assemble(params, lm.params)
    recipes.save(directory, name, lm, both, num_draft=2, options=options, dtype="float16", vocabulary=ids)
    return recipe, params


def beginning(name, directory, **options):
    return WORK._replace(recipe=name, options=options, start=str(directory))


@pytest.mark.parametrize("name", ["mtp", "small", "hydra++", "eagle3"])
def test_a_run_begins_from_what_was_saved(name, lm, tmp_path):
    """In float32, with its draft vocabulary."""
    options, ids = {"layers": 2} if name == "small" else {}, None if name == "small" else tuple(range(3, 40))
    recipe, params = saved(name, lm, tmp_path, ids, **options)
    work = beginning(name, tmp_path, **options)
    begun = start.find(lm, work)
    assert begun.vocabulary == ids and len(begun.digest) == 64
    first = start.begun_from(recipe, begun, lm, work).init(jax.random.key(1), lm.params)
    assert {x.dtype.name for x in jax.tree.leaves(first)} == {"float32"}
    written = lambda x, matrix: x.astype(np.float16) if matrix or name == "small" else x
    assert equal(first, jax.tree.map(written, params, matrices(params)))


def test_the_vocabulary_of_a_start_is_the_runs(lm, data, tmp_path):
    """And of its plan: a run that goes on under other ids would give every row of a law another meaning."""
    ids = tuple(range(3, 40))
    saved("mtp", lm, tmp_path / "start", ids)
    work = beginning("mtp", tmp_path / "start")
    begun = start.find(lm, work)
    found, share = run.drafted_ids(lm, work, data.train, begun)
    tokens = data.train.tokens[data.train.starts[0] : data.train.starts[-1]][data.train.mask[: data.train.starts[-1]]]
    assert found == ids and share == pytest.approx(np.isin(tokens, ids).mean()) and 0.4 < share < 0.8
    plans = [run.plan(lm, work, data, b)["start"] for b in (None, begun, begun._replace(vocabulary=ids[1:]))]
    plans += [run.plan(lm, work, data, begun._replace(digest="another"))["start"]]
    assert len({json.dumps(p) for p in plans}) == 4
    saved("mtp", lm, tmp_path / "out" / "drafter")
    with pytest.raises(ValueError, match="is what the run would write over: choose another directory"):
        run.train(lm, beginning("mtp", tmp_path / "out" / "drafter"), data, tmp_path / "out")


OTHER = [
    ("mtp", {"recycle_normed": False}, "says recycle_normed False, and what would be trained has True: give the options"),
    ("mtp", {"rope_theta": None}, "says rope_theta None, and what"),
    ("eagle3.1", {"norm_output": None}, "says norm_output None, and what would be trained has True"),
    ("dspark", {"anchor_first": None}, "says anchor_first None"),
    ("hydra++", {"prefix": True}, "says prefix True"),
    ("medusa", {"tree": [[0], [1]]}, r"says tree \[\[0\], \[1\]\], and what would be trained has None"),
]


@pytest.mark.parametrize("name, change, message", OTHER)
def test_a_start_of_other_facts_is_refused(name, change, message, lm, tmp_path):
    """config.json says what shapes do not, and a fact that it lacks is not taken for granted; None takes one out."""
    saved(name, lm, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(
        json.dumps({name: x for name, x in config.items() if name not in change or x is not None})
    )
    with pytest.raises(ValueError, match=message):
        start.find(lm, beginning(name, tmp_path))


def test_a_start_that_does_not_fit_is_refused(lm, tmp_path):
    for name, options in (("mtp", {}), ("medusa", {}), ("small", {"layers": 2})):
        saved(name, lm, tmp_path / name, **options)
    for work, message in (
        (beginning("medusa", tmp_path / "mtp"), "holds a drafter of method 'mtp' != 'medusa'"),
        (beginning("medusa_2", tmp_path / "medusa"), "tunes its target too: begin it without"),
        (beginning("mtp", tmp_path / "mtp")._replace(draft_vocabulary=8), "draft_vocabulary 8 beside start .*: that one's is"),
        (beginning("mtp", tmp_path / "none"), "no config.json"),
        (beginning("small", tmp_path / "mtp"), "model.safetensors: no such file: .* trained as small"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            start.find(lm, work)
    for work, message in (
        (beginning("small", tmp_path / "small", layers=1), "is a model of another layers"),
        (beginning("medusa", tmp_path / "medusa")._replace(num_draft=3), "of another shape: .*; num_draft 3, and it has 2"),
    ):
        recipe = recipes.build(work.recipe, lm, num_draft=work.num_draft, options=work.options)
        with pytest.raises(ValueError, match=message):
            start.begun_from(recipe, start.find(lm, work), lm, work)
    words = flags.Drafter("mtp", "out", start="some/where")
    assert train_commands.work_of(words).start == "some/where" and "--start some/where" in train_commands.retyped(words)
