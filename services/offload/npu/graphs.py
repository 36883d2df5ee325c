"""The graphs that a neural processor computes, in ONNX. Weights are inputs, so that all layers use the same graphs.

Activations are 16-bit and rows of weights signed bytes. Every value between two operations has a range, as these
processors require it: a value is `step * (integer - zero)`. Ranges are fixed. Inputs have a root mean square of 1, so
that none exceeds the root of their number. Products with rows whose largest byte is 127 lie within SPREAD standard
deviations, for weights distributed as in language models. Values beyond are clamped, which is visible at the ends of an
output's range, or in `FeedForward.peaks`, extra outputs for inner values.
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

MAX_INTEGER = 65535
MIDDLE = 32768
ROW_DEVIATION = 40.0  # standard deviation of the bytes of a row whose largest is 127
SPREAD = 24.0
HIDDEN_SHARE = 1 / 3  # range of `hidden` relative to the product of the ranges of gate and up
DOWN_SPREAD = 1 / 8
MARGIN = 1.3  # ranges relative to those that the calibration text had


@frozen
class Scale:
    """The scale of 16-bit integers: a value is step * (integer - zero)."""

    step: float
    zero: int

    @classmethod
    def within(cls, max_value: float, *, signed: bool) -> Scale:
        """Return the scale whose range is from -max_value, or from 0 if it is unsigned, to max_value."""
        return cls(max_value / (MAX_INTEGER - MIDDLE), MIDDLE) if signed else cls(max_value / MAX_INTEGER, 0)


def encode(values: NDArray[Any], scale: Scale) -> NDArray[np.uint16]:
    """Return the integers of values, clamped to the range."""
    integers = np.rint(values / values.dtype.type(scale.step)) + scale.zero
    encoded: NDArray[np.uint16] = np.clip(integers, 0, MAX_INTEGER).astype(np.uint16)
    return encoded


def as_integers(
    x: NDArray[np.float32], scale: Scale, *, by_token: bool
) -> tuple[NDArray[np.uint16], NDArray[np.float32], NDArray[np.bool_]]:
    """Quantize vectors [tokens, n] as the input of a graph.

    Return the integers; the divisor of each token, its root mean square if `by_token`, otherwise 1; and for each token
    whether its values were finite and within the range. The integers of other tokens stand for 0.
    """
    lengths = np.sqrt(np.mean(np.square(x), axis=1, dtype=np.float32))
    is_sound = np.isfinite(lengths)
    if by_token:
        lengths = np.where(is_sound & (lengths > 0), lengths, np.float32(1))
    else:
        is_sound &= np.abs(x).max(axis=1) <= np.float32(scale.step * (MAX_INTEGER - MIDDLE))
        lengths = np.ones_like(lengths)
    return encode(np.where(is_sound[:, None], x, np.float32(0)) / lengths[:, None], scale), lengths, is_sound


@frozen
class Matrix:
    """The ranges of an attention matrix's graph.

    measured: None if each token has its own scale
    """

    rows: int
    columns: int
    measured: MatrixRange | None = None

    @property
    def inputs(self) -> Scale:
        """The scale of input vectors: those with a root mean square of 1, or those of the calibration text."""
        return _inputs(self.columns, self.measured)

    @property
    def outputs(self) -> Scale:
        """The scale of products of input vectors with rows of bytes."""
        return _products(self.columns, None if self.measured is None else self.measured.products)


@frozen
class FeedForward:
    """The ranges of a feed-forward graph.

    measured: None if each token has its own scale; then a vector that is twice as long gives values that are four times
        as large
    """

    width: int
    neurons: int
    activation: str
    measured: NeuronRange | None = None

    @property
    def inputs(self) -> Scale:
        """The scale of inputs, as in `Matrix`."""
        return _inputs(self.width, self.measured)

    @property
    def gate(self) -> Scale:
        return _products(self.width, None if self.measured is None else self.measured.gate, signed=False)

    @property
    def up(self) -> Scale:
        """The scale of up products; with dReLU, of those above zero."""
        measured_up = None if self.measured is None else self.measured.up
        return _products(self.width, measured_up, signed=self.activation != "drelu")

    @property
    def hidden(self) -> Scale:
        """The scale of the neurons' values, times a factor of at most 1."""
        max_value = (SPREAD * ROW_DEVIATION) ** 2 * self.width * HIDDEN_SHARE
        if self.measured is not None:
            max_value = MARGIN * self.measured.hidden
        return Scale.within(max_value, signed=self.activation != "drelu")

    @property
    def peaks(self) -> dict[str, Scale]:
        """The scales of extra outputs by token: the extremes of inner values.

        A range that begins at 0 clamps negative values on purpose; the integer 0 indicates clamping only if 0 is the
        middle of the range.
        """
        return {
            "gate_peak": self.gate,
            "up_peak": self.up,
            "up_trough": self.up,
            "hidden_peak": self.hidden,
            "hidden_trough": self.hidden,
        }

    @property
    def outputs(self) -> Scale:
        """The scale of the sums of values times rows of bytes."""
        if self.measured is not None:
            return Scale.within(MARGIN * self.measured.outputs, signed=True)
        step = self.hidden.step * (MAX_INTEGER if self.hidden.zero == 0 else MIDDLE)
        return Scale.within(step * ROW_DEVIATION * math.sqrt(self.neurons) * DOWN_SPREAD, signed=True)


def _inputs(columns: int, measured: MatrixRange | NeuronRange | None) -> Scale:
    return Scale.within(math.sqrt(columns) if measured is None else MARGIN * measured.inputs, signed=True)


def _products(columns: int, measured: float | None, *, signed: bool = True) -> Scale:
    max_value = SPREAD * ROW_DEVIATION * math.sqrt(columns) if measured is None else MARGIN * measured
    return Scale.within(max_value, signed=signed)


@frozen
class Shapes:
    """The ranges of all graphs that a model's prompts need.

    by_token: True if each token has its own scale
    """

    matrices: Mapping[tuple[int, int], Matrix]
    feed_forward: FeedForward
    by_token: bool

    @classmethod
    def of(cls, manifest: Manifest, neurons: int) -> Shapes:
        """Return the ranges for a package: measured ones if its profile chose them.

        neurons: number of neurons of one product
        """
        return cls.scaled(manifest.model, neurons, None if manifest.npu is None else manifest.npu.static_ranges)

    @classmethod
    def scaled(cls, model: ModelSpec, neurons: int, ranges: Ranges | None) -> Shapes:
        """Return the ranges for measured `ranges`; None gives each token its own scale."""
        sizes = matrix_sizes(model)
        return cls(
            {size: Matrix(*size, None if ranges is None else ranges.of_matrix(*size)) for size in sizes},
            FeedForward(model.width, neurons, model.activation, None if ranges is None else ranges.neurons),
            ranges is None,
        )


@frozen
class Graph:
    """A graph: its name among those of a model, and the serialized ONNX model."""

    name: str
    model: bytes


class _Graph:
    """A builder of graphs: operations on values, each of which has a scale."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[str, onnx.TensorProto] = {}
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []

    def activations(self, name: str, shape: tuple[int, int], scale: Scale) -> str:
        """Add an input of 16-bit integers. Return the name of its value."""
        self._inputs.append(helper.make_tensor_value_info(name, TensorProto.UINT16, shape))
        return self._read(name, self._scale(scale, np.uint16))

    def rows(self, name: str, shape: tuple[int, int], *, across: bool = False) -> str:
        """Add an input of signed bytes. Return the name of its value, transposed if `across`."""
        self._inputs.append(helper.make_tensor_value_info(name, TensorProto.INT8, shape))
        scale = self._scale(Scale(1.0, 0), np.int8)
        read = self._read(name, scale)
        return self._apply("Transpose", [read], scale, f"{name}_across", perm=[1, 0]) if across else read

    def apply(self, operation: str, inputs: list[str], scale: Scale, name: str) -> str:
        """Add an operation whose result is clamped to the scale's range. Return the name of its value."""
        return self._apply(operation, inputs, self._scale(scale, np.uint16), name)

    def peak(self, operation: str, value: str, scale: Scale, tokens: int, name: str) -> None:
        """Add an output with the extreme of each token's values."""
        self._constants["columns"] = numpy_helper.from_array(np.array([1], np.int64), "columns")
        self.apply(operation, [value, "columns"], scale, name)
        self.output(name, (tokens, 1))

    def output(self, name: str, shape: tuple[int, int]) -> None:
        self._outputs.append(helper.make_tensor_value_info(name, TensorProto.UINT16, shape))

    def build(self) -> Graph:
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
    """Return the graph of x [tokens][columns] times w [rows][columns], which is y [tokens][rows]."""
    rows, columns = shape.rows, shape.columns
    graph = _Graph(f"matrix-{rows}x{columns}-{tokens}")
    x = graph.activations("x", (tokens, columns), shape.inputs)
    graph.apply("MatMul", [x, graph.rows("w", (rows, columns), across=True)], shape.outputs, "y")
    graph.output("y", (tokens, rows))
    return graph.build()


def feed_forward_graph(tokens: int, shape: FeedForward) -> Graph:
    """Return the graph of x [tokens][width] through gate, up and down [neurons][width], with each neuron's value times
    its `factor` [1][neurons]: y [tokens][width], and the peaks. A gate's range begins at 0, which is its ReLU."""
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
    return graph.build()
