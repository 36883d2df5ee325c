"""OPT: LayerNorm, learned positions, biases everywhere, a feed-forward of Up and Down with ReLU between them."""

from __future__ import annotations

from collections.abc import Callable

from neuronpipe.plans.models.configuration import context_tokens
from neuronpipe.plans.models.family import Architecture, Choices, Family, TensorNames
from neuronpipe.plans.models.spec import MAX, LayerKind, ModelSpec, SpecError
from neuronpipe.plans.strict_json import Record
from neuronpipe.protocol.errors import quoted

NAME = "opt"

# OPTConfig in transformers/models/opt/configuration_opt.py.
DEFAULTS = {
    "vocab_size": 50272,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "ffn_dim": 3072,
    "max_position_embeddings": 2048,
    "do_layer_norm_before": True,
    "_remove_final_layer_norm": False,
    "word_embed_proj_dim": None,  # hidden_size
    "num_attention_heads": 12,
    "activation_function": "relu",
    "enable_bias": True,
    "layer_norm_elementwise_affine": True,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
LAYER_NORM_EPSILON = 1e-5  # torch.nn.LayerNorm's, which modeling_opt.py does not change

NAMES = TensorNames(
    embedding="model.decoder.embed_tokens",
    output="lm_head",
    output_norm="model.decoder.final_layer_norm",
    layer="model.decoder.layers.{}.",
    attention_norm="self_attn_layer_norm",
    ffn_norm="final_layer_norm",
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    attention_output="self_attn.out_proj",
    up="fc1",
    down="fc2",
    positions="model.decoder.embed_positions",
    first_position=2,  # OPTLearnedPositionalEmbedding.offset
)


def _read(config: Record, has: Callable[[str], bool], choices: Choices) -> ModelSpec:
    for field, supported in (
        ("do_layer_norm_before", True),
        ("_remove_final_layer_norm", False),
        ("enable_bias", True),
        ("layer_norm_elementwise_affine", True),
    ):
        if config.boolean(field) != supported:
            config.fail(field, f"only models with {str(supported).lower()} are supported")
    width = config.integer("hidden_size", 1, MAX.width)
    if config.has("word_embed_proj_dim") and config.integer("word_embed_proj_dim", 1, MAX.width) != width:
        config.fail("word_embed_proj_dim", f"differs from hidden_size, {width}: not supported")
    heads = config.integer("num_attention_heads", 1, MAX.query_heads)
    if width % heads:
        config.fail("num_attention_heads", f"{heads} does not divide hidden_size, {width}")
    activation = choices.activation or config.text("activation_function")
    if activation != "relu":
        field = "activation_function"
        config.fail(field, f"{quoted(activation)} is not supported; relu is")
    try:
        return opt_spec(
            width=width,
            neurons=config.integer("ffn_dim", 1, MAX.neurons),
            layers=config.integer("num_hidden_layers", 1, MAX.layers),
            heads=heads,
            vocabulary=config.integer("vocab_size", 1, MAX.vocabulary),
            context_tokens=context_tokens(config, choices.context_tokens),
            tied_embeddings=config.boolean("tie_word_embeddings"),
        )
    except SpecError as error:
        config.fail(error.field, error.complaint)


def opt_spec(
    *,
    width: int,
    neurons: int,
    layers: int,
    heads: int,
    vocabulary: int,
    context_tokens: int,
    tied_embeddings: bool,
) -> ModelSpec:
    """Return the description of an OPT of these sizes. Raises SpecError if a size is out of range."""
    return ModelSpec(
        family=NAME,
        width=width,
        neurons=neurons,
        layer_kinds=(LayerKind(layers),),
        query_heads=heads,
        key_heads=heads,
        head_width=width // heads,
        vocabulary=vocabulary,
        context_tokens=context_tokens,
        norm="layer",
        norm_epsilon=LAYER_NORM_EPSILON,
        positions="learned",
        activation="relu",
        gated=False,
        qkv_bias=True,
        output_bias=True,
        ffn_bias=True,
        tied_embeddings=tied_embeddings,
    )


FAMILY = Family(
    name=NAME,
    architectures={
        "OPTForCausalLM": Architecture(config_class="OPTConfig", defaults=DEFAULTS, read=_read, names=NAMES),
    },
)
