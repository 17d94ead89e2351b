"""Rung: how a request ends.  Nothing after an end-of-sequence token, never more than the budget, never less without a reason.

End tokens are chosen among those that the same requests emit without an end: for every second one a drafted token that was
accepted, where there is any, so that ends stand inside a block even where few drafts are right; else a frequent one.
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
    free, rounds = decoded(subject._replace(eos=()), prompts, key=lab.key(6), new=how.short)
    tokens, start, length = (np.asarray(x) for x in (free.tokens, free.prompt_length, free.length))
    emitted = [tokens[i, start[i] : length[i]] for i in range(how.few)]
    common = [ids[np.argsort(-counts, kind="stable")] for ids, counts in (np.unique(x, return_counts=True) for x in emitted)]
    ends = [[int(x[i % 2 % len(x)]), int(x[-1])] if len(x) else [-1, -1] for i, x in enumerate(common)]
    for i in range(0, how.few, 2):
        kept = drafted(emitted[i][: budgets[i]], np.asarray(rounds.accepted)[i], np.asarray(rounds.emitted)[i])
        ends[i] = [kept[-1], -1] if kept else ends[i]
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


def drafted(new: np.ndarray, accepted: np.ndarray, emitted: np.ndarray) -> list[int]:
    """Tokens of `new` [n] whose first appearance was an accepted draft, given each round's counts [R]."""
    round_of = np.repeat(np.arange(len(emitted)), emitted)[: len(new)]
    place = np.arange(len(new)) - (np.cumsum(emitted) - emitted)[round_of]  # within its round
    first = np.isin(np.arange(len(new)), np.unique(new, return_index=True)[1])
    return [int(t) for t in new[(place < accepted[round_of]) & first]]


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
