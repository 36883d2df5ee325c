"""Two implementations in one run: its processes are replaced between requests, so that both see the same machine, the
same caches and nearly the same moments. Which one goes first alternates, and every request has a text of its own: a
cache that has just seen one would look too good.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

from neuronpipe.launch.bench.asking import Repetition
from neuronpipe.launch.bench.cases import Case
from neuronpipe.launch.bench.measure import Bench
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
    """One side: what was asked for, in words, and what does which work."""

    name: str
    uses: Implementations


def contenders(first: Iterable[Use], second: Iterable[Use]) -> tuple[Contender, Contender]:
    """The sides of `--use ... --versus ...`. Raises UserError for a role that cannot be replaced in a live run."""
    sides = []
    for uses in (tuple(first), tuple(second)):
        if fixed := {use.role for use in uses} - set(SWAPPABLE):
            raise UserError(f"--versus: {min(fixed)} cannot be replaced while a run is live; use bench --compare")
        named = ", ".join(f"{_name(use)}={use.implementation.text}" for use in uses)
        sides.append(Contender(named or "our own", Implementations(uses)))
    return sides[0], sides[1]


class Versus:
    """Measures both sides on one live run, which was started with the first one's implementations. settle: called
    when processes were replaced, to wait until the run is at rest."""

    def __init__(
        self, bench: Bench, directory: RunDirectory, sides: tuple[Contender, Contender], settle: Callable[[], None]
    ) -> None:
        self._bench, self._directory, self._sides, self._settle = bench, directory, sides, settle
        self._keys = [(spec.role, spec.index) for spec in bench.plan.compute.processes if spec.role in SWAPPABLE]
        self._present = sides[0]

    def measure(self, case: Case, repetitions: int, progress: Callable[[], None]) -> list[Row]:
        """A row for each side; the first one's says in `versus` how many times as fast it was."""
        warm_ups = [self._ask(side, case, number, progress) for number, side in enumerate(self._sides)]
        done: tuple[list[Repetition], list[Repetition]] = ([], [])
        for pair in range(repetitions):
            for turn, which in enumerate((0, 1) if pair % 2 == 0 else (1, 0)):
                done[which].append(self._ask(self._sides[which], case, 2 + 2 * pair + turn, progress))
        rows = [
            self._bench.row(case, warm_up, asked, None) | {"use": side.name}
            for side, warm_up, asked in zip(self._sides, warm_ups, done, strict=True)
        ]
        ratios = [a.tokens_per_s(case) / b.tokens_per_s(case) for a, b in zip(*done, strict=True)]
        rows[0]["versus"] = {
            "use": rows[1]["use"],
            "tokens_per_s_ratio": statistics.median(ratios),
            "tokens_per_s_ratio_least": min(ratios),
            "tokens_per_s_ratio_most": max(ratios),
        }
        return rows

    def _ask(self, side: Contender, case: Case, number: int, progress: Callable[[], None]) -> Repetition:
        self._replace_processes(side)
        answer = self._bench.ask(case, number)
        progress()
        return answer

    def _replace_processes(self, side: Contender) -> None:
        """Replace the processes that differ, those of one implementation together."""
        wanted: dict[Implementation, list[str]] = {}
        for role, index in self._keys:
            if side.uses.of(role, index) != self._present.uses.of(role, index):
                wanted.setdefault(side.uses.of(role, index), []).append(f"{role}.{index}")
        for implementation, names in wanted.items():
            candidate = Candidate(tuple(names), implementation.text, implementation.folder, PATIENCE_S)
            candidate.replace_processes(self._directory)
        self._present = side
        if wanted:
            self._settle()


def render(rows: list[Row]) -> str:
    """What a person reads: for each test both sides, and the ratio."""
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
        "\n".join(lines) + f"\n\nMedians of {rows[0]['repetitions']} pairs, after a warm-up; least and most of them.\n"
    )


def _name(use: Use) -> str:
    return use.role if use.index is None else f"{use.role}.{use.index}"
