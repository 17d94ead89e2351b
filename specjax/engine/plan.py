"""How much of the next drafts an engine verifies, and whether it drafts at all, by a policy of the simulator.

    policy(View)  ─► None: rounds without drafts         expected acceptance of each request: schedule/acceptance.py
                  ─► lengths(acceptance) [B]             costs of rounds: a `CostTable`, measured or a roofline's

The policy sees what earlier rounds accepted and nothing of the drafts that it decides on, so that any policy keeps the law.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from specjax.latency.cost_table import CostTable
from specjax.schedule import acceptance
from specjax.schedule.policies import Lengths, Policy, View


class Rows(NamedTuple):
    """What the slots hold, between two stretches of rounds."""

    held: np.ndarray  # [B] bool: a request
    active: np.ndarray  # [B] bool: one that decodes
    able: np.ndarray  # [B] bool: one whose drafter has missed nothing
    cached: np.ndarray  # [B] tokens in the caches
    read: int = 0  # tokens of prompts that were read before this stretch, a round of it
    unread: int = 0  # and those that are left over for later ones


class Plan(NamedTuple):
    """The next stretch of rounds."""

    lengths: np.ndarray | None  # [B] drafted tokens to verify; None, or all 0: draft nothing
    keep_up: bool = True  # where nothing is drafted: whether drafters shall take in what is emitted, to draft again


class Planner(Protocol):
    """What an engine asks, by slots."""

    def admit(self, slots: Sequence[int], rows: Rows) -> np.ndarray:
        """Other requests have these slots, all at once: for each, whether a drafter reads its prompt [n] bool.

        If not, it decodes without drafts to its end.
        """
        ...

    def plan(self, rows: Rows) -> Plan:
        """What to do next."""
        ...

    def learn(self, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """What came of a stretch of rounds [B, r]; zero for slots that were not active."""
        ...


class PolicyPlanner:
    """A policy at work in one engine.

    Where the policy would not draft though every drafter had kept up, drafters do nothing: running requests are left behind,
    and new ones come without.  When it wants to look again, the next request is a probe: its drafter reads the prompt, and
    drafts in one stretch.
    """

    def __init__(self, policy: Policy, table: CostTable, *, slots: int, num_draft: int) -> None:
        """Nothing is known yet.

        Args:
          policy: one of `schedule.policies`.
          table: what rounds cost.
          slots: B of the engine.
          num_draft: K of its drafter, a chain.
        """
        self._policy, self._table = policy, table
        self._history = acceptance.nothing_yet(slots, num_draft)
        self._quiet = 0  # stretches since anything was last drafted
        self._probe: int | None = None  # the slot of one that is still to be looked at

    def admit(self, slots: Sequence[int], rows: Rows) -> np.ndarray:
        """They are taken for what all requests were together."""
        self._history = acceptance.forgotten(self._history, slots)
        if self._probe is not None and (self._probe in slots or not rows.held[self._probe]):
            self._probe = None  # it has gone
        waits, drafting = self._probe is not None, np.ones(len(slots), bool)  # one look at a time
        if self._ask(rows, rows.held, 0 if waits else self._quiet) is None:
            return ~drafting
        if not waits and self._ask(rows, rows.held, 0) is None:
            self._probe = slots[0]
            drafting[1:] = False
        return drafting

    def plan(self, rows: Rows) -> Plan:
        """As the policy wants it, for those who can be drafted for; a token each at least, or nothing would be learnt."""
        can, lengths = rows.active & rows.able, np.zeros(len(rows.active), np.int32)
        if self._probe is not None and rows.active[self._probe]:
            self._probe = None
        chosen = self._ask(rows, rows.active, self._quiet, can, rows.read, rows.unread) if can.any() else None
        if chosen is not None:
            self._quiet = 0
            lengths[rows.active] = np.where(can[rows.active], chosen(self._known(rows.active, can)), 0)
            return Plan(lengths if lengths.any() else can.astype(np.int32))
        self._quiet += 1
        return Plan(None, keep_up=bool(can.any()) and self._ask(rows, rows.active, 0) is not None)

    def learn(self, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """Kept by slot, and in a pool of all requests."""
        if drafted.any():
            self._history = acceptance.learnt(self._history, accepted, drafted)

    def _ask(
        self, rows: Rows, whose: np.ndarray, quiet: int, can: np.ndarray | None = None, read: int = 0, unread: int = 0
    ) -> Lengths | None:  # fmt: skip
        """The policy on requests `whose` [B], of which `can` [B] be drafted for: all, unless given."""
        known = self._known(whose, whose if can is None else can)
        return self._policy(View(self._table, known, rows.cached[whose].sum(), quiet, read, unread))

    def _known(self, whose: np.ndarray, can: np.ndarray) -> np.ndarray:
        """Expected acceptance of requests `whose` [B]; none of those that cannot be drafted for."""
        known = np.where(can[:, None], acceptance.expected(self._history), 0)
        return known[whose].astype(self._table.verify.dtype)
