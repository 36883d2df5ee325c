"""manifest.json: what a package holds and where. FORMAT.md states every field.

The manifest names every other file with its size and hash, and carries the hash of itself as `id`. A plan is made for
one id.
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
QUANTIZATIONS: tuple[Quantization, ...] = ("q4", "q8", "f16")
GATE_QUANTIZATIONS: tuple[Quantization, ...] = ("q3",)  # of gates alone, in packages of q4


@frozen(slots=True)
class Source:
    """What the package was converted from."""

    kind: str
    name: str
    architecture: str
    weights: Mapping[str, int] = field(default_factory=dict)  # of a quantized source: by encoding, the most first


@frozen(slots=True)
class PredictorQuality:
    """How well one layer's neurons were predicted on held-out text; each a share 0..1.

    recall: of the active neurons, those predicted. precision: of the predicted, those active. predicted: of all
    neurons, those predicted. Predicted per active is recall / precision.
    """

    recall: float
    precision: float
    predicted: float


@frozen(slots=True)
class Predictor:
    """What predictor.safetensors computes; FORMAT.md states the arithmetic.

    rank: the greatest. reads: the normed input of the layer's attention, or of its feed-forward, or what the
    feed-forward's norm gets. sides: whose signs are predicted; both must be positive. hidden: what happens to the
    rank-vector before it is prepared as an activation. by_layer: empty where it was never measured. ranks: of each
    feed-forward, layer * experts + expert, where they differ. The last four, all or none: what mode predicted costs,
    measured on so many held-out tokens of a text.
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
        """By how much perplexity grows in mode predicted; None where it was never measured."""
        if self.exact_perplexity is None or self.predicted_perplexity is None:
            return None
        return self.predicted_perplexity / self.exact_perplexity - 1

    def rank_of(self, ffn: int) -> int:
        """The rank of one feed-forward's predictor."""
        return self.rank if self.ranks is None else self.ranks[ffn]


MAX_RANK = 1 << 16


def package_rank(rank: int) -> int:
    """The rank that factors of this rank have in a package: whole groups, filled up with zeros."""
    return -(-rank // GROUP_WEIGHTS) * GROUP_WEIGHTS


@frozen(slots=True)
class SilentLayer:
    """threshold: a neuron of this layer is silent for a token where |silu(gate)| is less. share: how often neurons
    were, on held-out text in mode thresholded."""

    threshold: float
    share: float


@frozen(slots=True)
class Silent:
    """From where on the neurons of a SiLU model count in mode thresholded, and what leaving out the others costs.

    share: of the neurons, those that were to be silent. text: its name. calibration_tokens of it set the thresholds;
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
        """By how much perplexity grows in mode thresholded."""
        return self.thresholded_perplexity / self.exact_perplexity - 1

    def loss(self) -> str:
        """For a person."""
        return (
            f"perplexity {self.thresholded_perplexity:.4g} instead of {self.exact_perplexity:.4g} exact "
            f"({self.loss_share:+.2%}), on {self.held_out_tokens:,} held-out tokens of {self.text}"
        )


@frozen(slots=True)
class Workload:
    """A synthetic package's trajectories: preset -> (first token, number of tokens). Greedy decoding from any token
    of a preset walks on through it, one id at a time."""

    seed: int
    presets: Mapping[str, tuple[int, int]]


@frozen(slots=True)
class Chat:
    """What the chat template calls `bos_token` and `eos_token`; "" where the model has none."""

    begin: str
    end: str


@frozen(slots=True)
class FileEntry:
    """Size and hash of one file; bundles.bin has no hash, its clusters have checksums."""

    bytes: int
    sha256: str | None


@frozen
class Manifest:
    """A package's manifest; `id` is empty until `sealed` has computed it."""

    name: str
    source: Source
    model: ModelSpec
    quantization: Quantization
    end_tokens: tuple[int, ...]
    layout: Layout
    files: Mapping[str, FileEntry]
    quantization_error: Mapping[str, float]  # kind of tensor -> |w - w'| / |w|
    fired_by_layer: tuple[float, ...] | None  # mean share of neurons that fire, when measured; `activity` in the file
    trigger_fired_by_layer: tuple[float, ...] | None = None  # mean share whose trigger fires, measured on the same text
    predictor: Predictor | None = None
    silent: Silent | None = None  # of a SiLU model that was given thresholds
    profiles: tuple[ActivityProfile, ...] = ()  # what activity.bin has of each mode that was measured
    npu: NpuProfile | None = None  # what a neural processor's arithmetic loses, where that was measured
    workload: Workload | None = None
    chat: Chat | None = None  # of a package with a chat template
    embedding_quantization: Quantization | None = None  # of embedding and output, where it is not the package's
    id: str = ""

    @cached_property
    def clusters(self) -> int:
        """Clusters of the whole package: entries of checksums.bin, and residency entries of one part."""
        return self.model.layers * self.model.experts * self.layout.clusters

    @property
    def trigger_quantization(self) -> Quantization:
        """That of the rows which decide whether a neuron fires."""
        return self.layout.matrices[0].quantization or self.quantization

    def quantization_of(self, name: str) -> Quantization:
        """That of a fixed matrix, by its name."""
        own = self.embedding_quantization if name in EMBEDDINGS else None
        return own or self.quantization

    @property
    def size_bytes(self) -> int:
        """What the package's files take."""
        return sum(entry.bytes for entry in self.files.values())

    @property
    def precision(self) -> str:
        """The quantization for a person, with that of gates where it is another."""
        own = self.trigger_quantization
        return self.quantization if own == self.quantization else f"{self.quantization} ({own} gates)"

    @cached_property
    def trigger_slot_bytes(self) -> int:
        """Bytes of a memory slot for a trigger part: what is used of it, in whole cache lines."""
        return self.layout.slot_bytes("trigger", self.quantization, self.model.width)

    @cached_property
    def value_slot_bytes(self) -> int:
        """Bytes of a memory slot for a value part."""
        return self.layout.slot_bytes("value", self.quantization, self.model.width)

    def slots(self, *, moved: bool = False) -> SlotPlaces:
        """The memory slots of a run; moved: as in `Layout.slots`."""
        return self._moved_slots if moved else self._plain_slots

    @cached_property
    def _plain_slots(self) -> SlotPlaces:
        return self.layout.slots(self.quantization, self.model.width)

    @cached_property
    def _moved_slots(self) -> SlotPlaces:
        return self.layout.slots(self.quantization, self.model.width, moved=True)

    def profile(self, mode: ProfileMode) -> ActivityProfile | None:
        """What was measured of the neurons in this mode."""
        return next((profile for profile in self.profiles if profile.mode == mode), None)

    def sealed(self) -> Manifest:
        """The same manifest with its id."""
        return replace(self, id=identity(_without_id(self)))

    def to_bytes(self) -> bytes:
        """manifest.json as it is written."""
        return json.dumps({**_without_id(self), "id": self.id}, indent=1, ensure_ascii=True).encode() + b"\n"


def identity(values: Mapping[str, Any]) -> str:
    """The id of a manifest: SHA-256 of its JSON without `id`, keys sorted, no spaces, ASCII."""
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _layer_kind(kind: LayerKind) -> dict[str, Any]:
    """Rotary, unless it says otherwise."""
    return {name: value for name, value in asdict(kind).items() if (name, value) != ("rotary", True)}


def _without_id(manifest: Manifest) -> dict[str, Any]:
    layout = manifest.layout
    values: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "name": manifest.name,
        "source": {name: value for name, value in asdict(manifest.source).items() if name != "weights" or value},
        "model": {
            name: value
            for name, value in asdict(manifest.model).items()
            if name not in LATER_FIELDS or value != LATER_FIELDS[name]
        }
        | {"layer_kinds": [_layer_kind(kind) for kind in manifest.model.layer_kinds]},
        "quantization": manifest.quantization,
        **({"embedding_quantization": own} if (own := manifest.embedding_quantization) is not None else {}),
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
    """The same value with tuples as lists, as it comes back from a file."""
    if isinstance(value, dict):
        return {key: _as_json(inner) for key, inner in value.items()}
    return [_as_json(inner) for inner in value] if isinstance(value, list | tuple) else value
