"""The history of a package on a device: what its runs have counted and measured, and how a run changes it.

It has numbers only: no text, no token, not even which expert was chosen. It says how soon clusters are used again,
which share of the neurons fires, and how the terms of the last runs compared with their plans.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Final

from neuronpipe.plans.history.run_terms import (
    MIN_TOKENS,
    RunTerms,
    TokenTerms,
    deviations,
    measured_terms,
    planned_terms,
)
from neuronpipe.plans.history.use_gaps import UseGaps
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import MAX_CORRECTION, Corrections, Mode, Plan
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.marks import Range

VERSION: Final = 1
MAX_RUNS: Final = 8
MAX_TOKENS: Final = 100_000
"""Tokens that count at most: older ones fade when new ones come."""
LATEST_TIME_S: Final = 1 << 36  # since 1970: the year 4147


@frozen(kw_only=True)
class RunRecord:
    """The terms of one run. ended_at: seconds since 1970; plan: its id"""

    ended_at: Annotated[int, Range(0, LATEST_TIME_S)]
    plan: str
    tokens: Annotated[int, Range(1, 1 << 50)]
    planned: TokenTerms
    measured: TokenTerms


@frozen(kw_only=True)
class Counts:
    """The counts of runs in one mode, over decode steps of one token.

    triggers, values: uses of clusters, by the part that was looked up
    neurons, fired, active: sums, as in `RunTerms`
    """

    mode: Mode
    triggers: UseGaps
    values: UseGaps
    neurons: Annotated[float, Range(0.0, 1e18)]
    fired: Annotated[float, Range(0.0, 1e18)]
    active: Annotated[float, Range(0.0, 1e18)]

    @property
    def tokens(self) -> int:
        return self.triggers.steps

    def plus(self, more: Counts) -> Counts:
        """Return the counts of both, older ones reduced if there are more than MAX_TOKENS."""
        max_before = max(0, MAX_TOKENS - more.tokens)
        share = min(1.0, max_before / self.tokens) if self.tokens else 0.0
        return Counts(
            mode=self.mode,
            triggers=self.triggers.plus(more.triggers, max_before),
            values=self.values.plus(more.values, max_before),
            **{name: share * getattr(self, name) + getattr(more, name) for name in ("neurons", "fired", "active")},
        )


@frozen(kw_only=True)
class History:
    """The history of a package on a device. corrections: factors for the next plan"""

    version: int
    package_id: str
    device_id: str
    counts: tuple[Counts, ...] = ()
    corrections: Corrections = Corrections()
    runs: tuple[RunRecord, ...] = ()

    def __post_init__(self) -> None:
        if len(self.runs) > MAX_RUNS:
            raise ValueError(f"runs: more than {MAX_RUNS}")
        if len({counts.mode for counts in self.counts}) < len(self.counts):
            raise ValueError("counts: a mode has several")

    def of_mode(self, mode: Mode) -> Counts | None:
        return next((counts for counts in self.counts if counts.mode == mode), None)

    def check(self, *, package_id: str, device_id: str, where: str) -> None:
        """Raise UserError if the history is of another version, package or device."""
        for name, expected in (("version", VERSION), ("package_id", package_id), ("device_id", device_id)):
            if getattr(self, name) != expected:
                raise UserError(f"{where}: field '{name}': expected {expected}")


@frozen(kw_only=True)
class RunResult:
    """The counts and measurements of a run so far.

    ended_at: seconds since 1970
    """

    plan: Plan
    terms: RunTerms
    triggers: UseGaps
    values: UseGaps
    ended_at: int


def with_run(history: History, manifest: Manifest, run: RunResult) -> History:
    """Return the history after a run. The result depends on the arguments alone."""
    mode, terms = run.plan.compute.mode, run.terms
    new = Counts(
        mode=mode,
        triggers=run.triggers,
        values=run.values,
        neurons=float(terms.neurons),
        fired=float(terms.fired),
        active=float(terms.active),
    )
    before = history.of_mode(mode)
    same_sample = before is not None and before.triggers.sampled == run.triggers.sampled
    counted = before.plus(new) if before is not None and same_sample else new
    history = dataclasses.replace(
        history, counts=(*(counts for counts in history.counts if counts.mode != mode), counted)
    )
    if terms.tokens < MIN_TOKENS:
        return history
    planned = planned_terms(run.plan, manifest, terms.positions / terms.tokens)
    record = RunRecord(
        ended_at=run.ended_at,
        plan=run.plan.id,
        tokens=terms.tokens,
        planned=planned,
        measured=measured_terms(terms),
    )
    return dataclasses.replace(
        history,
        runs=(*history.runs, record)[-MAX_RUNS:],
        corrections=_corrected(run.plan.corrections, history.corrections, record),
    )


def _corrected(of_plan: Corrections, stored: Corrections, run: RunRecord) -> Corrections:
    """Return the factors for the next plan: those of a run's plan times what the run has measured. A term that agrees
    with the plan keeps the plan's factor, so that plans do not change with every run.

    stored: the factors so far, which stay where this run says nothing
    """
    ratio_by_term = {deviation.term: deviation.ratio for deviation in deviations(run.planned, run.measured)}

    def factor(term: str, of_the_plan: float, before: float, is_measured: bool) -> float:
        if not is_measured:
            return before
        ratio = ratio_by_term.get(term) or 1.0  # type: ignore[call-overload]
        return round(min(max(of_the_plan * ratio, 1 / MAX_CORRECTION), MAX_CORRECTION), 3)

    return Corrections(
        kernels=factor("kernels", of_plan.kernels, stored.kernels, run.planned.compute_ms is not None),
        reads=factor("reads", of_plan.reads, stored.reads, bool(run.planned.wait_ms and run.measured.wait_ms)),
    )
