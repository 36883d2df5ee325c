"""A recurrent layer: random rows that read the state, with an output of a fixed share of the state's power."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from neuronpipe.plans.lab.synth import codes
from neuronpipe.plans.lab.synth.attention import Mixer, output_rows
from neuronpipe.plans.lab.synth.shapes import Coordinates
from neuronpipe.plans.lab.synth.tokens import CalibrationSequences
from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.package.tensors import recurrent_vectors
from neuronpipe.plans.package.writer import Rows
from neuronpipe.plans.reference.quantized import product
from neuronpipe.plans.reference.recurrent import RecurrentLayer
from numpy.typing import NDArray

Array = NDArray[np.float32]

TIME_BIAS = -3.0  # times of about a twentieth
RATE_DEVIATION = 0.5
SLOWEST, FASTEST = 0.3, 8.0  # decays in a unit of time: memories last from some tokens to some tens


class RecurrentMaker:
    """A maker of recurrent layers."""

    def __init__(
        self,
        model: ModelSpec,
        places: Coordinates,
        sequences: CalibrationSequences,
        seed: int,
        pool: ThreadPoolExecutor,
    ) -> None:
        self._model, self._places, self._sequences = model, places, sequences
        self._seed, self._pool = seed, pool

    def layer(self, layer: int, normed: Array) -> Mixer:
        """Return a recurrent layer. normed: its inputs for the calibration tokens [tokens, width]."""
        model, random = self._model, codes.generator(self._seed, 1, layer)
        matrices = {"recurrent_input": self._input(model.recurrent_rows(layer), normed, random, 1.0)}
        if model.rates(layer):
            matrices["recurrent_rates"] = self._input(model.rates(layer), normed, random, RATE_DEVIATION)
        vectors = {name: self._vector(name, layer, random) for name in recurrent_vectors(model, layer)}
        if model.mixers[layer] == "kda":
            self._raise(matrices, layer, normed, random)

        def read(name: str, inputs: Array) -> Array:
            return product("q4", matrices[name], inputs) if name in matrices else inputs

        mixer = RecurrentLayer(model, layer, read, vectors.__getitem__)
        parts = np.split(normed, len(self._sequences.ids))
        mixed = np.concatenate(list(self._pool.map(mixer.mix, parts)))
        output, change = output_rows(model, self._places.attention, mixed, random)
        return Mixer(matrices | {"recurrent_output": output}, vectors, change)

    def _raise(self, matrices: dict[str, Rows], layer: int, normed: Array, random: np.random.Generator) -> None:
        """Add the matrices of decays and gate of Kimi delta attention, which read products with the input."""
        model, columns = self._model, slice(0, self._model.state_rank)
        products = product("q4", matrices["recurrent_input"], normed)[:, model.channels(layer) :]
        inputs = dict(zip(("recurrent_decays", "recurrent_gates"), np.split(products, 2, axis=1), strict=True))
        rows = {"recurrent_decays": model.decays_width(layer), "recurrent_gates": model.gate_width(layer)}
        for name, deviation in (("recurrent_decays", RATE_DEVIATION), ("recurrent_gates", 1.0)):
            deviations = np.full(rows[name], deviation)
            matrices[name] = codes.reading_rows(np.ascontiguousarray(inputs[name]), columns, deviations, random)

    def _input(self, rows: int, normed: Array, random: np.random.Generator, deviation: float) -> Rows:
        return codes.reading_rows(normed, self._places.state, np.full(rows, deviation), random)

    def _vector(self, name: str, layer: int, random: np.random.Generator) -> Array:
        length = recurrent_vectors(self._model, layer)[name]
        if name == "convolution":
            deviation = np.float32(self._model.convolution_tokens**-0.5)  # outputs have the deviation of inputs
            return random.standard_normal(length, dtype=np.float32) * deviation
        if name == "decay":
            return -np.geomspace(SLOWEST, FASTEST, length, dtype=np.float32)
        values = {"convolution.bias": 0.0, "time_bias": TIME_BIAS}
        return np.full(length, values.get(name, 1.0), dtype=np.float32)
