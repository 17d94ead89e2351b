"""Who is drafted for: which of an engine's programs fills a slot, and which runs the next rounds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specjax.engine import slots as device
from specjax.engine.plan import Planner, Rows
from specjax.engine.request import Request


class Drafting:
    """A planner's word, and whose drafters have missed tokens: such a request decodes without drafts to its end.

    What the planner does not want of a drafter is not run: neither in prefill nor in rounds.  Who was let in with a drafter
    keeps it until its prompt is read.  Without a planner everybody is drafted for.
    """

    def __init__(self, build: device.Build, planner: Planner | None) -> None:
        self._build, self._planner = build, planner
        self._keeping_up, self._left_behind = (build, build) if planner is None else device.plain(build)
        self._behind = np.zeros(build.slots, bool)

    @property
    def fills(self) -> list[device.Build]:
        """All that `fill` may name, the engine's own first."""
        return list(dict.fromkeys([self._build, self._left_behind]))

    @property
    def runs(self) -> list[device.Build]:
        """All that `rounds` may name."""
        return list(dict.fromkeys([self._build, self._keeping_up, self._left_behind]))

    def admit(self, slots: list[int], held: Sequence[Request | None]) -> None:
        """Other requests have these slots."""
        self._behind[slots] = False
        if self._planner is not None and slots:
            self._behind[slots] = np.logical_not(self._planner.admit(slots, self._rows(held, 0)))

    def fill(self, slot: int) -> device.Build:
        """What reads the prompt there."""
        return self._left_behind if self._behind[slot] else self._build

    def rounds(self, held: Sequence[Request | None], read: int) -> tuple[device.Build, np.ndarray | None]:
        """What runs the next rounds, once `read` tokens of prompts were read, and lengths [B] where it is told any."""
        if self._planner is None:
            return self._build, None
        rows = self._rows(held, read)
        plan = self._planner.plan(rows)
        if plan.lengths is not None:
            lengths = np.where(rows.active & rows.able, plan.lengths, 0).astype(np.int32)
            if lengths.any():
                return self._build, lengths
        if plan.keep_up and (rows.active & rows.able).any():
            return self._keeping_up, None
        self._behind |= rows.active
        return self._left_behind, None

    def learn(self, brought: device.Stretch) -> None:
        """What came of them."""
        if self._planner is not None:
            self._planner.learn(brought.counts[:, 0], brought.counts[:, 1])

    def _rows(self, held: Sequence[Request | None], read: int) -> Rows:
        each = [(slot, request) for slot, request in enumerate(held) if request is not None]
        here, active, cached = (np.zeros(len(held), kind) for kind in (bool, bool, float))
        for slot, request in each:
            here[slot], active[slot] = True, not request.left
            cached[slot] = request.ask.length + len(request.tokens) - request.left
        unread = sum(request.left for _, request in each)
        return Rows(here, active, ~self._behind, cached, read // self._build.stride, unread)
