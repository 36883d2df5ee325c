"""A model as data: what its architecture computes, without its weights and its name.

Everything else derives from this description: the tensors of a package, the computation of the engines, the memory of a
run. No other code depends on the family of a model.

    step       x = embedding[token] (+ position_embedding[position])
    each layer x += attention_output(attend(heads(norm(x)))) ; x += down(inner(norm(x))) ; parallel: both of the same x
    logits     output(norm(x))
    inner      gated: activation(gate(x)) * up(x), drelu: relu(gate(x)) * relu(up(x)); not gated: activation(up(x))
    relu       0 for values up to activation_threshold, others unchanged
    latents    keys and values of all heads are products with one vector of a position, its latent
    gelu       gate * (1 + tanh(sqrt(2 / pi) * (gate + 0.044715 gate^3))) / 2
    gelu_erf   gate * (1 + erf(gate / sqrt(2))) / 2
    norms after  x += norm(attention_output(..)) and x += norm(down(..)), besides or instead of the norms before
    clamped_swiglu  (clamp(up) + 1) * g * sigmoid(1.702 g) with g = min(gate, limit): the experts of gpt-oss
    mixture    down(inner(norm(x))) is a sum over the experts with the greatest router values, each times its share, and
               over the shared experts, each times its gate

All experts have the same number of neurons, so that the clusters of a package are alike. A feed-forward of several
times that width is that many experts which compute every token: a layer without a router has no others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Literal, NamedTuple

from neuronpipe.plans.models.attention_sizes import AttentionSizes, CachedVectors
from neuronpipe.plans.models.expert_numbers import ExpertNumbers
from neuronpipe.plans.models.layer_properties import LayerProperties
from neuronpipe.plans.models.recurrent_sizes import Mixer
from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.marks import REQUIRED, Range, marks_of
from neuronpipe.protocol.schema import FieldError

Activation = Literal["relu", "drelu", "relu2", "silu", "clamped_swiglu", "gelu", "gelu_erf"]
NormKind = Literal["rms", "layer"]
NormPlaces = Literal["before", "after", "both"]
Positions = Literal["rotary", "learned"]
Router = Literal["softmax", "sigmoid", "sparsemixer"]
RouterInput = Literal["feed_forward", "layer"]
SELECTABLE_ACTIVATIONS: tuple[Activation, ...] = ("relu", "drelu", "relu2", "silu")  # which one a user may choose


class Limits(NamedTuple):
    """The largest values of ModelSpec's fields. Every reader of models applies them.

    layers: maximal number of layers of all kinds together
    """

    width: int = 1 << 20
    neurons: int = 1 << 22
    experts: int = 4096
    layers: int = 4096
    query_heads: int = 4096
    key_heads: int = 4096
    head_width: int = 4096
    vocabulary: int = 1 << 24
    context_tokens: int = 1 << 24


MAX = Limits()
MAX_THRESHOLD = 1e6
MAX_CONVOLUTION = 8  # tokens
MIN_SCALE, MAX_SCALE = 1e-6, 1e6

Width = Annotated[int, Range(1, MAX.width)]
OptionalWidth = Annotated[int, Range(0, MAX.width)]
HeadWidth = Annotated[int, Range(1, MAX.head_width)]
OptionalHeadWidth = Annotated[int, Range(0, MAX.head_width)]
Heads = Annotated[int, Range(1, MAX.query_heads)]
OptionalHeads = Annotated[int, Range(0, MAX.query_heads)]
Experts = Annotated[int, Range(1, MAX.experts)]
OptionalExperts = Annotated[int, Range(0, MAX.experts)]
Scale = Annotated[float, Range(MIN_SCALE, MAX_SCALE)]
Threshold = Annotated[float, Range(0.0, MAX_THRESHOLD)]
Share = Annotated[float, Range(0.0, 1.0)]
RequiredFlag = Annotated[bool, REQUIRED]


class SpecError(FieldError):
    """A ModelSpec whose field `field` is out of range or contradicts another. `complaint` says how."""


@frozen(slots=True)
class LayerKind:
    """A run of consecutive layers of the same kind.

    layers: number of layers
    window_tokens: the attention window: how many tokens a token attends to, itself included; 0: all up to itself
    rotary: True if heads are rotated, in a model with rotary positions
    dense_experts: in a mixture, the experts of a layer that has no router, all of which compute each token; 0: the
        layer has a router
    local_positions: True if heads are rotated by the local table of the model, not by that of the other layers
    mixer: what mixes tokens: attention, or a recurrent state; none: the layer has a feed-forward only
    feed_forward: False if the layer has a mixer only
    key_heads: heads of keys and values; 0: the model's number
    head_width: width of a head; 0: the model's
    value_from_key: there is no value matrix: a value is the product of the key matrix, before it is normed and rotated
    """

    layers: Annotated[int, Range(1, MAX.layers)]
    window_tokens: Annotated[int, Range(0, MAX.context_tokens), REQUIRED] = 0
    rotary: bool = True
    dense_experts: OptionalExperts = 0
    local_positions: bool = False
    mixer: Mixer = "attention"
    feed_forward: bool = True
    key_heads: OptionalHeads = 0
    head_width: OptionalHeadWidth = 0
    value_from_key: bool = False


@frozen(kw_only=True)
class ModelSpec(AttentionSizes, ExpertNumbers, LayerProperties):
    """An architecture with its sizes. Raises SpecError if fields contradict each other or are out of range.

    The reader and the writer of manifests, MODEL.md, and the engine's structure with its checks derive from this
    declaration: a field's type, marks, default and line below.

    family: name of the family in plans/models/, only for messages and tables
    width: number of elements of the residual stream
    neurons: neurons of one expert's feed-forward
    experts: experts of each layer among which its router chooses; a dense model has one
    experts_per_token: how many of them compute a token
    shared_experts: further experts of each layer with a router, which compute every token
    shared_gate: each token's output of the shared experts is multiplied by the sigmoid of a product with its input
    router: how router values become scores: their softmax, or their sigmoids. A chosen expert's share is its score,
        divided by the sum of the chosen experts' if `normalized_shares`, times `routed_scale`. sparsemixer: the share
        of each of two experts is its softmax among those whose values are near its own, the first one left out for the
        second: (v - u) / max(|u|, v) is at most twice `router_jitter`
    choosing_bias: experts are chosen by score plus a bias of each expert, which does not change the shares
    normalized_shares: the scores of the chosen experts are divided by their sum
    router_groups: groups of consecutive experts; a token's experts are in those with the greatest sum of two scores
    groups_per_token: how many groups a token's experts are in
    groups_by_best: groups are ranked by their greatest score instead of the sum of two
    router_reads: input of the router: the normed input of the feed-forward, or the layer's input unchanged
    router_norm: the router reads the feed-forward's input through an RMS norm of its own instead
    expert_scales: each expert's share is multiplied by a number of its own
    layer_kinds: the layers from the first to the last, in runs of the same kind
    draft_layers: the last ones of them, which no token needs: they draft tokens (multi-token prediction, MTP)
    query_heads: heads of attention
    key_heads: heads of keys and values; divides query_heads
    head_width: width of a query, key or value of one head; with latents of a query or key
    latent_width: multi-head latent attention: width of the vector from which the keys and values of all heads are
        computed, so that the KV cache needs only this vector and the rotated part of keys; 0: there are no latents
    rotary_width: with latents, the elements at a head's end that are rotated; of keys they are the same in all heads
    value_width: with latents, the width of a value of one head
    query_rank: with latents, the width of the vector from which queries are computed; 0: the layer's normed input
    gated_attention: attention's output is multiplied by the sigmoids of a product with its input
    state_heads: heads of recurrent layers with memories; 0: there are none
    state_key_heads: heads of their keys and queries; divides state_heads
    state_key_width: width of such a key
    state_value_width: width of a value of one head
    state_rank: Kimi delta attention: width of the two vectors from which decays and the gate are computed; else 0
    state_norm_groups: Mamba-2: groups of consecutive elements of the output, which are normed by themselves; else 0
    convolution_tokens: tokens that the convolution of recurrent layers mixes; 0: there are none
    convolution_bias: these convolutions have biases
    min_time_step: Mamba-2: the least time of a token
    vocabulary: rows of the embedding
    context_tokens: maximal number of positions of a sequence
    norm: rms: x / rms(x) * weight; layer: (x - mean(x)) / deviation(x) * weight + bias
    norms: vectors that are normed: what attention and feed-forward read (before), what they add (after), or both
    branch_norms: chosen experts have a norm of their input besides that of shared experts; the sum of their outputs is
        normed, and so is that of the shared experts', before both are added and normed again
    layer_scales: the residual stream is multiplied by a number of each layer behind it
    norm_epsilon: added to the mean square, or to the variance
    positions: rotary: heads are rotated by tables of the package; learned: each position has a vector that is added to
        the embedding
    head_norm: queries and keys are RMS-normed, each head by itself, before they are rotated
    norm_after_rotation: queries and keys are normed, each head by itself, after they are rotated
    joint_norm: queries and keys are RMS-normed, all heads together, before they are rotated
    value_norm: values are RMS-normed without weights, each head by itself
    qkv_limit: largest magnitude of the elements of queries, keys and values, which are clipped to it after their norms
        and before they are rotated; 0: they are not. Not with latents
    activation: activation of the feed-forward
    gated: the feed-forward has Gate beside Up and Down
    qkv_bias: the projections of queries, keys and values have biases
    logit_bias: the logits have biases
    output_bias: the output projection of attention has a bias
    ffn_bias: all matrices of the feed-forward have biases; with a gate only if all neurons fire
    router_bias: the router has a bias for each expert
    attention_sinks: each query head has a score that joins its softmax, and whose share is dropped
    tied_embeddings: the embedding is the output matrix too
    parallel: the feed-forward of a layer reads the layer's input, not its sum with attention's output
    activation_limit: the largest value of Gate, and of Up on both sides; 0 unless activation is clamped_swiglu
    activation_threshold: value that a neuron's trigger must exceed for the neuron to fire; 0 unless activation is relu
    score_cap: attention scores become score_cap * tanh(score / score_cap) before their softmax; 0: they stay
    logit_cap: likewise of logits
    embedding_scale: factor of a token's embedding
    logit_scale: factor of every logit
    residual_scale: factor of what attention and feed-forward add to the residual stream
    attention_scale: factor of attention scores besides 1 / sqrt(head_width): YaRN's factor for long contexts, squared
    local_attention_scale: the same in layers with local positions
    query_growth: factor of queries by position, after their rotation: 1 + query_growth * ln(1 + n) behind n times
        query_growth_tokens positions; 0: there is none
    query_growth_tokens: 0 without query_growth
    routed_scale: factor of the shares of chosen experts
    rotary_scale: factor of the rotated elements of queries and keys
    router_jitter: the field of `router`; 0 unless that is sparsemixer
    """

    family: str
    width: Width
    neurons: Annotated[int, Range(1, MAX.neurons)]
    experts: Annotated[int, Range(1, MAX.experts), REQUIRED] = 1
    experts_per_token: Experts = 1
    shared_experts: OptionalExperts = 0
    shared_gate: bool = False
    router: Router = "softmax"
    router_reads: RouterInput = "feed_forward"
    router_norm: bool = False
    expert_scales: bool = False
    choosing_bias: bool = False
    normalized_shares: bool = True
    router_groups: Experts = 1
    groups_per_token: Experts = 1
    groups_by_best: bool = False
    layer_kinds: tuple[LayerKind, ...]
    draft_layers: Annotated[int, Range(0, 1)] = 0
    query_heads: Heads
    key_heads: Heads
    head_width: HeadWidth
    latent_width: OptionalWidth = 0
    rotary_width: OptionalHeadWidth = 0
    value_width: OptionalHeadWidth = 0
    query_rank: OptionalWidth = 0
    gated_attention: bool = False
    state_heads: OptionalHeads = 0
    state_key_heads: OptionalHeads = 0
    state_key_width: OptionalHeadWidth = 0
    state_value_width: OptionalHeadWidth = 0
    state_rank: OptionalWidth = 0
    state_norm_groups: OptionalHeads = 0
    convolution_tokens: Annotated[int, Range(0, MAX_CONVOLUTION)] = 0
    convolution_bias: bool = False
    min_time_step: Share = 0.0
    vocabulary: Annotated[int, Range(1, MAX.vocabulary)]
    context_tokens: Annotated[int, Range(1, MAX.context_tokens)]
    norm: Annotated[NormKind, REQUIRED] = "rms"
    norms: NormPlaces = "before"
    branch_norms: bool = False
    layer_scales: bool = False
    norm_epsilon: Share
    positions: Annotated[Positions, REQUIRED] = "rotary"
    head_norm: RequiredFlag = False
    norm_after_rotation: bool = False
    joint_norm: bool = False
    value_norm: bool = False
    qkv_limit: Threshold = 0.0
    activation: Activation
    gated: RequiredFlag = True
    qkv_bias: RequiredFlag = False
    output_bias: RequiredFlag = False
    logit_bias: bool = False
    ffn_bias: RequiredFlag = False
    router_bias: bool = False
    attention_sinks: bool = False
    tied_embeddings: RequiredFlag = False
    parallel: bool = False
    activation_limit: Threshold = 0.0
    activation_threshold: Threshold = 0.0
    score_cap: Threshold = 0.0
    logit_cap: Threshold = 0.0
    embedding_scale: Scale = 1.0
    residual_scale: Scale = 1.0
    logit_scale: Scale = 1.0
    attention_scale: Scale = 1.0
    local_attention_scale: Scale = 1.0
    query_growth: Threshold = 0.0
    query_growth_tokens: Annotated[int, Range(0, MAX.context_tokens)] = 0
    routed_scale: Scale = 1.0
    rotary_scale: Scale = 1.0
    router_jitter: Annotated[float, Range(0.0, 0.5)] = 0.0

    def __post_init__(self) -> None:
        for field, allowed in RANGES.items():
            value = getattr(self, field)
            self._require(field, value in allowed, f"{value} is not {allowed}")
        for field, allowed in RUN_RANGES.items():
            for value in {getattr(kind, field) for kind in self.layer_kinds}:
                self._require("layer_kinds", value in allowed, f"{field} {value} is not {allowed}")
        self._require("layer_kinds", 1 <= self.layers <= MAX.layers, f"{self.layers} layers, not 1 to {MAX.layers}")
        for fault in (self.heads_fault(), self.latent_fault(), self.recurrent_fault()):
            if fault is not None:
                raise SpecError(*fault)
        self._require_layers()
        plain = self.gated or self.activation in ("relu", "relu2", "gelu", "gelu_erf")
        self._require("activation", plain, f"{self.activation} needs a feed-forward with a gate")
        plain = self.activation == "relu" or self.activation_threshold == 0
        self._require("activation_threshold", plain, f"is not 0, but {self.activation} has none")
        chosen = self.experts_per_token
        self._require("experts_per_token", 1 <= chosen <= self.experts, f"{chosen} of {self.experts} experts")
        plain = not (self.gated and self.ffn_bias) or self.all_neurons_fire
        self._require("ffn_bias", plain, f"not supported with a gate and {self.activation}")
        self._require_routing()
        self._require("norms", self.norms == "before" or not self.parallel, f"{self.norms} does not go with parallel")
        self._require("layer_scales", self.norms_after or not self.layer_scales, "not supported without norms after")
        local = any(self.local_layers)
        one_table = self.positions != "rotary" or self.latent_width > 0
        self._require("layer_kinds", not (local and one_table), "local positions are rotary, and without latents")
        self._require("local_attention_scale", local or self.local_attention_scale == 1, "no layer is local")
        is_complete = (self.query_growth > 0) == (self.query_growth_tokens > 0)
        self._require("query_growth", is_complete, f"{self.query_growth} behind {self.query_growth_tokens} tokens")
        limited = self.activation == "clamped_swiglu"
        within = self.activation_limit > 0 if limited else self.activation_limit == 0
        self._require("activation_limit", within, f"{self.activation_limit} does not go with {self.activation}")

    def _require_layers(self) -> None:
        kinds = self.layer_kinds
        whole = all(kind.feed_forward or kind.mixer != "none" for kind in kinds)
        self._require("layer_kinds", whole, "a layer has neither mixer nor feed-forward")
        self._require("layer_kinds", any(kind.feed_forward for kind in kinds), "no layer has a feed-forward")
        attends = all(kind.mixer == "attention" or (kind.window_tokens == 0 and kind.rotary) for kind in kinds)
        self._require("layer_kinds", attends, "a layer without attention has no window and no positions")
        routed = all(kind.feed_forward or kind.dense_experts == 0 for kind in kinds)
        self._require("layer_kinds", routed, "dense experts in a layer without feed-forward")
        plain = all(kind.mixer == "attention" and kind.feed_forward for kind in kinds)
        self._require("parallel", plain or not self.parallel, "needs attention and a feed-forward in every layer")
        self._require("norms", plain or self.norms == "before", f"{self.norms} needs attention in every layer")
        for field in ("gated_attention", "qkv_limit", "draft_layers"):
            self._require(field, not (getattr(self, field) and self.latent_width), "not supported with latents")
        drafts = kinds[-1].mixer == "attention" and kinds[-1].feed_forward and self.text_layers > 0
        drafts = drafts and self.positions == "rotary" and not kinds[-1].window_tokens
        requirement = "needs a last layer with rotary attention to all tokens"
        self._require("draft_layers", drafts or not self.draft_layers, requirement)

    def _require_routing(self) -> None:
        for field in ("router_bias", "choosing_bias", "shared_gate", "router_norm", "expert_scales", "branch_norms"):
            self._require(field, self.experts > 1 or not getattr(self, field), "a dense model has no router")
        for field in ("router_groups", "groups_per_token", "routed_scale"):
            self._require(field, self.experts > 1 or getattr(self, field) == 1, "a dense model has no router")
        self._require("normalized_shares", self.experts > 1 or self.normalized_shares, "a dense model has no router")
        whole = 1 <= self.router_groups <= self.experts and self.experts % self.router_groups == 0
        self._require("router_groups", whole, f"{self.router_groups} groups of {self.experts} experts")
        chosen, of_group = self.groups_per_token, self.experts // self.router_groups
        within = 1 <= chosen <= self.router_groups and chosen * of_group >= self.experts_per_token
        self._require("groups_per_token", within, f"{chosen} of {self.router_groups} groups of {of_group} experts")
        self._require("router_groups", self.router_groups == 1 or of_group > 1, "a group has at least two experts")
        two = self.experts_per_token == 2 and self.normalized_shares and not self.choosing_bias
        plain = self.router != "sparsemixer" or (two and self.router_groups == 1)
        self._require("router", plain, "sparsemixer chooses two experts by their values alone")
        plain = self.router == "sparsemixer" or self.router_jitter == 0
        self._require("router_jitter", plain, f"does not go with {self.router}")
        self._require("groups_by_best", self.router_groups > 1 or not self.groups_by_best, "there are no groups")
        shared, dense = self.shared_experts, [kind.dense_experts for kind in self.layer_kinds]
        within = 0 <= shared <= MAX.experts - self.experts and (shared == 0 or self.experts > 1)
        self._require("shared_experts", within, f"{shared} of a layer with {self.experts} other experts")
        self._require("shared_gate", shared > 0 or not self.shared_gate, "there are no shared experts")
        within = all(0 <= count <= MAX.experts for count in dense) and (not any(dense) or self.experts > 1)
        self._require("layer_kinds", within, f"{max(dense)} dense experts")
        has_router = any(kind.feed_forward and not kind.dense_experts for kind in self.layer_kinds)
        self._require("layer_kinds", self.experts == 1 or has_router, "a mixture has layers with a router")
        plain = not (self.ffn_bias and self.experts_differ)
        self._require("ffn_bias", plain, "not supported with shared experts or dense layers")
        plain = self.router_reads == "feed_forward" or not self.router_norm
        self._require("router_norm", plain, f"does not go with a router that reads the {self.router_reads}'s input")
        has_branches = self.norms == "both" and shared > 0 and not any(dense)
        self._require(
            "branch_norms", has_branches or not self.branch_norms, "needs norms before and after and shared experts"
        )
        once = not (self.head_norm and self.joint_norm)
        self._require("joint_norm", once, "queries and keys are normed once")
        normed = self.head_norm or not self.norm_after_rotation
        self._require("norm_after_rotation", normed, "heads are not normed")

    def _require(self, field: str, holds: bool, complaint: str) -> None:
        if not holds:
            raise SpecError(field, complaint)

    @cached_property
    def cached_vectors_in_windows(self) -> Mapping[tuple[CachedVectors, int], int]:
        """The number of layers for each pair of a position's vectors and a window in tokens (0: none)."""
        return Counter(zip(self.cached_vectors, self.windows_tokens, strict=True))

    @cached_property
    def layers(self) -> int:
        return sum(kind.layers for kind in self.layer_kinds)

    @property
    def text_layers(self) -> int:
        """Number of layers that every token passes."""
        return self.layers - self.draft_layers


RANGES, RUN_RANGES = marks_of(ModelSpec, Range), marks_of(LayerKind, Range)
"""The range of each number of ModelSpec and of LayerKind, by the field's name."""


def runs_of(
    windows_tokens: list[int],
    rotary: list[bool] | None = None,
    dense_experts: list[int] | None = None,
    local_positions: list[bool] | None = None,
    mixers: Sequence[Mixer] | None = None,
    feed_forward: list[bool] | None = None,
) -> tuple[LayerKind, ...]:
    """Return `layer_kinds` of ModelSpec: consecutive layers with equal properties form one run.

    windows_tokens: attention window of each layer, from the first to the last; 0: none
    rotary: for each layer, True if its heads are rotated; None: all are
    dense_experts: the field of LayerKind, of each layer; None: all layers of a mixture have a router
    local_positions: the field of LayerKind, of each layer; None: False
    mixers: the field `mixer` of LayerKind, of each layer; None: attention
    feed_forward: the field of LayerKind, of each layer; None: True
    """
    layers = len(windows_tokens)
    of_layers = zip(
        windows_tokens,
        rotary or [True] * layers,
        dense_experts or [0] * layers,
        local_positions or [False] * layers,
        mixers or ["attention"] * layers,
        feed_forward or [True] * layers,
        strict=True,
    )
    return joined_runs([LayerKind(1, *of_layer) for of_layer in of_layers])


def joined_runs(layers: Sequence[LayerKind]) -> tuple[LayerKind, ...]:
    """Return `layer_kinds` of ModelSpec from a run for each layer."""
    kinds: list[LayerKind] = []
    for kind in layers:
        if kinds and replace(kinds[-1], layers=1) == kind:
            kinds[-1] = replace(kind, layers=kinds[-1].layers + 1)
        else:
            kinds.append(kind)
    return tuple(kinds)
