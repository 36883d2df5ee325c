"""Keeps what a run counts and measures: at its end, and now and then while it is live, in case it is killed."""

from __future__ import annotations

import contextlib
import time
from typing import Final

from neuronpipe.plans.history.history import RunResult, with_run
from neuronpipe.plans.history.history_file import read_history, write_history
from neuronpipe.plans.history.run_terms import RunTerms
from neuronpipe.plans.history.use_gaps import UseGaps
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.document import Plan
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.layouts.weights import REUSE_BUCKETS
from neuronpipe.services.runtime.run_memory import RunMemory

EVERY_S: Final = 600.0


class RunHistory:
    """The history of one run.

    is_kept: False if the user or an experiment wants nothing kept
    """

    def __init__(self, package: Package, plan: Plan, memory: RunMemory, *, is_kept: bool) -> None:
        self._manifest, self._plan = package.manifest, plan
        self._terms = memory.view("board", "terms")
        self._last_uses, self._gaps, self._steps = (
            memory.view("residency", name) for name in ("last_uses", "use_gaps", "used_steps")
        )
        self._before = read_history(plan.package_id, plan.device_id) if is_kept else None
        self._kept_steps, self._due_at = 0, time.monotonic() + EVERY_S

    def look(self) -> None:
        """Write the history if the last time is EVERY_S ago."""
        if time.monotonic() >= self._due_at:
            self.keep()

    def keep(self) -> None:
        """Write the history with this run, unless nothing was counted since the last time. If it cannot be written, the
        run is not kept."""
        self._due_at, steps = time.monotonic() + EVERY_S, int(self._steps[0])
        if self._before is None or steps == self._kept_steps:
            return
        self._kept_steps = steps
        result = RunResult(
            plan=self._plan,
            terms=RunTerms.on_board(self._terms),
            triggers=self._use_gaps(0, steps),
            values=self._use_gaps(1, steps),
            ended_at=int(time.time()),
        )
        with contextlib.suppress(OSError, UserError):
            write_history(with_run(self._before, self._manifest, result))

    def _use_gaps(self, part: int, steps: int) -> UseGaps:
        sampled = len(self._last_uses) // 2
        return UseGaps.of_run(
            self._gaps[part * REUSE_BUCKETS : (part + 1) * REUSE_BUCKETS].tolist(),
            self._last_uses[part * sampled : (part + 1) * sampled].tolist(),
            steps,
            sampled,
        )
