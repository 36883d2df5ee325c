"""External matrix products of layers by graphs: activations to integers, a graph, and back to floats.

weight_rows.py prepares the weights. Each token has its own scale, and so has each row. Therefore the result of a token
depends neither on the other tokens nor on the length of the graph. Tokens with values that a graph had to clamp are
computed again by the engine's kernels.

A thread of its own computes the graphs one after the other. Up to two products of a turn may be in its queue, so that
the results of one are decoded while the graph of the next one runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from time import perf_counter
from typing import Any

import numpy as np
from neuronpipe.native import ffi, lib
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.runtime_memory import graph_tokens, graphs_for
from neuronpipe.protocol.frozen import frozen
from neuronpipe.services.offload.npu.graphs import (
    MAX_INTEGER,
    MIDDLE,
    FeedForward,
    Graph,
    Matrix,
    Scale,
    Shapes,
    as_integers,
    feed_forward_graph,
    matrix_graph,
)
from neuronpipe.services.offload.npu.sessions import Session
from neuronpipe.services.offload.npu.weight_rows import PreparedRows, RowsAhead, start_threads
from neuronpipe.services.worker.participant import Participant
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Integers = NDArray[np.uint16]
Bools = NDArray[np.bool_]
PART_TOKENS = 64
"""The tokens that one thread encodes or decodes at a time."""


@frozen(kw_only=True)
class _Turn:
    """The inputs that the products of a turn share.

    parts: the integers of each graph run, padded to the graph's length, and the number of tokens among them
    divisors: the divisors of the inputs of each token, [tokens]
    is_sound: True for each token whose values were finite and within the range
    """

    parts: list[tuple[Integers, int]]
    divisors: Floats
    is_sound: Bools


@frozen(kw_only=True)
class _Result:
    """The outputs of a graph for a turn's inputs and these rows.

    outputs: None if no graph was run, because all neurons are zero or their scales are not finite
    """

    rows: PreparedRows
    outputs: dict[str, Any] | None


class Products:
    """Computes every np_product of a model; implements Multiply of services/worker/external_products.py.

    session: opens a session for a graph
    neurons: the greatest number of neurons of one product
    max_tokens: the greatest number of tokens of a step
    threads: the number of threads that convert rows to bytes, and of those that encode and decode activations

    recomputed_tokens: the number of tokens that the engine computed again in this step, counted for each product
    """

    def __init__(
        self,
        manifest: Manifest,
        session: Callable[[Graph], Session],
        *,
        neurons: int,
        max_tokens: int,
        threads: int = 1,
    ) -> None:
        self._shapes = Shapes.of(manifest, neurons)
        self._shape = self._shapes.feed_forward
        self._lengths = graph_tokens(max_tokens)
        self._matrices = {
            (tokens, *size): session(matrix_graph(tokens, shape))
            for tokens in self._lengths
            for size, shape in self._shapes.matrices.items()
        }
        self._feed_forwards = {tokens: session(feed_forward_graph(tokens, self._shape)) for tokens in self._lengths}
        self._rows = RowsAhead(manifest, neurons=neurons, threads=threads)
        self._graphs, self._coders = start_threads("graphs", 1), start_threads("tokens", threads)
        self._running: deque[tuple[Any, Future[_Result]]] = deque()
        self.recomputed_tokens, self._graphs_ms = 0, 0.0

    def begin(self, participant: Participant) -> None:
        self.recomputed_tokens, self._graphs_ms = 0, 0.0
        self._rows.clear_counters()
        self._rows.begin(participant)

    def end(self) -> None:
        """End the step, and wait for the graphs that still run."""
        self._rows.end()
        wait([future for _, future in self._running])
        self._running.clear()

    def counters(self) -> dict[str, float]:
        """Return the counters of the last step.

        rows_ready, rows_late: the number of products whose rows were ready when their graph was free, and of the others
        rows_wait_ms: how long graphs waited for rows
        graphs_ms: how long graphs were computed
        """
        return {
            "recomputed_tokens": self.recomputed_tokens,
            "rows_ready": self._rows.ready,
            "rows_late": self._rows.late,
            "rows_wait_ms": self._rows.waited_ms,
            "graphs_ms": self._graphs_ms,
        }

    def __call__(self, participant: Participant, product: Any) -> None:
        """Start a product. The last product of a turn waits until all outputs of the turn are written."""
        self._rows.notify_product()
        if product.number == 0:
            self._turn = self._encode_inputs(product)
        self._running.append((product, self._graphs.submit(self._compute, product, self._turn)))
        may_run = 1 if product.number + 1 < product.count else 0
        while len(self._running) > may_run:
            self._finish(*self._running.popleft())

    def _shape_of(self, product: Any) -> Matrix | FeedForward:
        if product.kind == lib.NP_PRODUCT_NEURONS:
            return self._shape
        return self._shapes.matrices[product.rows, product.columns]

    def _in_parallel(self, tokens: int, call: Callable[[slice], None]) -> None:
        """Call a function for all tokens, in parts that the threads share."""
        parts = [slice(first, min(first + PART_TOKENS, tokens)) for first in range(0, tokens, PART_TOKENS)]
        for _ in self._coders.map(call, parts):
            pass

    def _encode_inputs(self, product: Any) -> _Turn:
        x = _inputs(product)
        scale, by_token = self._shape_of(product).inputs, self._shapes.by_token
        divisors, is_sound = np.empty(len(x), np.float32), np.empty(len(x), np.bool_)
        graphs = graphs_for(len(x), self._lengths)
        padded = np.full((sum(graphs), x.shape[1]), MIDDLE, np.uint16)
        first, parts = 0, []
        for length in graphs:
            parts.append((padded[first : first + length], min(length, len(x) - first)))
            first += length

        def encode_part(part: slice) -> None:
            padded[part], divisors[part], is_sound[part] = as_integers(x[part], scale, by_token=by_token)

        self._in_parallel(len(x), encode_part)
        return _Turn(parts=parts, divisors=divisors, is_sound=is_sound)

    def _compute(self, product: Any, turn: _Turn) -> _Result:
        rows = self._rows.take()
        place = rows.place
        if (place.kind, place.layer, place.rows) != (product.kind, product.layer, product.rows):
            raise RuntimeError(f"layer {product.layer}: the rows are those of another product")
        before, outputs = perf_counter(), None
        if rows.max_scale != 0 and np.isfinite(rows.max_scale):
            outputs = self._run(product, turn, rows)
        self._graphs_ms += (perf_counter() - before) * 1e3
        self._rows.release(rows)
        return _Result(rows=rows, outputs=outputs)

    def _run(self, product: Any, turn: _Turn, rows: PreparedRows) -> dict[str, Any]:
        parts = []
        for padded, count in turn.parts:
            if product.kind == lib.NP_PRODUCT_NEURONS:
                session = self._feed_forwards[len(padded)]
            else:
                session = self._matrices[len(padded), product.rows, product.columns]
            outputs = session.run({"x": padded, **rows.inputs})
            parts.append({name: value[:count] for name, value in outputs.items()})
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if parts[1:] else parts[0]

    def _finish(self, product: Any, future: Future[_Result]) -> None:
        result = future.result()
        clamped = ~self._turn.is_sound
        out = _matrix(product.outputs, product.tokens, product.outputs_stride)
        write = self._add_neurons if product.kind == lib.NP_PRODUCT_NEURONS else self._write_matrix
        self._in_parallel(len(out), lambda part: write(result, out, clamped, part))
        if clamped.any():
            tokens = np.flatnonzero(clamped).astype(np.uint32)
            self.recomputed_tokens += len(tokens)
            exact = self._rows.recompute(product, result.rows.place, tokens)
            out[tokens] = out[tokens] + exact if product.kind == lib.NP_PRODUCT_NEURONS else exact

    def _write_matrix(self, result: _Result, out: Floats, clamped: Bools, part: slice) -> None:
        """Write the products of some tokens, and mark the clamped tokens."""
        if result.outputs is None:
            return
        y, scale = result.outputs["y"][part], self._shape_of(result.rows.place).outputs
        clamped[part] |= is_at_limit(y)
        out[part] = decode(y, scale) * self._turn.divisors[part, None] * result.rows.scales

    def _add_neurons(self, result: _Result, out: Floats, clamped: Bools, part: slice) -> None:
        """Add the sums of some tokens to the outputs, except for clamped tokens, which are marked."""
        max_scale = result.rows.max_scale
        if result.outputs is None:
            clamped[part] |= max_scale != 0
            return
        outputs = {name: value[part] for name, value in result.outputs.items()}
        clamped[part] |= is_clamped(self._shape, outputs)
        factors = np.square(self._turn.divisors[part].astype(np.float64)) * max_scale
        sums = (decode(outputs["y"], self._shape.outputs) * factors[:, None]).astype(np.float32)
        np.add(out[part], sums, out=out[part], where=~clamped[part, None])


def is_clamped(shape: FeedForward, outputs: Mapping[str, Any]) -> Bools:
    """Return for each token whether the graph may have clamped one of its outputs or, according to their peaks, one of
    its inner values."""
    clamped = is_at_limit(outputs["y"])
    for name, scale in shape.peaks.items():
        peak = outputs[name][:, 0]
        clamped |= (peak == MAX_INTEGER) | ((peak == 0) & (scale.zero == MIDDLE))
    return clamped


def _inputs(product: Any) -> Floats:
    """Return the input vectors of a product, [tokens][columns]; those of an expert are gathered by token."""
    if not product.token:
        return _matrix(product.inputs, product.tokens, product.inputs_stride)
    token = np.frombuffer(ffi.buffer(product.token, 4 * product.tokens), np.uint32)
    gathered: Floats = _matrix(product.inputs, int(token[-1]) + 1, product.inputs_stride)[token]
    return gathered


def _matrix(pointer: Any, rows: int, columns: int) -> Floats:
    return np.frombuffer(ffi.buffer(pointer, 4 * rows * columns), np.float32).reshape(rows, columns)


def decode(integers: Integers, scale: Scale) -> Floats:
    """Return the values of integers, the inverse of `encode`."""
    values: Floats = (integers.astype(np.float32) - np.float32(scale.zero)) * np.float32(scale.step)
    return values


def is_at_limit(integers: Integers) -> Bools:
    """Return for each token whether it has a value at an end of the range, which may have been clamped."""
    at_limit: Bools = (integers.max(axis=1) == MAX_INTEGER) | (integers.min(axis=1) == 0)
    return at_limit
