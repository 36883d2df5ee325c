"""The manifest, manifest.json, which describes a package. FORMAT.md specifies every field.

The manifest names every other file with its size and hash. Its `id` is the hash of its own content. A plan is valid for
one id.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, field, replace
from functools import cached_property
from typing import Annotated, Any, Literal

from neuronpipe.plans.models.spec import ModelSpec, Share, Threshold
from neuronpipe.plans.package.activity_profile import ActivityProfile, ProfileMode, profiles_as_json
from neuronpipe.plans.package.layout import GROUP_WEIGHTS, Layout, Quantization, SlotPlaces
from neuronpipe.plans.package.npu_section import NpuProfile
from neuronpipe.plans.package.source_experts import SourceExperts
from neuronpipe.plans.strict_json import MAX_LINE_CHARACTERS
from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.marks import Range
from neuronpipe.protocol.schema import to_json

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
DEFAULT_RECALL = 0.98  # share of the active neurons that `profile` aims to predict
EMBEDDINGS = ("embedding", "output")
ERROR_KINDS = ("embedding", "output", "attention", "gate", "up", "down", "predictor")

SOURCE_KINDS = ("huggingface", "gguf", "synthetic")

MAX_RANK = 1 << 16

Line = Annotated[str, Range(0, MAX_LINE_CHARACTERS)]
Tokens = Annotated[int, Range(1, MAX_TEXT_TOKENS)]
Perplexity = Annotated[float, Range(1.0, MAX_PERPLEXITY)]
Rank = Annotated[int, Range(GROUP_WEIGHTS, MAX_RANK)]
Side = Literal["gate", "up"]
PredictorInput = Literal["attention", "feed_forward", "residual"]
Hidden = Literal["none", "relu"]
QUANTIZATIONS: tuple[Quantization, ...] = ("q4", "iq4", "mxfp4", "q4k", "q5k", "q6k", "q4h", "q5h", "q8", "f16")
PREDICTOR_QUANTIZATIONS: tuple[Quantization, ...] = ("q4", "q8", "f16")
GATE_QUANTIZATIONS: tuple[Quantization, ...] = ("q3",)  # for gates only, in packages of q4


@frozen(slots=True)
class Source:
    """The source of a package, for people.

    weights: number of weights by encoding, the most frequent first; empty unless the source is quantized
    importance: the text or imatrix file by which encoding weighed errors; "" if it did not
    """

    kind: str
    name: str
    architecture: str
    weights: Mapping[str, int] = field(default_factory=dict)
    importance: str = ""


@frozen(slots=True)
class PredictorQuality:
    """Quality of the predictions of one layer's neurons on held-out text; shares 0..1.

    recall: share of the active neurons that are predicted
    precision: share of the predicted neurons that are active
    predicted: share of all neurons that are predicted
    """

    recall: Share
    precision: Share
    predicted: Share


@frozen(slots=True)
class Predictor:
    """The predictor whose tensors are in predictor.safetensors; FORMAT.md specifies its arithmetic.

    rank: rows of `input`, a multiple of 32; the largest if ranks differ
    quantization: encoding of all its matrices
    reads: attention: the normed input of the layer (`attention_norm`), known before attention, so that reads hide
        behind it; feed_forward: the normed input of the feed-forward (`ffn_norm`); residual: the input of that norm,
        which PowerInfer's and TurboSparse's predictors read
    sides: matrices whose signs are predicted; a neuron is predicted if the scores of all are positive. The trigger
        (gate, or up without a gate); with `drelu` also gate and up
    hidden: activation function between the two factors; relu for imported PowerInfer predictors
    calibration_tokens: tokens that factors or thresholds were fitted on; 0: the checkpoint's predictor, unchanged, with
        the threshold it was trained for
    by_layer: quality in each layer; empty if it was not measured
    ranks: if they differ, the rank of each feed-forward, by layer * experts + expert; multiples of 32
    text: name of the text on which the cost of mode predicted was measured. This and the following three fields are all
        there or none; packages without them count as unmeasured
    held_out_tokens: tokens of the text that were measured
    exact_perplexity: perplexity of these tokens, by the reference engine
    predicted_perplexity: the same in mode predicted
    """

    rank: Rank
    quantization: Quantization
    reads: PredictorInput
    sides: tuple[Side, ...]
    hidden: Hidden
    calibration_tokens: Annotated[int, Range(0, MAX_TEXT_TOKENS)]
    by_layer: tuple[PredictorQuality, ...]
    ranks: tuple[Rank, ...] | None = None
    text: Line | None = None
    held_out_tokens: Tokens | None = None
    exact_perplexity: Perplexity | None = None
    predicted_perplexity: Perplexity | None = None

    @property
    def loss_share(self) -> float | None:
        """Relative increase of perplexity in mode predicted; None if it was not measured."""
        if self.exact_perplexity is None or self.predicted_perplexity is None:
            return None
        return self.predicted_perplexity / self.exact_perplexity - 1

    def rank_of(self, ffn: int) -> int:
        """Return the rank of a feed-forward's predictor. ffn: layer * experts + expert."""
        return self.rank if self.ranks is None else self.ranks[ffn]


def package_rank(rank: int) -> int:
    """Return the rank of factors in a package: rounded up to whole groups, since zeros pad the factors."""
    return -(-rank // GROUP_WEIGHTS) * GROUP_WEIGHTS


@frozen(slots=True)
class SilentLayer:
    """The threshold of one layer.

    threshold: a neuron is below it (silent) for a token if |silu(gate)| is less
    share: share of silent neurons, on held-out text in mode thresholded
    """

    threshold: Threshold
    share: Share


@frozen(slots=True)
class Silent:
    """The thresholds of mode thresholded, below which neurons of a SiLU model are left out, and the measured loss.

    share: target share of silent neurons
    by_layer: the threshold of each layer
    text: name of the text
    calibration_tokens: tokens of the text that set the thresholds
    held_out_tokens: other tokens of the text, on which perplexities were measured
    exact_perplexity: perplexity of the held-out tokens, by the reference engine
    thresholded_perplexity: the same in mode thresholded
    """

    share: Annotated[float, Range(0.0, MAX_SILENT_SHARE)]
    by_layer: tuple[SilentLayer, ...]
    text: Line
    calibration_tokens: Tokens
    held_out_tokens: Tokens
    exact_perplexity: Perplexity
    thresholded_perplexity: Perplexity

    @property
    def loss_share(self) -> float:
        """Relative increase of perplexity in mode thresholded."""
        return self.thresholded_perplexity / self.exact_perplexity - 1

    def loss(self) -> str:
        return (
            f"perplexity {self.thresholded_perplexity:.4g} instead of {self.exact_perplexity:.4g} exact "
            f"({self.loss_share:+.2%}), on {self.held_out_tokens:,} held-out tokens of {self.text}"
        )


@frozen(slots=True)
class Workload:
    """The trajectories of a synthetic package.

    presets: name -> (id of the first token, number of tokens). Greedy decoding from any token of a preset yields the
        following ids of the preset in order.
    """

    seed: int
    presets: Mapping[str, tuple[int, int]]


@frozen(slots=True)
class Chat:
    """The texts that the chat template calls `bos_token` and `eos_token`; "" if the model has none."""

    begin: str
    end: str


@frozen(slots=True)
class FileEntry:
    """Size and hash of one file.

    sha256: None for bundles.bin, whose clusters have checksums, and for the checksums of experts that are read in
        place, which the loader adds
    """

    bytes: int
    sha256: str | None


@frozen
class Manifest:
    """The manifest of a package. `id` is "" unless `sealed` computed it or a file had it."""

    name: str
    source: Source
    model: ModelSpec
    quantization: Quantization
    end_tokens: tuple[int, ...]
    layout: Layout
    files: Mapping[str, FileEntry]
    quantization_error: Mapping[str, float]  # kind of tensor -> |w - w'| / |w|
    fired_by_layer: tuple[float, ...] | None  # mean share of neurons that fire; None: not measured; `activity` in JSON
    trigger_fired_by_layer: tuple[float, ...] | None = None  # mean share whose trigger fires, on the same text
    predictor: Predictor | None = None
    silent: Silent | None = None  # None: no thresholds
    profiles: tuple[ActivityProfile, ...] = ()  # one for each measured mode, in the order of activity.bin
    npu: NpuProfile | None = None  # measured loss of a neural processor's arithmetic
    workload: Workload | None = None
    chat: Chat | None = None  # of a package with a chat template
    quantizations: Mapping[str, Quantization] = field(default_factory=dict)  # of fixed matrices that differ
    source_experts: SourceExperts | None = None  # experts that are read in place; None: they are in bundles.bin
    compact_tokenizer: bool = False  # `BytePairTokens.open` reads it, so that it takes little memory
    id: str = ""

    @cached_property
    def clusters(self) -> int:
        return self.model.ffns * self.layout.clusters

    @property
    def trigger_quantization(self) -> Quantization:
        """Quantization of the rows that decide whether a neuron fires."""
        return self.layout.matrices[0].quantization or self.quantization

    def quantization_of(self, name: str) -> Quantization:
        return self.quantizations.get(name, self.quantization)

    @property
    def all_quantizations(self) -> dict[str, Quantization]:
        """Quantizations that differ from the package's, by matrix: gate, up, down, and names of fixed matrices."""
        return {place.name: place.quantization for place in self.layout.matrices if place.quantization} | dict(
            self.quantizations
        )

    def row_quantization(self, matrix: str) -> Quantization:
        place = next(place for place in self.layout.matrices if place.name == matrix)
        return place.quantization or self.quantization

    @property
    def size_bytes(self) -> int:
        return sum(entry.bytes for entry in self.files.values())

    @property
    def precision(self) -> str:
        """The quantization for people, with that of gates if it differs."""
        gates = self.trigger_quantization
        return self.quantization if gates == self.quantization else f"{self.quantization} ({gates} gates)"

    @cached_property
    def trigger_slot_bytes(self) -> int:
        """Size of a memory slot for a trigger part without co-located scales."""
        return self.layout.slot_bytes("trigger", self.quantization, self.model.width)

    @cached_property
    def value_slot_bytes(self) -> int:
        """Size of a memory slot for a value part without co-located scales."""
        return self.layout.slot_bytes("value", self.quantization, self.model.width)

    def slots(self, *, moved: bool = False) -> SlotPlaces:
        """Return the memory slots of a cluster. moved: as in `Layout.slots`."""
        return self._moved_slots if moved else self._plain_slots

    @cached_property
    def _plain_slots(self) -> SlotPlaces:
        return self.layout.slots(self.quantization, self.model.width)

    @cached_property
    def _moved_slots(self) -> SlotPlaces:
        return self.layout.slots(self.quantization, self.model.width, moved=True)

    def profile(self, mode: ProfileMode) -> ActivityProfile | None:
        """Return the activity profile of a mode; None if it was not measured."""
        return self._profile_of_mode.get(mode)

    @cached_property
    def _profile_of_mode(self) -> Mapping[str, ActivityProfile]:
        return {profile.mode: profile for profile in reversed(self.profiles)}  # the first of a mode counts

    def sealed(self) -> Manifest:
        """Return a copy with the id of the content."""
        return replace(self, id=identity(_without_id(self)))

    def to_bytes(self) -> bytes:
        return json.dumps({**_without_id(self), "id": self.id}, indent=1, ensure_ascii=True).encode() + b"\n"


def identity(values: Mapping[str, Any]) -> str:
    """Return the id of a manifest: SHA-256 of its JSON with keys sorted, no spaces, ASCII. values: all but `id`."""
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _without_id(manifest: Manifest) -> dict[str, Any]:
    layout = manifest.layout
    values: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "name": manifest.name,
        "source": to_json(manifest.source),
        "model": to_json(manifest.model),
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
            **({"down_by_output": True} if layout.down_by_output else {}),
        },
        "files": {
            name: {"bytes": entry.bytes} | ({"sha256": entry.sha256} if entry.sha256 else {})
            for name, entry in manifest.files.items()
        },
        "quantization_error": dict(manifest.quantization_error),
        **({"compact_tokenizer": True} if manifest.compact_tokenizer else {}),
    }
    if manifest.source_experts is not None:
        values["source_experts"] = asdict(manifest.source_experts)
        for rows in (rows for of_runs in values["source_experts"]["matrices"].values() for rows in of_runs):
            if not rows["stride"]:  # as in older packages
                del rows["stride"]
    if manifest.fired_by_layer is not None:
        values["activity"] = {"mean_by_layer": list(manifest.fired_by_layer)}
        if manifest.trigger_fired_by_layer is not None:
            values["activity"]["trigger_fired_by_layer"] = list(manifest.trigger_fired_by_layer)
    if manifest.predictor is not None:
        values["predictor"] = to_json(manifest.predictor)
    if manifest.silent is not None:
        values["silent"] = to_json(manifest.silent)
    if manifest.npu is not None:
        values["npu"] = to_json(manifest.npu)
    if manifest.profiles:
        values["profiles"] = profiles_as_json(manifest.profiles)
    if manifest.chat is not None:
        values["chat"] = to_json(manifest.chat)
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
    """Return a copy with lists instead of tuples, so that values equal those read from JSON."""
    if isinstance(value, dict):
        return {key: _as_json(inner) for key, inner in value.items()}
    return [_as_json(inner) for inner in value] if isinstance(value, list | tuple) else value
