"""Families of models: what their configurations say becomes one description, or is refused by the field's name."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from neuronpipe.plans.convert import convert
from neuronpipe.plans.convert.checkpoint import Options
from neuronpipe.plans.convert.gguf.powerinfer import ARCHITECTURES as POWERINFER_ARCHITECTURES
from neuronpipe.plans.convert.huggingface import open_huggingface
from neuronpipe.plans.models.family import Choices
from neuronpipe.plans.models.registry import ARCHITECTURES, FAMILIES, GGUF_ARCHITECTURES
from neuronpipe.plans.models.spec import LayerKind, ModelSpec, SpecError, runs_of
from neuronpipe.plans.strict_json import Record
from neuronpipe.protocol.errors import UserError

from tests.conformance.checkpoints import RECIPES, tensors, write_checkpoint

DENSE = ModelSpec(
    family="llama",
    width=64,
    neurons=100,
    layer_kinds=(LayerKind(2),),
    query_heads=2,
    key_heads=1,
    head_width=32,
    vocabulary=300,
    context_tokens=128,
    norm_epsilon=1e-5,
    activation="relu",
)
KDA = {"state_heads": 2, "state_key_heads": 2, "state_key_width": 16, "state_value_width": 32, "convolution_tokens": 4}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"width": 0}, "width"),
        ({"layer_kinds": (LayerKind(2, mixer="none", feed_forward=False),)}, "layer_kinds"),
        ({"layer_kinds": (LayerKind(2, feed_forward=False),)}, "layer_kinds"),
        ({"layer_kinds": (LayerKind(1), LayerKind(1, 9, mixer="convolution")), "convolution_tokens": 3}, "layer_kinds"),
        ({"layer_kinds": (LayerKind(1), LayerKind(1, mixer="convolution"))}, "convolution_tokens"),
        ({"layer_kinds": (LayerKind(1), LayerKind(1, mixer="deltanet")), "convolution_tokens": 4}, "state_heads"),
        ({"state_heads": 4}, "state_heads"),
        ({"state_rank": 32}, "state_rank"),
        ({"layer_kinds": (LayerKind(1), LayerKind(1, mixer="kda")), **KDA}, "state_rank"),
        (
            {"layer_kinds": (LayerKind(1), LayerKind(1, mixer="kda")), **KDA, "state_rank": 32, "state_key_heads": 1},
            "state_key_heads",
        ),
        ({"convolution_bias": True}, "convolution_bias"),
        ({"state_norm_groups": 2}, "state_norm_groups"),
        ({"experts": 1 << 20}, "experts"),
        ({"experts_per_token": 2}, "experts_per_token"),
        ({"experts": 4, "experts_per_token": 5}, "experts_per_token"),
        ({"layer_kinds": ()}, "layer_kinds"),
        ({"layer_kinds": (LayerKind(0),)}, "layer_kinds"),
        ({"layer_kinds": (LayerKind(2, -1),)}, "layer_kinds"),
        ({"head_width": 33}, "head_width"),
        ({"query_heads": 3, "key_heads": 2}, "query_heads"),
        ({"norm_epsilon": float("nan")}, "norm_epsilon"),
        ({"gated": False, "activation": "silu"}, "activation"),
        ({"ffn_bias": True}, "ffn_bias"),
        ({"activation_threshold": -1.0}, "activation_threshold"),
        ({"embedding_scale": 0.0}, "embedding_scale"),
        ({"residual_scale": -1.0}, "residual_scale"),
        ({"attention_scale": 0.0}, "attention_scale"),
        ({"logit_scale": float("nan")}, "logit_scale"),
        ({"activation_threshold": float("inf")}, "activation_threshold"),
        ({"activation_threshold": 0.1, "activation": "drelu"}, "activation_threshold"),
    ],
)
def test_a_description_that_contradicts_itself_is_refused_by_its_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(SpecError) as caught:
        replace(DENSE, **changes)
    assert caught.value.field == field


def test_an_odd_head_needs_no_pairs_where_positions_are_learned() -> None:
    assert replace(DENSE, head_width=33, positions="learned").head_width == 33


def test_layers_of_one_window_are_one_run() -> None:
    assert runs_of([0, 0, 9, 9, 0]) == (LayerKind(2), LayerKind(2, 9), LayerKind(1))
    assert replace(DENSE, layer_kinds=runs_of([0, 9])).windows_tokens == (0, 9)


def test_every_family_is_known_by_the_name_that_its_models_carry() -> None:
    assert all(family.name == name for name, family in FAMILIES.items())
    assert len(ARCHITECTURES) == sum(len(family.architectures) for family in FAMILIES.values())


def test_the_readme_says_of_every_class_what_was_tried() -> None:
    readme = (Path(__file__).parents[2] / "plans" / "models" / "README.md").read_text()
    tried = readme.partition("## What was tried")[2].partition("\n## ")[0]
    for name in (*ARCHITECTURES, *GGUF_ARCHITECTURES, *POWERINFER_ARCHITECTURES):
        assert f"`{name}`" in tried
    for name in {recipe.architecture for recipe in RECIPES.values()}:
        (row,) = [line for line in tried.splitlines() if line.startswith("|") and f"`{name}`" in line]
        assert "none of its own" not in row


@pytest.mark.parametrize(
    ("recipe", "fields", "complaint"),
    [
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before: only models with true"),
        ("opt", {"enable_bias": False}, "enable_bias: only models with true"),
        ("opt", {"word_embed_proj_dim": 64}, "word_embed_proj_dim: differs from hidden_size, 192"),
        ("opt", {"activation_function": "gelu"}, "activation_function: 'gelu' is not supported"),
        ("opt", {"num_attention_heads": 5}, "num_attention_heads: 5 does not divide hidden_size"),
        ("opt", {"max_position_embeddings": 1000}, r"embed_positions\.weight: 130 rows, but 1002 are needed"),
        ("qwen3", {"attention_bias": True}, r"q_proj\.bias: the tensor is missing"),
        ("qwen3", {"head_dim": None}, r"q_proj\.weight: has shape \[192, 160\], but the configuration needs"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 3}, "layer_types: .*for each of 4 layers"),
        (
            "falcon 7b",
            {"activation": "gelu"},
            "activation: 'gelu' is not .*ReluFalcon has relu.*--activation relu",
        ),
        ("falcon 7b", {"alibi": True}, "alibi: is true: positions by ALiBi"),
        ("falcon 7b", {"parallel_attn": False}, "parallel_attn: is false: attention before"),
        ("falcon 7b", {"new_decoder_architecture": True}, r"ln_attn\.weight: the tensor is missing"),
        ("falcon 7b", {"multi_query": False}, r"query_key_value\.weight: has shape \[224, 160\], but .*\[480, 160\]"),
        ("falcon 40b", {"num_kv_heads": 4}, "query_heads: 6 is no multiple of key_heads, 4"),
        ("falcon 40b", {"num_ln_in_parallel_attn": 1}, r"input_layernorm\.weight: the tensor is missing"),
        ("arcee", {"mlp_bias": True}, r"mlp\.(up|down)_proj\.bias: the tensor is missing"),
        ("arcee", {"attention_bias": True}, r"q_proj\.bias: the tensor is missing"),
        ("arcee", {"hidden_act": "silu"}, "activation: silu needs a feed-forward with a gate"),
        ("nemotron", {"hidden_act": "silu"}, "activation: silu needs a feed-forward with a gate"),
        ("nemotron", {"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported"),
        ("nemotron", {"mlp_bias": False}, r"mlp\.(up|down)_proj\.bias: a tensor that this architecture does not have"),
        ("nemotron", {"partial_rotary_factor": 0.15}, r"partial_rotary_factor: 0\.15 of a head of 48 is 7 elements"),
        ("mixtral", {"num_local_experts": 4}, r"moe\.gate\.weight: has shape \[5, 160\], but .* \[4, 160\]"),
        ("mixtral", {"num_local_experts": 6}, r"moe\.gate\.weight: has shape \[5, 160\], but .* \[6, 160\]"),
        ("mixtral", {"num_local_experts": 1}, r"num_local_experts: 1 is outside 2\.\.4096"),
        ("mixtral", {"num_experts_per_tok": 6}, r"num_experts_per_tok: 6 is outside 1\.\.5"),
        ("mixtral", {"num_experts_per_tok": 0}, r"num_experts_per_tok: 0 is outside 1\.\.5"),
        ("mixtral", {"intermediate_size": 100}, r"experts\.0\.w1\.weight: has shape \[200, 160\], but .* \[100, 160\]"),
        ("turbosparse", {"hidden_act": "silu"}, r"hidden_act: is 'silu', but .* means drelu; .*--activation relu\|"),
        ("qwen3moe", {"decoder_sparse_step": 9}, "decoder_sparse_step: is 9, so that no layer has experts"),
        ("qwen3moe", {"mlp_only_layers": [0.5]}, "mlp_only_layers: .* is no list of layers"),
        ("qwen3moe", {"mlp_only_layers": [0]}, r"layers\.0\.mlp\.up_proj\.weight: the tensor is missing"),
        ("glm4moe", {"first_k_dense_replace": 4}, "first_k_dense_replace: 4 is outside 0..3"),
        ("glm4moe", {"intermediate_size": 300}, r"layers\.0\.mlp\.up_proj\.weight: has 200 neurons, but .* 241 to 300"),
        (
            "glm4moe",
            {"n_shared_experts": 2},
            r"mlp\.shared_experts\.up_proj\.weight: has 180 neurons, but .* 61 to 120",
        ),
        ("glm4moe groups", {"n_group": 5}, "n_group: 5 groups of 12 experts"),
        ("glm4moe groups", {"topk_group": 1, "num_experts_per_tok": 4}, "groups_per_token: 1 of 4 groups of 3 experts"),
        ("olmoe", {"clip_qkv": -8.0}, "clip_qkv: -8.0 is outside"),
        ("olmo", {"clip_qkv": 0}, "clip_qkv: 0 is outside"),
        ("ministral3", {"sliding_window": 0}, "sliding_window: 0 is outside"),
        ("olmo", {"attention_bias": True}, r"q_proj\.bias: the tensor is missing"),
        (
            "biases",
            {"attention_bias": False},
            "attention_bias: is not true, but the checkpoint has biases of self_attn",
        ),
        ("biases", {"mlp_bias": False}, "mlp_bias: is not true, but the checkpoint has biases of mlp.down_proj"),
        ("biases", {"hidden_act": "relu"}, "ffn_bias: not supported with a gate and relu"),
        ("qwen3moe windows", {"sliding_window": -9}, "sliding_window: -9 is outside"),
        ("qwen2moe windows", {"layer_types": ["full_attention"] * 4}, "layer_types: .* for each of 5 layers"),
        ("lfm2", {"block_ff_dim": 1200}, r"w1\.weight: has shape"),
        ("gemma4", {"per_layer_config": {"7": {"head_dim": 64}}}, r"per_layer_config\.7: is no layer of 5"),
        ("gemma4", {"per_layer_config": {"-1": {"head_dim": 64}}}, r"per_layer_config\.-1: is no layer of 5"),
        ("ernie4_5", {"use_bias": True}, "use_bias: is true: biases are not supported in this class"),
        ("seed-oss", {"attention_bias": False}, r"q_proj\.bias: a tensor that this architecture does not have"),
        ("seed-oss", {"attention_out_bias": True}, r"o_proj\.bias: the tensor is missing"),
        ("seed-oss", {"mlp_bias": True}, r"mlp\.\w+_proj\.bias: the tensor is missing"),
        ("ernie4_5moe", {"moe_layer_start_index": 9}, "moe_layer_start_index: is 9, so that no layer has experts"),
        ("hunyuan moe", {"moe_topk": [3, 3, 2]}, "moe_topk: .* differs between layers: not supported"),
        ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "short_factor: expected 12 positive"),
        ("phimoe", {"router_jitter_noise": 0.7}, "router_jitter_noise: 0.7 is outside 0.0..0.5"),
        ("qwen3moe", {"num_experts": 8}, r"mlp\.gate\.weight: has shape \[9, 96\], but .* \[8, 96\]"),
        ("qwen3moe", {"moe_intermediate_size": 777}, r"experts\.0\.gate_proj\.weight: has shape \[90, 96\]"),
        ("smallthinker", {"moe_enable_early_router": False}, "moe_enable_early_router: is false"),
        ("smallthinker", {"moe_enable_secondary_experts": True}, "moe_enable_secondary_experts: is true"),
        ("smallthinker", {"moe_num_primary_experts": 6}, r"primary_router\.weight: has shape \[7, 96\]"),
        ("smallthinker", {"moe_num_active_primary_experts": 9}, r"moe_num_active_primary_experts: 9 is outside 1\.\.7"),
        ("smallthinker", {"moe_layer_layout": [0, 1, 1, 1]}, "moe_layer_layout: layers without experts"),
        ("stablelm", {"qk_layernorm": True}, "qk_layernorm: is true: norms of queries and keys are not supported"),
        (
            "stablelm",
            {"use_parallel_residual": True},
            r"post_attention_layernorm\.\w+: a tensor that this architecture",
        ),
        ("cohere", {"use_qk_norm": True}, "use_qk_norm: is true: norms of queries and keys are not supported"),
        ("cohere", {"attention_bias": True}, r"q_proj\.bias: the tensor is missing"),
        ("cohere2", {"sliding_window": None}, "sliding_window: is missing: not supported"),
        ("cohere2", {"layer_types": ["full_attention"]}, "layer_types: .*for each of 5 layers"),
        ("gpt neox", {"hidden_act": "mish"}, "hidden_act: 'mish' is not supported; .*gelu_new"),
        ("gpt neox", {"hidden_act": "silu"}, "activation: silu needs a feed-forward with a gate"),
        ("gpt neox", {"attention_bias": False}, r"query_key_value\.bias: a tensor that this architecture"),
        ("starcoder2", {"use_bias": False}, r"\.bias: a tensor that this architecture"),
        ("bailing", {"norm_head": True}, "norm_head: is true: not supported"),
        ("bailing", {"use_bias": ...}, r"use_bias: is true: .*BailingMoeConfig's default"),
        ("bailing", {"num_experts": ...}, "num_experts: missing"),
        ("bailing", {"num_shared_experts": 3}, r"shared_experts\.up_proj\.weight: has 120 neurons, but .* 121 to 180"),
        ("bailing v2", {"score_function": "softmax"}, "score_function: only sigmoid"),
        ("bailing v2", {"n_group": 5}, "n_group: 5 groups of 12 experts"),
        ("smallthinker", {"rope_layout": [0, 1]}, r"rope_layout: \[0, 1\] is not 0 or 1 for each of 4 layers"),
    ],
)
def test_what_a_family_cannot_be_is_refused_by_its_field(
    recipe: str, fields: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    source = write_checkpoint(tmp_path / "source", RECIPES[recipe])
    path = source / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))
    with pytest.raises(UserError, match=complaint) as caught:
        convert(source, tmp_path / "package", quantization="q4")
    assert str(caught.value).isprintable()  # one line
    assert [one.name for one in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("recipe", "fields"),
    [
        ("qwen3moe", {"num_experts": ..., "num_local_experts": 9}),
        ("qwen3.5", {"layer_types": ...}),
        ("lfm2", {"intermediate_size": 7, "block_ff_dim": 300}),
        ("nemotron-h", {"n_groups": ..., "mamba_n_groups": 2, "conv_kernel": 7, "mamba_d_conv": 4}),
        ("nemotron-h", {"time_step_min": ..., "mamba_dt_min": 0.05, "tie_word_embeddings": True}),
        ("nemotron-h moe", {"n_shared_experts": 0}),
        ("bamba", {"partial_rotary_factor": 1.0}),
        ("gpt-oss", {"layer_types": None}),
        ("phi3", {"rope_scaling": {**RECIPES["phi3"].config["rope_scaling"], "rope_type": "longrope", "type": "su"}}),
        ("gemma4", {"per_layer_config": {f"0{layer}": {"head_dim": 64} for layer in (2, 4)}}),
        ("relu2", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
    ],
)
def test_what_a_class_of_transformers_also_reads_means_the_same(
    recipe: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    source = write_checkpoint(tmp_path / "source", replace(RECIPES[recipe], shards=1))
    path = source / "config.json"
    usual = json.loads(path.read_text()) | ({"rope_scaling": None} if recipe == "relu2" else {})
    opened = []
    for config in (usual, usual | fields):
        path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))
        with open_huggingface(source, Options()) as checkpoint:
            opened.append((checkpoint.model, checkpoint.inverse_frequency))
    (model, frequencies), (same_model, same_frequencies) = opened
    assert model == same_model
    assert frequencies is not None
    assert same_frequencies is not None
    assert np.array_equal(frequencies, same_frequencies)


def test_yarns_factor_concerns_the_layers_with_positions_alone(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 6.0, "original_max_position_embeddings": 16, "attention_factor": 1.5}
    recipe = RECIPES["smollm3"]
    source = write_checkpoint(tmp_path / "source", replace(recipe, config={**recipe.config, "rope_scaling": yarn}))
    with open_huggingface(source, Options()) as checkpoint:
        assert checkpoint.model.attention_scale == 1
        assert checkpoint.model.rotary_scale == pytest.approx(1.5)


def test_windows_of_smollm3_are_those_of_layers_without_positions(tmp_path: Path) -> None:
    recipe = RECIPES["smollm3"]
    windows = {"use_sliding_window": True, "sliding_window": 9}
    source = write_checkpoint(tmp_path / "source", replace(recipe, config={**recipe.config, **windows}))
    with open_huggingface(source, Options()) as checkpoint:
        assert checkpoint.model.windows_tokens == (0, 0, 0, 9, 0)


def test_longrope_ends_where_its_second_table_begins_unless_more_is_requested(tmp_path: Path) -> None:
    scaling = {"rope_type": "longrope", "short_factor": [2.0] * 20, "long_factor": [4.0] * 20}
    config = {"original_max_position_embeddings": 64, "rope_scaling": scaling}
    source = write_checkpoint(tmp_path / "source", replace(RECIPES["relu2"], config=config))
    for requested, context_tokens, divisor in ((None, 64, 2), (100, 100, 4)):
        with open_huggingface(source, Options(context_tokens=requested)) as checkpoint:
            assert checkpoint.model.context_tokens == context_tokens
            assert checkpoint.inverse_frequency is not None
            assert checkpoint.inverse_frequency[0] == 1 / divisor


def test_a_nemotron_h_without_blocks_has_those_of_its_class() -> None:
    config = Record({"hidden_size": 64, "layers_block_type": None}, "config.json")
    architecture = ARCHITECTURES["NemotronHForCausalLM"]
    model = architecture.read(architecture.language_part(config), lambda _: False, Choices())
    assert model.mixers == ("mamba2", "attention")
    assert [model.routed_experts(layer) for layer in range(2)] == [8, 0]


def test_a_ministral_without_positions_has_yarn(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", replace(RECIPES["ministral3"], config={}))
    with open_huggingface(source, Options()) as checkpoint:
        assert checkpoint.inverse_frequency is not None
        usual = 1_000_000.0 ** (-np.arange(16) / 16)
        assert np.isclose(usual[-1] / checkpoint.inverse_frequency[-1], 16)


@pytest.mark.parametrize("stated", [True, False])
def test_the_whole_models_tie_counts_more_than_its_parts(stated: bool) -> None:
    key = "tie_word_embeddings"
    config = Record({key: stated, "text_config": {key: not stated}}, "config.json")
    part = ARCHITECTURES["Qwen3_5ForConditionalGeneration"].language_part(config)
    assert part.boolean(key) is stated


def test_dense_layers_of_kimi_may_have_the_name_that_transformers_saves(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", replace(RECIPES["kimi linear"], shards=1))
    with open_huggingface(source, Options()) as checkpoint:
        usual = checkpoint.model
    stored = (source / "model.safetensors").read_bytes()
    length = int.from_bytes(stored[:8], "little")
    header = re.sub(rb"\.mlp\.((gate|up|down)_proj)", rb".block_sparse_moe.\1", stored[8 : 8 + length])
    assert header.count(b"block_sparse_moe.up_proj") == sum(kind.dense_experts > 0 for kind in usual.layer_kinds) > 0
    (source / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + stored[8 + length :])
    with open_huggingface(source, Options()) as checkpoint:
        assert checkpoint.model == usual


def test_half_of_each_head_rotates_in_a_nemotron_that_does_not_say_how_much(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", replace(RECIPES["nemotron"], head_width=32, config={}, bias=False))
    with open_huggingface(source, Options()) as checkpoint:
        assert checkpoint.inverse_frequency is not None
        assert np.count_nonzero(checkpoint.inverse_frequency) == 8
        assert len(checkpoint.inverse_frequency) == 16


def test_the_weights_of_nemotrons_norms_get_their_one_and_biases_do_not(tmp_path: Path) -> None:
    recipe = RECIPES["nemotron"]
    stored = dict(tensors(recipe))
    with open_huggingface(write_checkpoint(tmp_path / "source", recipe), Options()) as checkpoint:
        found = {name: parts[0].vector() for name, parts in checkpoint.vectors.items() if "norm" in name}
    assert np.array_equal(found["output_norm"], stored["model.norm.weight"] + 1)
    assert np.array_equal(found["output_norm.bias"], stored["model.norm.bias"])
    assert np.array_equal(
        found["layers.2.ffn_norm"], stored["model.layers.2.post_attention_layernorm.weight"] + np.float32(1)
    )


def test_a_shorter_context_takes_the_first_positions(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", RECIPES["opt"])
    with open_huggingface(source, Options()) as whole, open_huggingface(source, Options(context_tokens=7)) as short:
        name = "position_embedding"
        all_rows, rows = (checkpoint.vectors[name][0].vector() for checkpoint in (whole, short))
    assert rows.tolist() == all_rows[: 7 * RECIPES["opt"].width].tolist()
