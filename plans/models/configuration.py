"""Keys of config.json that many classes of transformers share: sizes, attention windows, activation, context length.

The functions raise UserError for values that are not supported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from neuronpipe.plans.models.family import SAY_WHICH, Choices, TensorNames, named_activation
from neuronpipe.plans.models.mixture_configuration import Mixture
from neuronpipe.plans.models.recurrent_sizes import Mixer
from neuronpipe.plans.models.spec import (
    MAX,
    MAX_THRESHOLD,
    Activation,
    ModelSpec,
    NormPlaces,
    SpecError,
    runs_of,
)
from neuronpipe.plans.strict_json import Record
from neuronpipe.protocol.errors import quoted

SLIDING, FULL = "sliding_attention", "full_attention"

# Names of LlamaForCausalLM, which most later classes use too.
GATED_NAMES = TensorNames(
    embedding="model.embed_tokens",
    output="lm_head",
    output_norm="model.norm",
    layer="model.layers.{}.",
    attention_norm="input_layernorm",
    ffn_norm="post_attention_layernorm",
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    query_norm="self_attn.q_norm",
    key_norm="self_attn.k_norm",
    attention_output="self_attn.o_proj",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
    predictor="mlp.predictor.fc{}",
)
# Names of Qwen2MoeForCausalLM, which most later classes of mixtures use too.
EXPERT_NAMES = replace(
    GATED_NAMES,
    router="mlp.gate",
    expert="mlp.experts.{}.",
    gate="gate_proj",
    up="up_proj",
    down="down_proj",
    dense="mlp.{}_proj",
    predictor=None,
)
PREDICTOR = "model.layers.0.mlp.predictor.fc1.weight"  # TurboSparse's; Bamboo has none
GATED_HARMLESS = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"  # tables that old checkpoints carry

# Defaults that the configuration classes of gated models share. rope_theta: RotaryEmbeddingConfigMixin.default_theta in
# transformers/modeling_rope_utils.py, and in transformers 4 a default of each class.
GATED_DEFAULTS = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "head_dim": None,  # hidden_size / num_attention_heads
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "rope_parameters": None,
}


def context_tokens(config: Record, requested_tokens: int | None, key: str = "max_position_embeddings") -> int:
    """Return the maximal number of positions of a sequence: the requested number, or the model's if it is None. With
    positions "longrope", which have another table beyond the original length, that length is the model's."""
    max_tokens = config.integer(key, 1, MAX.context_tokens)
    if requested_tokens is not None and not 1 <= requested_tokens <= max_tokens:
        config.fail(key, f"is {max_tokens}, so a context of {requested_tokens} tokens is impossible")
    return requested_tokens or min(max_tokens, _tokens_of_short_table(config))


def _tokens_of_short_table(config: Record) -> int:
    """Return the length up to which the first of the two tables of "longrope" holds; without them no limit."""
    original = "original_max_position_embeddings"
    for field in ("rope_scaling", "rope_parameters"):
        if config.has(field) and (scaling := config.record(field)).has("short_factor"):
            place = next((record for record in (scaling, config) if record.has(original)), None)
            return MAX.context_tokens if place is None else place.integer(original, 1, MAX.context_tokens)
    return MAX.context_tokens


def sliding_windows(
    config: Record, *, first_layer: int = 0, full_layer_every: int = 0, reads_layer_types: bool
) -> list[int]:
    """Return each layer's attention window in tokens; 0: none. `sliding_window` applies from `first_layer` on, unless
    `layer_types` says otherwise.

    full_layer_every: each layer of this number has no window; 0: no layer
    reads_layer_types: the class obeys `layer_types`; otherwise a contradiction to `first_layer` raises UserError
    """
    layers = config.integer("num_hidden_layers", 1, MAX.layers)
    if not config.has("sliding_window"):
        return [0] * layers
    window = config.integer("sliding_window", 1, MAX.context_tokens)
    kinds = [SLIDING if layer >= first_layer else FULL for layer in range(layers)]
    if full_layer_every:
        kinds = [SLIDING if (layer + 1) % full_layer_every else FULL for layer in range(layers)]
    if config.has("layer_types"):
        layer_types = config.items("layer_types")
        if not reads_layer_types and layer_types != kinds:
            config.fail("layer_types", "layers with different attention windows are not supported in this class")
        if len(layer_types) != layers or not all(kind in (SLIDING, FULL) for kind in layer_types):
            config.fail("layer_types", f"{quoted(layer_types)} is not {SLIDING} or {FULL} for each of {layers} layers")
        kinds = layer_types
    return [window if kind == SLIDING else 0 for kind in kinds]


def layer_mixers(
    config: Record, names: Mapping[str, Mixer], *, full_layer_every: int = 0, key: str = "layer_types"
) -> list[Mixer]:
    """Return the mixer of each layer as `key` lists them.

    names: the mixers by their names there
    full_layer_every: without the list each layer of this number has attention, and the others the first of `names`; 0:
        the list must be there
    """
    layers = config.integer("num_hidden_layers", 1, MAX.layers)
    if not config.has(key) and full_layer_every:
        usual = next(iter(names.values()))
        return [usual if (layer + 1) % full_layer_every else "attention" for layer in range(layers)]
    listed = config.items(key)
    if len(listed) != layers or not all(isinstance(name, str) and name in names for name in listed):
        config.fail(key, f"{quoted(listed)} is not one of {', '.join(names)} for each of {layers} layers")
    return [names[name] for name in listed]


def windows_of_qwen(config: Record) -> list[int]:
    """Return each layer's attention window in tokens; 0: none. `sliding_window` applies only if `use_sliding_window` is
    true, and then to layers from `max_window_layers` on or those in `layer_types`."""
    layers = config.integer("num_hidden_layers", 1, MAX.layers)
    if not (config.has("use_sliding_window") and config.boolean("use_sliding_window")):
        return [0] * layers
    first = config.integer("max_window_layers", 0, MAX.layers)
    return sliding_windows(config, first_layer=first, reads_layer_types=True)


def gated_activation(
    config: Record, has: Callable[[str], bool], requested: Activation | None, *, relu_may_mean_drelu: bool = False
) -> Activation:
    """Return the requested activation, or the one that `hidden_act` names ("relu" for FATReLU). Raises UserError if the
    name is unknown or ambiguous, or contradicts `hidden_act_param` or the predictors in the checkpoint."""
    if requested is not None:
        return requested
    if is_fatrelu(config):
        return "relu"
    if config.has("hidden_act_param") and config.number("hidden_act_param", -1e9, 1e9) != 0:
        config.fail("hidden_act_param", f"is a threshold, which {quoted(config.text('hidden_act'))} does not have")
    activation = named_activation(config, "hidden_act", relu_may_mean_drelu=relu_may_mean_drelu)
    if has(PREDICTOR) and activation != "drelu":
        stated = quoted(config.text("hidden_act"))
        config.fail("hidden_act", f"is {stated}, but the checkpoint has predictors, as dReLU models do; {SAY_WHICH}")
    return activation


def is_fatrelu(config: Record) -> bool:
    """Return True if `hidden_act` is ReLU with a threshold; `hidden_act_param` is the threshold."""
    return config.text("hidden_act") == "fatrelu"


def threshold(config: Record, choices: Choices) -> float:
    """Return `activation_threshold` of ModelSpec: 0, except for a FATReLU that the user does not override."""
    fat = choices.activation is None and is_fatrelu(config)
    return config.number("hidden_act_param", 0.0, MAX_THRESHOLD) if fat else 0.0


def biases(config: Record, has: Callable[[str], bool]) -> dict[str, Any]:
    """Return the fields of ModelSpec about biases that `attention_bias` and `mlp_bias` determine. Raises UserError if
    the checkpoint has others."""
    stated = []
    for name, field in (("self_attn.o_proj", "attention_bias"), ("mlp.down_proj", "mlp_bias")):
        stated.append(config.has(field) and config.boolean(field))
        if not stated[-1] and has(f"model.layers.0.{name}.bias"):
            config.fail(field, f"is not true, but the checkpoint has biases of {name}; say which is right")
    attention_bias, ffn_bias = stated
    return {"qkv_bias": attention_bias, "output_bias": attention_bias, "ffn_bias": ffn_bias}


def refuse_biases(config: Record, has: Callable[[str], bool]) -> None:
    """Raise UserError if attention's output projection or the gated feed-forward has a bias."""
    for name, field in (("self_attn.o_proj", "attention_bias"), ("mlp.down_proj", "mlp_bias")):
        if has(f"model.layers.0.{name}.bias"):
            config.fail(field, f"a bias of {name} is not supported")
    if config.has("mlp_bias") and config.boolean("mlp_bias"):
        config.fail("mlp_bias", "biases in the feed-forward are not supported")


def gated_model(
    config: Record,
    choices: Choices,
    *,
    family: str,
    activation: Activation,
    windows: list[int],
    qkv_bias: bool = False,
    output_bias: bool = False,
    ffn_bias: bool = False,
    head_norm: bool = False,
    joint_norm: bool = False,
    norm_after_rotation: bool = False,
    neurons: str = "intermediate_size",
    mixture: Mixture | None = None,
    rotary: list[bool] | None = None,
    dense_experts: list[int] | None = None,
    local_positions: list[bool] | None = None,
    norms: NormPlaces = "before",
    mixers: Sequence[Mixer] | None = None,
    epsilon: str = "rms_norm_eps",
    further: Mapping[str, Any] = MappingProxyType({}),
) -> ModelSpec:
    """Return a model with RMS norms, rotary positions and a gated feed-forward. Sizes come from `config`.

    windows, rotary, dense_experts, local_positions, mixers: as in `runs_of`
    epsilon: the key of `norm_epsilon`
    further: other fields of ModelSpec
    neurons: the key of the number of neurons
    mixture: None for a dense model
    """
    return build_spec(
        config,
        **sizes(config, choices, neurons),
        **({} if mixture is None else mixture._asdict()),
        family=family,
        **further,
        layer_kinds=runs_of(windows, rotary, dense_experts, local_positions, mixers),
        norm_epsilon=config.number(epsilon, 0.0, 1.0),
        norms=norms,
        head_norm=head_norm,
        joint_norm=joint_norm,
        norm_after_rotation=norm_after_rotation,
        activation=activation,
        activation_threshold=threshold(config, choices),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        ffn_bias=ffn_bias,
    )


def require_text(config: Record, key: str, expected: str) -> None:
    """Raise UserError if a key that transformers does not read contradicts what it computes."""
    if config.has(key) and config.text(key) != expected:
        config.fail(key, f"{quoted(config.text(key))} is not supported in this class, only {expected}")


def require_integer(config: Record, key: str, expected: int) -> None:
    """Raise UserError if a key is there and is not the only number that a class supports."""
    if config.has(key) and (stated := config.integer(key, 0, MAX.width)) != expected:
        config.fail(key, f"{stated} is not supported in this class, only {expected}")


def sizes(config: Record, choices: Choices, neurons: str = "intermediate_size") -> dict[str, Any]:
    """Return the fields of ModelSpec that Llama and most later classes read from the same keys.

    neurons: the key of the number of neurons
    """
    width = config.integer("hidden_size", 1, MAX.width)
    query_heads = config.integer("num_attention_heads", 1, MAX.query_heads)
    if not config.has("head_dim") and width % query_heads:
        config.fail("num_attention_heads", f"{query_heads} does not divide hidden_size, {width}")
    key_heads = "num_key_value_heads"
    return {
        "width": width,
        "neurons": config.integer(neurons, 1, MAX.neurons),
        "query_heads": query_heads,
        "key_heads": config.integer(key_heads, 1, MAX.key_heads) if config.has(key_heads) else query_heads,
        "head_width": config.integer("head_dim", 2, MAX.head_width) if config.has("head_dim") else width // query_heads,
        "vocabulary": config.integer("vocab_size", 1, MAX.vocabulary),
        "context_tokens": context_tokens(config, choices.context_tokens),
        "tied_embeddings": config.has("tie_word_embeddings") and config.boolean("tie_word_embeddings"),
    }


def build_spec(config: Record, **fields: Any) -> ModelSpec:
    """Return a ModelSpec with `fields`. Raises UserError if they contradict each other."""
    try:
        return ModelSpec(**fields)
    except SpecError as error:
        config.fail(error.field, error.complaint)
