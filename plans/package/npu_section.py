"""The manifest's section `npu`: the measured loss of a neural processor's arithmetic, and the ranges of its integers.

Two ways to turn activations into 16-bit integers are compared: each token's vector with its own scale, within ranges
that follow from the shape (`token`), or all tokens within ranges measured on a calibration text (`static`).
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from neuronpipe.plans.models.spec import ModelSpec, Share
from neuronpipe.plans.strict_json import MAX_LINE_CHARACTERS, Record
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.marks import Range

Scaling = Literal["token", "static"]
SCALINGS: tuple[Scaling, ...] = get_args(Scaling)
MAX_RANGE = 1e30
MAX_PERPLEXITY = 1e300
MAX_TEXT_TOKENS = 1 << 50
MAX_ERROR = 1e6
Magnitude = Annotated[float, Range(0.0, MAX_RANGE, exclusive=True)]
Size = Annotated[int, Range(1, 1 << 30)]
Tokens = Annotated[int, Range(1, MAX_TEXT_TOKENS)]
Perplexity = Annotated[float, Range(1.0, MAX_PERPLEXITY)]
AGAIN = "measure again: `neuronpipe profile PACKAGE --npu`"


@frozen(slots=True)
class MatrixRange:
    """Ranges of the attention matrices of one size.

    rows: rows of the matrices
    columns: columns of the matrices
    inputs: greatest magnitude of input elements
    products: greatest magnitude of products of inputs and rows, with rows as signed bytes
    """

    rows: Size
    columns: Size
    inputs: Magnitude
    products: Magnitude


@frozen(slots=True)
class NeuronRange:
    """Greatest magnitudes of a feed-forward's values.

    inputs: elements of the input; with `parallel` the same number as that of the matrices of queries, keys and values
    gate: products of the inputs and a neuron's row of Gate
    up: the same of Up
    hidden: gate times up
    outputs: sums over the neurons of one product
    """

    inputs: Magnitude
    gate: Magnitude
    up: Magnitude
    hidden: Magnitude
    outputs: Magnitude


@frozen(slots=True)
class Ranges:
    """The greatest magnitudes on calibration text. Graphs of the way `static` add a margin.

    matrices: ranges of each size of attention matrix, that of queries, keys and values first
    neurons: ranges of the feed-forward
    """

    matrices: tuple[MatrixRange, ...]
    neurons: NeuronRange

    def of_matrix(self, rows: int, columns: int) -> MatrixRange:
        return next(matrix for matrix in self.matrices if (matrix.rows, matrix.columns) == (rows, columns))


@frozen(slots=True)
class Loss:
    """The cost of one way on held-out text, with products by ONNX Runtime on the CPU.

    scaling: the way
    perplexity: perplexity of the held-out tokens
    agreement: share of positions at which the likeliest token is that of the exact model
    recomputed_share: share of tokens' products that had clamped values, so that the engine has to compute them again
    error_by_layer: |products - exact products| / |exact products|, for the same inputs
    """

    scaling: Scaling
    perplexity: Perplexity
    agreement: Share
    recomputed_share: Share
    error_by_layer: tuple[Annotated[float, Range(0.0, MAX_ERROR)], ...]


@frozen(slots=True)
class NpuProfile:
    """The measured loss of both ways.

    scaling: the way that backends use
    text: name of the text
    calibration_tokens: tokens of the text that set the ranges
    held_out_tokens: other tokens of the text, on which the loss was measured
    exact_perplexity: perplexity of the held-out tokens, by the reference engine
    losses: for `token` and `static`, in this order
    ranges: greatest magnitudes
    """

    scaling: Scaling
    text: Annotated[str, Range(0, MAX_LINE_CHARACTERS)]
    calibration_tokens: Tokens
    held_out_tokens: Tokens
    exact_perplexity: Perplexity
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
    profile = record.read(NpuProfile)
    if [loss.scaling for loss in profile.losses] != list(SCALINGS):
        record.fail("losses", f"expected those of {' and '.join(SCALINGS)}")
    for number, loss in enumerate(profile.losses):
        if len(loss.error_by_layer) != model.layers:
            record.fail(f"losses[{number}].error_by_layer", f"expected {model.layers} numbers, one for each layer")
    ranges = profile.ranges
    sizes = tuple((matrix.rows, matrix.columns) for matrix in ranges.matrices)
    if sizes != matrix_sizes(model):
        listed, expected = (", ".join(f"{r} x {c}" for r, c in matrices) for matrices in (sizes, matrix_sizes(model)))
        record.fail("ranges.matrices", f"{listed} do not fit the model, whose are {expected}")
    if model.parallel and ranges.of_matrix(model.qkv_rows, model.width).inputs != ranges.neurons.inputs:
        record.fail("ranges.neurons", "attention and feed-forward read one vector, so `inputs` of both are one number")
    return profile
