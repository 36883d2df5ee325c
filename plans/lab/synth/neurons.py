"""The neurons of a feed-forward: random weights, calibrated by the quantized computation on the calibration tokens.

Threads compute independent blocks of neurons. The scale of the output and the threshold of the predictor depend on all
blocks and are computed last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from neuronpipe.plans.convert.quantize import decode, q3_of_q4
from neuronpipe.plans.lab.synth import activation_rates as firing
from neuronpipe.plans.lab.synth import codes
from neuronpipe.plans.lab.synth.prediction import BlockPredictor, Prediction
from neuronpipe.plans.lab.synth.shapes import Coordinates
from neuronpipe.plans.lab.synth.tokens import STATE_POWER, CalibrationSequences
from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.package.layout import GROUP_WEIGHTS, Quantization
from neuronpipe.plans.package.manifest import PredictorQuality
from neuronpipe.plans.package.predictor_writer import LayerFactors
from neuronpipe.plans.package.writer import Rows
from neuronpipe.plans.predictor.fit import quantile
from neuronpipe.plans.reference.engine import inner_values
from neuronpipe.plans.reference.quantized import Vectors
from neuronpipe.protocol.frozen import frozen
from numpy.typing import NDArray

Array = NDArray[np.float32]
Half = np.dtype("<f2")

FEED_FORWARD_POWER = 0.014  # of a layer's output, as a share of the state's squared length
GROUP_NEURONS, GROUP_LOADING = 16, 0.3  # neurons of a group share this part of their rows, so they fire together
CORRECTIONS, MAX_CORRECTION = 3, 0.5
MIN_INDEPENDENT = 96  # independent tokens for an expert without a predictor, besides the tokens that choose it


@frozen
class Firing:
    """Activation statistics of a feed-forward.

    activity: mean share of neurons that are active
    fired: mean share of neurons whose trigger fires
    factors, quality: properties of the predictor; None without one
    """

    activity: float
    fired: float
    factors: LayerFactors | None
    quality: PredictorQuality | None


@frozen
class LayerInput:
    """The inputs of a layer's feed-forwards.

    normed: vectors of the calibration tokens [tokens, width]
    shares: requested activity of each neuron, hottest first
    prediction: the common part of the predictors; None without predictors
    """

    normed: Array
    shares: NDArray[np.float64]
    prediction: Prediction | None


@frozen
class _Inputs:
    """The inputs of all blocks of a feed-forward.

    tokens: indices of the calibration tokens for which it is computed
    independent: range of those with independent states
    vectors: normed inputs of the tokens
    steady: sum of the steady coordinates of each input
    scale: scale of random rows
    groups: number of each neuron's group
    common: the shared rows of each group
    """

    ffn: int
    layer: LayerInput
    tokens: NDArray[np.int64]
    independent: slice
    vectors: Vectors
    steady: Array
    scale: float
    groups: NDArray[np.int64]
    common: codes.Bytes


@frozen
class _Block:
    """The neurons of a block.

    before: the rows of the matrices before Down, the trigger first
    down: codes of Down by neuron, or by output
    sizes: scale of each neuron's weights of Down, without that of the feed-forward
    written: output without that scale [tokens, written]
    activity, fired: figures of Firing for each neuron
    """

    before: tuple[Rows, ...]
    down: codes.Bytes
    sizes: Array
    written: Array
    activity: Array
    fired: Array
    predictor: BlockPredictor | None


@frozen
class Neurons:
    """A feed-forward's neurons, hottest first.

    tokens: indices of the calibration tokens for which it was computed
    change: output for these tokens, of the coordinates that feed-forwards write [tokens, written]
    down_scale: scale of all rows of Down
    gates: quantization of gates
    slices: number of parts with rows of Down for each output; 0: Down has a row for each neuron
    """

    blocks: list[_Block]
    tokens: NDArray[np.int64]
    change: Array
    down_scale: float
    places: Coordinates
    prediction: Prediction | None
    gates: Quantization
    slices: int

    def rows(self) -> Iterator[tuple[Rows, ...]]:
        """Yield the rows of the matrices before Down and of transposed Down, block by block; with Down by output slice
        by slice."""
        written = self.places.feed_forward
        if self.slices:
            yield from self._whole()
        for block in self.blocks if not self.slices else ():
            down = codes.zero_rows(len(block.down), self.places.state.stop)
            down.quants[:, codes.code_bytes(written)] = block.down
            down.scales.view(Half)[:, codes.code_groups(written)] = (block.sizes * self.down_scale)[:, None]
            yield *self._stored(block.before), down

    def _stored(self, before: Sequence[Rows]) -> tuple[Rows, ...]:
        trigger, *following = before
        return (Rows(q3_of_q4(trigger.quants), trigger.scales) if self.gates == "q3" else trigger), *following

    def _whole(self) -> Iterator[tuple[Rows, ...]]:
        matrices = zip(*(block.before for block in self.blocks), strict=True)
        before = [Rows(*map(np.concatenate, zip(*blocks, strict=True))) for blocks in matrices]
        down = codes.zero_rows(self.places.state.stop, len(before[0].quants))
        down.quants[self.places.feed_forward] = np.concatenate([block.down for block in self.blocks], axis=1)
        sizes = np.concatenate([block.sizes for block in self.blocks])[::GROUP_WEIGHTS]
        down.scales.view(Half)[self.places.feed_forward] = sizes * self.down_scale
        parts = [[np.split(part, self.slices) for part in rows] for rows in self._stored(before)]
        parts.append([np.split(part, self.slices, axis=1) for part in down])
        for number in range(self.slices):
            yield tuple(Rows(quants[number], scales[number]) for quants, scales in parts)

    def firing(self, recall: float) -> Firing:
        """Return the activation statistics, and the predictor that reaches `recall`."""
        factors, quality = None, None
        if self.prediction is not None:
            parts = [block.predictor for block in self.blocks if block.predictor is not None]
            factors, quality = self.prediction.together(parts, recall)
        activity, fired = _mean([block.activity for block in self.blocks]), _mean([b.fired for b in self.blocks])
        return Firing(activity, fired, factors, quality)


@frozen
class Pending:
    """A feed-forward whose blocks are being computed."""

    inputs: _Inputs
    blocks: list[Future[_Block]]
    places: Coordinates
    power: float  # requested variance of the output
    residual_scale: float  # factor of the output, a field of ModelSpec
    gates: Quantization
    slices: int

    def result(self) -> Neurons:
        blocks = [block.result() for block in self.blocks]
        written = np.sum([block.written for block in blocks], axis=0)
        factor = np.sqrt(self.power / written.var(axis=0).sum())
        return Neurons(
            blocks,
            self.inputs.tokens,
            written * factor,
            factor / self.residual_scale,
            self.places,
            self.inputs.layer.prediction,
            self.gates,
            self.slices,
        )


class NeuronMaker:
    """A maker of a model's feed-forwards.

    block_neurons: neurons that are computed at once; with Down by output whole groups
    slices: see `Neurons`
    """

    def __init__(
        self,
        model: ModelSpec,
        places: Coordinates,
        sequences: CalibrationSequences,
        block_neurons: int,
        seed: int,
        pool: ThreadPoolExecutor,
        gates: Quantization = "q4",
        *,
        slices: int = 0,
    ) -> None:
        self._gates, self._slices = gates, slices
        self._model, self._places, self._sequences = model, places, sequences
        self._block_neurons, self._seed, self._pool = block_neurons, seed, pool

    def begin(self, ffn: int, layer: LayerInput, chosen: NDArray[np.bool_]) -> Pending:
        """Begin to compute neurons, each of which is active in its share of the independent tokens.

        With a predictor all calibration tokens are computed, since routers are independent of rows. Without one, only
        those that choose the feed-forward and some independent tokens are.

        ffn: number of the feed-forward, counted through all layers
        chosen: mask of the calibration tokens that choose the feed-forward
        """
        model, random = self._model, codes.generator(self._seed, 2, ffn)
        tokens, independent = self._tokens(layer, chosen)
        normed = layer.normed[tokens]
        groups = random.permutation(model.neurons) // GROUP_NEURONS
        columns = self._read.stop - self._read.start
        inputs = _Inputs(
            ffn=ffn,
            layer=layer,
            tokens=tokens,
            independent=independent,
            vectors=Vectors("q4", normed),
            steady=normed[:, self._places.steady].sum(axis=1),
            scale=codes.unit_scale(normed[:, self._places.state]),
            groups=groups,
            common=codes.random_codes(-(-model.neurons // GROUP_NEURONS), columns, random),
        )
        starts = range(0, model.neurons, self._block_neurons)
        of_layer, expert = model.place_of(ffn)
        # The variances of several experts' outputs add up.
        power = FEED_FORWARD_POWER * model.active_experts(of_layer) * (STATE_POWER * model.width)
        power /= model.routed_scale**2 if expert < model.routed_experts(of_layer) else 1
        blocks = [self._pool.submit(self._block, inputs, start) for start in starts]
        return Pending(inputs, blocks, self._places, power, model.residual_scale, self._gates, self._slices)

    def _tokens(self, layer: LayerInput, chosen: NDArray[np.bool_]) -> tuple[NDArray[np.int64], slice]:
        independent = self._sequences.independent
        if layer.prediction is not None or self._model.experts == 1:
            return np.arange(len(chosen)), independent
        independent_tokens = np.arange(independent.start, independent.stop)
        independent_tokens = independent_tokens[:: max(1, len(independent_tokens) // MIN_INDEPENDENT)]
        return np.concatenate((independent_tokens, np.setdiff1d(np.flatnonzero(chosen), independent_tokens))), slice(
            0, len(independent_tokens)
        )

    @property
    def _read(self) -> slice:
        """Coordinates that neurons read, except those of their bias."""
        return slice(self._places.attention.start, self._model.width)

    def _block(self, inputs: _Inputs, start: int) -> _Block:
        neuron_range = slice(start, min(start + self._block_neurons, self._model.neurons))
        random = codes.generator(self._seed, 3, inputs.ffn, start)
        neurons, columns = neuron_range.stop - neuron_range.start, self._read.stop - self._read.start
        codes_of_matrix = inputs.common[inputs.groups[neuron_range]]
        matrices, loading = [], GROUP_LOADING
        for _ in self._model.ffn_matrices[:-1]:  # what follows the trigger shares its columns with it
            codes_of_matrix = codes.mixed(codes.random_codes(neurons, columns, random), codes_of_matrix, loading)
            matrices.append(codes_of_matrix)
            loading = firing.SHARED
        before = tuple(self._unbiased(code, inputs.scale) for code in matrices)
        if self._gates == "q3":  # q4 rows with weights that q3 can express, so that results are those of stored rows
            coarse_scale = inputs.scale * codes.DEVIATION / codes.COARSE_DEVIATION
            before = self._unbiased(codes.coarse(matrices[0]), coarse_scale), *before[1:]
        values = [inputs.vectors.times(rows) for rows in before]
        biases = self._biases(inputs, values, inputs.layer.shares[neuron_range])
        for rows, value, bias in zip(before, values, biases, strict=False):  # Up may have no bias
            scales = rows.scales.view(Half)
            scales[:, codes.code_groups(self._places.steady)] = bias[:, None]
            value += inputs.steady[:, None] * bias.astype(Half).astype(np.float32)
        return self._written(inputs, before, values, random)

    def _unbiased(self, code: codes.Bytes, size: float) -> Rows:
        rows = codes.zero_rows(len(code), self._model.width)
        rows.quants[:, codes.code_bytes(self._read)] = code
        rows.quants[:, codes.code_bytes(self._places.steady)] = codes.ONE_PAIRS
        rows.scales.view(Half)[:, codes.code_groups(self._read)] = size
        return rows

    def _biases(self, inputs: _Inputs, values: list[Array], shares: NDArray[np.float64]) -> list[Array]:
        """Return the biases of the trigger, and with dReLU of up, with which each neuron is active in its share of the
        independent tokens; empty if all neurons fire."""
        cuts = firing.cuts(self._model.activation, shares)
        if not cuts:
            return []
        tokens, steady = inputs.independent, inputs.steady[inputs.independent, None]
        ratios = [value[tokens] / steady for value in values[: len(cuts)]]
        lines = [(ratio.mean(axis=0), ratio.std(axis=0)) for ratio in ratios]
        density = float(np.exp(-np.square(quantile(shares)) / 2).mean() / np.sqrt(2 * np.pi))
        shift = 0.0
        for _ in range(CORRECTIONS):  # values are not quite normal, so the mean activity is corrected
            is_active = np.logical_and.reduce([
                ratio > (mean + deviation * (cut + shift)).astype(np.float32)
                for ratio, (mean, deviation), cut in zip(ratios, lines, cuts, strict=True)
            ])  # fmt: skip
            step = (float(is_active.mean()) - float(shares.mean())) / density
            shift += float(np.clip(step, -MAX_CORRECTION, MAX_CORRECTION))
        return [-(mean + deviation * (cut + shift)) for (mean, deviation), cut in zip(lines, cuts, strict=True)]

    def _written(
        self, inputs: _Inputs, before: tuple[Rows, ...], values: list[Array], random: np.random.Generator
    ) -> _Block:
        """Return the block with its Down, of which each row is scaled by the neuron's deviation / rms: neurons with
        nearly the same value for all tokens contribute little."""
        written, prediction = self._places.feed_forward, inputs.layer.prediction
        inner = inner_values(self._model, dict(zip(self._model.ffn_matrices, values, strict=False)))
        active = inner != 0
        neurons, outputs = len(before[0].quants), written.stop - written.start
        rows, columns = (outputs, neurons) if self._slices else (neurons, outputs)
        down = codes.random_codes(rows, columns, random)
        power, mean = np.einsum("tn,tn->n", inner, inner) / len(inner), inner.mean(axis=0)
        sizes = np.sqrt(np.maximum(power - np.square(mean), 0)) / np.maximum(np.sqrt(power), 1e-6)
        weights = decode("q4", Rows(down, codes.equal_scales(down)))
        if self._slices:  # the neurons of a group have one scale
            weights, groups = weights.T, sizes.reshape(-1, GROUP_WEIGHTS)
            sizes = np.repeat(np.sqrt(np.square(groups).mean(axis=1)), GROUP_WEIGHTS)
        return _Block(
            before=before,
            down=down,
            sizes=sizes,
            written=inner @ (weights * sizes[:, None]),
            activity=active.mean(axis=0),
            fired=((values[0] > 0) if self._model.activation == "drelu" else active).mean(axis=0),
            predictor=None if prediction is None else prediction.of_block(before[0], values[0], active),
        )


def _mean(shares: list[Array]) -> float:
    return round(float(np.concatenate(shares).mean()), 6)
