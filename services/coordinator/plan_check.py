"""The comparison of a run with its plan, term by term. It has no sockets and no clock."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Mapping
from typing import Final

from neuronpipe.plans.history.run_terms import (
    COUNTERS,
    FIGURES,
    MIN_TOKENS,
    Deviation,
    RunTerms,
    deviations,
    measured_terms,
    planned_terms,
    sentence,
)
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import Plan
from neuronpipe.protocol.layouts.run import BOARD_TERMS

SETTLING_TOKENS: Final = 16
"""First tokens that are not counted: they fill caches, and touch memory for the first time."""
TOKENS_AT_ONCE: Final = 10
"""Tokens whose sums are added to the board together, since a small model makes a thousand tokens a second."""
log = logging.getLogger(__name__)


class PlanCheck:
    """Adds up the terms of a run on the board, and compares each MIN_TOKENS tokens of one sequence with the plan.

    board: the words of the board's field `terms`; sums of an earlier coordinator of the run stay
    """

    def __init__(self, plan: Plan, manifest: Manifest, board: memoryview) -> None:
        self._plan, self._manifest, self._board = plan, manifest, board
        self._total = self._since = RunTerms.on_board(board)
        self._settling_tokens = SETTLING_TOKENS
        self._differing: tuple[Deviation, ...] = ()
        self._logged = False
        self._sums = dict.fromkeys((*COUNTERS, *FIGURES), 0.0)

    @property
    def sentence(self) -> str:
        """The terms that differed from the plan in the last full window; empty if none did or there was none."""
        return sentence(self._differing)

    def add(
        self,
        counters: Mapping[str, float],
        *,
        position: int,
        ms: float,
        read_bytes: float,
        lookups: float,
        missed: float,
    ) -> None:
        """Add a decode step of one token, after the warm-up.

        counters: sums over the participants, and "answers", their number
        position: number of tokens before this one
        ms: time from sending the step until its last answer
        lookups, missed: cluster parts that it needed, and those of them that were not resident
        """
        if self._settling_tokens:
            self._settling_tokens -= 1
            return
        sums = self._sums
        for name in COUNTERS:
            sums[name] += counters.get(name, 0.0)
        for name, value in zip(FIGURES, (ms, 1, position, max(0.0, read_bytes), lookups, missed), strict=True):
            sums[name] += value
        if sums["tokens"] == TOKENS_AT_ONCE:
            self._total += RunTerms.of_steps(sums)
            self._sums = dict.fromkeys(sums, 0.0)
            self._board[: len(BOARD_TERMS)] = array("Q", (getattr(self._total, name) for name in BOARD_TERMS))
            self._compare()

    def _compare(self) -> None:
        if (window := self._total - self._since).tokens < MIN_TOKENS:
            return
        self._since = self._total
        planned = planned_terms(self._plan, self._manifest, window.positions / window.tokens)
        self._differing = deviations(planned, measured_terms(window))
        if self._differing and not self._logged:  # once, since a busy machine may come and go
            self._logged = True
            log.warning("%s", self.sentence)
