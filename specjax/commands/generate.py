"""`specjax generate`: answer prompts one by one, streaming."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from specjax import api, keys, metrics, sampling
from specjax.commands.common import Write, as_prompts, build_drafter, check_counts, check_names, choose, load_target, resolved
from specjax.console import say
from specjax.flags import Generate
from specjax.prompts import PromptRow


def run(command: Generate, write: Write) -> dict:
    """Answer prompts one by one, streaming."""
    asked, params, name = command.asked, command.sampling.params(), command.method
    if name == "plain" and command.num_draft is not None:
        raise ValueError(
            f"--num-draft {command.num_draft} means nothing to the method plain, which drafts nothing: leave it out"
        )
    num_draft = 4 if command.num_draft is None else command.num_draft
    rows = choose(command.prompt, asked, ())
    check_names([name], command.drafting, command.target.model)
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
