"""The tensors of dense checkpoints, and of mixtures that are Llama but for their experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tests.conformance.random_tensors import Array, random_tensor, rounded
from tests.conformance.recipes import Recipe

GATED = ("gate_proj", "up_proj", "down_proj")

# What a mixture's class calls its router, what comes before an expert's matrices, and these.
EXPERT_NAMES = {
    "MixtralForCausalLM": ("block_sparse_moe.gate", "block_sparse_moe.experts.{}.", ("w1", "w3", "w2")),
    "TurboSparseMixtralForCausalLM": ("block_sparse_moe.gate", "block_sparse_moe.experts.{}.", ("w1", "w3", "w2")),
    "Qwen3MoeForCausalLM": ("mlp.gate", "mlp.experts.{}.", GATED),
    "SmallThinkerForCausalLM": (
        "block_sparse_moe.primary_router", "block_sparse_moe.experts.{}.", ("gate", "up", "down"),
    ),
}  # fmt: skip

# What a class that norms each head calls these norms, of queries and of keys.
HEAD_NORMS = {
    "Qwen3ForCausalLM": ("q_norm", "k_norm"),
    "Qwen3MoeForCausalLM": ("q_norm", "k_norm"),
    "HunYuanDenseV1ForCausalLM": ("query_layernorm", "key_layernorm"),
}
UNGATED = ("ArceeForCausalLM",)

# Classes that norm the outputs of attention and feed-forward, and the norms of queries and keys that they have.
NORMED_OUTPUTS = {
    "Gemma2ForCausalLM": "none",
    "Gemma3ForCausalLM": "of each head",
    "Olmo2ForCausalLM": "of all heads",
    "Olmo3ForCausalLM": "of all heads",
    "Exaone4ForCausalLM": "of each head",
}


@dataclass(frozen=True)
class Named:
    """What a class of dense models with LayerNorm calls its parts; a layer's after the layer's name."""

    embedding: str = "model.embed_tokens"
    layer: str = "model.layers.{}."
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")  # one: of both in parallel
    norm_weight: bool = True
    norm_bias: bool = True
    projections: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")  # or one of all three
    attention_output: str = "self_attn.o_proj"
    ffn: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    output_norm: str = "model.norm"
    output: str = "lm_head"
    biased: tuple[str, ...] = ("qkv",)  # the parts with biases if a recipe has some


COHERE = Named(norms=("input_layernorm",), norm_bias=False, biased=("qkv", "output"))

LAYER_NORMED = {
    "StableLmForCausalLM": Named(),
    "OlmoForCausalLM": Named(norm_weight=False, norm_bias=False),
    "CohereForCausalLM": COHERE,
    "Cohere2ForCausalLM": COHERE,
    "GPTNeoXForCausalLM": Named(
        embedding="gpt_neox.embed_in", layer="gpt_neox.layers.{}.", projections=("attention.query_key_value",),
        attention_output="attention.dense", ffn=("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        output_norm="gpt_neox.final_layer_norm", output="embed_out", biased=("qkv", "output", "ffn"),
    ),
    "Starcoder2ForCausalLM": Named(ffn=("mlp.c_fc", "mlp.c_proj"), biased=("qkv", "output", "ffn")),
}  # fmt: skip


def llama_tensors(recipe: Recipe) -> Iterator[tuple[str, Array]]:
    """Of Llama and the classes that differ from it in a name, a norm or a gate."""
    generator = np.random.PCG64(recipe.seed)
    width, neurons, heads_width = recipe.width, recipe.neurons, recipe.query_heads * recipe.head_width

    def made(name: str, shape: tuple[int, ...], deviation: float, centre: float = 0.0) -> tuple[str, Array]:
        return name, rounded(random_tensor(generator, shape, deviation) + np.float32(centre), recipe.dtype)

    # A tied embedding must suit logits and residual stream alike; the norms make up for its scale.
    yield made("model.embed_tokens.weight", (recipe.vocabulary, width), 5 * width**-0.5 if recipe.tied else 1.0)
    for layer in range(recipe.layers):
        name = f"model.layers.{layer}"
        yield made(f"{name}.input_layernorm.weight", (width,), 0.1, 1.0)
        for projection, heads in (("q", recipe.query_heads), ("k", recipe.key_heads), ("v", recipe.key_heads)):
            rows = heads * recipe.head_width
            yield made(f"{name}.self_attn.{projection}_proj.weight", (rows, width), 1.3 * width**-0.5)
            if recipe.bias:
                yield made(f"{name}.self_attn.{projection}_proj.bias", (rows,), 0.5)
        for norm in HEAD_NORMS.get(recipe.architecture, ()):
            yield made(f"{name}.self_attn.{norm}.weight", (recipe.head_width,), 0.3, 1.2)
        yield made(f"{name}.self_attn.o_proj.weight", (width, heads_width), 0.5 * heads_width**-0.5)
        if recipe.bias and recipe.config.get("attention_out_bias", recipe.config.get("attention_bias")):
            yield made(f"{name}.self_attn.o_proj.bias", (width,), 0.3)
        yield made(f"{name}.post_attention_layernorm.weight", (width,), 0.1, 1.0)
        router, expert, (gate, up, down) = EXPERT_NAMES.get(recipe.architecture, ("", "mlp.", GATED))
        if recipe.experts:
            yield made(f"{name}.{router}.weight", (recipe.experts, width), 1.5 * width**-0.5)
        for number in range(recipe.experts or 1):
            ffn = f"{name}.{expert.format(number)}"
            if recipe.architecture not in UNGATED:
                yield made(f"{ffn}{gate}.weight", (neurons, width), width**-0.5)
            yield made(f"{ffn}{up}.weight", (neurons, width), width**-0.5)
            yield made(f"{ffn}{down}.weight", (width, neurons), 0.5 * neurons**-0.5)
            if recipe.config.get("mlp_bias"):
                for part, rows in ((gate, neurons), (up, neurons), (down, width)):
                    yield made(f"{ffn}{part}.bias", (rows,), 0.3)
    yield made("model.norm.weight", (width,), 0.1, 1.0)
    if not recipe.tied:
        yield made("lm_head.weight", (recipe.vocabulary, width), 5 * width**-0.5)


def opt_tensors(recipe: Recipe) -> Iterator[tuple[str, Array]]:
    generator = np.random.PCG64(recipe.seed)
    width, neurons = recipe.width, recipe.neurons

    def linear(name: str, rows: int, columns: int, gain: float) -> Iterator[tuple[str, Array]]:
        yield f"{name}.weight", rounded(random_tensor(generator, (rows, columns), gain * columns**-0.5), recipe.dtype)
        yield f"{name}.bias", rounded(random_tensor(generator, (rows,), 0.3), recipe.dtype)

    def norm(name: str) -> Iterator[tuple[str, Array]]:
        yield f"{name}.weight", rounded(random_tensor(generator, (width,), 0.1) + np.float32(1), recipe.dtype)
        yield f"{name}.bias", rounded(random_tensor(generator, (width,), 0.2), recipe.dtype)

    for name, rows in (("tokens", recipe.vocabulary), ("positions", recipe.context_tokens + 2)):
        values = random_tensor(generator, (rows, width), 5 * width**-0.5)
        yield f"model.decoder.embed_{name}.weight", rounded(values, recipe.dtype)
    for layer in range(recipe.layers):
        name = f"model.decoder.layers.{layer}"
        yield from norm(f"{name}.self_attn_layer_norm")
        for projection in "qkv":
            yield from linear(f"{name}.self_attn.{projection}_proj", width, width, 1.3)
        yield from linear(f"{name}.self_attn.out_proj", width, width, 0.5)
        yield from norm(f"{name}.final_layer_norm")
        yield from linear(f"{name}.fc1", neurons, width, 1.0)
        yield from linear(f"{name}.fc2", width, neurons, 0.5)
    yield from norm("model.decoder.final_layer_norm")


def nemotron_tensors(recipe: Recipe) -> Iterator[tuple[str, Array]]:
    """Stored norms lack 1."""
    generator = np.random.PCG64(recipe.seed)
    width, neurons, heads_width = recipe.width, recipe.neurons, recipe.query_heads * recipe.head_width

    def made(name: str, shape: tuple[int, ...], deviation: float) -> tuple[str, Array]:
        return name, rounded(random_tensor(generator, shape, deviation), recipe.dtype)

    def linear(name: str, rows: int, columns: int, gain: float) -> Iterator[tuple[str, Array]]:
        yield made(f"{name}.weight", (rows, columns), gain * columns**-0.5)
        if recipe.bias:
            yield made(f"{name}.bias", (rows,), 0.3)

    def norm(name: str) -> Iterator[tuple[str, Array]]:
        yield made(f"{name}.weight", (width,), 0.1)
        yield made(f"{name}.bias", (width,), 0.2)

    yield made("model.embed_tokens.weight", (recipe.vocabulary, width), 1.0)
    for layer in range(recipe.layers):
        name = f"model.layers.{layer}"
        yield from norm(f"{name}.input_layernorm")
        for projection, heads in (("q", recipe.query_heads), ("k", recipe.key_heads), ("v", recipe.key_heads)):
            yield from linear(f"{name}.self_attn.{projection}_proj", heads * recipe.head_width, width, 1.3)
        yield from linear(f"{name}.self_attn.o_proj", width, heads_width, 0.5)
        yield from norm(f"{name}.post_attention_layernorm")
        yield from linear(f"{name}.mlp.up_proj", neurons, width, 1.0)
        yield from linear(f"{name}.mlp.down_proj", width, neurons, 0.5)
    yield from norm("model.norm")
    yield made("lm_head.weight", (recipe.vocabulary, width), 5 * width**-0.5)


def phi3_tensors(recipe: Recipe) -> Iterator[tuple[str, Array]]:
    """Queries, keys and values are joined, and so are gate and up."""
    generator, width, neurons = np.random.PCG64(recipe.seed), recipe.width, recipe.neurons

    def made(name: str, shape: tuple[int, ...], deviation: float, centre: float = 0.0) -> tuple[str, Array]:
        return name, rounded(random_tensor(generator, shape, deviation) + np.float32(centre), recipe.dtype)

    yield made("model.embed_tokens.weight", (recipe.vocabulary, width), 1.0)
    for layer in range(recipe.layers):
        name, heads_width = f"model.layers.{layer}", recipe.query_heads * recipe.head_width
        rows = heads_width + 2 * recipe.key_heads * recipe.head_width
        yield made(f"{name}.input_layernorm.weight", (width,), 0.1, 1.0)
        yield made(f"{name}.self_attn.qkv_proj.weight", (rows, width), 1.3 * width**-0.5)
        yield made(f"{name}.self_attn.o_proj.weight", (width, heads_width), 0.5 * heads_width**-0.5)
        yield made(f"{name}.post_attention_layernorm.weight", (width,), 0.1, 1.0)
        yield made(f"{name}.mlp.gate_up_proj.weight", (2 * neurons, width), width**-0.5)
        yield made(f"{name}.mlp.down_proj.weight", (width, neurons), 0.5 * neurons**-0.5)
    yield made("model.norm.weight", (width,), 0.1, 1.0)
    yield made("lm_head.weight", (recipe.vocabulary, width), 5 * width**-0.5)


def falcon_tensors(recipe: Recipe) -> Iterator[tuple[str, Array]]:
    generator = np.random.PCG64(recipe.seed)
    width, neurons = recipe.width, recipe.neurons
    two_norms = recipe.config.get("num_ln_in_parallel_attn", 2 if recipe.config["new_decoder_architecture"] else 1) == 2

    def linear(name: str, rows: int, columns: int, gain: float) -> Iterator[tuple[str, Array]]:
        yield f"{name}.weight", rounded(random_tensor(generator, (rows, columns), gain * columns**-0.5), recipe.dtype)
        if recipe.bias:
            yield f"{name}.bias", rounded(random_tensor(generator, (rows,), 0.3), recipe.dtype)

    def norm(name: str) -> Iterator[tuple[str, Array]]:
        yield f"{name}.weight", rounded(random_tensor(generator, (width,), 0.1) + np.float32(1), recipe.dtype)
        yield f"{name}.bias", rounded(random_tensor(generator, (width,), 0.2), recipe.dtype)

    embedding = random_tensor(generator, (recipe.vocabulary, width), 5 * width**-0.5)
    yield "transformer.word_embeddings.weight", rounded(embedding, recipe.dtype)
    for layer in range(recipe.layers):
        name = f"transformer.h.{layer}"
        for one in ("ln_attn", "ln_mlp") if two_norms else ("input_layernorm",):
            yield from norm(f"{name}.{one}")
        rows = (recipe.query_heads + 2 * recipe.key_heads) * recipe.head_width
        yield from linear(f"{name}.self_attention.query_key_value", rows, width, 1.3)
        yield from linear(f"{name}.self_attention.dense", width, width, 0.5)
        yield from linear(f"{name}.mlp.dense_h_to_4h", neurons, width, 1.0)
        yield from linear(f"{name}.mlp.dense_4h_to_h", width, neurons, 0.5)
    yield from norm("transformer.ln_f")


def normed_tensors(recipe: Recipe) -> Iterator[tuple[str, Array]]:
    """Norms of outputs make them about half as large as the embeddings. Stored norms of Gemma lack 1."""
    generator, gemma = np.random.PCG64(recipe.seed), recipe.architecture.startswith("Gemma")
    width, heads_width, key_width = (
        recipe.width,
        *(n * recipe.head_width for n in (recipe.query_heads, recipe.key_heads)),
    )

    def made(name: str, shape: tuple[int, ...], deviation: float, centre: float = 0.0) -> tuple[str, Array]:
        return name, rounded(random_tensor(generator, shape, deviation) + np.float32(centre), recipe.dtype)

    def norm(name: str, length: int, deviation: float, centre: float = 1.0) -> tuple[str, Array]:
        return made(f"{name}.weight", (length,), deviation, centre - 1.0 if gemma else centre)

    yield made("model.embed_tokens.weight", (recipe.vocabulary, width), 5 * width**-0.5 if recipe.tied else 1.0)
    for layer in range(recipe.layers):
        name = f"model.layers.{layer}"
        for part, rows, columns, gain in (
            ("q", heads_width, width, 1.3),
            ("k", key_width, width, 1.3),
            ("v", key_width, width, 1.3),
            ("o", width, heads_width, 0.5),
        ):
            yield made(f"{name}.self_attn.{part}_proj.weight", (rows, columns), gain * columns**-0.5)
        for part, all_width in (("q", heads_width), ("k", key_width)):
            norms = NORMED_OUTPUTS[recipe.architecture]
            if norms != "none":
                length = recipe.head_width if norms == "of each head" else all_width
                yield norm(f"{name}.self_attn.{part}_norm", length, 0.3, 1.2)
        for part in ("input_layernorm", "pre_feedforward_layernorm") if gemma else ():
            yield norm(f"{name}.{part}", width, 0.1)
        for part in ("post_attention_layernorm", "post_feedforward_layernorm"):
            yield norm(f"{name}.{part}", width, 0.5, 2.0) if gemma else norm(f"{name}.{part}", width, 0.2, 0.5)
        for part, rows, columns in (
            ("gate", recipe.neurons, width),
            ("up", recipe.neurons, width),
            ("down", width, recipe.neurons),
        ):
            yield made(f"{name}.mlp.{part}_proj.weight", (rows, columns), columns**-0.5)
    yield norm("model.norm", width, 0.1)
    if not recipe.tied:
        yield made("lm_head.weight", (recipe.vocabulary, width), 5 * width**-0.5)


def layer_normed_tensors(recipe: Recipe) -> Iterator[tuple[str, Array]]:
    """Embeddings have a mean that LayerNorm takes away."""
    generator, width, names = np.random.PCG64(recipe.seed), recipe.width, LAYER_NORMED[recipe.architecture]
    queries, keys = (heads * recipe.head_width for heads in (recipe.query_heads, recipe.key_heads))

    def made(name: str, shape: tuple[int, ...], deviation: float, centre: float = 0.0) -> tuple[str, Array]:
        return name, rounded(random_tensor(generator, shape, deviation) + np.float32(centre), recipe.dtype)

    def linear(name: str, part: str, rows: int, columns: int, gain: float) -> Iterator[tuple[str, Array]]:
        yield made(f"{name}.weight", (rows, columns), gain * columns**-0.5)
        if recipe.bias and part in names.biased:
            yield made(f"{name}.bias", (rows,), 0.3)

    def norm(name: str) -> Iterator[tuple[str, Array]]:
        if names.norm_weight:
            yield made(f"{name}.weight", (width,), 0.1, 1.0)
        if names.norm_bias:
            yield made(f"{name}.bias", (width,), 0.2)

    yield made(f"{names.embedding}.weight", (recipe.vocabulary, width), 5 * width**-0.5 if recipe.tied else 1.0, 0.5)
    *before, down = names.ffn
    for number in range(recipe.layers):
        layer = names.layer.format(number)
        parallel = recipe.config.get("use_parallel_residual") and recipe.architecture == "StableLmForCausalLM"
        for one in names.norms[:1] if parallel else names.norms:
            yield from norm(f"{layer}{one}")
        rows = (queries, keys, keys) if len(names.projections) == 3 else (queries + 2 * keys,)
        for part, count in zip(names.projections, rows, strict=True):
            yield from linear(f"{layer}{part}", "qkv", count, width, 1.3)
        yield from linear(f"{layer}{names.attention_output}", "output", width, queries, 0.5)
        for part in before:
            yield from linear(f"{layer}{part}", "ffn", recipe.neurons, width, 1.0)
        yield from linear(f"{layer}{down}", "ffn", width, recipe.neurons, 0.5)
    yield from norm(names.output_norm)
    if not recipe.tied:
        yield made(f"{names.output}.weight", (recipe.vocabulary, width), 5 * width**-0.5)
