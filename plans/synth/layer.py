"""One layer's random weights, shaped step by step by what the quantized computation makes of the calibration tokens.

Neurons are made in blocks that need nothing of each other, by as many threads as there are cores. What a layer's blocks
have in common, the size of its output and the threshold of its predictor, comes after all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
from neuronpipe.plans.convert.quantize import decode, encode
from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.package.layout import Quantization
from neuronpipe.plans.package.manifest import PredictorQuality
from neuronpipe.plans.package.predictor_writer import LayerFactors, SideFactor
from neuronpipe.plans.package.writer import Rows
from neuronpipe.plans.predictor.fit import Line, least_chance, quantile
from neuronpipe.plans.predictor.predictions import judge
from neuronpipe.plans.reference.engine import attend, rotate
from neuronpipe.plans.reference.quantized import Vectors, product
from neuronpipe.plans.synth import codes, firing
from neuronpipe.plans.synth.directions import Directions
from neuronpipe.plans.synth.shapes import Coordinates
from neuronpipe.plans.synth.tokens import STATE_POWER
from numpy.typing import NDArray

Array = NDArray[np.float32]
Half = np.dtype("<f2")

ATTENTION_POWER, FEED_FORWARD_POWER = 0.006, 0.014  # written by a layer, as a share of the state's squared length
ROUTER_DEVIATION = 1.5  # of a router's values: the better of two chosen experts has about 70 % of the sum. Assumed
QUERY_DEVIATION = 0.7  # scores of this size squared: attention looks at everything, at some of it more
GROUP_NEURONS, GROUP_LOADING = 16, 0.3  # co-activation: neurons of a group share this part of their rows
CORRECTIONS, MAX_CORRECTION = 3, 0.5
RECALL_STEP = 4  # one token in so many is enough for the share of all active neurons that is found


@dataclass(frozen=True)
class Texts:
    """The calibration tokens, as every layer sees them: texts of one length one behind the other. independent: those
    whose states are independent; their statistics are those of every preset over all contexts. held_out: which the
    predictor is judged on, bool [tokens]."""

    ids: tuple[range, ...]
    independent: slice
    held_out: NDArray[np.bool_]


@dataclass(frozen=True)
class PredictorShape:
    """What a layer's predictor is to be."""

    rank: int
    quantization: Quantization


@dataclass(frozen=True)
class Found:
    """A layer's predictor, how well it does, and what fires: shares of active neurons and of gates above zero."""

    factors: LayerFactors
    quality: PredictorQuality
    activity: float
    fired: float


@dataclass(frozen=True)
class _Inputs:
    """What all blocks of a feed-forward read: its number, its normed input and the steady part of that, the scale of
    rows, how often each neuron is to be active, the rows that groups of neurons have in common; the predictor's
    directions and what it makes of its input."""

    ffn: int
    vectors: Vectors
    steady: Array
    scale: float
    shares: NDArray[np.float64]
    groups: NDArray[np.int64]
    common: codes.Bytes
    directions: Directions
    hidden: Vectors


@dataclass(frozen=True)
class _Block:
    """Neurons of a block: their rows, Down's without the scale of the layer; what they write [tokens, written], and
    what is to know of their predictor."""

    gate: Rows
    up: Rows
    down: codes.Bytes
    sizes: Array
    written: Array
    active: NDArray[np.bool_]  # of the held-out tokens
    factor: Rows
    scores: Array  # of the held-out tokens
    line: Line
    chances: NDArray[np.float64]  # of those active in some of the others
    activity: Array
    fired: Array


@dataclass(frozen=True)
class Neurons:
    """A layer's neurons, hottest first, and what their predictor multiplies its input with."""

    blocks: list[_Block]
    input_rows: Rows
    down_scale: float
    places: Coordinates

    def rows(self) -> Iterator[tuple[Rows, Rows, Rows]]:
        """Gate, up and transposed Down, block by block."""
        written = self.places.feed_forward
        for block in self.blocks:
            down = codes.zero_rows(len(block.down), self.places.state.stop)
            down.quants[:, codes.code_bytes(written)] = block.down
            down.scales.view(Half)[:, codes.code_groups(written)] = (block.sizes * self.down_scale)[:, None]
            yield block.gate, block.up, down

    def found(self, recall: float) -> Found:
        """The predictor with the thresholds that reach this recall on the calibration tokens, judged on the others."""
        least = least_chance(np.concatenate([block.chances for block in self.blocks]), recall)
        biases = [block.line.bias(least) for block in self.blocks]
        predicted = [block.scores + bias > 0 for block, bias in zip(self.blocks, biases, strict=True)]
        quants, scales = zip(*(block.factor for block in self.blocks), strict=True)
        side = SideFactor(Rows(np.concatenate(quants), np.concatenate(scales)), np.concatenate(biases))
        return Found(
            factors=LayerFactors(self.input_rows, {"gate": side}),
            quality=judge(np.hstack(predicted), np.hstack([block.active for block in self.blocks])),
            activity=_mean([block.activity for block in self.blocks]),
            fired=_mean([block.fired for block in self.blocks]),
        )


class LayerMaker:
    """Makes layers of one shape."""

    def __init__(
        self,
        model: ModelSpec,
        places: Coordinates,
        inverse_frequency: Array,
        texts: Texts,
        predictor: PredictorShape,
        block_neurons: int,
        seed: int,
        pool: ThreadPoolExecutor,
    ) -> None:
        self._model, self._places, self._frequency, self._texts = model, places, inverse_frequency, texts
        self._predictor, self._block_neurons, self._seed, self._pool = predictor, block_neurons, seed, pool
        self._state_power = STATE_POWER * model.width

    def attention(self, layer: int, normed: Array) -> tuple[Rows, Rows, Array]:
        """qkv and attention_output, and what they add to the residual stream [tokens, width]."""
        model, state, random = self._model, self._places.state, codes.generator(self._seed, 1, layer)
        qkv = codes.zero_rows(model.qkv_rows, model.width)
        qkv.quants[:, codes.code_bytes(state)] = codes.random_codes(model.qkv_rows, state.stop - state.start, random)
        unit = self._row_scale(normed)
        parts = np.full((model.qkv_rows, 1), unit * QUERY_DEVIATION)
        parts[(model.query_heads + model.key_heads) * model.head_width :] = unit
        qkv.scales.view(Half)[:, codes.code_groups(state)] = parts
        values = product("q4", qkv, normed).reshape(len(normed), -1, model.head_width)
        mixed = np.concatenate(list(self._pool.map(self._attend, np.split(values, len(self._texts.ids)))))
        written = self._places.attention
        output = codes.zero_rows(model.width, model.query_width)
        output.quants[written] = codes.random_codes(written.stop - written.start, model.query_width, random)
        scales = output.scales.view(Half)
        scales[written] = 1.0
        some = Rows(output.quants[written], output.scales[written])
        plain = product("q4", some, mixed)
        scales[written] = np.sqrt(ATTENTION_POWER * self._state_power / plain.var(axis=0).sum())
        change = np.zeros_like(normed)
        change[:, written] = plain * scales[written][0, 0].astype(np.float32)
        return qkv, output, change

    def _row_scale(self, normed: Array) -> float:
        """What gives random rows a deviation of about one over the states of these tokens."""
        return 1 / (codes.DEVIATION * float(np.sqrt(np.square(normed[:, self._places.state]).sum(axis=1).mean())))

    def _attend(self, heads: Array) -> Array:
        model = self._model
        queries, keys, values = np.split(heads, (model.query_heads, model.query_heads + model.key_heads), axis=1)
        angles = np.arange(len(heads), dtype=np.float32)[:, None] * self._frequency
        return attend(rotate(queries, angles), rotate(keys, angles), values, window_tokens=0).reshape(len(heads), -1)

    def router(self, layer: int, normed: Array) -> tuple[Array, Array]:
        """A router that reads the state, float32 [experts, width], and each expert's share of each token, 0 where it is
        not chosen [tokens, experts]. Experts are equally likely; from token to token they change as the state moves."""
        model, state = self._model, self._places.state
        rows = np.zeros((model.experts, model.width), dtype=np.float32)
        random = codes.generator(self._seed, 4, layer).standard_normal((model.experts, state.stop - state.start))
        length = float(np.sqrt(np.square(normed[:, state]).sum(axis=1).mean()))
        rows[:, state] = random * (ROUTER_DEVIATION / length)
        values = normed @ rows.T
        best = np.argsort(-values, axis=1, kind="stable")[:, : model.experts_per_token]
        shares, chosen = np.zeros_like(values), np.take_along_axis(values, best, axis=1)
        weights = np.exp(chosen - chosen.max(axis=1, keepdims=True))
        np.put_along_axis(shares, best, weights / weights.sum(axis=1, keepdims=True), axis=1)
        return rows, shares

    def neurons(self, ffn: int, normed: Array, reads: Array, shares: NDArray[np.float64]) -> tuple[Neurons, Array]:
        """Neurons of one feed-forward, of which each is active in its share of the independent tokens, and what they
        add to the residual stream [tokens, width], if all tokens were its own. reads: what their predictor reads.

        An expert's neurons are fitted on all tokens: its router is independent of their rows.
        """
        model, predictor, random = self._model, self._predictor, codes.generator(self._seed, 2, ffn)
        directions = Directions.leading(normed[~self._texts.held_out], self._places, predictor.rank)
        input_rows = encode(predictor.quantization, directions.rows(model.width))
        inputs = _Inputs(
            ffn=ffn,
            vectors=Vectors("q4", normed),
            steady=normed[:, self._places.steady].sum(axis=1),
            scale=self._row_scale(normed),
            shares=shares,
            groups=random.permutation(model.neurons) // GROUP_NEURONS,
            common=codes.random_codes(-(-model.neurons // GROUP_NEURONS), self._read.stop - self._read.start, random),
            directions=directions,
            hidden=Vectors(predictor.quantization, product(predictor.quantization, input_rows, reads)),
        )
        blocks = list(self._pool.map(partial(self._block, inputs), range(0, model.neurons, self._block_neurons)))
        written = np.sum([block.written for block in blocks], axis=0)
        power = FEED_FORWARD_POWER * model.experts_per_token  # what several experts write adds up by its power
        factor = np.sqrt(power * self._state_power / written.var(axis=0).sum())
        change = np.zeros_like(normed)
        change[:, self._places.feed_forward] = written * factor
        return Neurons(blocks, input_rows, factor, self._places), change

    @property
    def _read(self) -> slice:
        """The coordinates that neurons read, but for their bias."""
        return slice(self._places.attention.start, self._model.width)

    def _block(self, inputs: _Inputs, start: int) -> _Block:
        some = slice(start, min(start + self._block_neurons, self._model.neurons))
        random = codes.generator(self._seed, 3, inputs.ffn, start)
        neurons, columns = some.stop - some.start, self._read.stop - self._read.start
        gate_codes = codes.mixed(
            codes.random_codes(neurons, columns, random), inputs.common[inputs.groups[some]], GROUP_LOADING
        )
        up_codes = codes.mixed(codes.random_codes(neurons, columns, random), gate_codes, firing.SHARED)
        gate, up = (self._unbiased(code, inputs.scale) for code in (gate_codes, up_codes))
        values = [inputs.vectors.times(rows) for rows in (gate, up)]
        biases = self._biases(values, inputs.steady, inputs.shares[some])
        for rows, value, bias in zip((gate, up), values, biases, strict=True):
            scales = rows.scales.view(Half)
            scales[:, codes.code_groups(self._places.steady)] = bias[:, None]
            value += inputs.steady[:, None] * bias.astype(Half).astype(np.float32)
        return self._written(inputs, gate, up, values[0], values[1], random)

    def _unbiased(self, code: codes.Bytes, size: float) -> Rows:
        rows = codes.zero_rows(len(code), self._model.width)
        rows.quants[:, codes.code_bytes(self._read)] = code
        rows.quants[:, codes.code_bytes(self._places.steady)] = codes.ONES
        rows.scales.view(Half)[:, codes.code_groups(self._read)] = size
        return rows

    def _biases(self, values: list[Array], steady: Array, shares: NDArray[np.float64]) -> list[Array]:
        """Of gate and up: what makes each neuron active in its share of the independent tokens."""
        ratios = [value[self._texts.independent] / steady[self._texts.independent, None] for value in values]
        lines = [(ratio.mean(axis=0), ratio.std(axis=0)) for ratio in ratios]
        cuts = firing.thresholds(shares)
        density = float(np.exp(-np.square(quantile(shares)) / 2).mean() / np.sqrt(2 * np.pi))
        shift = 0.0
        for _ in range(CORRECTIONS):  # what is not quite normal moves the mean; the shape of the curve stays
            found = np.logical_and(*(
                ratio > (mean + deviation * (cut + shift)).astype(np.float32)
                for ratio, (mean, deviation), cut in zip(ratios, lines, cuts, strict=True)
            ))  # fmt: skip
            step = (float(found.mean()) - float(shares.mean())) / density
            shift += float(np.clip(step, -MAX_CORRECTION, MAX_CORRECTION))
        return [-(mean + deviation * (cut + shift)) for (mean, deviation), cut in zip(lines, cuts, strict=True)]

    def _written(
        self, inputs: _Inputs, gate: Rows, up: Rows, gates: Array, ups: Array, random: np.random.Generator
    ) -> _Block:
        """The block with its Down. A neuron that fires often has smaller weights, so that what changes from token to
        token is as large as what does not."""
        written, held_out = self._places.feed_forward, self._texts.held_out
        fired = (gates > 0).mean(axis=0)
        inner = np.maximum(gates, 0)
        inner *= np.maximum(ups, 0)
        active = inner > 0
        down = codes.random_codes(len(gate.quants), written.stop - written.start, random)
        power, mean = np.einsum("tn,tn->n", inner, inner) / len(inner), inner.mean(axis=0)
        sizes = np.sqrt(np.maximum(power - np.square(mean), 0)) / np.maximum(np.sqrt(power), 1e-6)
        weights = decode("q4", Rows(down, codes.equal_scales(down)))
        factor = inputs.directions.factor(gate, self._predictor.quantization)
        scores = inputs.hidden.times(factor)
        some = np.flatnonzero(~held_out)[::RECALL_STEP]
        line = Line.fitted(scores[~held_out], gates[~held_out], active[~held_out])
        return _Block(
            gate=gate,
            up=up,
            down=down,
            sizes=sizes,
            written=inner @ (weights * sizes[:, None]),
            active=active[held_out],
            factor=factor,
            scores=scores[held_out],
            line=line,
            chances=line.chances(scores[some], active[some]),
            activity=active.mean(axis=0),
            fired=fired,
        )


def _mean(shares: list[Array]) -> float:
    return round(float(np.concatenate(shares).mean()), 6)
