"""The terms of a run, measured, beside those of its plan.

Only decode steps of one token count, since plans are for these, and only after the warm-up, whose reads are not theirs.
A term is compared apart from those that it follows from, so that one wrong fact is one term: twice as many misses also
mean twice the bytes and longer waits.

    term         compared
    misses       miss rate
    flash bytes  bytes of a miss: bytes over misses
    reads        time that workers wait for a byte
    kernels      time that workers compute for a token, at the mean position of the tokens

Time at barriers is part of the planned time of kernels, and in a run a part of it has other causes. It therefore only
counts where kernels would seem faster than planned without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, Literal

from neuronpipe.plans.number_format import show_number
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.package.traffic import position_bytes
from neuronpipe.plans.plan.document import Plan
from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.layouts.run import BOARD_TERMS
from neuronpipe.protocol.marks import Range

TermName = Literal["misses", "flash bytes", "reads", "kernels"]
MIN_TOKENS: Final = 100
"""Tokens after which terms are compared."""
TOLERANCE: Final = 0.25
MIN_MISS_RATE_DIFFERENCE: Final = 0.01
MIN_TIME_SHARE: Final = 0.05  # of a token's time: smaller differences of a time are not worth a sentence
MAX_SUM: Final = 1 << 60
Sum = Annotated[int, Range(0, MAX_SUM)]
COUNTERS: Final = ("answers", "step_ms", "barrier_ms", "flash_ms", "neurons", "fired", "active")
"""The counters of a step that count; "answers" is the number of participants."""
FIGURES: Final = ("ms", "tokens", "positions", "read_bytes", "lookups", "missed")
"""Other figures of a step: the time until its last answer, 1, its token's position, and what it read and looked up."""


@frozen(kw_only=True)
class RunTerms:
    """Sums over decode steps of one token; times are means over the participants.

    positions: tokens of the sequences before the decoded ones
    compute_ns, barrier_ns, wait_ns: time that a participant computes, waits for the others, and waits for flash
    lookups, missed: cluster parts that the steps needed, and those of them that were not resident
    neurons, fired, active: neurons of the chosen experts, those whose trigger fired, those whose value was not zero
    """

    tokens: Sum = 0
    positions: Sum = 0
    total_ns: Sum = 0
    compute_ns: Sum = 0
    barrier_ns: Sum = 0
    wait_ns: Sum = 0
    read_bytes: Sum = 0
    lookups: Sum = 0
    missed: Sum = 0
    neurons: Sum = 0
    fired: Sum = 0
    active: Sum = 0

    def __add__(self, more: RunTerms) -> RunTerms:
        return RunTerms(**{name: getattr(self, name) + getattr(more, name) for name in BOARD_TERMS})

    def __sub__(self, before: RunTerms) -> RunTerms:
        return RunTerms(**{name: getattr(self, name) - getattr(before, name) for name in BOARD_TERMS})

    @classmethod
    def on_board(cls, words: memoryview) -> RunTerms:
        """Return the sums that the coordinator has written to the board."""
        return cls(**{name: int(words[n]) for n, name in enumerate(BOARD_TERMS)})

    @classmethod
    def of_steps(cls, sums: Mapping[str, float]) -> RunTerms:
        """Return the terms of steps of one token.

        sums: the counters of COUNTERS, summed over the participants, and the figures of FIGURES, over the steps
        """

        def per_participant_ns(name: str) -> int:
            answers_per_step = sums["answers"] / sums["tokens"]
            return round(1e6 * max(0.0, sums[name]) / max(1.0, answers_per_step))

        step_ns, barrier_ns, wait_ns = map(per_participant_ns, ("step_ms", "barrier_ms", "flash_ms"))
        return cls(
            total_ns=round(1e6 * sums["ms"]),
            compute_ns=max(0, step_ns - barrier_ns - wait_ns),
            barrier_ns=barrier_ns,
            wait_ns=wait_ns,
            **{name: round(sums[name]) for name in (*COUNTERS[4:], *FIGURES[1:])},
        )


@frozen(kw_only=True)
class TokenTerms:
    """The terms of one decoded token, planned or measured; a time is None if the plan has none.

    barrier_ms: measured apart from compute_ms, and planned as a part of it
    """

    miss_rate: Annotated[float, Range(0.0, 1.0)]
    flash_bytes: Annotated[float, Range(0.0, 1e18)]
    wait_ms: Annotated[float, Range(0.0, 1e9)] | None
    compute_ms: Annotated[float, Range(0.0, 1e9)] | None
    ms: Annotated[float, Range(0.0, 1e9)] | None
    barrier_ms: Annotated[float, Range(0.0, 1e9)] = 0.0


def measured_terms(run: RunTerms) -> TokenTerms:
    """Return the means over the tokens of a run, of which there must be at least one."""
    return TokenTerms(
        miss_rate=min(1.0, run.missed / max(1, run.lookups)),
        flash_bytes=run.read_bytes / run.tokens,
        wait_ms=run.wait_ns / run.tokens / 1e6,
        compute_ms=run.compute_ns / run.tokens / 1e6,
        ms=run.total_ns / run.tokens / 1e6,
        barrier_ms=run.barrier_ns / run.tokens / 1e6,
    )


def planned_terms(plan: Plan, manifest: Manifest, position: float) -> TokenTerms:
    """Return what the plan expects of a token after `position` tokens.

    A plan is for half of the context, where more keys and values are read. They are assumed to take the time of as many
    other bytes that are read in order. Times with an accelerator are not compared, which takes part in steps.
    """
    expected, compute_ms = plan.expected, plan.expected.sequential_ms_per_token
    has_accelerator = bool(plan.compute.held_blocks or plan.compute.held_matrices)
    if expected.neuron_ms_per_token is None or has_accelerator:
        compute_ms = None
    elif compute_ms is not None:
        half, kv_bytes = plan.compute.context_tokens // 2, position_bytes(manifest.model, plan.compute.kv_type)
        fewer_bytes = min(kv_bytes * max(0.0, half - position), 0.9 * expected.sequential_bytes_per_token)
        compute_ms *= 1 - fewer_bytes / max(1, expected.sequential_bytes_per_token)
        compute_ms += expected.neuron_ms_per_token
    wait_ms = None if has_accelerator else expected.exposed_flash_ms_per_token
    times_ms = compute_ms, wait_ms
    return TokenTerms(
        miss_rate=expected.miss_rate,
        flash_bytes=expected.flash_bytes_per_token,
        wait_ms=wait_ms,
        compute_ms=compute_ms,
        ms=None if None in times_ms else sum(time or 0.0 for time in times_ms) + expected.overhead_ms_per_token,
    )


@frozen
class Deviation:
    """A term that differs from the plan. ratio: measured over planned, without what follows from other terms."""

    term: TermName
    planned: str
    measured: str
    ratio: float | None

    def __str__(self) -> str:
        each = "" if self.term == "misses" else " a token"
        return f"{self.term}: planned {self.planned}{each}, measured {self.measured}"


def ratios(planned: TokenTerms, measured: TokenTerms) -> dict[TermName, float | None]:
    """Return measured over planned for each term; None where one of them is zero or not known."""
    misses = _ratio(planned.miss_rate, measured.miss_rate)
    flash = _ratio(planned.flash_bytes, measured.flash_bytes)
    waits = _ratio(planned.wait_ms, measured.wait_ms)
    return {
        "misses": misses,
        "flash bytes": _ratio(misses, flash),
        "reads": _ratio(flash, waits),
        "kernels": _ratio(planned.compute_ms, kernels_ms(planned, measured)),
    }


def kernels_ms(planned: TokenTerms, measured: TokenTerms) -> float | None:
    """Return the measured time to compare with the planned one: without barriers if that is longer than planned, with
    them if that is still shorter, else the planned time itself."""
    if planned.compute_ms is None or measured.compute_ms is None:
        return None
    return min(max(planned.compute_ms, measured.compute_ms), measured.compute_ms + measured.barrier_ms)


def deviations(planned: TokenTerms, measured: TokenTerms) -> tuple[Deviation, ...]:
    """Return the terms that differ by more than TOLERANCE, causes before what follows from them.

    Slow kernels hide more of the reads, and fast ones less: waiting that differs in that direction is no term then.
    Differences that hardly change the time of a token are left out: miss rates that are nearly the same, and times
    below MIN_TIME_SHARE of it.
    """
    min_ms = MIN_TIME_SHARE * (measured.ms or 0.0)
    columns: dict[TermName, tuple[Callable[[TokenTerms], Any], Callable[[float], str], float]] = {
        "misses": (lambda terms: terms.miss_rate, show_percent, MIN_MISS_RATE_DIFFERENCE),
        "flash bytes": (lambda terms: terms.flash_bytes, show_mebibytes, 0.0),
        "reads": (lambda terms: terms.wait_ms, show_milliseconds, min_ms),
        "kernels": (lambda terms: terms.compute_ms, show_milliseconds, min_ms),
    }
    differing = []
    for term, ratio in ratios(planned, measured).items():
        value, show, min_difference = columns[term]
        before, now = value(planned), kernels_ms(planned, measured) if term == "kernels" else value(measured)
        if before is None or now is None or abs(now - before) <= min_difference:
            continue
        # Without a ratio, nothing was planned or nothing happened. What follows from misses is not blamed then.
        is_near = term != "misses" if ratio is None else 1 / (1 + TOLERANCE) <= ratio <= 1 + TOLERANCE
        if not is_near:
            differing.append(Deviation(term, show(before), show(now), ratio))
    if len(differing) > 1 and [each.term for each in differing[-2:]] == ["reads", "kernels"]:
        reads, kernels = (each.ratio or 1.0 for each in differing[-2:])
        if (reads < 1) != (kernels < 1):
            del differing[-2]
    return tuple(differing)


def sentence(differing: tuple[Deviation, ...]) -> str:
    """Return the deviations in one line; empty if there are none."""
    return "; ".join(map(str, differing))


def _ratio(planned: float | None, measured: float | None) -> float | None:
    return measured / planned if planned and measured else None


def show_percent(share: float) -> str:
    """Return a share in percent, with a decimal below ten."""
    return f"{100 * share:.0f}%" if share >= 0.1 or not share else f"{100 * share:.1f}%"


def show_mebibytes(size_bytes: float) -> str:
    """Return a number of bytes in MiB."""
    return f"{show_number(size_bytes / (1 << 20))} MiB"


def show_milliseconds(time_ms: float) -> str:
    """Return a time in milliseconds."""
    return f"{show_number(time_ms)} ms"
