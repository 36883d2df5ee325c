"""The manifest's section `npu`: the measured loss of a neural processor's arithmetic, and the ranges of its integers.

Two ways to turn activations into 16-bit integers are compared: each token's vector with its own scale, within ranges
that follow from the shape (`token`), or all tokens within ranges measured on a calibration text (`static`).
"""

from __future__ import annotations

from typing import Literal, get_args

from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.strict_json import Record
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen

Scaling = Literal["token", "static"]
SCALINGS: tuple[Scaling, ...] = get_args(Scaling)
MAX_RANGE = 1e30
MAX_PERPLEXITY = 1e300
MAX_TEXT_TOKENS = 1 << 50
MAX_ERROR = 1e6
AGAIN = "measure again: `neuronpipe profile PACKAGE --npu`"


@frozen(slots=True)
class MatrixRange:
    """Ranges of the attention matrices of one size.

    inputs: greatest magnitude of input elements
    products: greatest magnitude of products of inputs and rows, with rows as signed bytes
    """

    rows: int
    columns: int
    inputs: float
    products: float


@frozen(slots=True)
class NeuronRange:
    """Greatest magnitudes of a feed-forward's values.

    inputs: elements of the input
    gate, up: products of the inputs and a neuron's rows
    hidden: gate times up
    outputs: sums over the neurons of one product
    """

    inputs: float
    gate: float
    up: float
    hidden: float
    outputs: float


@frozen(slots=True)
class Ranges:
    """The greatest magnitudes on calibration text. Graphs of the way `static` add a margin."""

    matrices: tuple[MatrixRange, ...]
    neurons: NeuronRange

    def of_matrix(self, rows: int, columns: int) -> MatrixRange:
        return next(matrix for matrix in self.matrices if (matrix.rows, matrix.columns) == (rows, columns))


@frozen(slots=True)
class Loss:
    """The cost of one way on held-out text, with products by ONNX Runtime on the CPU.

    agreement: share of positions at which the likeliest token is that of the exact model
    recomputed_share: share of tokens' products that had clamped values, so that the engine has to compute them again
    error_by_layer: |products - exact products| / |exact products|, for the same inputs
    """

    scaling: Scaling
    perplexity: float
    agreement: float
    recomputed_share: float
    error_by_layer: tuple[float, ...]


@frozen(slots=True)
class NpuProfile:
    """The measured loss of both ways.

    scaling: the way that backends use
    calibration_tokens: tokens of the text that set the ranges
    held_out_tokens: other tokens of the text, on which the loss was measured
    losses: for `token` and `static`, in this order
    """

    scaling: Scaling
    text: str
    calibration_tokens: int
    held_out_tokens: int
    exact_perplexity: float
    losses: tuple[Loss, ...]
    ranges: Ranges

    @property
    def chosen(self) -> Loss:
        """The loss of the way that backends use."""
        return next(loss for loss in self.losses if loss.scaling == self.scaling)

    @property
    def static_ranges(self) -> Ranges | None:
        """The ranges within which prompts are computed; None if each token has its own scale."""
        return self.ranges if self.scaling == "static" else None

    @property
    def loss_share(self) -> float:
        """Relative increase of perplexity if a neural processor computes prompts; may be negative."""
        return self.chosen.perplexity / self.exact_perplexity - 1


def matrix_sizes(model: ModelSpec) -> tuple[tuple[int, int], ...]:
    """Return (rows, columns) of the attention matrices, each size once."""
    return tuple(dict.fromkeys(((model.qkv_rows, model.width), (model.width, model.query_width))))


def parse_npu(record: Record, model: ModelSpec) -> NpuProfile:
    """Return the parsed section. Raises UserError, which names file and field, if it does not fit the model."""
    try:
        return _parsed(record, model)
    except UserError as error:
        raise UserError(f"{error}; {AGAIN}") from None


def _parsed(record: Record, model: ModelSpec) -> NpuProfile:
    scaling: Scaling = "static" if record.choice("scaling", *SCALINGS) == "static" else "token"
    profile = NpuProfile(
        scaling=scaling,
        text=record.line("text"),
        calibration_tokens=record.integer("calibration_tokens", 1, MAX_TEXT_TOKENS),
        held_out_tokens=record.integer("held_out_tokens", 1, MAX_TEXT_TOKENS),
        exact_perplexity=record.number("exact_perplexity", 1.0, MAX_PERPLEXITY),
        losses=tuple(_parse_loss(loss, model) for loss in record.records("losses")),
        ranges=_parse_ranges(record.record("ranges"), model),
    )
    record.finish()
    if [loss.scaling for loss in profile.losses] != list(SCALINGS):
        record.fail("losses", f"expected those of {' and '.join(SCALINGS)}")
    return profile


def _parse_loss(record: Record, model: ModelSpec) -> Loss:
    loss = Loss(
        scaling="static" if record.choice("scaling", *SCALINGS) == "static" else "token",
        perplexity=record.number("perplexity", 1.0, MAX_PERPLEXITY),
        agreement=record.number("agreement", 0.0, 1.0),
        recomputed_share=record.number("recomputed_share", 0.0, 1.0),
        error_by_layer=tuple(record.items("error_by_layer")),
    )
    record.finish()
    errors = loss.error_by_layer
    if len(errors) != model.layers or not all(isinstance(error, float) and 0 <= error <= MAX_ERROR for error in errors):
        record.fail("error_by_layer", f"expected {model.layers} numbers from 0 on, one for each layer of the model")
    return loss


def _parse_ranges(record: Record, model: ModelSpec) -> Ranges:
    matrices = tuple(_parse_matrix(item) for item in record.records("matrices"))
    neurons = record.record("neurons")
    ranges = Ranges(matrices, NeuronRange(**{name: _range(neurons, name) for name in NeuronRange.__slots__}))
    neurons.finish()
    record.finish()
    sizes = tuple((matrix.rows, matrix.columns) for matrix in matrices)
    if sizes != matrix_sizes(model):
        listed, expected = (", ".join(f"{r} x {c}" for r, c in matrices) for matrices in (sizes, matrix_sizes(model)))
        record.fail("matrices", f"{listed} do not fit the model, whose are {expected}")
    if model.parallel and ranges.of_matrix(model.qkv_rows, model.width).inputs != ranges.neurons.inputs:
        record.fail("neurons", "attention and feed-forward read one vector, so `inputs` of both are one number")
    return ranges


def _parse_matrix(record: Record) -> MatrixRange:
    matrix = MatrixRange(
        rows=record.integer("rows", 1, 1 << 30),
        columns=record.integer("columns", 1, 1 << 30),
        inputs=_range(record, "inputs"),
        products=_range(record, "products"),
    )
    record.finish()
    return matrix


def _range(record: Record, name: str) -> float:
    value = record.number(name, 0.0, MAX_RANGE)
    if value == 0:
        record.fail(name, "is 0, which is no range")
    return value
