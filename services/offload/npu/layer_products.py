"""Products of a layer's matrices by graphs: activations to integers, a graph, and back. weight_rows.py has the weights.

Each token has a scale of its own, and each row. So a token's result depends on nothing but the token: not on who comes
with it, nor on the graph's length. Tokens whose values a graph had to clamp are computed again by the engine's kernels.

Graphs are computed by a thread of their own, one after the other; two products of a turn may wait for it, so that while
one is computed the results of the one before are taken.
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
from neuronpipe.services.offload.npu.weight_rows import Made, RowsAhead, started
from neuronpipe.services.worker.participant import Participant
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Integers = NDArray[np.uint16]
Bools = NDArray[np.bool_]
SOME_TOKENS = 64
"""That one thread makes to integers, or whose results it takes, at once."""


@frozen(kw_only=True)
class _Turn:
    """Inputs that products have in common.

    parts: by graphs that follow each other, as integers padded to the graph's length, and how many tokens there are
    lengths: by which each token's input was divided
    is_sound: whether it was a number
    """

    parts: list[tuple[Integers, int]]
    lengths: Floats
    is_sound: Bools


@frozen(kw_only=True)
class _Result:
    """What a graph made of a turn's inputs and these rows. outputs: None where all neurons are nothing."""

    made: Made
    outputs: dict[str, Any] | None


class Products:
    """Computes every np_product of a model: see Multiply. session: a graph, ready to be computed. neurons: most of one
    graph. most_tokens: of a step. threads: that make rows to bytes, and activations to integers and back.
    recomputed_tokens: how many the engine computed again in this step; a token counts for each product by itself."""

    def __init__(
        self,
        manifest: Manifest,
        session: Callable[[Graph], Session],
        *,
        neurons: int,
        most_tokens: int,
        threads: int = 1,
    ) -> None:
        self._shapes = Shapes.of(manifest, neurons)
        self._shape = self._shapes.feed_forward
        self._lengths = graph_tokens(most_tokens)
        self._matrices = {
            (tokens, *size): session(matrix_graph(tokens, shape))
            for tokens in self._lengths
            for size, shape in self._shapes.matrices.items()
        }
        self._feed_forwards = {tokens: session(feed_forward_graph(tokens, self._shape)) for tokens in self._lengths}
        self._rows = RowsAhead(manifest, neurons=neurons, threads=threads)
        self._graphs, self._sharers = started("graphs", 1), started("tokens", threads)
        self._running: deque[tuple[Any, Future[_Result]]] = deque()
        self.recomputed_tokens, self._graphs_ms = 0, 0.0

    def begin(self, participant: Participant) -> None:
        """See Multiply."""
        self.recomputed_tokens, self._graphs_ms = 0, 0.0
        self._rows.forget()
        self._rows.begin(participant)

    def end(self) -> None:
        """See Multiply."""
        self._rows.end()
        wait([future for _, future in self._running])
        self._running.clear()

    def counters(self) -> dict[str, float]:
        """Of the last step: products whose rows were ready when a graph was free for them, and those whose were not;
        how long graphs waited for rows, and computed."""
        return {
            "recomputed_tokens": self.recomputed_tokens,
            "rows_ready": self._rows.ready,
            "rows_late": self._rows.late,
            "rows_wait_ms": self._rows.waited_ms,
            "graphs_ms": self._graphs_ms,
        }

    def __call__(self, participant: Participant, product: Any) -> None:
        """Let it be computed into its outputs. After a turn's last product all of the turn are."""
        self._rows.want()
        if product.number == 0:
            self._turn = self._encoded(product)
        self._running.append((product, self._graphs.submit(self._compute, product, self._turn)))
        may_run = 1 if product.number + 1 < product.count else 0
        while len(self._running) > may_run:
            self._finish(*self._running.popleft())

    def _shape_of(self, product: Any) -> Matrix | FeedForward:
        """Of the graph that computes it, or these rows."""
        if product.kind == lib.NP_PRODUCT_NEURONS:
            return self._shape
        return self._shapes.matrices[product.rows, product.columns]

    def _share(self, tokens: int, call: Callable[[slice], None]) -> None:
        """Have it called for all tokens, some at once."""
        parts = [slice(first, min(first + SOME_TOKENS, tokens)) for first in range(0, tokens, SOME_TOKENS)]
        for _ in self._sharers.map(call, parts):
            pass

    def _encoded(self, product: Any) -> _Turn:
        x = _inputs(product)
        scale, by_token = self._shape_of(product).inputs, self._shapes.by_token
        lengths, is_sound = np.empty(len(x), np.float32), np.empty(len(x), np.bool_)
        graphs = graphs_for(len(x), self._lengths)
        padded = np.full((sum(graphs), x.shape[1]), MIDDLE, np.uint16)
        first, parts = 0, []
        for length in graphs:
            parts.append((padded[first : first + length], min(length, len(x) - first)))
            first += length

        def encode_some(some: slice) -> None:
            padded[some], lengths[some], is_sound[some] = as_integers(x[some], scale, by_token=by_token)

        self._share(len(x), encode_some)
        return _Turn(parts=parts, lengths=lengths, is_sound=is_sound)

    def _compute(self, product: Any, turn: _Turn) -> _Result:
        """In the graphs' own thread."""
        made = self._rows.take()
        place = made.place
        if (place.kind, place.layer, place.rows) != (product.kind, product.layer, product.rows):
            raise RuntimeError(f"layer {product.layer}: rows came for another product")
        before, outputs = perf_counter(), None
        if made.most != 0 and np.isfinite(made.most):
            outputs = self._run(product, turn, made)
        self._graphs_ms += (perf_counter() - before) * 1e3
        self._rows.give_back(made)
        return _Result(made=made, outputs=outputs)

    def _run(self, product: Any, turn: _Turn, made: Made) -> dict[str, Any]:
        found = []
        for padded, count in turn.parts:
            if product.kind == lib.NP_PRODUCT_NEURONS:
                session = self._feed_forwards[len(padded)]
            else:
                session = self._matrices[len(padded), product.rows, product.columns]
            outputs = session.run({"x": padded, **made.inputs})
            found.append({name: value[:count] for name, value in outputs.items()})
        return {name: np.concatenate([part[name] for part in found]) for name in found[0]} if found[1:] else found[0]

    def _finish(self, product: Any, future: Future[_Result]) -> None:
        result = future.result()
        clamped = ~self._turn.is_sound
        out = _matrix(product.outputs, product.tokens, product.outputs_stride)
        add = self._add_neurons if product.kind == lib.NP_PRODUCT_NEURONS else self._take_matrix
        self._share(len(out), lambda some: add(result, out, clamped, some))
        if clamped.any():
            again = np.flatnonzero(clamped).astype(np.uint32)
            self.recomputed_tokens += len(again)
            found = self._rows.compute_again(product, result.made.place, again)
            out[again] = out[again] + found if product.kind == lib.NP_PRODUCT_NEURONS else found

    def _take_matrix(self, result: _Result, out: Floats, clamped: Bools, some: slice) -> None:
        """Of some tokens; and say which of them were clamped."""
        if result.outputs is None:
            return
        y, scale = result.outputs["y"][some], self._shape_of(result.made.place).outputs
        clamped[some] |= at_end(y)
        out[some] = decode(y, scale) * self._turn.lengths[some, None] * result.made.scales

    def _add_neurons(self, result: _Result, out: Floats, clamped: Bools, some: slice) -> None:
        """The same, added to what is there but for tokens that were clamped."""
        most = result.made.most
        if result.outputs is None:
            clamped[some] |= most != 0
            return
        outputs = {name: value[some] for name, value in result.outputs.items()}
        clamped[some] |= is_clamped(self._shape, outputs)
        factors = np.square(self._turn.lengths[some].astype(np.float64)) * most
        added = (decode(outputs["y"], self._shape.outputs) * factors[:, None]).astype(np.float32)
        np.add(out[some], added, out=out[some], where=~clamped[some, None])


def is_clamped(shape: FeedForward, outputs: Mapping[str, Any]) -> Bools:
    """Which tokens have values that the graph may have clamped: its outputs or, by their peaks, those inside."""
    clamped = at_end(outputs["y"])
    for name, scale in shape.peaks.items():
        peak = outputs[name][:, 0]
        clamped |= (peak == MAX_INTEGER) | ((peak == 0) & (scale.zero == MIDDLE))
    return clamped


def _inputs(product: Any) -> Floats:
    """The product's tokens' inputs."""
    if not product.token:
        return _matrix(product.inputs, product.tokens, product.inputs_stride)
    token = np.frombuffer(ffi.buffer(product.token, 4 * product.tokens), np.uint32)
    taken: Floats = _matrix(product.inputs, int(token[-1]) + 1, product.inputs_stride)[token]
    return taken


def _matrix(pointer: Any, rows: int, columns: int) -> Floats:
    return np.frombuffer(ffi.buffer(pointer, 4 * rows * columns), np.float32).reshape(rows, columns)


def decode(integers: Integers, scale: Scale) -> Floats:
    """The values that integers stand for."""
    values: Floats = (integers.astype(np.float32) - np.float32(scale.zero)) * np.float32(scale.step)
    return values


def at_end(integers: Integers) -> Bools:
    """Which tokens have a value at an end of the range: it may have been clamped."""
    ends: Bools = (integers.max(axis=1) == MAX_INTEGER) | (integers.min(axis=1) == 0)
    return ends
