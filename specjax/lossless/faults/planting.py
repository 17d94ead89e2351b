"""How a fault is planted: in the rule's plan, in the drafter's proposal, or in a function of the engine while it is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

from specjax.lossless.subject import Subject

Plant = Callable[[Subject], Subject]


class Mutant(NamedTuple):
    """A fault that the ladder has to find."""

    name: str
    family: str
    story: str  # what it does; who shipped it
    subject: str  # a key of mutants.SUBJECTS
    plant: Plant


def in_rule(change: Callable) -> Plant:
    """`change(plan, draft, log_p) -> Plan` in place of the rule's own `plan`."""

    def plant(subject: Subject) -> Subject:
        own = subject.rule.plan
        return subject._replace(rule=subject.rule._replace(plan=lambda draft, log_p: change(own, draft, log_p)))

    return plant


def in_draft(change: Callable) -> Plant:
    """`change(draft) -> Draft` on what the drafter proposes."""

    def plant(subject: Subject) -> Subject:
        own = subject.drafter.propose

        def propose(noise, params, state, sequences):
            draft, state = own(noise, params, state, sequences)
            return change(draft), state

        return subject._replace(drafter=subject.drafter._replace(propose=propose))

    return plant


def in_noise(change: Callable) -> Plant:
    """`change(array) -> array` on the noise that the drafter draws with."""

    def plant(subject: Subject) -> Subject:
        own = subject.drafter.propose

        def propose(noise, params, state, sequences):
            return own(lambda *asked: change(noise(*asked)), params, state, sequences)

        return subject._replace(drafter=subject.drafter._replace(propose=propose))

    return plant


def in_module(module, name: str, make: Callable) -> Plant:
    """`make(original)` in place of `module.name` while the subject's program is traced."""
    faulty = make(getattr(module, name))

    def patched() -> contextlib.AbstractContextManager:
        return mock.patch.object(module, name, faulty)

    return lambda subject: subject._replace(plant=patched)


def in_pass(change: Callable) -> Plant:
    """`change(apply) -> apply` on the target's pass over a block, and on no other pass."""
    from specjax import decode

    def make(verify_block):
        def faulty(params, state, draft, noise, *, target, **rest):
            return verify_block(params, state, draft, noise, target=target._replace(apply=change(target.apply)), **rest)

        return faulty

    return in_module(decode, "verify_block", make)
