"""Measurement of the kernels that dominate decode and prefill, on slots as in a run, called as the engine calls them.

    exact       all triggers of a block; then Up and Down rows of a share of its neurons
    predicted   triggers of a share of a block's neurons; then their Up rows, which prefetch Down rows; then Down rows
    matrix      rows of a whole matrix
    panel       triggers of a block times many tokens; times a few, rows in order
    reused      value rows that are still in the cache from the previous token
    attended    keys and values of a prompt, which are still in the cache from the previous head

A repetition lasts some milliseconds and continues where the last one ended, so that its rows are in no cache. Its speed
is that of the median call, so that calls that the system interrupts do not count. The time of an empty call from Python
is subtracted. Workers are processes, each with its own core and its own part of the memory.
"""

from __future__ import annotations

import dataclasses
import functools
import mmap
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

from neuronpipe.native import ffi, lib
from neuronpipe.plans.device.cores import Kind
from neuronpipe.plans.device.measured_figures import Figure
from neuronpipe.plans.device.measured_points import DecodePoint, PanelPoint, ReusedPoint
from neuronpipe.plans.measure.benchmark_processes import BenchmarkProcess, OnMeasured, ignore_progress, measure_together
from neuronpipe.plans.measure.benchmark_slots import BenchmarkMemory, Neurons, Rows
from neuronpipe.plans.package.layout import Quantization
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import KV_TYPES
from neuronpipe.protocol.frozen import frozen

SHAPES: tuple[tuple[Quantization, int], ...] = (
    *(("q4", 2048), ("q4", 4096), ("q4k", 2048), ("q4k", 4096), ("q8", 2048), ("q8", 4096), ("f16", 4096)),
    *(("q3", 2048), ("q3", 4096)),  # gates only: their Ups and Downs are q4
)
SHARES = (0.1, 0.5)
ALL_FIRE = 1.0  # rows that lie one behind the other are read up to 1.4 times as fast as half of them
DOWN_TOKENS = 16  # whose Down rows the engine adds together
FEW_TOKENS = 8  # the engine packs panels from 16 tokens on
PANEL_TOKENS = (FEW_TOKENS, 16, 64, 512)
BRIEF_PANEL_TOKENS = (FEW_TOKENS, 64, 512)
PANEL_ROWS = 128  # in a call
MAX_ROW_WEIGHTS = 4096  # wider rows take the same time per byte, and their blocks would exceed a worker's memory
SHARED_ROW_WEIGHTS = 2048  # of cases that serve several packages
MATRIX_ROWS = 512  # in a call
DIFFERENT_VECTORS = 16  # of activations: more take Python longer than a brief measurement lasts
MIN_CALLS = 2  # in a repetition
EMPTY_CALLS = 200

ATTENDED_POSITIONS, ATTENDED_WIDTH = 512, 128

CaseKind = Literal["exact", "predicted", "matrix", "panel", "reused", "attended"]
KINDS = {
    "exact": ("triggers", "ups", "downs"),
    "predicted": ("predicted_triggers", "predicted_ups", "predicted_downs"),
    "matrix": ("matrix",),
    "panel": ("panel",),
    "reused": ("ups", "downs"),
    "attended": ("attended",),
}
"""The kinds of points that a case measures, in the order of its figures."""

Point = DecodePoint | PanelPoint | ReusedPoint
Calls = Callable[[int], Iterator[tuple[int, float, int]]]
"""Calls kernels on a block. Yields, for each call, (index in KINDS[case.kind], bytes or tokens x weights, ns)."""


@frozen
class Case:
    """One kernel to measure, with one quantization and width.

    amount: for panels a number of tokens, else the share of a block's neurons whose rows are computed
    """

    kind: CaseKind
    quantization: Quantization
    row_weights: int
    amount: float


ATTENTION = tuple(Case("attended", kv_type, ATTENDED_WIDTH, ALL_FIRE) for kv_type in KV_TYPES)


def all_cases(shapes: Sequence[tuple[Quantization, int]] = SHAPES) -> tuple[Case, ...]:
    """Return the cases of a device profile: attention, and others for these pairs of quantization and row width."""
    amounts: tuple[tuple[CaseKind, Sequence[float]], ...] = (
        ("matrix", (1.0,)),
        ("exact", (*SHARES, ALL_FIRE)),
        ("predicted", SHARES),
        ("reused", (*SHARES, ALL_FIRE)),
        ("panel", PANEL_TOKENS),
    )
    of_shapes = (
        Case(kind, *shape, float(amount))
        for shape in shapes
        for kind, kind_amounts in amounts
        for amount in kind_amounts
        if shape[0] != "q3" or kind in ("exact", "predicted", "panel")
    )
    return (*of_shapes, *ATTENTION)


def profile_cases(manifest: Manifest) -> tuple[Case, ...]:
    """Return the cases of a device profile that is measured for a package: those of every profile, and those of the
    package's quantizations that profiles lack."""
    width = min(manifest.model.width, MAX_ROW_WEIGHTS)
    measured = {quantization for quantization, _ in SHAPES}
    lacking = sorted({manifest.quantization, *manifest.all_quantizations.values()} - measured)
    return all_cases((*SHAPES, *((quantization, width) for quantization in lacking)))


def kernel_cases(manifest: Manifest) -> tuple[Case, ...]:
    """Return the cases of the kernels that dominate runs of this package."""
    width, kinds = min(manifest.model.width, MAX_ROW_WEIGHTS), dict[Quantization, dict[CaseKind, None]]()
    of_downs: tuple[CaseKind, ...] = ("matrix", "panel") if manifest.layout.down_by_output else ("exact", "reused")
    of_matrices: tuple[tuple[Quantization, tuple[CaseKind, ...]], ...] = (
        (manifest.quantization, ("matrix", "exact", "reused", "panel")),
        (manifest.trigger_quantization, ("exact", "panel")),
        (manifest.row_quantization("down"), of_downs),
        (manifest.quantization_of("output"), ("matrix",)),
    )
    for quantization, measured in of_matrices:
        predicted: tuple[CaseKind, ...] = ("predicted",) if "exact" in measured and manifest.predictor else ()
        kinds.setdefault(quantization, {}).update(dict.fromkeys((*measured, *predicted)))
    shares = (SHARES[-1], ALL_FIRE) if manifest.model.all_neurons_fire else (SHARES[0],)
    amounts: dict[CaseKind, tuple[float, ...]] = {
        "matrix": (1.0,),
        "panel": tuple(map(float, BRIEF_PANEL_TOKENS)),
        "exact": shares,
        "reused": shares[-1:],
    }
    return (
        *(
            Case(kind, quantization, width, amount)
            for quantization, of_rows in kinds.items()
            for kind in of_rows
            for amount in amounts.get(kind, shares[:1])
        ),
        *ATTENTION,
    )


def kernel_cases_of_all(manifests: Iterable[Manifest]) -> tuple[Case, ...]:
    """Return the cases of the kernels that dominate exact runs of these packages, with rows of SHARED_ROW_WEIGHTS, and
    that of the attention of prompts."""
    cases: dict[Case, None] = {}
    for manifest, case in ((of, case) for of in manifests for case in kernel_cases(of)):
        if case in ATTENTION:
            cases[case] = None
            continue
        shared = dataclasses.replace(case, amount=max(case.amount, SHARES[-1]))
        if manifest.model.all_neurons_fire and case.kind == "exact" and case.amount < ALL_FIRE:
            continue
        if case.kind in ("matrix", "exact", "panel") or case.amount == ALL_FIRE:
            cases[dataclasses.replace(shared, row_weights=SHARED_ROW_WEIGHTS)] = None
    return tuple(cases)


def measure_kernels(
    memory: BenchmarkMemory,
    cores: Sequence[int | None],
    core: Kind | None,
    cases: Sequence[Case],
    *,
    rounds: int,
    budget_s: float,
    progress: OnMeasured = ignore_progress,
) -> list[Point]:
    """Measure the cases with a worker on each of `cores`. Speeds are of all workers together.

    core: class of the core of a single worker; None: decode cores
    budget_s: time for a repetition
    """
    repetitions_of: dict[tuple[Case, str], list[float]] = {}
    turns = (case for _ in range(rounds) for case in cases)
    work = functools.partial(_work, memory=memory, cases=cases, rounds=rounds, budget_s=budget_s)
    for case, speeds in zip(turns, measure_together(cores, work, progress), strict=True):
        for number, kind in enumerate(KINDS[case.kind]):
            repetitions_of.setdefault((case, kind), []).append(sum(worker_speeds[number] for worker_speeds in speeds))
    figures = {key: Figure.of(repetitions) for key, repetitions in repetitions_of.items()}
    unique = {key: figure for key, figure in figures.items() if not _is_duplicate(*key, cases)}
    return [_point(case, kind, len(cores), core, figure) for (case, kind), figure in unique.items()]


def _is_duplicate(case: Case, kind: str, cases: Sequence[Case]) -> bool:
    """Return True if another case measures the same.

    All triggers of a block are measured again with each share of value rows, and value rows of q3 gates are q4, which
    has cases of its own.
    """
    if case.quantization == "q3" and kind not in ("triggers", "predicted_triggers", "panel"):
        return True
    same_kind = [candidate for candidate in cases if dataclasses.replace(candidate, amount=case.amount) == case]
    return kind == "triggers" and case.amount != same_kind[0].amount


def _point(case: Case, kind: str, workers: int, core: Kind | None, figure: Figure) -> Point:
    place: dict[str, Any] = {
        "quantization": case.quantization,
        "row_weights": case.row_weights,
        "workers": workers,
        "core": core,
    }
    if case.kind == "panel":
        return PanelPoint(tokens=int(case.amount), token_weights_per_s=figure, **place)
    share = 1.0 if kind == "triggers" else case.amount
    names: dict[str, Any] = {"kind": kind, "share": share}
    if case.kind in ("reused", "attended"):
        return ReusedPoint(token_weights_per_s=figure, **names, **place)
    return DecodePoint(bytes_per_s=figure, **names, **place)


def _work(
    process: BenchmarkProcess, memory: BenchmarkMemory, cases: Sequence[Case], rounds: int, budget_s: float
) -> Iterator[Sequence[float]]:
    """Yield the speeds of each repetition, in work per second. This is what each worker process runs."""
    bench = _Bench(process, memory)
    prepared = {case: bench.calls(case) for case in cases}
    bench.touch_pages()
    block = 0
    for _ in range(rounds):
        for case in cases:
            process.meet()
            speeds, block = bench.repetition(case, prepared[case], block, budget_s)
            yield speeds


class _Bench:
    """One worker's part of the memory, and its vectors."""

    def __init__(self, process: BenchmarkProcess, memory: BenchmarkMemory) -> None:
        self._content = memory.content
        self._size_bytes = len(memory.content) // process.count // mmap.PAGESIZE * mmap.PAGESIZE
        self._first_byte = process.index * self._size_bytes
        self._start = int(ffi.cast("uintptr_t", memory.pointer)) + self._first_byte
        self._neurons: dict[tuple[Quantization, int], Neurons] = {}
        self._empty_ns = self._empty_call_ns()

    def touch_pages(self) -> None:
        """Read a byte of each page.

        A forked process takes a page fault at its first access to a page. A hypervisor with shadow page tables maps
        pages that were idle for a second one by one, at up to 30 us each: that is slower than flash.
        """
        self._content[self._first_byte : self._first_byte + self._size_bytes : mmap.PAGESIZE].tobytes()

    def repetition(self, case: Case, calls: Calls, block: int, budget_s: float) -> tuple[list[float], int]:
        """Return the speed of the median call for each kind of the case, and the block to continue with.

        block: number of the block to begin with
        """
        speeds: list[list[float]] = [[] for _ in KINDS[case.kind]]
        deadline = time.perf_counter() + budget_s
        while time.perf_counter() < deadline or len(speeds[0]) < MIN_CALLS:
            for number, work, ns in calls(block):
                speeds[number].append(1e9 * work / max(1.0, ns - self._empty_ns))
            block += 1
        return [statistics.median(kind_speeds) for kind_speeds in speeds], block

    def calls(self, case: Case) -> Calls:
        """Prepare the rows of a case, and return its calls."""
        key = (case.quantization, case.row_weights)
        neurons = self._neurons.setdefault(key, Neurons(*key, self._start, self._size_bytes))
        calls: Calls = getattr(self, f"_{case.kind}")(neurons, case.amount)
        return calls

    def _exact(self, neurons: Neurons, share: float) -> Calls:
        whole = [neurons.rows(0, neurons.whole_block(block)) for block in range(neurons.blocks)]
        choices = self._choices(neurons, share)
        lists = [
            (whole[n % neurons.blocks], neurons.rows(1, chosen), neurons.rows(2, chosen))
            for n, chosen in enumerate(choices)
        ]
        return self._block_calls(neurons, lists)

    def _predicted(self, neurons: Neurons, share: float) -> Calls:
        lists = [
            (neurons.rows(0, chosen), neurons.rows(1, chosen), neurons.rows(2, chosen))
            for chosen in self._choices(neurons, share)
        ]
        return self._block_calls(neurons, lists)

    def _choices(self, neurons: Neurons, share: float) -> Iterator[list[int]]:
        """Yield samples of all blocks, block after block, until every neuron was in one.

        If a few rows of each block were used again and again, they would stay in the cache.
        """
        for turn in range(int(1 / share)):
            for block in range(neurons.blocks):
                yield neurons.sample_block(block, share, turn)

    def _block_calls(self, neurons: Neurons, lists: Sequence[tuple[Rows, Rows, Rows]]) -> Calls:
        dot, add = self._dot(neurons), self._add(neurons)

        def calls(block: int) -> Iterator[tuple[int, float, int]]:
            triggers, ups, downs = lists[block % len(lists)]
            yield 0, triggers.count * neurons.trigger_row_bytes, dot(triggers, triggers.fetch)
            yield 1, ups.count * neurons.row_bytes, dot(ups, ups.fetch)
            yield 2, downs.count * neurons.row_bytes, add(downs)

        return calls

    def _reused(self, neurons: Neurons, share: float) -> Calls:
        tokens = DOWN_TOKENS if share == ALL_FIRE else 1  # those with the same active neurons are added together
        dot, add = self._dot(neurons), self._add(neurons, tokens)
        lists = [
            (neurons.rows(1, sample), neurons.rows(2, sample))
            for sample in (neurons.sample_block(block, share, 0) for block in range(min(neurons.blocks, 8)))
        ]

        def calls(block: int) -> Iterator[tuple[int, float, int]]:
            ups, downs = lists[block % len(lists)]
            for repetition in range(4):  # the first loads the rows into the cache
                weights = ups.count * neurons.row_weights
                times_ns = (weights, dot(ups, ffi.NULL)), (tokens * weights, add(downs))
                if repetition:
                    for number, (token_weights, ns) in enumerate(times_ns):
                        yield number, token_weights, ns

        return calls

    def _attended(self, neurons: Neurons, _share: float) -> Calls:
        positions, width, queries = ATTENDED_POSITIONS, neurons.row_weights, lib.NP_ATTEND_QUERIES
        query = ffi.new("float[]", [1e-3 * (j % 17) for j in range(queries * width)])
        out, scores = ffi.new("float[]", queries * width), ffi.new("float[]", queries * (positions + 1))
        content_bytes = 2 * positions * lib.np_kv_row_bytes(neurons.type, width)
        places = max(1, self._size_bytes // content_bytes)
        job, clock, attend = ffi.new("np_attend_job *"), time.perf_counter_ns, lib.np_attend
        job.heads, job.tokens, job.positions, job.width = queries, 1, positions, width
        job.type, job.scale = neurons.type, 1e-3

        def calls(block: int) -> Iterator[tuple[int, float, int]]:
            job.queries, job.out, job.scores = query, out, scores
            job.keys = ffi.cast("void *", self._start + block % places * content_bytes)
            job.values = ffi.cast("uint8_t *", job.keys) + content_bytes // 2
            for repetition in range(4):  # the first loads the rows into the cache
                began = clock()
                attend(job)
                ns = clock() - began
                if repetition:
                    yield 0, 2 * queries * positions * width, ns

        return calls

    def _matrix(self, neurons: Neurons, _share: float) -> Calls:
        return self._in_order(neurons, 1, neurons.row_bytes)

    def _in_order(self, neurons: Neurons, tokens: int, row_work: int) -> Calls:
        """Prepare calls with rows that lie one behind the other. row_work: the work of a row"""
        n, quants = neurons.row_weights, lib.np_quant_bytes(neurons.type, neurons.row_weights)
        rows = self._size_bytes // neurons.row_bytes // MATRIX_ROWS * MATRIX_ROWS
        quants_at = ffi.cast("uint8_t *", self._start)
        scales_at = quants_at + rows * quants
        vectors, stride = _activations(neurons, tokens)
        out = ffi.new("float[]", MATRIX_ROWS * tokens)
        scale_bytes, clock, dot = neurons.row_bytes - quants, time.perf_counter_ns, lib.np_dot_rows

        def calls(block: int) -> Iterator[tuple[int, float, int]]:
            first = block * MATRIX_ROWS % rows
            first_quants, scales = quants_at + first * quants, scales_at + first * scale_bytes
            began = clock()
            dot(
                *(neurons.type, first_quants, scales, MATRIX_ROWS, n, vectors, stride, tokens),
                *(ffi.NULL, out, MATRIX_ROWS),
            )
            yield 0, MATRIX_ROWS * row_work, clock() - began

        return calls

    def _panel(self, neurons: Neurons, amount: float) -> Calls:
        tokens, n = int(amount), neurons.row_weights
        if tokens <= FEW_TOKENS:
            return self._in_order(neurons, tokens, n * tokens)
        vectors, stride = _activations(neurons, tokens)
        panel = _page_aligned(lib.np_panel_bytes(neurons.type, n, tokens))
        lib.np_panel_prepare(neurons.type, vectors, stride, tokens, n, panel)
        lists = [neurons.rows(0, neurons.whole_block(block)[:PANEL_ROWS]) for block in range(neurons.blocks)]
        out, clock, dot = ffi.new("float[]", PANEL_ROWS * tokens), time.perf_counter_ns, lib.np_dot_panel

        def calls(block: int) -> Iterator[tuple[int, float, int]]:
            rows = lists[block % len(lists)]
            began = clock()
            dot(rows.type, rows.quants, rows.scales, rows.count, n, panel, tokens, ffi.NULL, out, rows.count)
            yield 0, rows.count * n * tokens, clock() - began

        return calls

    def _dot(self, neurons: Neurons) -> Callable[[Rows, Any], int]:
        vector, out = _activations(neurons, 1)[0], ffi.new("float[]", neurons.block_neurons)
        clock, dot, n = time.perf_counter_ns, lib.np_dot_scattered, neurons.row_weights

        def timed(rows: Rows, fetch: Any) -> int:
            began = clock()
            dot(rows.type, rows.quants, rows.scales, rows.count, n, fetch, vector, 0, 1, out, 0)
            return clock() - began

        return timed

    def _add(self, neurons: Neurons, tokens: int = 1) -> Callable[[Rows], int]:
        block, n = neurons.block_neurons, neurons.row_weights
        factors = ffi.new("float[]", [1e-3 * (number % 17) for number in range(tokens * block)])
        out, clock, add = ffi.new("float[]", tokens * n), time.perf_counter_ns, lib.np_add_rows_for_tokens

        def timed(rows: Rows) -> int:
            began = clock()
            add(neurons.type, rows.quants, rows.scales, factors, block, rows.count, tokens, n, out, n)
            return clock() - began

        return timed

    def _empty_call_ns(self) -> float:
        neurons = Neurons("q4", 2048, self._start, self._size_bytes)
        rows = dataclasses.replace(neurons.rows(1, neurons.whole_block(0)), count=0)
        dot = self._dot(neurons)
        return statistics.median(dot(rows, rows.fetch) for _ in range(EMPTY_CALLS))


def _activations(neurons: Neurons, tokens: int) -> tuple[Any, int]:
    """Return vectors of `tokens` tokens, prepared for kernels, and the bytes from one vector to the next."""
    n = neurons.row_weights
    stride = -(-lib.np_activation_bytes(neurons.type, n) // 64) * 64
    vectors = _page_aligned(tokens * stride)
    for token in range(min(tokens, DIFFERENT_VECTORS)):
        vector = ffi.new("float[]", [float((j * 7919 + token) % 255 - 127) for j in range(n)])
        lib.np_activation_prepare(neurons.type, vector, n, vectors + token * stride)
    for token in range(DIFFERENT_VECTORS, tokens, DIFFERENT_VECTORS):
        count = min(DIFFERENT_VECTORS, tokens - token)
        ffi.memmove(vectors + token * stride, vectors, count * stride)
    return vectors, stride


def _page_aligned(size_bytes: int) -> Any:
    """Return zeroed memory that starts at a page boundary."""
    return ffi.from_buffer("uint8_t[]", mmap.mmap(-1, max(1, size_bytes)))
