"""The tensors of checkpoints of mixtures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from tests.conformance.dense_tensors import GATED
from tests.conformance.random_tensors import Array, random_tensor, rounded
from tests.conformance.recipes import Recipe

KDA_WIDTH = 32


@dataclass(frozen=True)
class Parts:
    """What a class of mixtures calls its parts, after a layer's name. Those without a name it does not have."""

    router: str = "mlp.gate"
    experts: str = "mlp.experts.{}."  # what comes before an expert's matrices
    matrices: tuple[str, ...] = GATED  # two: each of all experts at once, the first one gate and up
    correction: str = ""  # of the scores by which experts are chosen
    correction_rows: tuple[int, ...] = ()  # what its shape has before the experts
    correction_deviation: float = 0.2  # as much as scores differ
    shared: str = ""  # what comes before the shared expert's matrices
    shared_gate: str = ""
    norms: tuple[str, ...] = ()  # of queries and of keys, each head by itself
    whole_norms: bool = False  # or all heads as one
    output_bias: bool = False  # of attention's last projection, where a recipe's others have one
    layer_norm: bool = False  # norms that take the mean away and add a bias
    attention: str = "self_attn."  # what comes before the parts of attention
    joins_projections: bool = False  # queries, keys and values are one matrix, and the last projection is `dense`
    embedding: str = "model.embed_tokens"


NORMS = ("q_norm", "k_norm")

DEEPSEEK = Parts(correction="mlp.gate.e_score_correction_bias", shared="mlp.shared_experts.", norms=NORMS)

MIXTRAL = Parts(router="block_sparse_moe.gate", experts="block_sparse_moe.experts.{}.", matrices=("w1", "w3", "w2"))

BAILING = Parts(
    shared="mlp.shared_experts.", norms=("query_layernorm", "key_layernorm"), attention="attention.",
    joins_projections=True, embedding="model.word_embeddings",
)  # fmt: skip

PARTS = {
    "Glm4MoeForCausalLM": DEEPSEEK,
    "Dots1ForCausalLM": DEEPSEEK,
    "DeepseekV2ForCausalLM": Parts(shared="mlp.shared_experts."),
    "DeepseekV3ForCausalLM": DEEPSEEK,
    "Glm4MoeLiteForCausalLM": DEEPSEEK,
    "Qwen2MoeForCausalLM": Parts(shared="mlp.shared_expert.", shared_gate="mlp.shared_expert_gate"),
    "OlmoeForCausalLM": Parts(norms=NORMS, whole_norms=True),
    "Ernie4_5_MoeForCausalLM": Parts(
        correction="mlp.moe_statics.e_score_correction_bias", correction_rows=(1,), correction_deviation=0.08,
        shared="mlp.shared_experts.",
    ),
    "HunYuanMoEV1ForCausalLM": Parts(
        router="mlp.gate.wg", shared="mlp.shared_mlp.", norms=("query_layernorm", "key_layernorm")
    ),
    "MiniMaxM2ForCausalLM": replace(
        MIXTRAL, correction="block_sparse_moe.e_score_correction_bias", norms=NORMS, whole_norms=True
    ),
    "KimiLinearForCausalLM": replace(
        MIXTRAL, correction="block_sparse_moe.gate.e_score_correction_bias", shared="block_sparse_moe.shared_experts."
    ),
    "PhimoeForCausalLM": replace(MIXTRAL, output_bias=True, layer_norm=True),
    "BailingMoeForCausalLM": BAILING,
    "BailingMoeV2ForCausalLM": replace(BAILING, correction="mlp.gate.expert_bias"),
    "GraniteMoeForCausalLM": Parts(
        router="block_sparse_moe.router.layer", experts="block_sparse_moe.", matrices=("input_linear", "output_linear")
    ),
}  # fmt: skip


def mixture_tensors(recipe: Recipe) -> Iterator[tuple[str, Array]]:
    """A shared expert counts as much as the chosen ones together. Where norms take the mean away, it is large."""
    generator, parts = np.random.PCG64(recipe.seed), PARTS[recipe.architecture]
    width, head_width = recipe.width, recipe.head_width
    heads_width, keys_width = recipe.query_heads * head_width, recipe.key_heads * head_width

    def made(name: str, shape: tuple[int, ...], deviation: float, centre: float = 0.0) -> tuple[str, Array]:
        return name, rounded(random_tensor(generator, shape, deviation) + np.float32(centre), recipe.dtype)

    def norm(name: str) -> Iterator[tuple[str, Array]]:
        yield made(f"{name}.weight", (width,), 0.1, 1.0)
        if parts.layer_norm:
            yield made(f"{name}.bias", (width,), 0.2)

    def projection(name: str, rows: int, columns: int, gain: float) -> Iterator[tuple[str, Array]]:
        yield made(f"{name}.weight", (rows, columns), gain * columns**-0.5)
        if recipe.bias and (parts.output_bias or not name.endswith("o_proj")):
            yield made(f"{name}.bias", (rows,), 0.5)

    def gated(name: str, matrices: tuple[str, ...], neurons: int) -> Iterator[tuple[str, Array]]:
        *ups, down = matrices
        for up in ups:
            yield made(f"{name}{up}.weight", (neurons, width), width**-0.5)
        yield made(f"{name}{down}.weight", (width, neurons), 0.5 * neurons**-0.5)

    def mixture(name: str) -> Iterator[tuple[str, Array]]:
        experts, neurons = recipe.experts, recipe.neurons
        yield made(f"{name}.{parts.router}.weight", (experts, width), 1.5 * width**-0.5)
        if parts.correction:
            yield made(f"{name}.{parts.correction}", (*parts.correction_rows, experts), parts.correction_deviation)
        if len(parts.matrices) == 2:
            up, down = (f"{name}.{parts.experts}{matrix}.weight" for matrix in parts.matrices)
            yield made(up, (experts, 2 * neurons, width), width**-0.5)
            yield made(down, (experts, width, neurons), 0.5 * neurons**-0.5)
        else:
            for number in range(experts):
                yield from gated(f"{name}.{parts.experts.format(number)}", parts.matrices, neurons)
        if recipe.shared:
            yield from gated(f"{name}.{parts.shared}", GATED, recipe.shared)
        if parts.shared_gate:
            yield made(f"{name}.{parts.shared_gate}.weight", (1, width), 1.5 * width**-0.5)

    mean = 0.5 if parts.layer_norm else 0.0
    yield made(f"{parts.embedding}.weight", (recipe.vocabulary, width), 5 * width**-0.5 if recipe.tied else 1.0, mean)
    for layer in range(recipe.layers):
        name = f"model.layers.{layer}"
        attention = f"{name}.{parts.attention}"
        yield from norm(f"{name}.input_layernorm")
        if layer in kda_layers(recipe):
            heads_width = _kda_heads(recipe) * KDA_WIDTH
            for part, shape, deviation, centre in _kda(recipe):
                yield made(f"{name}.self_attn.{part}", shape, deviation, centre)
        elif "kv_lora_rank" in recipe.config:
            heads_width = recipe.query_heads * recipe.config["v_head_dim"]
            for part, shape, deviation, centre in _latent_attention(recipe):
                yield made(f"{name}.self_attn.{part}.weight", shape, deviation, centre)
        elif parts.joins_projections:
            yield from projection(f"{attention}query_key_value", heads_width + 2 * keys_width, width, 1.3)
        else:
            for part, rows in (("q", heads_width), ("k", keys_width), ("v", keys_width)):
                yield from projection(f"{name}.self_attn.{part}_proj", rows, width, 1.3)
        if "kv_lora_rank" not in recipe.config and recipe.config.get("use_qk_norm", True):
            for one, values in zip(parts.norms, (heads_width, keys_width), strict=False):
                yield made(f"{attention}{one}.weight", (values if parts.whole_norms else head_width,), 0.3, 1.2)
        yield from projection(f"{attention}{'dense' if parts.joins_projections else 'o_proj'}", width, heads_width, 0.5)
        yield from norm(f"{name}.post_attention_layernorm")
        if layer in recipe.dense:
            yield from gated(f"{name}.mlp.", GATED, recipe.config["intermediate_size"])
        else:
            yield from mixture(name)
    yield from norm("model.norm")
    if not recipe.tied:
        yield made("lm_head.weight", (recipe.vocabulary, width), 5 * width**-0.5)
    if recipe.config.get("lm_head_bias"):
        yield made("lm_head.bias", (recipe.vocabulary,), 2.0)


def _kda_heads(recipe: Recipe) -> int:
    settings = recipe.config
    return settings.get("linear_num_heads") or settings["linear_attn_config"]["num_heads"]


def kda_layers(recipe: Recipe) -> list[int]:
    """The layers with Kimi delta attention, in either form that config.json may have."""
    if "linear_attn_config" in recipe.config:
        return [number - 1 for number in recipe.config["linear_attn_config"]["kda_layers"]]
    kinds = recipe.config.get("layer_types", ()) if recipe.architecture == "KimiLinearForCausalLM" else ()
    return [layer for layer, kind in enumerate(kinds) if kind == "linear_attention"]


def _kda(recipe: Recipe) -> Iterator[tuple[str, tuple[int, ...], float, float]]:
    """Name, shape, deviation and centre of all but the output matrix. Memories decay so slowly that tokens far away
    count, and their channels at rates that differ."""
    width, heads = recipe.width, _kda_heads(recipe)
    heads_width = heads * KDA_WIDTH
    for part in "qkv":
        yield f"{part}_proj.weight", (heads_width, width), 1.3 * width**-0.5, 0.0
        yield f"{part}_conv1d.weight", (heads_width, 1, 4), 0.5, 0.0
    for part in "fg":
        yield f"{part}_a_proj.weight", (KDA_WIDTH, width), width**-0.5, 0.0
        yield f"{part}_b_proj.weight", (heads_width, KDA_WIDTH), 1.5 * KDA_WIDTH**-0.5, 0.0
    yield "b_proj.weight", (heads, width), width**-0.5, 0.0
    yield "A_log", (1, 1, heads, 1), 1.0, -2.0
    yield "dt_bias", (heads_width,), 1.0, -1.0
    yield "o_norm.weight", (KDA_WIDTH,), 0.3, 1.0


def _latent_attention(recipe: Recipe) -> Iterator[tuple[str, tuple[int, ...], float, float]]:
    """Name, shape, deviation and centre of matrices and norms. The input of queries is so small that epsilon counts."""
    settings, heads, width = recipe.config, recipe.query_heads, recipe.width
    rank, latent, rotated = settings["q_lora_rank"], settings["kv_lora_rank"], settings["qk_rope_head_dim"]
    head, values = settings["qk_nope_head_dim"] + rotated, settings["v_head_dim"]
    if rank is None:
        yield "q_proj", (heads * head, width), 1.3 * width**-0.5, 0.0
    else:
        yield "q_a_proj", (rank, width), 0.005 * width**-0.5, 0.0
        yield "q_a_layernorm", (rank,), 0.3, 1.0
        yield "q_b_proj", (heads * head, rank), 1.3 * rank**-0.5, 0.0
    yield "kv_a_proj_with_mqa", (latent + rotated, width), 1.3 * width**-0.5, 0.0
    yield "kv_a_layernorm", (latent,), 0.3, 1.0
    yield "kv_b_proj", (heads * (head - rotated + values), latent), 1.3 * latent**-0.5, 0.0


def gpt_oss_tensors(recipe: Recipe) -> Iterator[tuple[str, Array]]:
    """Matrices of experts have a row for each input. Sinks are as large as scores, and many gates exceed the limit."""
    generator = np.random.PCG64(recipe.seed)
    width, neurons, experts = recipe.width, recipe.neurons, recipe.experts
    heads_width = recipe.query_heads * recipe.head_width

    def made(name: str, shape: tuple[int, ...], deviation: float, centre: float = 0.0) -> tuple[str, Array]:
        return name, rounded(random_tensor(generator, shape, deviation) + np.float32(centre), recipe.dtype)

    yield made("model.embed_tokens.weight", (recipe.vocabulary, width), 1.0)
    for layer in range(recipe.layers):
        name = f"model.layers.{layer}"
        yield made(f"{name}.input_layernorm.weight", (width,), 0.1, 1.0)
        yield made(f"{name}.self_attn.sinks", (recipe.query_heads,), 1.5)
        for part, rows, columns, gain in (
            ("q", heads_width, width, 1.3),
            ("k", recipe.key_heads * recipe.head_width, width, 1.3),
            ("v", recipe.key_heads * recipe.head_width, width, 1.3),
            ("o", width, heads_width, 0.5),
        ):
            yield made(f"{name}.self_attn.{part}_proj.weight", (rows, columns), gain * columns**-0.5)
            yield made(f"{name}.self_attn.{part}_proj.bias", (rows,), 0.3)
        yield made(f"{name}.post_attention_layernorm.weight", (width,), 0.1, 1.0)
        yield made(f"{name}.mlp.router.weight", (experts, width), 1.5 * width**-0.5)
        yield made(f"{name}.mlp.router.bias", (experts,), 0.5)
        yield made(f"{name}.mlp.experts.gate_up_proj", (experts, width, 2 * neurons), 1.5 * width**-0.5)
        yield made(f"{name}.mlp.experts.gate_up_proj_bias", (experts, 2 * neurons), 0.5)
        yield made(f"{name}.mlp.experts.down_proj", (experts, neurons, width), 0.5 * neurons**-0.5)
        yield made(f"{name}.mlp.experts.down_proj_bias", (experts, width), 0.2)
    yield made("model.norm.weight", (width,), 0.1, 1.0)
    yield made("lm_head.weight", (recipe.vocabulary, width), 5 * width**-0.5)


def gemma4_tensors(recipe: Recipe) -> Iterator[tuple[str, Array]]:
    """Norms of queries and keys are small, since nothing divides scores. Layer scalars are far from 1."""
    generator, width, settings = np.random.PCG64(recipe.seed), recipe.width, recipe.config

    def made(name: str, shape: tuple[int, ...], deviation: float, centre: float = 0.0) -> tuple[str, Array]:
        return name, rounded(random_tensor(generator, shape, deviation) + np.float32(centre), recipe.dtype)

    def norm(name: str, length: int, deviation: float, centre: float = 1.0) -> tuple[str, Array]:
        return made(f"{name}.weight", (length,), deviation, centre)

    yield made("model.embed_tokens.weight", (recipe.vocabulary, width), 5 * width**-0.5)
    for layer in range(recipe.layers):
        name = f"model.layers.{layer}"
        is_full, joint = settings["layer_types"][layer] == "full_attention", settings["attention_k_eq_v"]
        head_width = settings["global_head_dim"] if is_full else recipe.head_width
        key_heads = settings["num_global_key_value_heads"] if is_full and joint else recipe.key_heads
        heads_width = recipe.query_heads * head_width
        for part, rows in (("q", heads_width), ("k", key_heads * head_width), ("v", key_heads * head_width)):
            if part != "v" or not (is_full and joint):
                yield made(f"{name}.self_attn.{part}_proj.weight", (rows, width), 1.3 * width**-0.5)
        yield made(f"{name}.self_attn.o_proj.weight", (width, heads_width), heads_width**-0.5)
        for part in ("q_norm", "k_norm"):
            yield norm(f"{name}.self_attn.{part}", head_width, 0.15, 0.5)
        for part in ("input_layernorm", "pre_feedforward_layernorm"):
            yield norm(f"{name}.{part}", width, 0.1)
        for part in ("post_attention_layernorm", "post_feedforward_layernorm"):
            yield norm(f"{name}.{part}", width, 0.3, 1.0)
        yield made(f"{name}.layer_scalar", (1,), 0.2, 0.7)
        wide = recipe.shared or recipe.neurons
        for part, shape in (("gate", (wide, width)), ("up", (wide, width)), ("down", (width, wide))):
            yield made(f"{name}.mlp.{part}_proj.weight", shape, shape[1] ** -0.5)
        if recipe.experts:
            yield norm(f"{name}.pre_feedforward_layernorm_2", width, 0.3, 1.5)
            yield norm(f"{name}.post_feedforward_layernorm_1", width, 0.3, 0.8)
            yield norm(f"{name}.post_feedforward_layernorm_2", width, 0.3, 1.3)
            yield made(f"{name}.router.proj.weight", (recipe.experts, width), 2.5)
            yield made(f"{name}.router.scale", (width,), 0.4, 1.0)
            yield made(f"{name}.router.per_expert_scale", (recipe.experts,), 0.4, 1.0)
            yield made(f"{name}.experts.gate_up_proj", (recipe.experts, 2 * recipe.neurons, width), width**-0.5)
            yield made(f"{name}.experts.down_proj", (recipe.experts, width, recipe.neurons), recipe.neurons**-0.5)
    yield norm("model.norm", width, 0.1)
