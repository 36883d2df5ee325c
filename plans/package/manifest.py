"""The manifest, manifest.json: the content of a package. FORMAT.md specifies every field.

The manifest names every other file with its size and hash, and has the hash of itself as `id`. A plan is made for one
id.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, field, replace
from functools import cached_property
from typing import Any, Literal

from neuronpipe.plans.models.spec import LATER_FIELDS, LayerKind, ModelSpec
from neuronpipe.plans.package.activity_profile import ActivityProfile, ProfileMode, profiles_as_json
from neuronpipe.plans.package.layout import GROUP_WEIGHTS, Layout, Quantization, SlotPlaces
from neuronpipe.plans.package.npu_section import NpuProfile
from neuronpipe.protocol.frozen import frozen

FORMAT = "neuronpipe-package"
VERSION = 3
MANIFEST, TOKENIZER, FIXED, BUNDLES, CHECKSUMS, PREDICTOR, CHAT_TEMPLATE, ACTIVITY = (
    "manifest.json",
    "tokenizer.json",
    "fixed.safetensors",
    "bundles.bin",
    "checksums.bin",
    "predictor.safetensors",
    "chat_template.jinja",
    "activity.bin",
)
MAX_TEMPLATE_BYTES = 1 << 20
MAX_TOKENIZER_BYTES = 256 << 20
MAX_SILENT_SHARE = 0.95
MAX_PERPLEXITY = 1e300
MAX_TEXT_TOKENS = 1 << 50
DEFAULT_RECALL = 0.98  # of the active neurons, the share that `profile` aims to predict
EMBEDDINGS = ("embedding", "output")
ERROR_KINDS = ("embedding", "output", "attention", "gate", "up", "down", "predictor")

SOURCE_KINDS = ("huggingface", "gguf", "synthetic")

Side = Literal["gate", "up"]
PredictorInput = Literal["attention", "feed_forward", "residual"]
Hidden = Literal["none", "relu"]
QUANTIZATIONS: tuple[Quantization, ...] = ("q4", "iq4", "mxfp4", "q4k", "q5k", "q6k", "q4h", "q5h", "q8", "f16")
PREDICTOR_QUANTIZATIONS: tuple[Quantization, ...] = ("q4", "q8", "f16")
GATE_QUANTIZATIONS: tuple[Quantization, ...] = ("q3",)  # for gates only, in packages of q4


@frozen(slots=True)
class Source:
    """The source of a package.

    weights: number of weights by encoding, the most frequent first; only of a quantized source
    """

    kind: str
    name: str
    architecture: str
    weights: Mapping[str, int] = field(default_factory=dict)
    importance: str = ""


@frozen(slots=True)
class PredictorQuality:
    """Quality of the predictions of one layer's neurons on held-out text; each a share 0..1.

    recall: share of the active neurons that are predicted. precision: share of the predicted neurons that are active.
        predicted: share of all neurons that are predicted. Predicted per active is recall / precision.
    """

    recall: float
    precision: float
    predicted: float


@frozen(slots=True)
class Predictor:
    """The predictor whose tensors are in predictor.safetensors; FORMAT.md specifies its arithmetic.

    rank: the largest rank
    reads: input: the normed input of the layer's attention or of its feed-forward, or the input of the feed-forward's
        norm
    sides: matrices whose signs are predicted; both must be positive
    hidden: activation of the rank vector
    by_layer: empty if it was never measured
    ranks: rank of each feed-forward, layer * experts + expert, if they differ
    text, held_out_tokens, exact_perplexity, predicted_perplexity: all or none: the cost of mode predicted, measured on
        held-out tokens of a text
    """

    rank: int
    quantization: Quantization
    reads: PredictorInput
    sides: tuple[Side, ...]
    hidden: Hidden
    calibration_tokens: int
    by_layer: tuple[PredictorQuality, ...]
    ranks: tuple[int, ...] | None = None
    text: str | None = None
    held_out_tokens: int | None = None
    exact_perplexity: float | None = None
    predicted_perplexity: float | None = None

    @property
    def loss_share(self) -> float | None:
        """Relative increase of perplexity in mode predicted; None if it was never measured."""
        if self.exact_perplexity is None or self.predicted_perplexity is None:
            return None
        return self.predicted_perplexity / self.exact_perplexity - 1

    def rank_of(self, ffn: int) -> int:
        """Return the rank of one feed-forward's predictor."""
        return self.rank if self.ranks is None else self.ranks[ffn]


MAX_RANK = 1 << 16


def package_rank(rank: int) -> int:
    """Return the rank that factors of this rank have in a package: whole groups, padded with zeros."""
    return -(-rank // GROUP_WEIGHTS) * GROUP_WEIGHTS


@frozen(slots=True)
class SilentLayer:
    """The threshold of one layer.

    threshold: a neuron is silent for a token if |silu(gate)| is less
    share: how often neurons were silent, on held-out text in mode thresholded
    """

    threshold: float
    share: float


@frozen(slots=True)
class Silent:
    """The thresholds of mode thresholded, below which neurons of a SiLU model are left out, and the measured loss.

    share: target share of silent neurons. text: name of the text. calibration_tokens of it set the thresholds;
        perplexities are of the other held_out_tokens.
    """

    share: float
    by_layer: tuple[SilentLayer, ...]
    text: str
    calibration_tokens: int
    held_out_tokens: int
    exact_perplexity: float
    thresholded_perplexity: float

    @property
    def loss_share(self) -> float:
        """Relative increase of perplexity in mode thresholded."""
        return self.thresholded_perplexity / self.exact_perplexity - 1

    def loss(self) -> str:
        """Describe the loss for a person."""
        return (
            f"perplexity {self.thresholded_perplexity:.4g} instead of {self.exact_perplexity:.4g} exact "
            f"({self.loss_share:+.2%}), on {self.held_out_tokens:,} held-out tokens of {self.text}"
        )


@frozen(slots=True)
class Workload:
    """A synthetic package's trajectories: preset -> (first token, number of tokens). Greedy decoding from any token of
    a preset continues through it, one id at a time."""

    seed: int
    presets: Mapping[str, tuple[int, int]]


@frozen(slots=True)
class Chat:
    """The texts that the chat template calls `bos_token` and `eos_token`; "" if the model has none."""

    begin: str
    end: str


@frozen(slots=True)
class FileEntry:
    """Size and hash of one file. bundles.bin has no hash; its clusters have checksums."""

    bytes: int
    sha256: str | None


@frozen
class Manifest:
    """The manifest of a package. `id` is empty until `sealed` has computed it."""

    name: str
    source: Source
    model: ModelSpec
    quantization: Quantization
    end_tokens: tuple[int, ...]
    layout: Layout
    files: Mapping[str, FileEntry]
    quantization_error: Mapping[str, float]  # kind of tensor -> |w - w'| / |w|
    fired_by_layer: tuple[float, ...] | None  # mean share of neurons that fire, when measured; `activity` in the file
    trigger_fired_by_layer: tuple[float, ...] | None = None  # mean share whose trigger fires, on the same text
    predictor: Predictor | None = None
    silent: Silent | None = None  # of a SiLU model with thresholds
    profiles: tuple[ActivityProfile, ...] = ()  # one for each measured mode, in the order of activity.bin
    npu: NpuProfile | None = None  # measured loss of a neural processor's arithmetic
    workload: Workload | None = None
    chat: Chat | None = None  # of a package with a chat template
    quantizations: Mapping[str, Quantization] = field(default_factory=dict)  # of fixed matrices, if not the package's
    id: str = ""

    @cached_property
    def clusters(self) -> int:
        """Clusters of the whole package: entries of checksums.bin, and residency entries of one part."""
        return self.model.layers * self.model.experts * self.layout.clusters

    @property
    def trigger_quantization(self) -> Quantization:
        """Quantization of the rows that decide whether a neuron fires."""
        return self.layout.matrices[0].quantization or self.quantization

    def quantization_of(self, name: str) -> Quantization:
        """Return the quantization of a fixed matrix, by its name."""
        return self.quantizations.get(name, self.quantization)

    @property
    def all_quantizations(self) -> dict[str, Quantization]:
        """The quantizations that differ from the package's, by matrix: gate, up, down, and names of fixed matrices."""
        return {place.name: place.quantization for place in self.layout.matrices if place.quantization} | dict(
            self.quantizations
        )

    def row_quantization(self, matrix: str) -> Quantization:
        """Return the quantization of a feed-forward's matrix: gate, up or down."""
        place = next(place for place in self.layout.matrices if place.name == matrix)
        return place.quantization or self.quantization

    @property
    def size_bytes(self) -> int:
        """Size of all files of the package."""
        return sum(entry.bytes for entry in self.files.values())

    @property
    def precision(self) -> str:
        """The quantization for a person, with that of gates if it differs."""
        gates = self.trigger_quantization
        return self.quantization if gates == self.quantization else f"{self.quantization} ({gates} gates)"

    @cached_property
    def trigger_slot_bytes(self) -> int:
        """Size of a memory slot for a trigger part: the used bytes, in whole cache lines."""
        return self.layout.slot_bytes("trigger", self.quantization, self.model.width)

    @cached_property
    def value_slot_bytes(self) -> int:
        """Size of a memory slot for a value part."""
        return self.layout.slot_bytes("value", self.quantization, self.model.width)

    def slots(self, *, moved: bool = False) -> SlotPlaces:
        """Return the memory slots of a run.

        moved: as in `Layout.slots`
        """
        return self._moved_slots if moved else self._plain_slots

    @cached_property
    def _plain_slots(self) -> SlotPlaces:
        return self.layout.slots(self.quantization, self.model.width)

    @cached_property
    def _moved_slots(self) -> SlotPlaces:
        return self.layout.slots(self.quantization, self.model.width, moved=True)

    def profile(self, mode: ProfileMode) -> ActivityProfile | None:
        """Return the activity profile of a mode; None if it was not measured."""
        return next((profile for profile in self.profiles if profile.mode == mode), None)

    def sealed(self) -> Manifest:
        """Return the same manifest with its id."""
        return replace(self, id=identity(_without_id(self)))

    def to_bytes(self) -> bytes:
        """Return the content of manifest.json."""
        return json.dumps({**_without_id(self), "id": self.id}, indent=1, ensure_ascii=True).encode() + b"\n"


def identity(values: Mapping[str, Any]) -> str:
    """Return the id of a manifest: SHA-256 of its JSON without `id`, keys sorted, no spaces, ASCII."""
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _layer_kind(kind: LayerKind) -> dict[str, Any]:
    """Return a layer kind as JSON. `rotary` is left out if it is true, as in packages without this field."""
    return {name: value for name, value in asdict(kind).items() if (name, value) != ("rotary", True)}


def _without_id(manifest: Manifest) -> dict[str, Any]:
    layout = manifest.layout
    values: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "name": manifest.name,
        "source": {
            name: value
            for name, value in asdict(manifest.source).items()
            if value or name not in ("weights", "importance")
        },
        "model": {
            name: value
            for name, value in asdict(manifest.model).items()
            if name not in LATER_FIELDS or value != LATER_FIELDS[name]
        }
        | {"layer_kinds": [_layer_kind(kind) for kind in manifest.model.layer_kinds]},
        "quantization": manifest.quantization,
        **({"quantizations": dict(manifest.quantizations)} if manifest.quantizations else {}),
        "special_tokens": {"end": list(manifest.end_tokens)},
        "layout": {
            "cluster_neurons": layout.cluster_neurons,
            "clusters": layout.clusters,
            "trigger_part_bytes": layout.trigger_part_bytes,
            "value_part_bytes": layout.value_part_bytes,
            "cluster_stride_bytes": layout.cluster_stride_bytes,
            "block_neurons": layout.block_neurons,
            "blocks": layout.blocks,
            "neuron_order": layout.neuron_order,
            "matrices": {
                matrix.name: {
                    "part": matrix.part,
                    "quants": matrix.quants,
                    "scales_part": matrix.scales_part,
                    "scales": matrix.scales,
                }
                | ({} if matrix.quantization is None else {"quantization": matrix.quantization})
                for matrix in layout.matrices
            },
        },
        "files": {
            name: {"bytes": entry.bytes} | ({"sha256": entry.sha256} if entry.sha256 else {})
            for name, entry in manifest.files.items()
        },
        "quantization_error": dict(manifest.quantization_error),
    }
    if manifest.fired_by_layer is not None:
        values["activity"] = {"mean_by_layer": list(manifest.fired_by_layer)}
        if manifest.trigger_fired_by_layer is not None:
            values["activity"]["trigger_fired_by_layer"] = list(manifest.trigger_fired_by_layer)
    if manifest.predictor is not None:
        values["predictor"] = {name: value for name, value in asdict(manifest.predictor).items() if value is not None}
    if manifest.silent is not None:
        values["silent"] = asdict(manifest.silent)
    if manifest.npu is not None:
        values["npu"] = asdict(manifest.npu)
    if manifest.profiles:
        values["profiles"] = profiles_as_json(manifest.profiles)
    if manifest.chat is not None:
        values["chat"] = asdict(manifest.chat)
    if manifest.workload is not None:
        values["workload"] = {
            "seed": manifest.workload.seed,
            "presets": {
                name: {"first_token": first, "tokens": tokens}
                for name, (first, tokens) in manifest.workload.presets.items()
            },
        }
    return {name: _as_json(value) for name, value in values.items()}


def _as_json(value: Any) -> Any:
    """Return the same value with tuples as lists, as JSON is read back."""
    if isinstance(value, dict):
        return {key: _as_json(inner) for key, inner in value.items()}
    return [_as_json(inner) for inner in value] if isinstance(value, list | tuple) else value
