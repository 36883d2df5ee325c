"""The manifest's section `npu`: what a neural processor's arithmetic was measured to lose, and its integers' ranges.

Two ways to make activations 16-bit integers were compared: each token with a scale of its own, within ranges that no
text decides (`token`), or all tokens within ranges that a calibration text had (`static`).
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
    """Of an attention matrix of this size: the greatest magnitudes of its inputs, and of their products with its rows
    as signed bytes."""

    rows: int
    columns: int
    inputs: float
    products: float


@frozen(slots=True)
class NeuronRange:
    """Of feed-forwards, likewise; hidden: of neurons' values before their factors. outputs: of their sums, of one
    product's neurons."""

    inputs: float
    gate: float
    up: float
    hidden: float
    outputs: float


@frozen(slots=True)
class Ranges:
    """What calibration text had at most; the graphs have a margin beyond."""

    matrices: tuple[MatrixRange, ...]
    neurons: NeuronRange

    def of_matrix(self, rows: int, columns: int) -> MatrixRange:
        """Those of a size."""
        return next(one for one in self.matrices if (one.rows, one.columns) == (rows, columns))


@frozen(slots=True)
class Loss:
    """What one way costs, on held-out text, products by ONNX Runtime on the CPU.

    agreement: share of positions whose likeliest token is the exact model's. recomputed_share: of tokens' products,
    those that the engine has to compute again. error_by_layer: |products - exact ones| / |exact ones|, of the same
    inputs.
    """

    scaling: Scaling
    perplexity: float
    agreement: float
    recomputed_share: float
    error_by_layer: tuple[float, ...]


@frozen(slots=True)
class NpuProfile:
    """scaling: the way that was chosen. losses: of both. text: its name."""

    scaling: Scaling
    text: str
    calibration_tokens: int
    held_out_tokens: int
    exact_perplexity: float
    losses: tuple[Loss, ...]
    ranges: Ranges

    @property
    def chosen(self) -> Loss:
        """The loss of the way that was chosen."""
        return next(loss for loss in self.losses if loss.scaling == self.scaling)

    @property
    def static_ranges(self) -> Ranges | None:
        """The ranges that prompts are computed within; None: each token has a scale of its own."""
        return self.ranges if self.scaling == "static" else None

    @property
    def loss_share(self) -> float:
        """By how much perplexity grows with prompts on a neural processor; less than 0: it falls."""
        return self.chosen.perplexity / self.exact_perplexity - 1


def matrix_sizes(model: ModelSpec) -> tuple[tuple[int, int], ...]:
    """Rows and columns of the attention matrices, each size once."""
    return tuple(dict.fromkeys(((model.qkv_rows, model.width), (model.width, model.query_width))))


def parse_npu(record: Record, model: ModelSpec) -> NpuProfile:
    """The section, checked against the model. Raises UserError naming the file and the field."""
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
        losses=tuple(_parse_loss(one, model) for one in record.records("losses")),
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
    if len(errors) != model.layers or not all(isinstance(one, float) and 0 <= one <= MAX_ERROR for one in errors):
        record.fail("error_by_layer", f"expected {model.layers} numbers from 0 on, one for each layer of the model")
    return loss


def _parse_ranges(record: Record, model: ModelSpec) -> Ranges:
    matrices = tuple(_parse_matrix(one) for one in record.records("matrices"))
    neurons = record.record("neurons")
    ranges = Ranges(matrices, NeuronRange(**{name: _range(neurons, name) for name in NeuronRange.__slots__}))
    neurons.finish()
    record.finish()
    found = tuple((one.rows, one.columns) for one in matrices)
    if found != matrix_sizes(model):
        shown, wanted = (", ".join(f"{r} x {c}" for r, c in some) for some in (found, matrix_sizes(model)))
        record.fail("matrices", f"{shown} do not fit the model, whose are {wanted}")
    if model.parallel and ranges.of_matrix(model.qkv_rows, model.width).inputs != ranges.neurons.inputs:
        record.fail("neurons", "attention and feed-forward read one vector, so `inputs` of both are one number")
    return ranges


def _parse_matrix(record: Record) -> MatrixRange:
    found = MatrixRange(
        rows=record.integer("rows", 1, 1 << 30),
        columns=record.integer("columns", 1, 1 << 30),
        inputs=_range(record, "inputs"),
        products=_range(record, "products"),
    )
    record.finish()
    return found


def _range(record: Record, name: str) -> float:
    value = record.number(name, 0.0, MAX_RANGE)
    if value == 0:
        record.fail(name, "is 0, which is no range")
    return value
