"""`specjax methods`: every method and rule."""

from __future__ import annotations

from specjax import api
from specjax.commands.common import Write, build_drafter, has_models, has_weights, load_target, usual_depth
from specjax.console import say, table
from specjax.drafters.base import options
from specjax.flags import Drafting, Methods, Target, settings


def run(command: Methods, write: Write) -> dict:
    """List methods and rules.  What a method adds to a target is known where it is nothing, or where --model names one."""
    if command.draft_model and command.model is None:
        raise ValueError(f"--draft-model {','.join(command.draft_model)} is counted beside a target: give --model too")
    lm = None if command.model is None else load_target(Target(command.model))
    drafting, target, items = Drafting(draft_model=command.draft_model), command.model or "", []
    for name, method in api.METHODS.items():
        extra = (0, 0) if method.kind in ("none", "training-free") else (None, None)
        if lm is not None and has_models(name, drafting, target) and has_weights(name, drafting, target):
            extra = build_drafter(lm, name, usual_depth(name, target), drafting).card[1:3]
        facts = dict(method=name, kind=method.kind, extra_parameters=extra[0], extra_bytes=extra[1], rule=method.rule)
        lossless, known = api.RULES[method.rule].lossless, [*(["num_draft"] if name != "plain" else []), *options(method.load)]
        items.append({**facts, "lossless": lossless, "options": known, "summary": method.summary})
    rules = [
        {"rule": n, "lossless": r.lossless, "coupled": r.coupled, "accepts": list(r.accepts)} for n, r in api.RULES.items()
    ]
    for records in (items, rules):
        shown = [[", ".join(v) if isinstance(v, list) else "-" if v is None else str(v) for v in x.values()] for x in records]
        say(table([[name.replace("_", " ") for name in records[0]], *shown]) + "\n")
    return {"summary": {"settings": settings(command), "rules": rules}, "methods": items}
