"""Compare two implementations in one run, whose processes are replaced between requests.

Both have the same machine, the same caches and nearly the same moments. The order alternates, and every request has its
own prompt, because the weight cache is too favourable to a repeated one.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

from neuronpipe.launch.bench.cases import Case
from neuronpipe.launch.bench.measure import Bench
from neuronpipe.launch.bench.repetition import Repetition
from neuronpipe.launch.conformance.trial import Candidate
from neuronpipe.plans.number_format import show_number
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.run_directory import RunDirectory
from neuronpipe.services.runtime.implementations import SWAPPABLE, Implementation, Implementations, Use

PATIENCE_S = 60.0
Row = dict[str, Any]


@frozen
class Contender:
    """One side of the comparison: its name, and its implementations."""

    name: str
    uses: Implementations


def contenders(first: Iterable[Use], second: Iterable[Use]) -> tuple[Contender, Contender]:
    """Return the sides of --use and --versus. Raises UserError for a role that cannot be replaced in a live run."""
    sides = []
    for uses in (tuple(first), tuple(second)):
        if fixed := {use.role for use in uses} - set(SWAPPABLE):
            raise UserError(f"--versus: {min(fixed)} cannot be replaced while a run is live; use bench --compare")
        name = ", ".join(f"{_name(use)}={use.implementation.text}" for use in uses)
        sides.append(Contender(name or "our own", Implementations(uses)))
    return sides[0], sides[1]


class Versus:
    """Measures both sides on one live run, which was started with the implementations of the first side.

    settle: called after processes were replaced, to wait until the run is at rest
    """

    def __init__(
        self, bench: Bench, directory: RunDirectory, sides: tuple[Contender, Contender], settle: Callable[[], None]
    ) -> None:
        self._bench, self._directory, self._sides, self._settle = bench, directory, sides, settle
        self._keys = [(spec.role, spec.index) for spec in bench.plan.compute.processes if spec.role in SWAPPABLE]
        self._current = sides[0]

    def measure(self, case: Case, repetitions: int, progress: Callable[[], None]) -> list[Row]:
        """Measure a test with both sides in turns, and return a row of `Bench.row` for each side.

        repetitions: number of pairs; a warm-up of each side comes first
        progress: called after each of 2 + 2 * repetitions requests

        The speed of the first side over that of the second is a ratio for each pair. The field `versus` of the first
        row has the median, minimum and maximum of these ratios. Raises UserError as `Bench.repeat` does, and if a
        replacement fails.
        """
        warm_ups = [self._repeat(side, case, number, progress) for number, side in enumerate(self._sides)]
        repetitions_done: tuple[list[Repetition], list[Repetition]] = ([], [])
        for pair in range(repetitions):
            for turn, which in enumerate((0, 1) if pair % 2 == 0 else (1, 0)):
                repetitions_done[which].append(self._repeat(self._sides[which], case, 2 + 2 * pair + turn, progress))
        rows = [
            self._bench.row(case, warm_up, measured, None) | {"use": side.name}
            for side, warm_up, measured in zip(self._sides, warm_ups, repetitions_done, strict=True)
        ]
        ratios = [a.tokens_per_s(case) / b.tokens_per_s(case) for a, b in zip(*repetitions_done, strict=True)]
        rows[0]["versus"] = {
            "use": rows[1]["use"],
            "tokens_per_s_ratio": statistics.median(ratios),
            "tokens_per_s_ratio_least": min(ratios),
            "tokens_per_s_ratio_most": max(ratios),
        }
        return rows

    def _repeat(self, side: Contender, case: Case, number: int, progress: Callable[[], None]) -> Repetition:
        self._replace_processes(side)
        repetition = self._bench.repeat(case, number)
        progress()
        return repetition

    def _replace_processes(self, side: Contender) -> None:
        """Replace the processes that differ between the sides, those of one implementation together."""
        changes: dict[Implementation, list[str]] = {}
        for role, index in self._keys:
            if side.uses.of(role, index) != self._current.uses.of(role, index):
                changes.setdefault(side.uses.of(role, index), []).append(f"{role}.{index}")
        for implementation, names in changes.items():
            candidate = Candidate(tuple(names), implementation.text, implementation.folder, PATIENCE_S)
            candidate.replace_processes(self._directory)
        self._current = side
        if changes:
            self._settle()


def render(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        lines.append(
            f"{row['test']:<14}{show_number(row['tokens_per_s']):>10} tokens/s "
            f"({show_number(row['tokens_per_s_least'])} .. {show_number(row['tokens_per_s_most'])})  {row['use']}"
        )
        if "versus" in row:
            ratio = row["versus"]
            first = (
                f"{'':<14}{ratio['tokens_per_s_ratio']:>10.3f} times     "
                f"({ratio['tokens_per_s_ratio_least']:.3f} .. {ratio['tokens_per_s_ratio_most']:.3f})  as fast as"
            )
            lines.append(first)
    return (
        "\n".join(lines)
        + f"\n\nMedians of {rows[0]['repetitions']} pairs, after a warm-up; minimum and maximum of them.\n"
    )


def _name(use: Use) -> str:
    return use.role if use.index is None else f"{use.role}.{use.index}"
