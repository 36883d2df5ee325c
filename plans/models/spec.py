"""A model as data: what its architecture computes, without its weights and its name.

Everything else derives from this description: the tensors of a package, the computation of the engines, the memory of a
run. No other code depends on the family of a model.

    step       x = embedding[token] (+ position_embedding[position])
    each layer x += attention_output(attend(heads(norm(x)))) ; x += down(inner(norm(x))) ; parallel: both of the same x
    logits     output(norm(x))
    inner      gated: activation(gate(x)) * up(x), drelu: relu(gate(x)) * relu(up(x)); not gated: activation(up(x))
    relu       0 for values up to activation_threshold, others unchanged
    clamped_swiglu  (clamp(up) + 1) * g * sigmoid(1.702 g) with g = min(gate, limit): the experts of gpt-oss
    mixture    down(inner(norm(x))) is a sum over the experts with the greatest router values, each times its share
"""

from __future__ import annotations

from dataclasses import fields
from functools import cached_property
from typing import Literal, NamedTuple

from neuronpipe.protocol.frozen import frozen

Activation = Literal["relu", "drelu", "relu2", "silu", "clamped_swiglu"]
NormKind = Literal["rms", "layer"]
Positions = Literal["rotary", "learned"]
Router = Literal["softmax", "sigmoid"]
RouterInput = Literal["feed_forward", "layer"]
ACTIVATIONS: tuple[Activation, ...] = ("relu", "drelu", "relu2", "silu", "clamped_swiglu")
SELECTABLE_ACTIVATIONS: tuple[Activation, ...] = ("relu", "drelu", "relu2", "silu")  # which one a user may choose
NORMS: tuple[NormKind, ...] = ("rms", "layer")
POSITIONS: tuple[Positions, ...] = ("rotary", "learned")
ROUTERS: tuple[Router, ...] = ("softmax", "sigmoid")
ROUTER_INPUTS: tuple[RouterInput, ...] = ("feed_forward", "layer")


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
MIN_SCALE, MAX_SCALE = 1e-6, 1e6
SCALES = ("embedding_scale", "residual_scale", "logit_scale", "attention_scale")


class SpecError(ValueError):
    """A ModelSpec whose field `field` is out of range or contradicts another. `complaint` says how."""

    def __init__(self, field: str, complaint: str) -> None:
        super().__init__(f"{field}: {complaint}")
        self.field, self.complaint = field, complaint


@frozen(slots=True)
class LayerKind:
    """A run of consecutive layers of the same kind.

    layers: number of layers
    window_tokens: the attention window: how many tokens a token attends to, itself included; 0: all up to itself
    rotary: True if heads are rotated, in a model with rotary positions
    """

    layers: int
    window_tokens: int = 0
    rotary: bool = True


@frozen(kw_only=True)
class ModelSpec:
    """An architecture with its sizes. Raises SpecError if fields contradict each other or are out of range.

    family: name of the family in plans/models/, only for messages and tables
    neurons: neurons of one expert's feed-forward
    experts: experts of each layer; a dense model has one
    experts_per_token: how many experts compute a token
    router: how the router values of the chosen experts become factors that sum to 1: softmax, or sigmoids divided by
        their sum
    router_reads: input of the router: the normed input of the feed-forward, or the layer's input unchanged
    layer_kinds: the layers from the first to the last, in runs of the same kind
    query_heads: heads of attention
    key_heads: heads of keys and values; divides query_heads
    head_width: width of a query, key or value of one head
    vocabulary: rows of the embedding
    context_tokens: maximal number of positions of a sequence
    norm: rms: x / rms(x) * weight; layer: (x - mean(x)) / deviation(x) * weight + bias
    norm_epsilon: added to the mean square, or to the variance
    positions: rotary: heads are rotated by tables of the package; learned: each position has a vector that is added to
        the embedding
    head_norm: queries and keys are RMS-normed, each head by itself, before they are rotated
    activation: activation of the feed-forward
    gated: the feed-forward has Gate beside Up and Down
    qkv_bias: the projections of queries, keys and values have biases
    output_bias: the output projection of attention has a bias
    ffn_bias: all matrices of the feed-forward have biases; with a gate only if all neurons fire
    router_bias: the router has a bias for each expert
    attention_sinks: each query head has a score that joins its softmax, and whose share is dropped
    tied_embeddings: the embedding is the output matrix too
    parallel: the feed-forward of a layer reads the layer's input, not its sum with attention's output
    activation_limit: the largest value of Gate, and of Up on both sides; 0 unless activation is clamped_swiglu
    activation_threshold: value that a neuron's trigger must exceed for the neuron to fire; 0 unless activation is relu
    embedding_scale: factor of a token's embedding
    logit_scale: factor of every logit
    residual_scale: factor of what attention and feed-forward add to the residual stream
    attention_scale: factor of attention scores besides 1 / sqrt(head_width): YaRN's factor for long contexts, squared
    """

    family: str
    width: int
    neurons: int
    experts: int = 1
    experts_per_token: int = 1
    router: Router = "softmax"
    router_reads: RouterInput = "feed_forward"
    layer_kinds: tuple[LayerKind, ...]
    query_heads: int
    key_heads: int
    head_width: int
    vocabulary: int
    context_tokens: int
    norm: NormKind = "rms"
    norm_epsilon: float
    positions: Positions = "rotary"
    head_norm: bool = False
    activation: Activation
    gated: bool = True
    qkv_bias: bool = False
    output_bias: bool = False
    ffn_bias: bool = False
    router_bias: bool = False
    attention_sinks: bool = False
    tied_embeddings: bool = False
    parallel: bool = False
    activation_limit: float = 0.0
    activation_threshold: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    attention_scale: float = 1.0

    def __post_init__(self) -> None:
        for field, maximum in MAX._asdict().items():
            if field != "layers":
                value = getattr(self, field)
                self._require(field, 1 <= value <= maximum, f"{value} is not between 1 and {maximum}")
        self._require("layer_kinds", all(kind.layers >= 1 for kind in self.layer_kinds), "a run of no layers")
        self._require("layer_kinds", 1 <= self.layers <= MAX.layers, f"{self.layers} layers, not 1 to {MAX.layers}")
        windows = (0 <= kind.window_tokens <= MAX.context_tokens for kind in self.layer_kinds)
        self._require("layer_kinds", all(windows), f"attention windows are 0 to {MAX.context_tokens} tokens")
        pairs = self.positions != "rotary" or self.head_width % 2 == 0
        self._require("head_width", pairs, f"{self.head_width} is odd; rotary positions need pairs")
        multiple = self.query_heads % self.key_heads == 0
        self._require("query_heads", multiple, f"{self.query_heads} is no multiple of key_heads, {self.key_heads}")
        self._require("norm_epsilon", 0 <= self.norm_epsilon <= 1, f"{self.norm_epsilon} is not between 0 and 1")
        plain = self.gated or self.activation in ("relu", "relu2")
        self._require("activation", plain, f"{self.activation} needs a feed-forward with a gate")
        for field in SCALES:
            value = getattr(self, field)
            self._require(field, MIN_SCALE <= value <= MAX_SCALE, f"{value} is not {MIN_SCALE} to {MAX_SCALE}")
        within = 0 <= self.activation_threshold <= MAX_THRESHOLD
        self._require("activation_threshold", within, f"{self.activation_threshold} is not 0 to {MAX_THRESHOLD}")
        plain = self.activation == "relu" or self.activation_threshold == 0
        self._require("activation_threshold", plain, f"is not 0, but {self.activation} has none")
        chosen = self.experts_per_token
        self._require("experts_per_token", 1 <= chosen <= self.experts, f"{chosen} of {self.experts} experts")
        self._require("experts", self.gated or self.experts == 1, "a mixture's experts have a gate")
        plain = not (self.gated and self.ffn_bias) or self.all_neurons_fire
        self._require("ffn_bias", plain, f"not supported with a gate and {self.activation}")
        self._require("router_bias", self.experts > 1 or not self.router_bias, "a dense model has no router")
        limited = self.activation == "clamped_swiglu"
        within = 0 < self.activation_limit <= MAX_THRESHOLD if limited else self.activation_limit == 0
        self._require("activation_limit", within, f"{self.activation_limit} does not go with {self.activation}")

    def _require(self, field: str, holds: bool, complaint: str) -> None:
        if not holds:
            raise SpecError(field, complaint)

    @cached_property
    def layers(self) -> int:
        return sum(kind.layers for kind in self.layer_kinds)

    @property
    def windows_tokens(self) -> tuple[int, ...]:
        """Attention window of each layer in tokens; 0: none."""
        return tuple(kind.window_tokens for kind in self.layer_kinds for _ in range(kind.layers))

    @property
    def rotary_layers(self) -> tuple[bool, ...]:
        """For each layer, True if its heads are rotated."""
        return tuple(
            kind.rotary and self.positions == "rotary" for kind in self.layer_kinds for _ in range(kind.layers)
        )

    @property
    def ffns(self) -> int:
        """Number of feed-forwards in all layers. Each expert is one."""
        return self.layers * self.experts

    @property
    def read_whole(self) -> bool:
        """True if a token needs nearly all pages of an expert that computes it. With SiLU every neuron fires; with ReLU
        in the small experts of SmallThinker about 40 % do, which touches almost every page."""
        return self.all_neurons_fire or (self.activation == "relu" and self.experts > 1)

    @property
    def all_neurons_fire(self) -> bool:
        """True if no neuron has a value of exactly 0, so that every neuron of a chosen expert is needed."""
        return self.activation in ("silu", "clamped_swiglu")

    @property
    def query_width(self) -> int:
        """Number of columns of attention_output."""
        return self.query_heads * self.head_width

    @property
    def key_width(self) -> int:
        """Number of rows of the key matrix; the value matrix has as many."""
        return self.key_heads * self.head_width

    @property
    def qkv_rows(self) -> int:
        """Number of rows of the query, key and value matrices together."""
        return self.query_width + 2 * self.key_width

    @property
    def ffn_matrices(self) -> tuple[str, ...]:
        """The matrices of the feed-forward, the trigger first."""
        return ("gate", "up", "down") if self.gated else ("up", "down")

    @property
    def trigger(self) -> Literal["gate", "up"]:
        """The matrix whose row decides whether a neuron fires."""
        return "gate" if self.gated else "up"


# Manifests omit these fields while they have ModelSpec's defaults, so that older packages keep their ids.
_LATER = (
    "experts_per_token", "router", "router_reads", "router_bias", "parallel", "attention_sinks",
    "activation_limit", "activation_threshold", *SCALES,
)  # fmt: skip
LATER_FIELDS = {field.name: field.default for field in fields(ModelSpec) if field.name in _LATER}


def runs_of(windows_tokens: list[int], rotary: list[bool] | None = None) -> tuple[LayerKind, ...]:
    """Return `layer_kinds` of ModelSpec: consecutive layers with equal properties form one run.

    windows_tokens: attention window of each layer, from the first to the last; 0: none
    rotary: for each layer, True if its heads are rotated; None: all are
    """
    kinds: list[LayerKind] = []
    for window, rotates in zip(windows_tokens, rotary or [True] * len(windows_tokens), strict=True):
        if kinds and (kinds[-1].window_tokens, kinds[-1].rotary) == (window, rotates):
            kinds[-1] = LayerKind(kinds[-1].layers + 1, window, rotates)
        else:
            kinds.append(LayerKind(1, window, rotates))
    return tuple(kinds)
