"""Rung: how a request ends.  Nothing after an end-of-sequence token, never more than the budget, never less without a reason.

End tokens are chosen among those that the subject emits and drafts most, so that many stand inside a block.
"""

from __future__ import annotations

import numpy as np

from specjax.lossless.finding import Finding
from specjax.lossless.lab import Lab, exactly
from specjax.lossless.subject import decoded, varied
from specjax.types import EOS, FINISH_REASONS, LENGTH


def endings(lab: Lab) -> Finding:
    """Frequent tokens as ends, and budgets of every size."""
    name, subject, how = "endings", lab.subject, lab.how
    looked = "requests with frequent tokens as ends and budgets of every size: nothing after an end, budgets kept"
    prompts = varied(subject, how.few)
    budgets = how.short - np.arange(how.few) % how.short
    free = decoded(subject._replace(eos=()), prompts, key=lab.key(6), new=how.short)[0]
    tokens, start, length = (np.asarray(x) for x in (free.tokens, free.prompt_length, free.length))
    emitted = [tokens[i, start[i] : length[i]] for i in range(how.few)]
    common = [ids[np.argsort(-counts, kind="stable")] for ids, counts in (np.unique(x, return_counts=True) for x in emitted)]
    ends = [[int(x[i % 2 % len(x)]), int(x[-1])] if len(x) else [-1, -1] for i, x in enumerate(common)]
    done, info = decoded(subject, prompts, key=lab.key(6), new=how.short, budgets=budgets, eos=ends)
    tokens, length, status = (np.asarray(x) for x in (done.tokens, done.length, done.status))
    faults = []
    for i in range(how.few):
        new = tokens[i, start[i] : length[i]].tolist()
        faults += [f"request {i}: {fault}" for fault in bad_end(new, ends[i], int(budgets[i]), int(status[i]))]
    emitted_rounds, accepted = np.asarray(info.emitted), np.asarray(info.accepted)
    inside = (status == EOS)[:, None] & (np.cumsum(emitted_rounds, 1) == (length - start)[:, None]) & (emitted_rounds > 0)
    inside = int((inside & (accepted == emitted_rounds)).sum())
    counts = ", ".join(f"{(status == s).sum()} by {FINISH_REASONS[s]}" for s in (EOS, LENGTH))
    saw = f"{how.few} requests ended {counts}; {inside} on a drafted token"
    return exactly(name, looked, faults, saw, inside > 0 or subject.drafter.num_nodes == 0)


def bad_end(new: list[int], ends: list[int], budget: int, status: int) -> list[str]:
    """What is wrong with how one request ended."""
    first = next((i for i, t in enumerate(new) if t in ends), None)
    if first is not None and first + 1 < len(new):
        return [f"{len(new) - first - 1} tokens after the end token {new[first]}"]
    if len(new) > budget:
        return [f"{len(new)} tokens of a budget of {budget}"]
    if first is None and len(new) < budget:
        return [f"it stops after {len(new)} of {budget} tokens without an end token"]
    reason = LENGTH if first is None else EOS
    return [] if status == reason else [f"it says {FINISH_REASONS[status]} where it ended by {FINISH_REASONS[reason]}"]
