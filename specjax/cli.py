"""The command `specjax`: each subcommand is a dataclass of flags (`flags.py`) handed to functions of the library.

Progress and tables go to stderr, generated text to stdout, `--json FILE` (`-` = stdout) gets one object at the very end.
Exit status 0 = done, 2 = bad input, told in one line on stderr.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specjax import api, bench, demo, keys, metrics, sampling
from specjax.console import check_goal, environment, keep_compiled, progress_bar, say, silent, table, word, write, write_json
from specjax.drafters.base import LoadedDrafter, options, parse_options, readable
from specjax.flags import Bench, Demo, Drafting, Generate, Methods, Prompts, Target, parse, settings
from specjax.models.fetch import cache_dir
from specjax.models.load import LM, load
from specjax.names import unknown
from specjax.prompts import PromptRow, load_prompts, select

Write = Callable[[str], None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (the process's own by default); the exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        command = parse(arguments)
        goal = command.output.json
        check_goal(goal)
        keep_compiled(cache_dir() / "compiled")
        run = {Demo: run_demo, Methods: run_methods, Generate: run_generate, Bench: run_bench}[type(command)]
        result = run(command, silent if goal == "-" else write)
        if goal is not None:
            summary = {"command": shlex.join(["specjax", *arguments]), **environment(), **result["summary"]}
            write_json(goal, {**result, "summary": summary})
    except (ValueError, OSError, ImportError, FloatingPointError) as error:
        say(f"specjax: {' '.join(str(error).split())}")
        return 2
    except SystemExit as end:  # --help
        return int(end.code or 0)
    except KeyboardInterrupt:
        return 130
    return 0


def run_demo(command: Demo, write: Write) -> dict:
    """Stream answers, then the table: plain decoding against n-gram drafts, prompt by prompt."""
    check_counts(command.max_new_tokens, [command.num_draft])
    lm = load_target(command.target)
    shape = dict(num_draft=command.num_draft, max_new_tokens=command.max_new_tokens)
    with progress_bar("run") as progress:
        plain, ngram = demo.demo(lm, **shape, write=write, progress=progress)
    pairs = list(zip(demo.PROMPTS, plain.samples, ngram.samples, strict=True))
    lines = [(row.id, row.category, [a], [b]) for row, a, b in pairs] + [("all", "", plain.samples, ngram.samples)]
    rows = [["prompt", "kind", "same tokens?", "tau", "plain tokens/s", "ngram tokens/s", "speed-up"]]
    for name, kind, *both in lines:
        rates = [f"{sum(s.num_tokens for s in x) / sum(s.seconds for s in x):.1f}" for x in both]
        tau = metrics.merge([c.stats for s in both[1] for c in s.completions]).mean_acceptance_length
        rows.append([name, kind, word(bench.same_tokens(*both)), f"{tau:.2f}", *rates, f"{bench.speedup(*both).mean:.2f}x"])
    say("\n" + table(rows))
    return {"summary": {"settings": settings(command)}, "methods": [bench.record(r) for r in (plain, ngram)]}


def run_methods(command: Methods, write: Write) -> dict:
    """List methods and rules.  What a method adds to a target is known where it is nothing, or where --model names one."""
    if command.draft_model and command.model is None:
        raise ValueError(f"--draft-model {','.join(command.draft_model)} is counted beside a target: give --model too")
    lm = None if command.model is None else load_target(Target(command.model))
    drafting, items = Drafting(draft_model=command.draft_model), []
    for name, method in api.METHODS.items():
        extra = (0, 0) if method.kind in ("none", "training-free") else (None, None)
        if lm is not None and has_models(name, drafting):
            extra = build_drafter(lm, name, 4, drafting).card[1:3]
        facts = dict(method=name, kind=method.kind, extra_parameters=extra[0], extra_bytes=extra[1], rule=method.rule)
        lossless, known = api.RULES[method.rule].lossless, [*(["num_draft"] if name != "plain" else []), *options(method)]
        items.append({**facts, "lossless": lossless, "options": known, "summary": method.summary})
    rules = [
        {"rule": n, "lossless": r.lossless, "coupled": r.coupled, "accepts": list(r.accepts)} for n, r in api.RULES.items()
    ]
    for records in (items, rules):
        shown = [[", ".join(v) if isinstance(v, list) else "-" if v is None else str(v) for v in x.values()] for x in records]
        say(table([[name.replace("_", " ") for name in records[0]], *shown]) + "\n")
    return {"summary": {"settings": settings(command), "rules": rules}, "methods": items}


def run_generate(command: Generate, write: Write) -> dict:
    """Answer prompts one by one, streaming."""
    asked, params, name = command.asked, command.sampling.params(), command.method
    if name == "plain" and command.num_draft is not None:
        raise ValueError(
            f"--num-draft {command.num_draft} means nothing to the method plain, which drafts nothing: leave it out"
        )
    num_draft = 4 if command.num_draft is None else command.num_draft
    rows = choose(command.prompt, asked, ())
    check_names([name], command.drafting)
    check_counts(asked.max_new_tokens, [num_draft])
    sampling.check(params, 0)
    lm = load_target(command.target)
    prompts, chat = as_prompts(lm, rows, asked)
    loaded = build_drafter(lm, name, num_draft, command.drafting)
    rule = command.drafting.rule or loaded.rule
    key = keys.request_keys(jax.random.key(asked.seed), jnp.arange(len(rows)))
    request: dict[str, Any] = dict(max_new_tokens=asked.max_new_tokens, rule=rule, sampling=params, stop=asked.stop)
    done: list[api.Completion] = []
    for i, row in enumerate(rows):
        if len(rows) > 1:
            say(f"[{row.id}]")
        for piece in api.stream(lm, loaded, prompts[i], key=key[i : i + 1], **request):
            write(piece.text)
            done += [] if piece.completion is None else [piece.completion]
        write("\n")
        api.require_sound(done)
    total = metrics.merge([c.stats for c in done])
    say(f"{name}, {rule}: {total.num_emitted_tokens} tokens, mean acceptance length {total.mean_acceptance_length:.2f}")
    chosen = resolved(command, params, rule=rule, num_draft=loaded.drafter.depth, chat=chat, raw=not chat)
    summary = {"seed": asked.seed, "settings": chosen, "drafter": loaded.card._asdict(), "stats": total._asdict()}
    return {"summary": summary, "prompts": [answer(row, c) for row, c in zip(rows, done, strict=True)]}


def answer(row: PromptRow, done: api.Completion) -> dict:
    """What --json says of one prompt."""
    facts = {"tokens": done.tokens, "text": done.text, "finish_reason": done.finish_reason, "stats": done.stats._asdict()}
    return {"id": row.id, "category": row.category, "prompt_tokens": len(done.prompt_tokens), **facts}


def run_bench(command: Bench, write: Write) -> dict:
    """Measure methods side by side."""
    asked, params, drafting = command.asked, command.sampling.params(), command.drafting
    rows = choose(command.prompt, asked, demo.PROMPTS)
    check_names(command.methods, drafting)
    check_counts(asked.max_new_tokens, command.num_draft)
    sampling.check(params, 0)
    lm = load_target(command.target)
    prompts, chat = as_prompts(lm, rows, asked)
    several = [(name, k) for name in command.methods if name != "plain" for k in command.num_draft]
    loaded = [build_drafter(lm, name, k, drafting) for name, k in several]
    rules = [drafting.rule or drafter.rule for drafter in loaded]
    contenders = [bench.Contender(n, d, r) for (n, _), d, r in zip(several, loaded, rules, strict=True)]
    work = bench.Work(prompts, jax.random.key(asked.seed), asked.max_new_tokens, params, asked.stop, command.batch_size)
    with progress_bar("run") as progress:
        results = bench.compare(lm, contenders, work, progress=progress)
    results = [r._replace(passes=bench.pass_times(lm, r.contender, work)) for r in results]
    say(bench_table(results))
    chosen = resolved(command, params, rule=rules, chat=chat, raw=not chat)
    summary = {"seed": asked.seed, "settings": chosen, "num_prompts": len(rows)}
    return {"summary": summary, "methods": [bench.record(r) for r in results]}


def bench_table(results: Sequence[bench.Result]) -> str:
    """Results as people read them; acceptance is by position in the draft."""
    heads = ["method", "K", "rule", "lossless", "same tokens?", "tau", "acceptance", "tokens/s", "speed-up [95 %]"]
    rows = [[*heads, "draft ms", "verify ms", "ms/token"]]
    for r in results:
        names = [r.contender.method, str(r.contender.loaded.drafter.depth), r.contender.rule, word(r.lossless)]
        rates = " ".join(f"{x:.2f}" for x in r.stats.per_position_acceptance_rate)
        speed = f"{r.speedup.mean:.2f}x [{r.speedup.low:.2f}, {r.speedup.high:.2f}]"
        tau, rate = f"{r.stats.mean_acceptance_length:.2f}", f"{r.tokens_per_second:.1f}"
        yields = [word(r.same_tokens_as_plain), tau, rates, rate, speed]
        rows.append([*names, *yields, *(f"{ms:.2f}" for ms in (*(r.passes or ()), r.itl_ms))])
    return table(rows)


def choose(words: Sequence[str], asked: Prompts, default: Sequence[PromptRow]) -> list[PromptRow]:
    """The rows that a command asks, in order."""
    if words and asked.prompts is not None:
        raise ValueError(f"prompts on the command line and --prompts {asked.prompts}: give one or the other")
    rows = [PromptRow(str(i), "prompt", (text,)) for i, text in enumerate(words)] or list(default)
    if asked.prompts is not None:
        rows = load_prompts(asked.prompts)
    if not rows:
        raise ValueError("no prompt: give one, or --prompts FILE")
    empty = [row.id for row in rows if not row.turns[0]]
    if empty:
        raise ValueError(f"prompt {empty[0]} is empty: give it some text")
    rows = select(rows, categories=asked.categories, limit=asked.limit)
    several = sum(len(row.turns) > 1 for row in rows)
    if several:
        say(f"{several} of {len(rows)} prompts have several turns: only the first of each is asked")
    return rows


def as_prompts(lm: LM, rows: Sequence[PromptRow], asked: Prompts) -> tuple[list[list[int]], bool]:
    """Token ids of every prompt, and whether they went through the chat template."""
    chat = asked.chat or not (asked.raw or lm.tokenizer.chat_template is None)
    texts = [row.turns[0] for row in rows]
    return [api.encode(lm, demo.chat(text) if chat else text, i) for i, text in enumerate(texts)], chat


def resolved(command: Generate | Bench, params: sampling.SamplingParams, **decided) -> dict:
    """Every setting with the value it had in the end; sampling stands together, None = that part of the law is off."""
    chosen = {name: value for name, value in settings(command).items() if name not in params._fields}
    return {**chosen, **decided, "sampling": params._asdict()}


def check_names(methods: Sequence[str], drafting: Drafting) -> None:
    """Raise ValueError for a method or rule that does not exist, and for a flag that none of the methods takes or one lacks."""
    for name in methods:
        if name not in api.METHODS:
            raise ValueError(unknown("method", name, api.METHODS))
    if drafting.rule is not None:
        api.find_rule(drafting.rule)
    models, layers = ",".join(drafting.draft_model), drafting.exit_layers
    for flag, value, names in (("draft-model", models, {"model", "models"}), ("exit-layers", layers, {"layers"})):
        owners = [name for name, method in api.METHODS.items() if names & set(options(method))]
        if value not in ("", None) and not set(owners) & set(methods):
            who = f"of the method {' or '.join(owners)}, not of {', '.join(methods)}"
            raise ValueError(f"--{flag} {value} is {who}: leave it out or add {owners[0]}")
    for name in methods:
        if not has_models(name, drafting):
            wanted = "a small model" if "model" in options(api.METHODS[name]) else "small models"
            given = f"give --draft-model, which names {len(drafting.draft_model)}"
            raise ValueError(f"the method {name} needs {wanted} of the target's vocabulary: {given}")
        parse_options(api.METHODS[name], own_options(name, drafting))
    known = {option for name in methods for option in readable(api.METHODS[name])}
    for option in drafting.option:
        if option.partition("=")[0] not in known:
            raise ValueError(unknown(f"option of {' or '.join(methods)}", option.partition("=")[0], sorted(known)))


def has_models(method: str, drafting: Drafting) -> bool:
    """Whether --draft-model names as many models as a method wants."""
    known, given = options(api.METHODS[method]), len(drafting.draft_model)
    return given == 1 if "model" in known else given > 0 if "models" in known else True


def own_options(method: str, drafting: Drafting) -> list[str]:
    """Those of --option that a method takes."""
    return [option for option in drafting.option if option.partition("=")[0] in readable(api.METHODS[method])]


def check_counts(max_new_tokens: int, num_draft: Sequence[int]) -> None:
    """Raise ValueError before anything is loaded."""
    if max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens {max_new_tokens}: ask for at least 1")
    if min(num_draft) < 1:
        raise ValueError(f"--num-draft {min(num_draft)}: draft at least 1 token, or use the method plain")


def load_target(target: Target) -> LM:
    """A model, with a bar while it is downloaded."""
    with progress_bar("B") as progress:
        return load(target.model, weights_dtype=target.weights_dtype, progress=progress)


def build_drafter(lm: LM, method: str, num_draft: int, drafting: Drafting) -> LoadedDrafter:
    """A method's drafter with those of the flags that are its own."""
    models, known = drafting.draft_model, options(api.METHODS[method])
    flags = {"model": models[0] if models else None, "models": models or None, "layers": drafting.exit_layers}
    given = {name: value for name, value in flags.items() if name in known and value is not None}
    given |= parse_options(api.METHODS[method], own_options(method, drafting))
    return api.load_drafter(method, lm, num_draft=num_draft, **given)
