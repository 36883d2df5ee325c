"""The graphs that a neural processor computes, in ONNX: matrices as inputs, so that all layers use the same ones.

Activations are 16-bit, rows of weights signed bytes, and every step between two operations says its range, as these
processors want it: a value is `step * (integer - zero)`. Ranges are fixed. Inputs have a root mean square of 1, so that
none is beyond the root of their number; products of them with rows whose largest byte is 127 lie, for weights that are
spread as those of language models are, within SPREAD standard deviations. What lies beyond is clamped, and shows:
`FeedForward.peaks` are outputs of their own where the clamped values are not outputs themselves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.package.npu_section import MatrixRange, NeuronRange, Ranges, matrix_sizes
from neuronpipe.protocol.frozen import frozen
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

MOST = 65535
MIDDLE = 32768
ROW_DEVIATION = 40.0  # of the bytes of a row whose largest is 127
SPREAD = 24.0
HIDDEN_SHARE = 1 / 3  # of the largest product of a gate and an up, each within its range
DOWN_SPREAD = 1 / 8
MARGIN = 1.3  # of measured ranges, beyond what calibration text had


@frozen
class Scale:
    """How 16-bit integers stand for values."""

    step: float
    zero: int

    @classmethod
    def within(cls, most: float, *, signed: bool) -> Scale:
        """From -most, or 0, to most."""
        return cls(most / (MOST - MIDDLE), MIDDLE) if signed else cls(most / MOST, 0)


def encode(values: NDArray[Any], scale: Scale) -> NDArray[np.uint16]:
    """The integers that stand for values, which are clamped to the range."""
    integers = np.rint(values / values.dtype.type(scale.step)) + scale.zero
    encoded: NDArray[np.uint16] = np.clip(integers, 0, MOST).astype(np.uint16)
    return encoded


def as_integers(
    x: NDArray[np.float32], scale: Scale, *, by_token: bool
) -> tuple[NDArray[np.uint16], NDArray[np.float32], NDArray[np.bool_]]:
    """Vectors [tokens, n] as a graph takes them; by what each was divided, its root mean square if `by_token`; and
    whether it was a number, and within the range: what is not becomes 0."""
    lengths = np.sqrt(np.mean(np.square(x), axis=1, dtype=np.float32))
    is_sound = np.isfinite(lengths)
    if by_token:
        lengths = np.where(is_sound & (lengths > 0), lengths, np.float32(1))
    else:
        most = np.float32(scale.step * (MOST - MIDDLE))
        is_sound &= np.abs(x).max(axis=1) <= most
        lengths = np.ones_like(lengths)
    return encode(np.where(is_sound[:, None], x, np.float32(0)) / lengths[:, None], scale), lengths, is_sound


@frozen
class Matrix:
    """The ranges of an attention matrix's graph. measured: None where each token has a scale of its own."""

    rows: int
    columns: int
    measured: MatrixRange | None = None

    @property
    def inputs(self) -> Scale:
        """Of vectors with a root mean square of 1, or of all that text had."""
        return _inputs(self.columns, self.measured)

    @property
    def outputs(self) -> Scale:
        """Of products of such vectors with rows of bytes."""
        return _products(self.columns, None if self.measured is None else self.measured.products)


@frozen
class FeedForward:
    """The ranges of a feed-forward graph, likewise. Of tokens with scales of their own a vector that is twice as long
    gives values that are four times as large."""

    width: int
    neurons: int
    activation: str
    measured: NeuronRange | None = None

    @property
    def inputs(self) -> Scale:
        """As of a matrix."""
        return _inputs(self.width, self.measured)

    @property
    def gate(self) -> Scale:
        """Gates that let something through."""
        return _products(self.width, None if self.measured is None else self.measured.gate, signed=False)

    @property
    def up(self) -> Scale:
        """With dReLU those alone that are positive."""
        most = None if self.measured is None else self.measured.up
        return _products(self.width, most, signed=self.activation != "drelu")

    @property
    def hidden(self) -> Scale:
        """Values of neurons, times a factor of 1 at most."""
        most = (SPREAD * ROW_DEVIATION) ** 2 * self.width * HIDDEN_SHARE
        if self.measured is not None:
            most = MARGIN * self.measured.hidden
        return Scale.within(most, signed=self.activation != "drelu")

    @property
    def peaks(self) -> dict[str, Scale]:
        """Outputs of the graph, by token: the extremes of what stays inside, each with its range. A range that begins
        at 0 is meant to end there: only where 0 is its middle does the integer 0 say that a value may have been
        clamped."""
        return {
            "gate_peak": self.gate,
            "up_peak": self.up,
            "up_trough": self.up,
            "hidden_peak": self.hidden,
            "hidden_trough": self.hidden,
        }

    @property
    def outputs(self) -> Scale:
        """Sums of values times rows of bytes."""
        if self.measured is not None:
            return Scale.within(MARGIN * self.measured.outputs, signed=True)
        step = self.hidden.step * (MOST if self.hidden.zero == 0 else MIDDLE)
        return Scale.within(step * ROW_DEVIATION * math.sqrt(self.neurons) * DOWN_SPREAD, signed=True)


def _inputs(columns: int, measured: MatrixRange | NeuronRange | None) -> Scale:
    return Scale.within(math.sqrt(columns) if measured is None else MARGIN * measured.inputs, signed=True)


def _products(columns: int, measured: float | None, *, signed: bool = True) -> Scale:
    most = SPREAD * ROW_DEVIATION * math.sqrt(columns) if measured is None else MARGIN * measured
    return Scale.within(most, signed=signed)


@frozen
class Shapes:
    """The graphs that a model's prompts need. by_token: each token has a scale of its own."""

    matrices: Mapping[tuple[int, int], Matrix]
    feed_forward: FeedForward
    by_token: bool

    @classmethod
    def of(cls, manifest: Manifest, neurons: int) -> Shapes:
        """As the package says. neurons: of one product."""
        return cls.scaled(manifest.model, neurons, None if manifest.npu is None else manifest.npu.static_ranges)

    @classmethod
    def scaled(cls, model: ModelSpec, neurons: int, ranges: Ranges | None) -> Shapes:
        """Within these ranges; None: by token."""
        sizes = matrix_sizes(model)
        return cls(
            {size: Matrix(*size, None if ranges is None else ranges.of_matrix(*size)) for size in sizes},
            FeedForward(model.width, neurons, model.activation, None if ranges is None else ranges.neurons),
            ranges is None,
        )


@frozen
class Graph:
    """A graph: its name among those of a model, and the graph itself."""

    name: str
    model: bytes


class _Graph:
    """A graph in the making: operations on values of which each has its scale."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[str, onnx.TensorProto] = {}
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []

    def activations(self, name: str, shape: tuple[int, int], scale: Scale) -> str:
        """An input of 16-bit integers."""
        self._inputs.append(helper.make_tensor_value_info(name, TensorProto.UINT16, shape))
        return self._read(name, self._scale(scale, np.uint16))

    def rows(self, name: str, shape: tuple[int, int], *, across: bool = False) -> str:
        """An input of signed bytes. across: as its columns."""
        self._inputs.append(helper.make_tensor_value_info(name, TensorProto.INT8, shape))
        scale = self._scale(Scale(1.0, 0), np.int8)
        read = self._read(name, scale)
        return self._apply("Transpose", [read], scale, f"{name}_across", perm=[1, 0]) if across else read

    def apply(self, operation: str, inputs: list[str], scale: Scale, name: str) -> str:
        """What an operation gives, clamped to the scale's range."""
        return self._apply(operation, inputs, self._scale(scale, np.uint16), name)

    def peak(self, operation: str, value: str, scale: Scale, tokens: int, name: str) -> None:
        """An output: the extreme of each token's."""
        self._constants["columns"] = numpy_helper.from_array(np.array([1], np.int64), "columns")
        self.apply(operation, [value, "columns"], scale, name)
        self.output(name, (tokens, 1))

    def output(self, name: str, shape: tuple[int, int]) -> None:
        """The integers of a value that `apply` named so."""
        self._outputs.append(helper.make_tensor_value_info(name, TensorProto.UINT16, shape))

    def made(self) -> Graph:
        """The graph."""
        graph = helper.make_graph(self._nodes, self._name, self._inputs, self._outputs, list(self._constants.values()))
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
        return Graph(self._name, model.SerializeToString())

    def _apply(self, operation: str, inputs: list[str], scale: tuple[str, str], name: str, **attributes: Any) -> str:
        self._nodes.append(helper.make_node(operation, inputs, [f"{name}_exact"], **attributes))
        self._nodes.append(helper.make_node("QuantizeLinear", [f"{name}_exact", *scale], [name]))
        return self._read(name, scale)

    def _read(self, name: str, scale: tuple[str, str]) -> str:
        self._nodes.append(helper.make_node("DequantizeLinear", [name, *scale], [f"{name}_value"]))
        return f"{name}_value"

    def _scale(self, scale: Scale, kind: type[np.uint16] | type[np.int8]) -> tuple[str, str]:
        step, zero = f"step_{scale.step!r}", f"zero_{kind.__name__}_{scale.zero}"
        self._constants[step] = numpy_helper.from_array(np.array(scale.step, np.float32), step)
        self._constants[zero] = numpy_helper.from_array(np.array(scale.zero, kind), zero)
        return step, zero


def matrix_graph(tokens: int, shape: Matrix) -> Graph:
    """x [tokens][columns] times w [rows][columns]: y [tokens][rows]."""
    rows, columns = shape.rows, shape.columns
    graph = _Graph(f"matrix-{rows}x{columns}-{tokens}")
    x = graph.activations("x", (tokens, columns), shape.inputs)
    graph.apply("MatMul", [x, graph.rows("w", (rows, columns), across=True)], shape.outputs, "y")
    graph.output("y", (tokens, rows))
    return graph.made()


def feed_forward_graph(tokens: int, shape: FeedForward) -> Graph:
    """x [tokens][width] through gate, up and down [neurons][width], each neuron's value times its `factor`
    [1][neurons]: y [tokens][width], and the peaks. A gate's range begins at 0, which is its ReLU."""
    graph, width, neurons = _Graph(f"feed_forward-{tokens}"), shape.width, shape.neurons
    x = graph.activations("x", (tokens, width), shape.inputs)
    factor = graph.activations("factor", (1, neurons), Scale.within(1.0, signed=False))
    rows = {name: graph.rows(name, (neurons, width), across=name != "down") for name in ("gate", "up", "down")}
    gate = graph.apply("MatMul", [x, rows["gate"]], shape.gate, "gate_product")
    up = graph.apply("MatMul", [x, rows["up"]], shape.up, "up_product")
    product = graph.apply("Mul", [gate, up], shape.hidden, "hidden")
    values = graph.apply("Mul", [product, factor], shape.hidden, "values")
    graph.apply("MatMul", [values, rows["down"]], shape.outputs, "y")
    graph.output("y", (tokens, width))
    inside = {"gate": gate, "up": up, "hidden": product}
    for name, scale in shape.peaks.items():
        value, end = name.split("_")
        graph.peak("ReduceMax" if end == "peak" else "ReduceMin", inside[value], scale, tokens, name)
    return graph.made()
