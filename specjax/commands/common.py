"""What subcommands share: prompts, the target, drafters by their flags, and checks before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from specjax import api, demo, distributed, sampling, zoo
from specjax.console import progress_bar, say
from specjax.drafters.base import LoadedDrafter, options, parse_options, readable
from specjax.flags import Bench, Drafting, Generate, Prompts, Target, settings
from specjax.models.load import LM, NAMES, load
from specjax.names import unknown
from specjax.prompts import PromptRow, load_prompts, select

Write = Callable[[str], None]


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


def check_names(methods: Sequence[str], drafting: Drafting, target: str) -> None:
    """Raise ValueError for a method or rule that does not exist, and for a flag that none of the methods takes or one lacks."""
    for name in methods:
        if name not in api.METHODS:
            raise ValueError(unknown("method", name, api.METHODS))
    if drafting.rule is not None:
        api.find_rule(drafting.rule)
    models, layers = ",".join(drafting.draft_model), drafting.exit_layers
    for flag, value, names in (("draft-model", models, {"model", "models"}), ("exit-layers", layers, {"layers"})):
        owners = [name for name, method in api.METHODS.items() if names & set(options(method.load))]
        if value not in ("", None) and not set(owners) & set(methods):
            who = f"of the method {' or '.join(owners)}, not of {', '.join(methods)}"
            raise ValueError(f"--{flag} {value} is {who}: leave it out or add {owners[0]}")
    for name in methods:
        if not has_models(name, drafting, target):
            wanted = "a small model" if "model" in options(api.METHODS[name].load) else "small models"
            given = f"give --draft-model, which names {len(drafting.draft_model)}"
            raise ValueError(f"the method {name} needs {wanted} of the target's vocabulary: {given}")
        parse_options(api.METHODS[name].load, own_options(name, drafting))
    known = {option for name in methods for option in readable(api.METHODS[name].load)}
    for option in drafting.option:
        if option.partition("=")[0] not in known:
            raise ValueError(unknown(f"option of {' or '.join(methods)}", option.partition("=")[0], sorted(known)))


def has_models(method: str, drafting: Drafting, target: str) -> bool:
    """Whether --draft-model names as many models as a method wants, or something stands in for them."""
    known, given = options(api.METHODS[method].load), len(drafting.draft_model)
    if "model" in known:
        return given == 1 or not given and (names_weights(method, drafting) or packaged(method, target))
    return given > 0 if "models" in known else True


def has_weights(method: str, drafting: Drafting, target: str) -> bool:
    """Whether a method wants no weights, is given them or a model instead, or the package holds those for this target."""
    known = options(api.METHODS[method].load)
    given = names_weights(method, drafting) or "model" in known and len(drafting.draft_model) > 0
    return "weights" not in known or given or packaged(method, target)


def names_weights(method: str, drafting: Drafting) -> bool:
    """Whether an --option gives a method its weights."""
    return any(option.startswith("weights=") for option in own_options(method, drafting))


def packaged(method: str, target: str) -> bool:
    """Whether a drafter for this very target lies in the package; a path is no name."""
    return target in NAMES and zoo.drafter(target, method) is not None


def usual_depth(method: str, target: str) -> int:
    """K of the packaged drafter for a target, as its config says; 4 where none says any."""
    found = zoo.drafter(target, method) if target in NAMES else None
    return 4 if found is None else json.loads((found / "config.json").read_text("utf-8")).get("num_draft", 4)


def own_options(method: str, drafting: Drafting) -> list[str]:
    """Those of --option that a method takes."""
    return [option for option in drafting.option if option.partition("=")[0] in readable(api.METHODS[method].load)]


def check_counts(max_new_tokens: int, num_draft: Sequence[int]) -> None:
    """Raise ValueError before anything is loaded."""
    if max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens {max_new_tokens}: ask for at least 1")
    if min(num_draft) < 1:
        raise ValueError(f"--num-draft {min(num_draft)}: draft at least 1 token, or use the method plain")


def load_target(target: Target) -> LM:
    """A model, with a bar while it is downloaded; what a mesh cannot divide is said."""
    if target.mesh is not None:
        distributed.join()
    with progress_bar("B") as progress:
        lm = load(target.model, weights_dtype=target.weights_dtype, mesh=target.mesh, progress=progress)
    for note in lm.notes:
        say(note)
    return lm


def build_drafter(lm: LM, method: str, num_draft: int, drafting: Drafting) -> LoadedDrafter:
    """A method's drafter with those of the flags that are its own."""
    models, known = drafting.draft_model, options(api.METHODS[method].load)
    flags = {"model": models[0] if models else None, "models": models or None, "layers": drafting.exit_layers}
    given = {name: value for name, value in flags.items() if name in known and value is not None}
    given |= parse_options(api.METHODS[method].load, own_options(method, drafting))
    loaded = api.load_drafter(method, lm, num_draft=num_draft, **given)
    for note in loaded.notes:
        say(f"{method}: {note}")
    return loaded
