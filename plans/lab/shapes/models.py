"""Simulated models: sizes, and shares of neurons that fire and that are predicted."""

from __future__ import annotations

import dataclasses
import difflib
import math
from pathlib import Path

from neuronpipe.plans.cost.activation_rates import ASSUMED_FIRED, ASSUMED_PREDICTED
from neuronpipe.plans.lab.devices.device_file import Sourced
from neuronpipe.plans.lab.synth.shapes import SHAPES, rank_of
from neuronpipe.plans.models.spec import LayerKind, ModelSpec
from neuronpipe.plans.package.layout import PAGE_BYTES, row_bytes
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.segment_sizes import STATE_ELEMENT_BYTES
from neuronpipe.plans.pull.catalog import catalog_model
from neuronpipe.plans.pull.package_library import REPOSITORY
from neuronpipe.protocol.errors import UserError, quoted
from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.schema import from_json, json_object

FILE = Path(__file__).with_name("models.json")
BITS_PER_WEIGHT = 4.5  # q4: 4, and an fp16 scale for 32 weights
QUANT_BITS, SCALE_BITS = 4.0, 0.5
EXPERTS_FIRED = 0.4  # SmallThinker's experts; of Nemotron's with ReLU² nothing is published
RUNTIME_BYTES = 0.3e9  # PowerInfer-2 v3, 7.2.3


@frozen(kw_only=True)
class SimulatedModel:
    """A model without its weights.

    active: share of an expert's neurons that fire for a token that it computes
    predicted: share of an expert's neurons that are predicted; not less than `active`
    predictor_rank: 0 without a predictor
    """

    name: str
    spec: ModelSpec
    active: float
    predicted: float
    predictor_rank: int
    bits_per_weight: float = BITS_PER_WEIGHT

    @property
    def row_bytes(self) -> float:
        """Bytes of a neuron's row in memory, scales included."""
        return self.spec.width * self.bits_per_weight / 8

    @property
    def neuron_bytes(self) -> float:
        return len(self.spec.ffn_matrices) * self.row_bytes

    @property
    def value_rows(self) -> int:
        """Number of a neuron's rows in the value part."""
        return len(self.spec.ffn_matrices) - 1

    @property
    def ffn_bytes(self) -> float:
        return self.spec.ffns * self.spec.neurons * self.neuron_bytes

    @property
    def mixer_layer_bytes(self) -> float:
        """Bytes of the matrices of attention or of a recurrent layer's mixer in one layer, a mean over the layers."""
        return self.mixer_weights / self.spec.layers * self.bits_per_weight / 8

    @property
    def mixer_weights(self) -> int:
        return self.spec.attention_weights + self.spec.recurrent_weights

    @property
    def output_bytes(self) -> float:
        return self.spec.vocabulary * self.row_bytes

    def predictor_bytes(self, rows_share: float = 1.0) -> float:
        """Return the bytes of a feed-forward's predictor at four bits, with a share of its second factor's rows."""
        spec = self.spec
        return self.predictor_rank * (spec.width + rows_share * spec.neurons) * QUANT_BITS / 8

    def key_value_layer_bytes(self, context_tokens: float) -> float:
        """Return the bytes that a token needs of a layer's keys and values in fp16 and of its recurrent state, which is
        read and written; a mean over the layers."""
        spec = self.spec
        states = 2 * STATE_ELEMENT_BYTES * spec.all_state_elements
        return (2 * spec.position_elements * context_tokens + states) / spec.layers

    @property
    def fixed_bytes(self) -> float:
        """Bytes that are always resident: all weights but the feed-forward's, predictors, the feed-forward's scales and
        the program. PowerInfer-2's paper counts in this way for the 47B."""
        spec = self.spec
        outside = spec.layers * self.mixer_layer_bytes + 2 * self.output_bytes
        scales = self.ffn_bytes * SCALE_BITS / self.bits_per_weight
        return outside + spec.ffns * self.predictor_bytes() + scales + RUNTIME_BYTES

    @property
    def cacheable_bytes(self) -> float:
        """Bytes of the feed-forward's quants, without scales."""
        return self.ffn_bytes * (1 - SCALE_BITS / self.bits_per_weight)

    @property
    def computed_weights(self) -> float:
        """Number of weights of the layers that compute a token of a prompt."""
        spec = self.spec
        return len(spec.ffn_matrices) * spec.width * spec.neurons * spec.active_ffns + self.mixer_weights


@frozen
class Parts:
    """Bytes of a neuron's trigger and value part on flash, each in whole pages."""

    trigger_bytes: int
    value_bytes: int

    @classmethod
    def of(cls, model: SimulatedModel) -> Parts:
        """Return the smallest parts. The trigger part has the trigger's quants and all scales."""
        quants = model.row_bytes * (1 - SCALE_BITS / model.bits_per_weight)
        scales = model.row_bytes - quants
        rows = 1 + model.value_rows
        return cls(_pages(quants + rows * scales), _pages(model.value_rows * quants))

    @property
    def whole_bytes(self) -> int:
        return self.trigger_bytes + self.value_bytes


def _pages(size_bytes: float) -> int:
    return math.ceil(size_bytes / PAGE_BYTES) * PAGE_BYTES


@frozen(kw_only=True)
class PublishedModel:
    """A model of PowerInfer-2's paper, in models.json."""

    title: str
    width: int
    neurons: int
    layers: int
    query_heads: int
    key_heads: int
    vocabulary: int
    experts: int
    experts_per_token: int
    shape_source: str
    active: Sourced
    predicted: Sourced
    predictor_rank: Sourced


@frozen(kw_only=True)
class _File:
    models: dict[str, PublishedModel]


def published_models() -> dict[str, PublishedModel]:
    return from_json(_File, json_object(FILE.read_bytes(), str(FILE)), str(FILE)).models


def known_models() -> list[str]:
    return sorted({*published_models(), *SHAPES})


def shape_named(text: str) -> str | None:
    """Return the name of the shape that `text`, NAME or ORG/NAME in any case, refers to; None if there is none."""
    by_folded = {name.casefold(): name for name in known_models()}
    return by_folded.get(text.casefold().rpartition("/")[2])


def refuse_shape(text: str) -> None:
    """Raise UserError if `text` names a shape."""
    if (name := shape_named(text)) is not None:
        raise UserError(
            f"{text}: no such package; it is a shape, which `neuronpipe plan {name}` and "
            f"`neuronpipe simulate DEVICE {name}` take without a package"
        )


def model_named(text: str) -> SimulatedModel:
    """Return the model of a shape, or of a name of the catalog. Raises UserError, which lists the shapes, if there is
    none."""
    name = shape_named(text) or text
    if (published := published_models().get(name)) is not None:
        spec = ModelSpec(
            family="llama",
            activation="drelu",
            norm_epsilon=1e-5,
            width=published.width,
            neurons=published.neurons,
            layer_kinds=(LayerKind(published.layers),),
            experts=published.experts,
            experts_per_token=published.experts_per_token,
            query_heads=published.query_heads,
            key_heads=published.key_heads,
            head_width=published.width // published.query_heads,
            vocabulary=published.vocabulary,
            context_tokens=4096,
        )
        return SimulatedModel(
            name=name,
            spec=spec,
            active=published.active.value,
            predicted=published.predicted.value,
            predictor_rank=int(published.predictor_rank.value),
        )
    if name in SHAPES:
        return _assumed(name, SHAPES[name])
    if (listed := catalog_model(name)) is not None:
        return _assumed(listed.name, listed.spec)
    names = known_models()
    near = difflib.get_close_matches(name.casefold(), names, n=1)
    hint = f"did you mean {near[0]}? Shapes" if near else "shapes"
    from_hub = f"; from a hub it comes with `neuronpipe pull {name}`" if REPOSITORY.fullmatch(name) else ""
    raise UserError(f"{quoted(name)}: is neither a package nor a known shape{from_hub}; {hint} are {', '.join(names)}")


def model_of(manifest: Manifest) -> SimulatedModel:
    """Return a package's model, with measured shares of active and predicted neurons if there are any."""
    spec = manifest.model
    model = _assumed(manifest.name, spec)
    mean = spec.ffn_mean(manifest.fired_by_layer)
    active = model.active if mean is None or spec.all_neurons_fire else mean
    predicted = model.predicted if spec.all_neurons_fire else min(1.0, ASSUMED_PREDICTED * active)
    rank = 0
    if manifest.predictor is not None:
        rank = manifest.predictor.rank
        predicted = _mean(tuple(layer.predicted for layer in manifest.predictor.by_layer)) or predicted
    bits = 8 * row_bytes(manifest.quantization, spec.width) / spec.width
    return dataclasses.replace(
        model, active=active, predicted=max(active, predicted), predictor_rank=rank, bits_per_weight=bits
    )


def _assumed(name: str, spec: ModelSpec) -> SimulatedModel:
    active = 1.0 if spec.all_neurons_fire else ASSUMED_FIRED
    if spec.activation in ("relu", "relu2") and spec.experts > 1:
        active = EXPERTS_FIRED
    predicted = min(1.0, ASSUMED_PREDICTED * active)
    return SimulatedModel(name=name, spec=spec, active=active, predicted=predicted, predictor_rank=rank_of(spec.width))


def _mean(values: tuple[float, ...] | None) -> float | None:
    return sum(values) / len(values) if values else None
