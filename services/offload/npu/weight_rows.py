"""Weight rows as signed bytes, prepared ahead of the products that use them.

One thread reads the rows of a step in the order of the products. It waits for the graphs only if it has no free buffer.
There is one buffer for each attention matrix and two for neurons, so that at the end of a layer the qkv matrix, the
output matrix and the first two blocks of the next layer are being prepared.

Only this thread opens the engine's windows. Therefore it also recomputes products with the engine's kernels, between
the rows of two products.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Barrier, Condition
from time import perf_counter
from typing import Any

import numpy as np
from neuronpipe.native import ffi, lib
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.protocol.frozen import frozen
from neuronpipe.services.offload.npu.graphs import Scale, encode
from neuronpipe.services.steps.backend import Abandoned
from neuronpipe.services.worker.participant import Participant
from numpy.typing import NDArray

Bytes = NDArray[np.int8]
Floats = NDArray[np.float32]
MATRICES = ("gate", "up", "down")
MATRIX = ("w",)
NEURON_BUFFERS = 2
PART_ROWS = 256
"""The rows of a matrix that one thread converts at a time."""


@frozen(kw_only=True)
class PreparedRows:
    """The rows of one product, ready for its graph.

    place: the np_product_rows that were read
    inputs: the inputs of the graph, except the activations
    scales: one per row of an attention matrix, [rows]
    max_scale: the greatest product of a neuron's three scales, to which the factors of neurons are relative; if it is
        0, all neurons are zero
    """

    place: Any
    inputs: dict[str, Any]
    scales: Floats
    max_scale: float = 1.0


@dataclasses.dataclass(kw_only=True)
class _Recomputation:
    """A product that the engine's kernels compute for some of its tokens, into `out`."""

    product: Any
    place: Any
    tokens: NDArray[np.uint32]
    out: Floats
    is_done: bool = False


class RowsAhead:
    """A reader that prepares the rows of a step in a thread of its own.

    neurons: the number of neurons of one graph
    threads: the number of threads that convert rows

    ready, late: the number of products whose rows were ready when their graph was free, and of the others
    waited_ms: the total time for which graphs waited for late rows
    """

    def __init__(self, manifest: Manifest, *, neurons: int, threads: int) -> None:
        model = manifest.model
        self._neurons = neurons
        matrices = {
            lib.NP_PRODUCT_QKV: (model.qkv_rows, model.width),
            lib.NP_PRODUCT_ATTENTION_OUTPUT: (model.width, model.query_width),
        }
        self._free: dict[int, deque[list[Bytes]]] = {
            kind: deque([[np.zeros(size, np.int8)]]) for kind, size in matrices.items()
        }
        self._free[lib.NP_PRODUCT_NEURONS] = deque(
            [[np.zeros((neurons, model.width), np.int8) for _ in MATRICES] for _ in range(NEURON_BUFFERS)]
        )
        self._changed = Condition()
        self._prepared: deque[PreparedRows] = deque()
        self._recomputation: _Recomputation | None = None
        self._failure: BaseException | None = None
        self._is_over, self._begun_products = True, 0
        self._reader, self._converters = start_threads("rows", 1), start_threads("converters", threads)
        self._reading: Future[None] | None = None
        self.clear_counters()

    def clear_counters(self) -> None:
        self.ready = self.late = 0
        self.waited_ms = 0.0

    def begin(self, participant: Participant) -> None:
        self._is_over, self._failure, self._begun_products = False, None, 0
        self._reading = self._reader.submit(self._read, participant)

    def end(self) -> None:
        """End the step, completed or abandoned."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        if self._reading is not None:
            wait([self._reading])
        while self._prepared:
            self._recycle(self._prepared.popleft())

    def notify_product(self) -> None:
        """Wake the reader because a product has begun: the next rows may be known now."""
        with self._changed:
            self._begun_products += 1
            self._changed.notify_all()

    def take(self) -> PreparedRows:
        """Wait for the rows of the next product, whose buffers stay in use until they are released.

        Raises the error of the reader, or Abandoned if the step is over.
        """
        with self._changed:
            if self._prepared:
                self.ready += 1
            else:
                self.late += 1
                before = perf_counter()
                self._changed.wait_for(lambda: self._prepared or self._failure or self._is_over)
                self.waited_ms += (perf_counter() - before) * 1e3
            if not self._prepared:
                raise self._failure or Abandoned
            return self._prepared.popleft()

    def release(self, rows: PreparedRows) -> None:
        """Free the buffers of rows whose graph has been computed."""
        with self._changed:
            self._recycle(rows)
            self._changed.notify_all()

    def recompute(self, product: Any, place: Any, tokens: NDArray[np.uint32]) -> Floats:
        """Compute a product with the engine's own kernels. Return [tokens][outputs_stride]. Raises as `take`."""
        recomputation = _Recomputation(
            product=product,
            place=place,
            tokens=tokens,
            out=np.empty((len(tokens), product.outputs_stride), np.float32),
        )
        with self._changed:
            self._recomputation = recomputation
            self._changed.notify_all()
            self._changed.wait_for(lambda: recomputation.is_done or self._failure)
        if not recomputation.is_done:
            raise self._failure or Abandoned
        return recomputation.out

    def _recycle(self, rows: PreparedRows) -> None:
        names = MATRICES if rows.place.kind == lib.NP_PRODUCT_NEURONS else MATRIX
        self._free[rows.place.kind].append([rows.inputs[name] for name in names])

    # ---- the reader's thread ----

    def _read(self, participant: Participant) -> None:
        try:
            while (place := self._next(participant)) is not None:
                free = self._free[place.kind]
                if not self._wait_until(participant, lambda free=free: bool(free)):  # type: ignore[misc]
                    return
                participant.open_rows(place)
                rows = self._convert(place, free.popleft())
                with self._changed:
                    self._prepared.append(rows)
                    self._changed.notify_all()
            self._wait_until(participant, lambda: False)  # all rows are prepared; serve recomputations until the end
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()
        finally:
            participant.close_rows()

    def _next(self, participant: Participant) -> Any | None:
        """Wait until the next rows are known. Return None after the last, or if the step is over."""
        while True:
            begun = self._begun_products
            place = participant.next_rows()
            if place is None or place.kind:
                return place
            if not self._wait_until(participant, lambda begun=begun: self._begun_products != begun):  # type: ignore[misc]
                return None

    def _wait_until(self, participant: Participant, condition: Callable[[], bool]) -> bool:
        """Wait until the condition holds, and meanwhile compute the requested recomputations.

        Return False when the step is over.
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_over or self._recomputation or condition())
                recomputation, self._recomputation = self._recomputation, None
                if self._is_over or recomputation is None:
                    return not self._is_over
            participant.open_rows(recomputation.place)
            participant.product(recomputation.product, recomputation.place, recomputation.tokens, recomputation.out)
            with self._changed:
                recomputation.is_done = True
                self._changed.notify_all()

    def _convert(self, place: Any, buffers: list[Bytes]) -> PreparedRows:
        scales = np.empty((len(buffers), place.rows), np.float32)
        parts = [
            (matrix, first, min(PART_ROWS, place.rows - first))
            for matrix in range(len(buffers))
            for first in range(0, place.rows, PART_ROWS)
        ]
        for _ in self._converters.map(lambda part: self._convert_part(place, buffers, scales, *part), parts):
            pass
        if place.kind != lib.NP_PRODUCT_NEURONS:
            return PreparedRows(place=place, inputs={"w": buffers[0]}, scales=scales[0])
        factors = np.zeros((1, self._neurons))
        factors[0, : place.rows] = scales[0].astype(np.float64) * scales[1] * scales[2]
        max_scale = float(factors.max())
        inputs: dict[str, Any] = dict(zip(MATRICES, buffers, strict=True))
        for buffer in buffers:
            buffer[place.rows :] = 0  # rows of an earlier product, if this one has fewer
        is_sound = max_scale != 0 and np.isfinite(max_scale)
        inputs["factor"] = encode(
            factors / max_scale if is_sound else np.zeros_like(factors), Scale.within(1.0, signed=False)
        )
        return PreparedRows(place=place, inputs=inputs, scales=scales[0], max_scale=max_scale)

    def _convert_part(
        self, place: Any, buffers: list[Bytes], scales: Floats, matrix: int, first: int, count: int
    ) -> None:
        """Convert `count` rows of one matrix, beginning with row `first`, and write their scales."""
        rows = buffers[matrix][first : first + count]
        kind = place.types[matrix]
        status = lib.np_rows_to_s8(
            kind,
            place.quants[matrix] + first,
            place.scales[matrix] + first,
            count,
            rows.shape[1],
            ffi.from_buffer("int8_t[]", rows, require_writable=True),
            rows.shape[1],
            ffi.from_buffer("float[]", scales[matrix, first : first + count], require_writable=True),
        )
        if status < 0 or len(rows) != count:
            raise ValueError(f"{count} rows of {rows.shape[1]} of type {kind} cannot be converted to bytes")


def start_threads(name: str, threads: int) -> ThreadPoolExecutor:
    """Return a pool whose threads have all started.

    A thread inherits the CPU affinity of the thread that starts it. The participant's thread, which submits the work,
    may be pinned to a core, and threads that it started would be pinned to the same one.
    """
    pool = ThreadPoolExecutor(threads, name)
    started = Barrier(threads)
    wait([pool.submit(started.wait) for _ in range(threads)])
    return pool
