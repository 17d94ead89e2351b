"""How much of the next drafts an engine verifies, and whether it drafts at all, by a policy of the simulator.

    policy(View)  ─► None: rounds without drafts         expected acceptance of each request: schedule/acceptance.py
                  ─► lengths(acceptance) [B]             costs of rounds: a `CostTable`, measured or a roofline's

The policy sees what earlier rounds accepted and nothing of the drafts that it decides on, so that any policy keeps the law.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from specjax.latency.cost_table import CostTable, pass_seconds, round_seconds
from specjax.schedule import acceptance
from specjax.schedule.policies import Policy, View
from specjax.schedule.verify_length import plan_budget


class Plan(NamedTuple):
    """The next stretch of rounds."""

    lengths: np.ndarray | None  # [B] drafted tokens to verify; None, or all 0: draft nothing
    keep_up: bool = True  # where nothing is drafted: whether drafters shall take in what is emitted, to draft again


class Planner(Protocol):
    """What an engine asks, by slots."""

    def plan(self, active: np.ndarray, able: np.ndarray, cached: np.ndarray) -> Plan:
        """What to do next.

        `active` [B] are the slots that decode, `able` those of them that can be drafted for (their drafters have kept up),
        `cached` [B] the tokens in their caches.
        """
        ...

    def learn(self, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """What came of a stretch of rounds [B, r]; zero for slots that were not active."""
        ...

    def admit(self, slot: int) -> None:
        """Another request has the slot."""
        ...


class PolicyPlanner:
    """A policy at work in one engine.  In rounds without drafts nothing is learnt, so now and then it drafts all the same."""

    def __init__(
        self, policy: Policy, table: CostTable, *, slots: int, num_draft: int, probe_share: float = 0.01, near: float = 0.9,
        every: int = 64,
    ) -> None:  # fmt: skip
        """Nothing is known yet.

        Args:
          policy: one of `schedule.policies`; `fixed_budget` with a `probe_every` that never comes, for probes are made here.
          table: what rounds cost.
          slots: B of the engine.
          num_draft: K of its drafter, a chain.
          probe_share: the share of time that is spent on drafts only to learn what is accepted; none where drafts would not
            pay if all were accepted.
          near: where the best drafts are worth less than this share of plain decoding, drafters do not keep up either, which
            costs; requests that come later can be drafted for again.
          every: stretches without drafts until the policy is asked again, if the same slots are decoding.
        """
        self._policy, self._table, self._share, self._near, self._every = policy, table, probe_share, near, every
        self._history, self._num_draft = acceptance.nothing_yet(slots, num_draft), num_draft
        self._stretches, self._asked, self._probed, self._for = 0, 0, 0, b""
        self._plan = Plan(None)

    def plan(self, active: np.ndarray, able: np.ndarray, cached: np.ndarray) -> Plan:
        """As the policy wants it; while there are drafts it is asked every time."""
        waited, now = self._stretches - self._asked, active.tobytes()
        if self._plan.lengths is not None or self._for != now or waited >= self._every:
            self._plan, self._for, self._asked = self._ask(active, able, cached), now, self._stretches
        self._stretches += 1
        return self._plan

    def learn(self, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """Kept by slot, and in a pool of all requests."""
        if drafted.any():
            self._history = acceptance.learnt(self._history, accepted, drafted)

    def admit(self, slot: int) -> None:
        """It is taken for what all requests were together."""
        self._history = acceptance.forgotten(self._history, slot)

    def _ask(self, active: np.ndarray, able: np.ndarray, cached: np.ndarray) -> Plan:
        slots, can = cached[active].sum(), able[active]
        known = acceptance.expected(self._history)[active].astype(self._table.verify.dtype)
        known = np.where(can[:, None], known, 0)
        chosen = self._policy(View(self._table, known, slots, 1 + self._stretches))  # 0 would be a probe of the policy's own
        lengths = np.zeros(len(active), np.int32)
        lengths[active] = 0 if chosen is None else np.where(can, chosen(known), 0)
        if not lengths.any() and can.any() and self._stretches - self._probed >= self._pause(len(can), slots):
            lengths[active] = np.where(can, self._num_draft, 0)
        if lengths.any():
            self._probed = self._stretches
            return Plan(lengths)
        worth = plan_budget(known, self._table, np.ones_like(can), slots)
        return Plan(None, keep_up=bool(worth.rate >= self._near * worth.plain_rate))

    def _pause(self, requests: int, slots: np.ndarray) -> float:
        """Stretches from a probe to the next; infinite where drafts would not pay if all were accepted."""
        one, all_drafted = np.asarray(requests), np.asarray(requests * (self._num_draft + 1))
        probe = round_seconds(self._table, one, all_drafted, slots) / pass_seconds(self._table, one, slots)
        return np.inf if probe >= self._num_draft + 1 else float(probe / self._share)
