"""One training run of a drafter: what it learns from, what it is judged by, what it leaves behind.

OUT/run/      plan.json, checkpoints/, metrics.jsonl: from there the same run goes on, and another one is refused
OUT/drafter/  config.json, weights and card.md: load_drafter(method, lm, weights=OUT/drafter) (`small`: model=...)
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax import distributed, sharding
from specjax.drafters.recipe import Recipe
from specjax.drafters.siblings import SIBLINGS
from specjax.drafters.vocabulary import Ids, frequent
from specjax.models.load import LM
from specjax.train import corpus, recipes, start
from specjax.train.cards import drafter_card
from specjax.train.checks import check, check_labels, check_target, check_vocabulary
from specjax.train.corpus import keep_to, planned
from specjax.train.digests import digest, fingerprint
from specjax.train.evaluate import acceptance, held_out, kept_mass
from specjax.train.features import cached
from specjax.train.journal import Report
from specjax.train.loop import Evaluate, fit
from specjax.train.packing import batches
from specjax.train.self_check import self_check
from specjax.train.settings import MATTERS
from specjax.train.work import Split, Work
from specjax.types import Rule
from specjax.verify import RULES

PROMPT_TOKENS = 128


class Trained(NamedTuple):
    """What a run left."""

    directory: Path
    params: Any
    metrics: dict[str, float]  # of its last report
    hours: float  # of the whole run, however often it was stopped


def train(
    lm: LM,
    work: Work,
    data: Split,
    directory: str | Path,
    *,
    command: str = "",
    features: str | Path | None = None,
    progress: Callable[[Report], None] = lambda report: None,
) -> Trained:
    """Train a drafter for `lm`, judge it while it learns, and save it with its card; call it again to go on.

    Args:
      lm: the target.
      work: what is trained and how.
      data: token ids of the target's own vocabulary.
      directory: for run/ and drafter/.
      command: what the card says the drafter was made by.
      features: a directory for the target's states, which are then computed once, for all drafters that read the same rows
        and layers; None: the target runs in every step.
      progress: called with each report; those that judge hold "held_out_loss", "tau_t0" and "tau_t1".

    Raises:
      ValueError: numbers, options or data that do not fit, another run was begun there, or the trained drafter drafts other
        tokens than its loss predicts (`self_check`); then nothing is saved.
      FloatingPointError: a loss is not finite.
    """
    check(work)
    check_target(lm, work)
    check_labels(work, data)
    check_vocabulary(lm, data)
    directory, begun = Path(directory), start.find(lm, work)
    if begun is not None and begun.directory.resolve() == (directory / "drafter").resolve():
        raise ValueError(f"start {begun.directory} is what the run would write over: choose another directory for the run")
    facts = plan(lm, work, data, begun)
    planned(directory / "run" / "plan.json", facts)
    ids, share = drafted_ids(lm, work, data.train, begun)
    recipe = recipes.build(work.recipe, lm, num_draft=work.num_draft, options=work.options, vocabulary=ids)
    if begun is not None:
        recipe = start.begun_from(recipe, begun, lm, work)
    jax.eval_shape(recipe.init, jax.random.key(0), lm.params)  # parts that do not fit together are found now
    rows = batches(data.train, length=work.length, batch=work.batch, seed=work.settings.seed)
    judging, looked_at = judges(recipe, lm, work, data.held_out), stretches_of(data.held_out, 4, 32)
    if features is not None:
        rows = cached(features, rows, lm.model, lm.params, config=lm.config, features=recipe.features)
    keep_to(directory / "run", facts)  # last: where a run is refused nothing was begun
    params = fit(
        recipe, rows, work.settings, directory / "run", target=lm.model, target_params=lm.params, evaluate=judging,
        progress=progress, mesh=sharding.mesh_of(lm.params),
    )  # fmt: skip
    if recipe.drafter is not None:
        self_check(recipe, params, lm.params, looked_at, target=lm.model, rule=rule_of(recipe))
    goal = directory / "drafter"
    how: dict[str, Any] = dict(num_draft=work.num_draft, options=work.options, dtype=work.dtype, vocabulary=ids)
    params = jax.tree.map(sharding.fetch, params)  # of all hosts
    distributed.together("trained")  # the first has written its journal
    if distributed.first():
        recipes.save(goal, work.recipe, lm, recipe.assemble(params, lm.params), **how)
    journal = [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text("utf-8").splitlines()]
    hours = sum(line.get("seconds", 0.0) for line in journal) / 3600
    size = sum(x.size for x in jax.tree.leaves(params))
    method = recipes.find(work.recipe).method
    held = batches(data.held_out, length=work.length, batch=work.batch, seed=0)
    mass = 1.0 if ids is None else kept_mass(lm.model, lm.params, ids, held, steps=4)
    about: dict[str, Any] = dict(method=method, size=size, hours=hours, command=command)
    text = drafter_card(lm, work, data, journal, ids=ids, share=share, mass=mass, begun=begun, **about)
    if distributed.first():
        (goal / "card.md").write_text(text, "utf-8")
    return Trained(goal, params, journal[-1], hours)


def drafted_ids(lm: LM, work: Work, data: corpus.Corpus, begun: start.Start | None) -> tuple[Ids | None, float]:
    """The draft vocabulary that was asked for or begun with, and the share of the tokens to predict that it covers."""
    given = None if begun is None else begun.vocabulary
    size = work.draft_vocabulary if given is None else len(given)
    if size is None:
        return None, 1.0
    if size > lm.model.vocab_size:
        raise ValueError(f"draft_vocabulary {size} > {lm.model.vocab_size}, the target's: ask for fewer tokens")
    stretch = slice(int(data.starts[0]), int(data.starts[-1]))
    tokens = data.tokens[stretch] if data.mask is None else data.tokens[stretch][data.mask[stretch]]
    return frequent(tokens, size, lm.model.vocab_size) if given is None else (given, float(np.isin(tokens, given).mean()))


def judges(recipe: Recipe, lm: LM, work: Work, held: corpus.Corpus) -> list[Evaluate]:
    """Held-out loss, and tau at temperatures 0 and 1 where the recipe has something that decodes."""
    found = [held_out(recipe, batches(held, length=work.length, batch=work.batch), steps=4, target=lm.model)]
    if recipe.drafter is None:
        return found
    longest = lm.model.max_length - work.new_tokens
    prompts = prompts_of(held, work.prompts, min(PROMPT_TOKENS, longest))
    ask: dict[str, Any] = dict(target=lm.model, rule=rule_of(recipe), new_tokens=work.new_tokens, eos_ids=lm.tokenizer.eos_ids)
    return [*found, acceptance(recipe, prompts, temperatures=(0.0, 1.0), **ask)]


def rule_of(recipe: Recipe) -> Rule:
    """What its drafts are verified with while it is judged."""
    drafter = recipe.drafter
    return RULES["rejection" if drafter is None or drafter.chain else SIBLINGS[drafter.children].rule]


def prompts_of(held: corpus.Corpus, count: int, length: int) -> list[list[int]]:
    """Held-out prompts of at most `length` tokens, the same every time.

    What stands before a document's first answer; of plain text, a stretch of it.

    Raises:
      ValueError: there is none.
    """
    rng, found = np.random.default_rng(0), []
    for n in rng.permutation(held.documents)[:count].tolist():
        begin, end = int(held.starts[n]), int(held.starts[n + 1])
        if held.mask is None:
            begin += int(rng.integers(0, max(1, end - begin - length)))
            found.append(held.tokens[begin : min(begin + length, end)].tolist())
        else:
            found.append(held.tokens[begin : begin + int(held.mask[begin:end].argmax())][-length:].tolist())
    kept = [prompt for prompt in found if prompt]
    if not kept:
        raise ValueError(f"no prompt in {held.documents} held-out documents: their first token is one to predict already")
    return kept


def stretches_of(held: corpus.Corpus, count: int, length: int) -> list[list[int]]:
    """Held-out text of 2 to `length` tokens that `self_check` drafts from, the same every time.

    The end of what stands before a document's first answer, and where that is shorter, or it is plain text, of the document.

    Raises:
      ValueError: no document has 2 tokens.
    """
    found: list[list[int]] = []
    for n in np.random.default_rng(0).permutation(held.documents).tolist():
        begin, end = int(held.starts[n]), int(held.starts[n + 1])
        before = 0 if held.mask is None or end == begin else int(held.mask[begin:end].argmax())
        stop = begin + before if before >= 2 else end
        if stop - begin >= 2 and len(found) < count:
            found.append(held.tokens[max(begin, stop - length) : stop].tolist())
    if not found:
        raise ValueError(f"no document of {held.documents} held-out ones has 2 tokens: hold out longer ones")
    return found


def plan(lm: LM, work: Work, data: Split, begun: start.Start | None) -> dict:
    """Everything that a run depends on; options that are functions by their names, what it begins from by its digest."""
    options = {name: getattr(value, "__name__", value) for name, value in work.options.items()}
    facts = {**work._asdict(), "options": options, "settings": {n: getattr(work.settings, n) for n in MATTERS}}
    del facts["dtype"]  # the same run may be written in several
    target = [lm.name, str(lm.config), fingerprint(sharding.whole(lm.params), lm.config)]
    return {
        **facts,
        "start": start.facts(begun),
        "target": target,
        "train": digest(data.train),
        "held_out": digest(data.held_out),
    }
