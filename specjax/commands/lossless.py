"""`specjax lossless`: climb the ladder, write a report; exit status 0 only if every rung that applies passed."""

from __future__ import annotations

from pathlib import Path

from specjax import api, decode, demo, sampling
from specjax.commands.common import Write, build_drafter, check_counts, check_names, load_target
from specjax.console import environment, progress_bar, say, table
from specjax.drafters.base import parse_options
from specjax.drafters.siblings import find_siblings
from specjax.flags import Lossless, Target
from specjax.lossless import report as reports
from specjax.lossless.bias import bias
from specjax.lossless.built_in import built_in
from specjax.lossless.finding import PASS
from specjax.lossless.lab import FALSE_ALARM, settings
from specjax.lossless.ladder import RUNGS, climb
from specjax.lossless.subject import Subject, of_model
from specjax.names import unknown
from specjax.prompts import load_prompts, select

BUILT_IN = ("table", "tiny")
"""Targets that need no file: a table of known law, and a transformer of two layers."""


def run(command: Lossless, write: Write) -> dict:
    """Test, report, and say the verdict on stdout."""
    subject = find_subject(command)
    decode.check(subject.target, subject.drafter, subject.rule)
    if command.plant_bias:
        subject = bias(subject, command.plant_bias)
    how = settings(subject, quick=command.quick, seed=command.seed)
    about = describe(command, subject)
    directory = Path(command.out)
    directory.mkdir(parents=True, exist_ok=True)
    journal = reports.Journal(directory / "findings.jsonl", about)
    with progress_bar("test") as progress:
        done = [f.rung for f in journal.findings]
        for finding in climb(subject, quick=command.quick, seed=command.seed, progress=progress, done=done):
            journal.add(finding)
        progress(len(RUNGS), len(RUNGS), "done")
    facts = {**about, "machine": environment()}
    report = reports.Report(facts, how.wanted, FALSE_ALARM, subject.rule.lossless, tuple(journal.findings))
    reports.write(report, directory)
    shown = [(mark, rung, saw) for mark, rung, _, saw, *_ in reports.rows(report.findings)]
    say(table([("", "test", "saw"), *shown]) + f"\n\nwritten: {directory}/report.html, report.md, report.json")
    write(reports.headline(report) + "\n")
    summary = {"status": report.status, "settings": about}
    return {"summary": summary, "report": reports.records(report), "exit_status": 0 if report.status == PASS else 1}


def find_subject(command: Lossless) -> Subject:
    """What is tested: something built in, or a model with a drafter for it."""
    params = command.sampling.params()
    check_counts(1, [command.num_draft])
    sampling.check(params, 0)
    if not 0 <= command.plant_bias < 1:
        raise ValueError(f"--plant-bias {command.plant_bias} is no total variation: give a number from 0 to 1")
    if command.drafting.rule is not None:
        api.find_rule(command.drafting.rule)
    if command.target in BUILT_IN:
        rule, num_draft = command.drafting.rule, command.num_draft
        own = own_of_built_in(command)
        return built_in(command.method, rule, target=command.target, num_draft=num_draft, sampling=params, **own)
    check_names([command.method], command.drafting, command.target)
    lm = load_target(Target(command.target, command.weights_dtype))
    rows = demo.PROMPTS if command.prompts is None else select(load_prompts(command.prompts), limit=command.limit)
    chat = lm.tokenizer is not None and lm.tokenizer.chat_template is not None
    prompts = [api.encode(lm, demo.chat(r.turns[0]) if chat else r.turns[0], i) for i, r in enumerate(rows)]
    loaded = build_drafter(lm, command.method, command.num_draft, command.drafting)
    rule = command.drafting.rule or loaded.rule
    return of_model(lm, loaded, prompts, target=command.target, rule=rule, sampling=params)


def own_of_built_in(command: Lossless) -> dict[str, str]:
    """Options of a built-in subject; ValueError for flags that it would ignore."""
    drafting, method = command.drafting, command.method
    flags = {"draft-model": drafting.draft_model, "exit-layers": drafting.exit_layers, "prompts": command.prompts}
    for flag, value in flags.items():
        if value:
            raise ValueError(f"--{flag} is for real models, and the target {command.target} brings its own: leave it out")
    if method not in api.METHODS:
        raise ValueError(unknown("method", method, api.METHODS))
    own = parse_options(api.METHODS[method].load, drafting.option)
    fixed = sorted(set(own) - {"children", "weights"})
    if fixed:
        raise ValueError(f"--option {fixed[0]}: a built-in subject takes children and weights only; give a real --target")
    if "children" in own:
        find_siblings(own["children"])
    return own


def describe(command: Lossless, subject: Subject) -> dict:
    """Everything that the findings depend on."""
    names, drafter = subject.names, subject.drafter
    drafts = dict(num_draft=drafter.depth, nodes=drafter.num_nodes, children=drafter.children)
    law = dict(sampling=command.sampling.params()._asdict(), weights_dtype=command.weights_dtype)
    options = dict(options=command.drafting.option, draft_model=command.drafting.draft_model, prompts=len(subject.prompts))
    how = dict(quick=command.quick, seed=command.seed, plant_bias=command.plant_bias)
    return {**names._asdict(), **drafts, **law, **options, **how}
