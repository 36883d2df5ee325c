"""The recent activity of the processes, from their spans: shares of time, a strip of the last steps, firing neurons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from neuronpipe.protocol.messages.snapshot import StripRow
from neuronpipe.services.monitor.span_groups import GROUPS, NUMBER
from neuronpipe.services.monitor.span_rings import SPANS, Row, Span
from neuronpipe.services.monitor.time_window import TimeWindow, last_steps

CELLS = 360
LATE_NS = 1_000_000_000
COORDINATOR_SPANS = 64  # each step has about four
CELL_GROUPS = [group for group in GROUPS if group.letter]


class Activity:
    """The latest spans of every process.

    processes: the processes, as "role.index"
    max_spans: spans to store of each process; earlier ones are dropped
    """

    def __init__(self, processes: Sequence[str], max_spans: int) -> None:
        self._processes = [(role, int(index)) for role, _, index in (process.partition(".") for process in processes)]
        self._max_spans = max_spans
        self._spans: list[Any] = [np.empty(0, SPANS) for _ in processes]

    def add(self, new_spans: Sequence[tuple[Any, int]]) -> None:
        """Append new spans, as `RunTrace.take_arrays` returns them. Earlier spans are dropped if some between were
        lost."""
        for n, (spans, lost) in enumerate(new_spans):
            if len(spans):
                self._spans[n] = (spans if lost else np.concatenate([self._spans[n], spans]))[-self._max_spans :]

    def doing(self, now_ns: int) -> list[dict[str, float]]:
        """Return for each process the share of the last second in each group of spans, by the group's label.

        Groups without spans are absent. If the stored spans do not cover the second, shares are of the covered time.
        """
        return [self._doing(spans, now_ns) for spans in self._spans]

    def _doing(self, spans: Any, now_ns: int) -> dict[str, float]:
        late = spans[spans["end_ns"] > now_ns - LATE_NS]
        if not len(late):
            return {}
        from_ns = now_ns - LATE_NS if len(spans) < self._max_spans else int(late["start_ns"].min())
        edges = np.array([max(from_ns, now_ns - LATE_NS), now_ns])
        covered = _coverage(late, edges)[:, 0] / max(1, edges[1] - edges[0])
        return {
            group.label: round(float(share), 4) for group, share in zip(CELL_GROUPS, covered, strict=True) if share > 0
        }

    def strip(self) -> tuple[TimeWindow, tuple[int, ...], tuple[StripRow, ...]]:
        """Return the last steps: their time window, their numbers, and a row for every process that was active.

        A row has CELLS letters, each of the group with the most time in that cell; "." if all have nearly none.
        """
        window = last_steps(self._rows())
        edges = window.from_ns + np.arange(CELLS + 1) * (window.ns / CELLS)
        rows = []
        for (role, index), spans in zip(self._processes, self._spans, strict=True):
            within = spans[(spans["end_ns"] > window.from_ns) & (spans["start_ns"] < window.to_ns)]
            if len(within):
                covered = _coverage(within, edges)
                best = covered.argmax(axis=0)
                busy = covered.max(axis=0) > 0.05 * window.ns / CELLS
                cells = "".join(
                    CELL_GROUPS[group].letter if is_busy else "."
                    for group, is_busy in zip(best.tolist(), busy, strict=True)
                )
                if cells.strip("."):
                    rows.append(StripRow(name=f"{role}.{index}", cells=cells))
        return window, self._steps_in(window), tuple(rows)

    def fired(self, layers: int, neurons: int) -> tuple[float, ...]:
        """Return for each layer the mean share of its neurons that fire for a token, 0..1.

        It covers the decode steps whose spans are all stored; the result is empty if there is none.

        neurons: number of neurons of a layer
        """
        decodes = [spans for (role, _), spans in zip(self._processes, self._spans, strict=True) if role == "decode"]
        stored_from_ns = max((int(spans["start_ns"][0]) for spans in decodes if len(spans)), default=0)
        tokens = 0
        whole = set()
        computed = {step for spans in decodes for step in np.unique(spans["step"]).tolist()}
        for spans in self._of("coordinator"):
            ended = spans[(spans["kind"] == NUMBER["await"]) & (spans["start_ns"] >= stored_from_ns)]
            for step, count in zip(ended["step"].tolist(), ended["value"].tolist(), strict=True):
                if step in computed and step not in whole:
                    whole.add(step)
                    tokens += count
        if not whole:
            return ()
        total = np.zeros(layers)
        for spans in decodes:
            neuron_spans = spans[(spans["kind"] == NUMBER["neurons"]) & np.isin(spans["step"], list(whole))]
            total += np.bincount(neuron_spans["layer"], weights=neuron_spans["value"], minlength=layers)[:layers]
        return tuple(round(float(share), 5) for share in total / (tokens * neurons))

    def _of(self, role: str) -> list[Any]:
        return [spans for (name, _), spans in zip(self._processes, self._spans, strict=True) if name == role]

    def _rows(self) -> list[Row]:
        """Return the spans that show which steps are complete: the coordinator's last ones, and the first of each
        decode worker."""
        rows = []
        for (role, index), spans in zip(self._processes, self._spans, strict=True):
            keep = spans[-COORDINATOR_SPANS:] if role == "coordinator" else spans[:1] if role == "decode" else spans[:0]
            rows.append(Row(role, index, 0, [Span(*fields) for fields in keep.tolist()], 0))
        return rows

    def _steps_in(self, window: TimeWindow) -> tuple[int, ...]:
        steps = set()
        for spans in self._of("coordinator"):
            done = spans[(spans["kind"] == NUMBER["await"]) & (spans["start_ns"] >= window.from_ns)]
            steps |= set(done[done["end_ns"] <= window.to_ns]["step"].tolist())
        return tuple(sorted(steps))


def _coverage(spans: Any, edges: Any) -> Any:
    """Return ns during which a span of a group was under way, of shape [groups, intervals between successive edges].

    Waiting that lies within spans of "neurons" is subtracted from that group.
    """
    covered = np.zeros((len(CELL_GROUPS), len(edges) - 1))
    for n, group in enumerate(CELL_GROUPS):
        numbers = [NUMBER[kind] for kind in group.kinds]
        covered[n] = _covered(spans[np.isin(spans["kind"], numbers)], edges)
    waiting_ns = covered[[not group.works for group in CELL_GROUPS]].sum(axis=0)
    neurons = next(n for n, group in enumerate(CELL_GROUPS) if "neurons" in group.kinds)
    total = covered.sum(axis=0)
    inside = np.clip(total - np.diff(edges), 0, waiting_ns)  # what exceeds the interval is waiting within neurons
    covered[neurons] = np.clip(covered[neurons] - inside, 0, None)
    return covered


def _covered(spans: Any, edges: Any) -> Any:
    """Return ns of each interval during which at least one of the spans was under way."""
    if not len(spans):
        return np.zeros(len(edges) - 1)
    spans = spans[np.argsort(spans["start_ns"], kind="stable")]
    starts = spans["start_ns"].astype(np.float64)
    ends = np.maximum.accumulate(spans["end_ns"].astype(np.float64))
    starts[1:] = np.maximum(starts[1:], ends[:-1])  # an earlier span covers the time before
    lengths = np.clip(ends - starts, 0, None)
    times = np.column_stack([starts, starts + lengths]).ravel()
    sums = np.cumsum(lengths)
    covered = np.column_stack([sums - lengths, sums]).ravel()
    return np.diff(np.interp(edges, times, covered))
