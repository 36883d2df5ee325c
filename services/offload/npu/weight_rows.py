"""Rows of weights as bytes, made ahead of the products that take them.

One thread reads a step's rows in their order and never stops for the graphs but for want of a buffer: there is one for
each matrix of attention and two for neurons, so that at the end of a layer the next one's qkv, output and first two
blocks are under way. The engine's windows are this thread's: a product that its own kernels have to compute again is
computed here too, between two others' rows.
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
from neuronpipe.services.worker.participant import TYPES, Participant
from numpy.typing import NDArray

Bytes = NDArray[np.int8]
Floats = NDArray[np.float32]
MATRICES = ("gate", "up", "down")
MATRIX = ("w",)
NEURON_BUFFERS = 2
PART_ROWS = 256
"""Of a matrix, that one thread makes at once."""


@frozen(kw_only=True)
class Made:
    """Rows of one product, ready for its graph.

    place: np_product_rows, whose they are
    inputs: of the graph, besides the activations
    scales: of a matrix of attention, [rows]
    most: of neurons, the greatest product of three scales; their factors are parts of it. 0: all are nothing
    """

    place: Any
    inputs: dict[str, Any]
    scales: Floats
    most: float = 1.0


@dataclasses.dataclass(kw_only=True)
class _Again:
    """A product that the engine's kernels are to compute for these tokens, into `out`."""

    product: Any
    place: Any
    tokens: NDArray[np.uint32]
    out: Floats
    is_done: bool = False


class RowsAhead:
    """See the module. neurons: of one graph. threads: that make rows.

    ready, late: how many products found their rows made when a graph was free for them, and how many did not;
    waited_ms: how long these waited, all together."""

    def __init__(self, manifest: Manifest, *, neurons: int, threads: int) -> None:
        model = manifest.model
        self._type, self._gate_type = TYPES[manifest.quantization], TYPES[manifest.trigger_quantization]
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
        self._made: deque[Made] = deque()
        self._again: _Again | None = None
        self._failure: BaseException | None = None
        self._is_over, self._wanted = True, 0
        self._reader, self._makers = started("rows", 1), started("makers", threads)
        self._working: Future[None] | None = None
        self.forget()

    def forget(self) -> None:
        """Count from 0."""
        self.ready = self.late = 0
        self.waited_ms = 0.0

    def begin(self, participant: Participant) -> None:
        """A step of this participant."""
        self._is_over, self._failure, self._wanted = False, None, 0
        self._working = self._reader.submit(self._work, participant)

    def end(self) -> None:
        """The step is over, or was left."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        if self._working is not None:
            wait([self._working])
        while self._made:
            self._recycle(self._made.popleft())

    def want(self) -> None:
        """A product is wanted: which rows come next may be known now."""
        with self._changed:
            self._wanted += 1
            self._changed.notify_all()

    def take(self) -> Made:
        """The next product's. Raises what reading them raises, and Abandoned where the step was left."""
        with self._changed:
            if self._made:
                self.ready += 1
            else:
                self.late += 1
                before = perf_counter()
                self._changed.wait_for(lambda: self._made or self._failure or self._is_over)
                self.waited_ms += (perf_counter() - before) * 1e3
            if not self._made:
                raise self._failure or Abandoned
            return self._made.popleft()

    def give_back(self, made: Made) -> None:
        """Its graph is computed: the buffers are free."""
        with self._changed:
            self._recycle(made)
            self._changed.notify_all()

    def compute_again(self, product: Any, place: Any, tokens: NDArray[np.uint32]) -> Floats:
        """[tokens][outputs_stride] of a product by the engine's own kernels."""
        asked = _Again(
            product=product,
            place=place,
            tokens=tokens,
            out=np.empty((len(tokens), product.outputs_stride), np.float32),
        )
        with self._changed:
            self._again = asked
            self._changed.notify_all()
            self._changed.wait_for(lambda: asked.is_done or self._failure)
        if not asked.is_done:
            raise self._failure or Abandoned
        return asked.out

    def _recycle(self, made: Made) -> None:
        names = MATRICES if made.place.kind == lib.NP_PRODUCT_NEURONS else MATRIX
        self._free[made.place.kind].append([made.inputs[name] for name in names])

    # ---- the reader's thread ----

    def _work(self, participant: Participant) -> None:
        try:
            while (place := self._next(participant)) is not None:
                free = self._free[place.kind]
                if not self._until(participant, lambda free=free: bool(free)):  # type: ignore[misc]
                    return
                participant.open_rows(place)
                made = self._make(place, free.popleft())
                with self._changed:
                    self._made.append(made)
                    self._changed.notify_all()
            self._until(participant, lambda: False)
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()
        finally:
            participant.close_rows()

    def _next(self, participant: Participant) -> Any | None:
        """The rows that come next, once they are known; None: there are no more, or the step was left."""
        while True:
            seen = self._wanted
            place = participant.next_rows()
            if place is None or place.kind:
                return place
            if not self._until(participant, lambda seen=seen: self._wanted != seen):  # type: ignore[misc]
                return None

    def _until(self, participant: Participant, is_so: Callable[[], bool]) -> bool:
        """Wait, and compute what is asked for meanwhile. Returns False when the step is over."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_over or self._again or is_so())
                asked, self._again = self._again, None
                if self._is_over or asked is None:
                    return not self._is_over
            participant.open_rows(asked.place)
            participant.product(asked.product, asked.place, asked.tokens, asked.out)
            with self._changed:
                asked.is_done = True
                self._changed.notify_all()

    def _make(self, place: Any, buffers: list[Bytes]) -> Made:
        scales = np.empty((len(buffers), place.rows), np.float32)
        parts = [
            (matrix, first, min(PART_ROWS, place.rows - first))
            for matrix in range(len(buffers))
            for first in range(0, place.rows, PART_ROWS)
        ]
        for _ in self._makers.map(lambda part: self._narrow(place, buffers, scales, *part), parts):
            pass
        if place.kind != lib.NP_PRODUCT_NEURONS:
            return Made(place=place, inputs={"w": buffers[0]}, scales=scales[0])
        factors = np.zeros((1, self._neurons))
        factors[0, : place.rows] = scales[0].astype(np.float64) * scales[1] * scales[2]
        most = float(factors.max())
        inputs: dict[str, Any] = dict(zip(MATRICES, buffers, strict=True))
        for buffer in buffers:
            buffer[place.rows :] = 0
        is_sound = most != 0 and np.isfinite(most)
        inputs["factor"] = encode(
            factors / most if is_sound else np.zeros_like(factors), Scale.within(1.0, signed=False)
        )
        return Made(place=place, inputs=inputs, scales=scales[0], most=most)

    def _narrow(self, place: Any, buffers: list[Bytes], scales: Floats, matrix: int, first: int, count: int) -> None:
        """So many rows of one matrix, from the first on."""
        rows = buffers[matrix][first : first + count]
        is_gate = place.kind == lib.NP_PRODUCT_NEURONS and matrix == MATRICES.index("gate")
        kind = self._gate_type if is_gate else self._type
        done = lib.np_rows_to_s8(
            kind,
            place.quants[matrix] + first,
            place.scales[matrix] + first,
            count,
            rows.shape[1],
            ffi.from_buffer("int8_t[]", rows, require_writable=True),
            rows.shape[1],
            ffi.from_buffer("float[]", scales[matrix, first : first + count], require_writable=True),
        )
        if done < 0 or len(rows) != count:
            raise ValueError(f"{count} rows of {rows.shape[1]} of type {kind} cannot be made to bytes")


def started(name: str, threads: int) -> ThreadPoolExecutor:
    """Threads that begin here: a participant's, which will ask them, may be pinned to a core, and they would be too."""
    pool = ThreadPoolExecutor(threads, name)
    everybody = Barrier(threads)
    wait([pool.submit(everybody.wait) for _ in range(threads)])
    return pool
