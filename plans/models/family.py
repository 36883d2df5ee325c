"""The classes that a family file fills in: how the configurations and tensor names of its sources become a ModelSpec.

Also the rules for which activation a source means, since many files of ReLU models name a wrong one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import field, replace
from typing import Any, Literal, NamedTuple

from neuronpipe.plans.models.recurrent_sizes import Mixer
from neuronpipe.plans.models.recurrent_tensors import RecurrentTensors
from neuronpipe.plans.models.spec import (
    SELECTABLE_ACTIVATIONS,
    Activation,
    ModelSpec,
    NormKind,
    NormPlaces,
    Router,
    RouterInput,
)
from neuronpipe.plans.strict_json import Record
from neuronpipe.protocol.errors import quoted
from neuronpipe.protocol.frozen import frozen


class Choices(NamedTuple):
    """Choices of the user that override the source. None leaves the choice to the source."""

    activation: Activation | None = None
    context_tokens: int | None = None


@frozen(kw_only=True)
class TensorNames:
    """The names of a model's tensors in a source, without `.weight` and `.bias`. None: the model has no such tensor.

    The prefix `layer` precedes a layer's names; its {} is the number of the layer. In a mixture, `expert` with the
    number of the expert precedes gate, up and down too.

    stacked: one tensor has the matrices of all experts of a layer, one after the other
    query_key_value: the joined tensor of queries, keys and values. A layer without it has the separate ones, if they
        have names
    latent_down, query_down: with latents, the matrices that compute the latent and the rotated part of keys, and the
        input of queries; latent_norm, query_down_norm: their norms
    latent_up: the matrix of the keys, without their rotated part, and values of all heads, head after head; or
        turned_key_up and value_up: stacks of the heads' matrices, of keys with a row for each element of the latent
    first_position: number of rows of `positions` before the row of position 0
    gate_up: the tensor in which the rows of each expert's gate precede those of its up
    joined_gate_up: the tensor in which the rows of gate and up of all experts alternate
    attention_norm, ffn_norm: norms of what attention and feed-forward read
    norm_weight: norms have weights; without them, and then without biases, a package has ones
    norm_bias: LayerNorm has biases; without them a package has zeros
    attention_output_norm, ffn_output_norm: norms of what they add to the residual stream
    routed_norm, routed_output_norm, shared_output_norm: with norms of branches, those of the input and output of chosen
        experts, and of the output of shared experts, whose input has ffn_norm
    router_norm: factors of the router's normed input, besides the root of 1 / width; the whole name
    expert_scales: the factors of the experts' shares; the whole name
    scale: the factor of a layer's result; the whole name
    sinks: scores of attention sinks; the whole name
    draft_layer: takes the place of `layer` for draft layers, which are counted from 0
    draft_input, draft_embedding_norm, draft_hidden_norm, draft_output_norm: tensors of a draft layer beside those of
        other layers
    choosing_bias: biases of experts that only choose; the whole name
    shared: a matrix of the shared experts of a layer, which lie in one tensor; {} is gate, up or down; or the names by
        these. If gate and up have one name, that tensor has the rows of both
    dense: a matrix of the feed-forward of a mixture's layer without router, likewise
    blocks: for each layer the numbers that take the place of {} in `layer`, for its mixer and for its feed-forward;
        None: both are the layer's number
    shared_gate: the weights of the gate of the shared experts
    predictor: the two matrices of the predictor, {} is 1 or 2; the prefix is `layer`, in a mixture also `expert`
    recurrent: (model, layer) -> the tensors of a recurrent layer
    fused_experts: two tensors that a source may have instead of each expert's: of all experts, one after the other, the
        rows of gate and those of up; and Down. Their whole names
    turns_experts: these two have a row for each input instead
    """

    embedding: str
    output: str
    output_norm: str
    layer: str
    attention_norm: str | None
    ffn_norm: str | None
    attention_output: str
    up: str
    down: str
    query: str | None = None
    key: str | None = None
    value: str | None = None
    query_key_value: str | None = None
    gate: str | None = None
    attention_output_norm: str | None = None
    ffn_output_norm: str | None = None
    routed_norm: str | None = None
    routed_output_norm: str | None = None
    shared_output_norm: str | None = None
    router_norm: str | None = None
    expert_scales: str | None = None
    scale: str | None = None
    query_norm: str | None = None
    key_norm: str | None = None
    gate_up: str | None = None
    latent_down: str | None = None
    latent_norm: str | None = None
    latent_up: str | None = None
    turned_key_up: str | None = None
    value_up: str | None = None
    query_down: str | None = None
    query_down_norm: str | None = None
    joined_gate_up: str | None = None
    sinks: str | None = None
    draft_layer: str | None = None
    draft_input: str | None = None
    draft_embedding_norm: str | None = None
    draft_hidden_norm: str | None = None
    draft_output_norm: str | None = None
    positions: str | None = None
    first_position: int = 0
    norm_weight: bool = True
    norm_bias: bool = True
    router: str | None = None
    choosing_bias: str | None = None
    shared: str | Mapping[str, str] | None = None
    shared_gate: str | None = None
    dense: str | Mapping[str, str] | None = None
    blocks: tuple[tuple[int, int], ...] | None = None
    expert: str = ""
    stacked: bool = False
    predictor: str | None = None
    recurrent: Callable[[ModelSpec, int], RecurrentTensors] | None = None
    fused_experts: tuple[str, str] | None = None
    turns_experts: bool = False


@frozen(kw_only=True)
class Architecture:
    """A class of transformers, as config.json names it under `architectures`.

    config_class: name of the configuration class that `defaults` are from
    defaults: values of missing keys, for every key that is read; a key that is `null` is not missing
    read: (configuration, function that returns True if a tensor exists, choices) -> the model. Raises UserError, which
        names the field.
    names: names of the tensors, or a function of the configuration that returns them
    joined_rows: (configuration, model) -> the rows of the tensor `query_key_value` in the order in which packages
        store them: queries, keys, values
    harmless: a regular expression of the names of tensors that may be present and are ignored
    norm_offset: added to the stored weight of every norm
    partial_rotary: only a part of each head is rotated, from the first element on: `partial_rotary_factor` of it, or
        `rotary_dim` elements
    interleaved: rotary positions rotate neighbouring elements as a pair, not element i with i + head_width / 2; or a
        function of the configuration that says so
    local_theta: default base of the rotary positions of layers with windows, which have a table of their own; None: all
        layers have the same table
    part: the key under which config.json has the configuration of the language model, which lies beside others: its
        tensors have names like language_model.model.norm or model.language_model.norm. Files of older classes have its
        keys and names as if there were nothing else. None: it has nothing else
    renamed: keys of config.json that this class calls otherwise than others do -> their names in others
    renamed_tensors: regular expressions of names of tensors -> the names that the family has for them
    extra_layers: the key of the number of layers behind the last one, which predict further tokens and are left out
    constants: keys whose values the class sets, whatever config.json says
    """

    config_class: str
    defaults: Mapping[str, Any]
    read: Callable[[Record, Callable[[str], bool], Choices], ModelSpec]
    names: TensorNames | Callable[[Record], TensorNames]
    joined_rows: Callable[[Record, ModelSpec], list[int]] | None = None
    harmless: str = r"(?!)"
    norm_offset: float = 0.0
    partial_rotary: bool = False
    interleaved: bool | Callable[[Record], bool] = False
    local_theta: float | None = None
    part: str | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)
    renamed_tensors: Mapping[str, str] = field(default_factory=dict)
    extra_layers: str | None = None
    constants: Mapping[str, Any] = field(default_factory=dict)

    def language_part(self, config: Record) -> Record:
        """Return the configuration of the language model in a config.json, with the defaults of its class."""
        part = config
        if self.part is not None and (config.has(self.part) or not config.has("hidden_size")):
            tied = "tie_word_embeddings"
            part = config.record(self.part)
            if config.has(tied):  # of the whole model, whatever its part says
                part = part.replaced({tied: config.value(tied)})
        renamed = {name: other for name, other in self.renamed.items() if part.has(name)}
        if values := {other: part.value(name) for name, other in renamed.items()} | dict(self.constants):
            part = part.replaced(values)
        return part.over(self.defaults, self.config_class)

    def tensor_name(self, stored: str) -> str:
        """Return the family's name of a tensor of a source."""
        for pattern, name in self.renamed_tensors.items():
            stored = re.sub(pattern, name, stored)
        return stored

    def is_interleaved(self, config: Record) -> bool:
        return self.interleaved(config) if callable(self.interleaved) else self.interleaved

    def tensor_names(self, config: Record, has: Callable[[str], bool]) -> TensorNames:
        """Return the names of the tensors in a source. has: returns True if a tensor exists"""
        names = self.names(config) if callable(self.names) else self.names
        return names if self.part is None else _within_language_model(names, has)


def _within_language_model(names: TensorNames, has: Callable[[str], bool]) -> TensorNames:
    """Return the names of a language model that lies beside others. Newer checkpoints have the prefix elsewhere, and
    the oldest have none."""
    if has(f"{names.embedding}.weight"):
        return names
    prefixes = ("", "language_model.")
    if not has(f"language_model.{names.embedding}.weight"):
        prefixes = ("model.", "model.language_model.")
    fields = ("embedding", "output", "output_norm", "layer")
    outer, inner = prefixes
    return replace(
        names,
        **{
            field: inner + name.removeprefix(outer) if (name := getattr(names, field)).startswith(outer) else name
            for field in fields
        },
    )


@frozen(kw_only=True)
class GgufArchitecture:
    """A value of `general.architecture` in GGUF files. All share one scheme of keys and tensor names.

    interleaved: rotary positions rotate neighbouring elements as a pair, not element i with i + head_width / 2
    qkv_bias: queries, keys and values always have biases; otherwise only if the tensors exist
    joint_norm: queries and keys are normed over all heads together; otherwise each head by itself, if the tensors exist
    norm_after_rotation: the field of ModelSpec
    relu_may_mean_drelu: the user has to confirm `relu`, since files of known dReLU models say it
    activation: used if a file names none; None: GELU, which is not supported
    router, router_jitter: used for mixtures if a file names no router
    router_reads: the field of ModelSpec
    normalized_shares: the field of ModelSpec, if a file does not say it
    latents: attention has latents, with heads whose ends are rotated by neighbouring elements
    harmless: a regular expression of the names of tensors that may be present and are ignored
    norm: norm of the layers; weights of LayerNorm have no offset, unlike those of checkpoints (`norm_offset`)
    norm_weight, norm_bias: the fields of TensorNames
    gated: the feed-forward has Gate beside Up and Down
    joint_gate_up: a layer's gate and up are one tensor, that of up
    parallel: when attention and feed-forward are computed from the same input, after one norm or one norm each: if the
        file has no norm of the feed-forward (one norm), or unless `use_parallel_residual` denies it (stated)
    partial_rotary: `rope.dimension_count` may be less than the width of a head
    activation_limit: the field of ModelSpec
    ffn_norm: the name of the feed-forward's norm
    full_layer_every: with windows, each layer of this number has none; 0: all layers have windows
    rotates_full_layers: with windows, layers without one are rotated like the others
    window_tokens: the window if a file states none; 0: layers have none then; None: the file has to state one
    unrotated_layer_every: each layer of this number is not rotated; 0: all are
    has_scales: the file has factors of embeddings, attention scores, additions to the residual stream, and logits
    required_scales: those that have no default
    multiplies_logits: the file has a factor of logits, `logit_scale`
    rounds_yarn: the bounds of YaRN are rounded to whole pairs
    yarn_multiplier: the file's `yarn_log_multiplier` reduces YaRN's factor of queries and keys; otherwise it is refused
    norms: the field of ModelSpec
    scales_embedding: token embeddings are multiplied by the root of their width
    score_cap, logit_cap: the fields of ModelSpec, if the file does not have them
    local_theta: base of the rotary positions of layers with windows, which nothing scales; 0: that of the other layers;
        None: all layers have the same table
    layers_scaled_by_width: number of layers of the one size whose scores are divided by the root of width / query_heads
    gemma4_layers: layers are those of Gemma 4 (gguf_gemma4.py)
    recurrent: the mixer of layers without attention; None: there are none
    tiled_heads: the first values of all key heads of DeltaNet precede the second ones
    one_part: a layer of the file is a mixer or a feed-forward
    rotated: heads are rotated; None: if `rope.scaling.finetuned` is not false
    gated_attention: the field of ModelSpec
    drafts: a layer behind the last one is a draft layer
    """

    interleaved: bool
    qkv_bias: bool = False
    joint_norm: bool = False
    norm_after_rotation: bool = False
    relu_may_mean_drelu: bool = False
    activation: Activation | None = "silu"
    router: Router = "softmax"
    router_jitter: float = 0.0
    router_reads: RouterInput = "feed_forward"
    normalized_shares: bool = True
    latents: bool = False
    harmless: str = r"(?!)"
    norm: NormKind = "rms"
    norm_weight: bool = True
    norm_bias: bool = True
    gated: bool = True
    joint_gate_up: bool = False
    parallel: Literal["never", "always", "one norm", "stated"] = "never"
    partial_rotary: bool = False
    activation_limit: float = 0.0
    ffn_norm: str = "ffn_norm"
    full_layer_every: int = 0
    rotates_full_layers: bool = True
    window_tokens: int | None = 0
    unrotated_layer_every: int = 0
    has_scales: bool = False
    required_scales: tuple[str, ...] = ()
    multiplies_logits: bool = False
    rounds_yarn: bool = True
    yarn_multiplier: bool = False
    norms: NormPlaces = "before"
    scales_embedding: bool = False
    score_cap: float = 0.0
    logit_cap: float = 0.0
    local_theta: float | None = None
    layers_scaled_by_width: int = 0
    gemma4_layers: bool = False
    recurrent: Mixer | None = None
    tiled_heads: bool = False
    one_part: bool = False
    rotated: bool | None = True
    gated_attention: bool = False
    drafts: bool = False


@frozen(kw_only=True)
class Family:
    """Models that are read in the same way.

    architectures: the architectures by the name of their class in config.json
    gguf: the architectures by `general.architecture` of GGUF files
    """

    name: str
    architectures: Mapping[str, Architecture]
    gguf: Mapping[str, GgufArchitecture] = field(default_factory=dict)


ACTIVATION_NAMES: dict[str, Activation] = {
    "relu": "relu",
    "drelu": "drelu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu",
}
SAY_WHICH = (
    f"say which it is with --activation {'|'.join(SELECTABLE_ACTIVATIONS)} "
    "(drelu: SparseQwen2, TurboSparse, Bamboo; relu: ReluLLaMA and others with relu(gate) * up)"
)
_RELU_MODELS = re.compile(r"relu|sparse|bamboo|powerinfer|minicpm-s", re.IGNORECASE)


def sounds_like_relu(*names: str) -> str | None:
    """Return the first of `names` that looks like the name of a ReLU model, None if none does."""
    return next((name for name in names if _RELU_MODELS.search(name)), None)


def named_activation(
    record: Record, field: str, *, relu_may_mean_drelu: bool, names: Mapping[str, Activation] = ACTIVATION_NAMES
) -> Activation:
    """Return the activation that a field names. Raises UserError if the name is unknown or ambiguous.

    relu_may_mean_drelu: the name relu raises UserError, since SparseQwen2's files say relu, mean drelu and cannot be
        distinguished from files of a Qwen2 with relu
    names: the names that the class knows
    """
    if (name := record.text(field)) not in names:
        record.fail(field, f"{quoted(name)} is not supported; {', '.join(names)} are (or pass --activation)")
    if name == "relu" and relu_may_mean_drelu:
        record.fail(field, f"is 'relu', but SparseQwen2 says so and means drelu; {SAY_WHICH}")
    return names[name]
