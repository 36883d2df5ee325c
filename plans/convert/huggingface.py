"""A Hugging Face directory: config.json, safetensors in one file or in shards, tokenizer.json."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path

from neuronpipe.plans.convert.activations import ACTIVATION_NAMES, SAY_WHICH, may_mean_drelu
from neuronpipe.plans.convert.advice import refuse_other_directories
from neuronpipe.plans.convert.chat_template import huggingface_template
from neuronpipe.plans.convert.checkpoint import Checkpoint, Inventory, Options, SourceFile, Stack, StoredMatrix
from neuronpipe.plans.convert.defaults import DEFAULTS
from neuronpipe.plans.convert.rope import scaled_frequencies
from neuronpipe.plans.convert.tokenizer_file import read_tokenizer
from neuronpipe.plans.package.fields import Record, one_line, read_json
from neuronpipe.plans.package.manifest import Activation, Shape, Source
from neuronpipe.plans.package.parse import check_shape
from neuronpipe.plans.package.safetensors_header import read_header
from neuronpipe.protocol.errors import MAX_QUOTED_CHARACTERS, UserError, named, quoted

SLIDING, FULL = "sliding_attention", "full_attention"
# Rotary tables that old checkpoints carry, and predictors: exact mode computes what they guess.
HARMLESS = re.compile(r"model\.layers\.\d+\.(self_attn\.rotary_emb\.inv_freq|mlp\.predictor\..*)")


def open_huggingface(path: Path, options: Options) -> Checkpoint:
    """Read the configuration and every header, check each tensor's shape. Raises UserError naming file and field."""
    refuse_other_directories(path)
    config = read_json(path / "config.json")
    architecture = _architecture(config)
    config = config.over(DEFAULTS[architecture].values, DEFAULTS[architecture].owner)
    shape = _shape(config, architecture, options.context_tokens)
    tied = config.has("tie_word_embeddings") and config.boolean("tie_word_embeddings")
    with ExitStack() as files:
        inventory = _inventory(path, files)
        activation = _activation(config, architecture, inventory, options.activation)
        bias = _attention_bias(config, architecture, inventory)
        matrices, vectors = _tensors(inventory, shape, tied, bias)
        inventory.refuse_leftovers(re.compile(rf"{HARMLESS.pattern}|lm_head\.weight") if tied else HARMLESS)
        return Checkpoint(
            source=Source("huggingface", one_line(path.resolve().name), architecture),
            activation=activation,
            shape=shape,
            tied_embeddings=tied,
            attention_bias=bias,
            end_tokens=_end_tokens(path, config, shape.vocabulary),
            tokenizer=read_tokenizer(options.tokenizer or path / "tokenizer.json", shape.vocabulary),
            chat_template=huggingface_template(path),
            inverse_frequency=scaled_frequencies(config, shape.head_width),
            matrices=matrices,
            vectors=vectors,
            files=files.pop_all(),
        )
    raise AssertionError  # ExitStack.__exit__ may swallow errors as far as a type checker knows; ours never does


def _architecture(config: Record) -> str:
    names = config.items("architectures")
    if len(names) != 1 or names[0] not in tuple(DEFAULTS):
        config.fail("architectures", f"{quoted(names)} is not supported; {', '.join(DEFAULTS)} are")
    if config.has("quantization_config"):
        config.fail("quantization_config", "quantized checkpoints are not supported; convert the original weights")
    return str(names[0])


def _shape(config: Record, architecture: str, context_tokens: int | None) -> Shape:
    width, query_heads = config.integer("hidden_size", 1, 1 << 20), config.integer("num_attention_heads", 1, 4096)
    if not config.has("head_dim") and width % query_heads:
        config.fail("num_attention_heads", f"{query_heads} does not divide hidden_size, {width}")
    most_tokens = config.integer("max_position_embeddings", 1, 1 << 24)
    if context_tokens is not None and not 1 <= context_tokens <= most_tokens:
        config.fail(
            "max_position_embeddings", f"is {most_tokens}, so a context of {context_tokens} tokens is impossible"
        )
    shape = Shape(
        width=width,
        neurons=config.integer("intermediate_size", 1, 1 << 22),
        layers=config.integer("num_hidden_layers", 1, 4096),
        experts=1,
        query_heads=query_heads,
        key_heads=config.integer("num_key_value_heads", 1, 4096) if config.has("num_key_value_heads") else query_heads,
        head_width=config.integer("head_dim", 2, 4096) if config.has("head_dim") else width // query_heads,
        vocabulary=config.integer("vocab_size", 1, 1 << 24),
        context_tokens=context_tokens or most_tokens,
        norm_epsilon=config.number("rms_norm_eps", 0.0, 1.0),
        window_tokens=_window_tokens(config, architecture),
    )
    check_shape(shape, config)
    return shape


def _window_tokens(config: Record, architecture: str) -> int:
    """The window that all layers share, by each class's own rules; models whose layers differ are refused."""
    if architecture == "LlamaForCausalLM":
        return 0
    first = 0
    if architecture == "Qwen2ForCausalLM":
        if not (config.has("use_sliding_window") and config.boolean("use_sliding_window")):
            return 0
        first = config.integer("max_window_layers", 0, 4096)
    if not config.has("sliding_window"):
        return 0
    window, layers = config.integer("sliding_window", 1, 1 << 24), config.integer("num_hidden_layers", 1, 4096)
    said = config.has("layer_types")
    kinds = config.items("layer_types") if said else [SLIDING if n >= first else FULL for n in range(layers)]
    if kinds == [SLIDING] * layers:
        return window
    if kinds == [FULL] * layers and architecture == "Qwen2ForCausalLM":  # Mistral's class does not read layer_types
        return 0
    config.fail("layer_types" if said else "max_window_layers", "layers with different windows are not supported")


def _activation(config: Record, architecture: str, inventory: Inventory, wanted: Activation | None) -> Activation:
    if config.has("hidden_act_param") and config.number("hidden_act_param", -1e9, 1e9) != 0:
        config.fail("hidden_act_param", "activations with a threshold are not supported")
    if wanted is not None:
        return wanted
    name = config.text("hidden_act")
    if name not in ACTIVATION_NAMES:
        config.fail(
            "hidden_act", f"{quoted(name)} is not supported; {', '.join(ACTIVATION_NAMES)} are (or pass --activation)"
        )
    if architecture == "BambooForCausalLM":
        if name not in ("relu", "drelu"):
            config.fail("hidden_act", f"is {quoted(name)}, but Bamboo's class is known with relu only")
        return "drelu"  # its class applies the configured activation to gate and to up
    if may_mean_drelu(architecture, name):
        config.fail("hidden_act", f"is 'relu', but SparseQwen2 says so and means drelu; {SAY_WHICH}")
    if inventory.has("model.layers.0.mlp.predictor.fc1.weight") and name != "drelu":
        config.fail(
            "hidden_act",
            f"is {quoted(name)}, but the checkpoint has predictors, as dReLU models do; {SAY_WHICH}",
        )
    return ACTIVATION_NAMES[name]


def _inventory(path: Path, files: ExitStack) -> Inventory:
    inventory = Inventory(path)
    index_path = path / "model.safetensors.index.json"
    if (path / "model.safetensors").exists() or not index_path.exists():
        names, promised = ["model.safetensors"], {}
    else:
        weights = read_json(index_path).record("weight_map")
        promised = {name: weights.text(name) for name in weights.names()}
        names = sorted(set(promised.values()))
        for name in names:
            if not _is_file_name(name):
                raise UserError(f"{index_path}: weight_map: {quoted(name)} is not the name of a file beside it")
    headers = {name: read_header(path / name) for name in names}
    for tensor, name in promised.items():
        if tensor not in headers[name]:
            raise UserError(f"{path / name}: {named(tensor)}: missing, though {index_path.name} promises it")
    for name, entries in headers.items():
        file = SourceFile(path / name)
        files.callback(file.close)
        for tensor, entry in entries.items():
            inventory.add(tensor, file, entry.start, entry.shape, entry.dtype)
    return inventory


def _is_file_name(name: str) -> bool:
    """Whether a file of this name can lie in a directory, and shows as one in an error."""
    return Path(name).name == name and name.isprintable() and 0 < len(name) <= MAX_QUOTED_CHARACTERS


def _attention_bias(config: Record, architecture: str, inventory: Inventory) -> bool:
    """Whether query, key and value have biases; those of the output and of the feed-forward are refused."""
    for name, field in (("self_attn.o_proj", "attention_bias"), ("mlp.down_proj", "mlp_bias")):
        if inventory.has(f"model.layers.0.{name}.bias"):
            config.fail(field, f"a bias of {name} is not supported")
    if config.has("mlp_bias") and config.boolean("mlp_bias"):
        config.fail("mlp_bias", "biases in the feed-forward are not supported")
    if architecture == "Qwen2ForCausalLM":
        return True  # fixed in modeling_qwen2.py
    if architecture != "LlamaForCausalLM":
        return False
    biased = config.has("attention_bias") and config.boolean("attention_bias")
    if not biased and inventory.has("model.layers.0.self_attn.q_proj.bias"):
        config.fail(
            "attention_bias", "is not true, but the checkpoint has biases of self_attn.q_proj; say which is right"
        )
    return biased


def _tensors(inventory: Inventory, shape: Shape, tied: bool, bias: bool) -> tuple[Stack, Stack]:
    width, neurons, heads_width = shape.width, shape.neurons, shape.query_width
    projections = (
        ("q", heads_width),
        ("k", shape.key_heads * shape.head_width),
        ("v", shape.key_heads * shape.head_width),
    )
    matrices: dict[str, tuple[StoredMatrix, ...]] = {
        "embedding": (inventory.take("model.embed_tokens.weight", shape.vocabulary, width),)
    }
    if not tied:
        matrices["output"] = (inventory.take("lm_head.weight", shape.vocabulary, width),)
    vectors: dict[str, tuple[StoredMatrix, ...]] = {"output_norm": (inventory.take("model.norm.weight", width),)}
    for n in range(shape.layers):
        here, there = f"layers.{n}", f"model.layers.{n}"
        attention, feed_forward = f"{there}.self_attn", f"{there}.mlp"
        matrices[f"{here}.qkv"] = tuple(
            inventory.take(f"{attention}.{name}_proj.weight", rows, width) for name, rows in projections
        )
        matrices[f"{here}.attention_output"] = (inventory.take(f"{attention}.o_proj.weight", width, heads_width),)
        matrices[f"{here}.gate"] = (inventory.take(f"{feed_forward}.gate_proj.weight", neurons, width),)
        matrices[f"{here}.up"] = (inventory.take(f"{feed_forward}.up_proj.weight", neurons, width),)
        matrices[f"{here}.down"] = (inventory.take(f"{feed_forward}.down_proj.weight", width, neurons),)
        vectors[f"{here}.attention_norm"] = (inventory.take(f"{there}.input_layernorm.weight", width),)
        vectors[f"{here}.ffn_norm"] = (inventory.take(f"{there}.post_attention_layernorm.weight", width),)
        if bias:
            vectors[f"{here}.qkv.bias"] = tuple(
                inventory.take(f"{attention}.{name}_proj.bias", rows) for name, rows in projections
            )
    return matrices, vectors


def _end_tokens(path: Path, config: Record, vocabulary: int) -> tuple[int, ...]:
    """The ids that end a text: generation_config.json knows better than config.json, where both speak."""
    generation = path / "generation_config.json"
    record = read_json(generation) if generation.exists() else config
    record = record if record.has("eos_token_id") else config
    if not record.has("eos_token_id"):
        return ()
    if "eos_token_id" not in record.names() and record.value("eos_token_id") >= vocabulary:
        return ()  # the class's default, in a model that has no such token
    value = record.value("eos_token_id")
    tokens = value if isinstance(value, list) else [value]
    for token in tokens:
        if type(token) is not int or not 0 <= token < vocabulary:
            record.fail("eos_token_id", f"{quoted(token)} is no token id below {vocabulary}")
    return tuple(dict.fromkeys(tokens))
