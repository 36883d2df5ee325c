"""Hugging Face directories: accepted sources mean what transformers means, others are refused by file and field."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from neuronpipe.plans.convert import convert
from neuronpipe.plans.convert.chat_template import ChatTemplate, TemplateFacts
from neuronpipe.plans.convert.checkpoint import Checkpoint, Options
from neuronpipe.plans.convert.end_tokens import CLOSES, end_tokens
from neuronpipe.plans.convert.huggingface import open_huggingface
from neuronpipe.plans.models.registry import ARCHITECTURES
from neuronpipe.plans.models.spec import Activation
from neuronpipe.plans.package.safetensors_header import read_header
from neuronpipe.protocol.errors import UserError

from tests.conformance.checkpoints import END_TOKEN, TINY, tokenizer, write_checkpoint, write_safetensors


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A small checkpoint of this test's own."""
    return write_checkpoint(tmp_path / "source", TINY)


def configure(source: Path, **fields: Any) -> None:
    """Change fields of config.json; ... removes one."""
    path = source / "config.json"
    values = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not ...}))


def rewrite(source: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the tensors of model.safetensors: name -> (dtype, model, bytes)."""
    path = source / "model.safetensors"
    data = path.read_bytes()
    stored: dict[str, Any] = {
        name: (entry.dtype, entry.shape, data[entry.start : entry.stop]) for name, entry in read_header(path).items()
    }
    change(stored)
    write_safetensors(path, stored)


def ids(checkpoint: Checkpoint) -> tuple[int, ...]:
    return tuple(end.token for end in checkpoint.ends)


def refuse(source: Path, message: str) -> None:
    """The source is refused, and nothing was written."""
    with pytest.raises(UserError, match=message):
        convert(source, source.parent / "package", quantization="q4")
    assert [path.name for path in source.parent.iterdir()] == ["source"]


QWEN2 = replace(TINY, architecture="Qwen2ForCausalLM", activation="silu", bias=True)
GOLDEN_DEFAULTS = json.loads((Path(__file__).parents[1] / "conformance" / "golden" / "defaults.json").read_text())


@pytest.mark.parametrize(
    "owner",
    [
        "LlamaConfig",
        "MistralConfig",
        "Qwen2Config",
        "Qwen3Config",
        "Qwen2VLTextConfig",
        "Qwen2_5_VLTextConfig",
        "Qwen3VLTextConfig",
        "Qwen3VLMoeTextConfig",
        "MixtralConfig",
        "Qwen3MoeConfig",
        "OPTConfig",
        "NemotronConfig",
        "FalconConfig",
        "ArceeConfig",
        "GptOssConfig",
        "SmolLM3Config",
        "GraniteConfig",
        "Glm4MoeConfig",
        "Dots1Config",
        "Qwen2MoeConfig",
        "OlmoeConfig",
        "OlmoConfig",
        "Ministral3Config",
        "MiniMaxM2Config",
        "Ernie4_5Config",
        "Ernie4_5_MoeConfig",
        "Exaone4Config",
        "HunYuanDenseV1Config",
        "HunYuanMoEV1Config",
        "SeedOssConfig",
        "PhimoeConfig",
        "Phi3Config",
        "GraniteMoeConfig",
        "DeepseekV2Config",
        "DeepseekV3Config",
        "Glm4MoeLiteConfig",
        "Gemma2Config",
        "Gemma3TextConfig",
        "Gemma4TextConfig",
        "Olmo2Config",
        "Olmo3Config",
        "StableLmConfig",
        "CohereConfig",
        "Cohere2Config",
        "GPTNeoXConfig",
        "Starcoder2Config",
        "KimiLinearConfig",
    ],
)
def test_a_missing_key_means_what_it_means_to_transformers(owner: str) -> None:
    ours, *others = (one.defaults for one in ARCHITECTURES.values() if one.config_class == owner)
    assert others in (
        [],
        [ours],
    )  # Gemma 3 and 4 alone and beside a vision tower; Phi-3.5-MoE and ERNIE under two names
    theirs = {"head_dim": None, **GOLDEN_DEFAULTS[owner]}  # Qwen2's class leaves it to modeling_qwen2.py, which agrees
    if owner in ("GptOssConfig", "Ministral3Config"):
        theirs["rope_parameters"] = ours["rope_parameters"]  # __post_init__ fills them in
    if "VL" in owner:  # the class of the whole model says it
        theirs["tie_word_embeddings"] = False
    if owner == "Gemma4TextConfig":  # likewise; they are parameters of its __post_init__
        fields = ("rope_parameters", "global_head_dim", "num_global_key_value_heads", "per_layer_config")
        theirs |= {name: ours[name] for name in fields}
    if owner in ("Glm4MoeConfig", "DeepseekV3Config"):
        theirs["num_nextn_predict_layers"] = theirs["num_mtp_layers"]  # published files have the older name
    assert dict(ours) == {name: theirs[name] for name in ours}
    windows = {"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"}
    assert (windows | {"attention_bias", "mlp_bias"}) & theirs.keys() <= ours.keys()


def test_bamboos_class_has_mistrals_defaults() -> None:
    assert ARCHITECTURES["BambooForCausalLM"].defaults == ARCHITECTURES["MistralForCausalLM"].defaults


def test_missing_keys_have_the_defaults_of_the_class(source: Path) -> None:
    keys = ("rms_norm_eps", "rope_theta", "tie_word_embeddings", "hidden_act", "max_position_embeddings")
    configure(source, **dict.fromkeys((*keys, "eos_token_id", "head_dim"), ...))
    with open_huggingface(source, Options()) as checkpoint:
        assert (checkpoint.model.norm_epsilon, checkpoint.model.context_tokens) == (1e-6, 2048)
        assert (checkpoint.model.activation, checkpoint.model.tied_embeddings) == ("silu", False)
        assert ids(checkpoint) == (2,)
        assert checkpoint.inverse_frequency[1] == pytest.approx(10_000 ** (-2 / 32))
    configure(source, architectures=["MistralForCausalLM"])
    with open_huggingface(source, Options()) as checkpoint:
        assert checkpoint.model.context_tokens == 4096 * 32


def test_null_is_not_missing(source: Path) -> None:
    configure(source, architectures=["MistralForCausalLM"], num_key_value_heads=None, eos_token_id=None)
    refuse(source, r"k_proj\.weight: has shape \[32, 64\], but the configuration needs \[64, 64\]")  # as many as heads
    configure(source, num_key_value_heads=1)
    with open_huggingface(source, Options()) as checkpoint:
        assert ids(checkpoint) == ()
    configure(source, rms_norm_eps=None)
    refuse(source, "rms_norm_eps: expected a number, found None")


def test_an_error_about_a_default_says_that_it_is_one(source: Path) -> None:
    configure(source, architectures=["MistralForCausalLM"], num_key_value_heads=...)
    refuse(source, "query_heads: 2 is no multiple of key_heads, 8")
    configure(source, architectures=["BambooForCausalLM"], num_key_value_heads=1, hidden_act=...)
    refuse(source, "hidden_act: is 'silu', .*the file does not have it; 'silu' is BambooConfig's default")


def test_rope_scaling_without_its_original_context_means_the_models(source: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    tables = []
    for extra in ({}, {"original_max_position_embeddings": TINY.context_tokens}):
        configure(source, rope_scaling=scaling | extra)
        with open_huggingface(source, Options()) as checkpoint:
            tables.append(checkpoint.inverse_frequency.tolist())
    assert tables[0] == tables[1]


@pytest.mark.parametrize("activation", ["relu", "drelu"])
def test_a_qwen2_that_says_relu_may_be_sparseqwen2_and_needs_a_word(activation: Activation, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", replace(QWEN2, activation="relu"))
    refuse(source, r"hidden_act: is 'relu', but SparseQwen2 .* means drelu; .*--activation relu\|.*drelu: SparseQwen2")
    assert (
        convert(source, tmp_path / "p", quantization="q4", activation=activation).manifest.model.activation
        == activation
    )


LONG = "x" * 100_000


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_act": LONG},
        {"architectures": [LONG]},
        {"architectures": LONG},
        {"hidden_size": 10**4000},
        {"rope_scaling": {"rope_type": LONG}},
        {"rope_scaling": {LONG: {}}},
        {"eos_token_id": LONG},
        {"eos_token_id": [[LONG]]},
        {"vocab_size": "\x1b[2J" * 1000},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_a_configuration_says_is_quoted_in_part(fields: dict[str, Any], source: Path) -> None:
    configure(source, **fields)
    with pytest.raises(UserError) as caught:
        open_huggingface(source, Options())
    assert len(str(caught.value)) < len(str(source)) + 400
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", ["model\0.safetensors", "\ud800.safetensors", LONG, "", ".", "\x1b[2J"])
def test_a_shard_that_cannot_be_a_file_is_refused(name: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", replace(TINY, shards=2))
    index = source / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"]["model.norm.weight"] = name
    index.write_text(json.dumps(values))
    refuse(source, r"weight_map.*: ('.* is not the name of a file beside it|expected a string, found '.*')$")


@pytest.mark.parametrize(
    "fields", [{"attention_bias": False}, {"architectures": ["MistralForCausalLM"]}], ids=["llama", "mistral"]
)
def test_biases_that_the_class_would_leave_out_are_not_ignored(fields: dict[str, Any], tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", replace(TINY, bias=True))
    configure(source, **fields)
    refuse(source, "attention_bias: is not true, but|q_proj.bias: a tensor that this architecture does not have")


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "a known architecture": (
        {"architectures": ["BitNetForCausalLM"]},
        r"architectures: .* is not supported: it needs ternary weights",
    ),
    "another architecture": (
        {"architectures": ["DbrxForCausalLM"]},
        r"architectures: .*is not supported; \d+ classes are: see plans/models/README.md",
    ),
    "no architecture": ({"architectures": ...}, "architectures: missing"),
    "an unknown activation": ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported"),
    "a shifted threshold": ({"hidden_act": "fatrelu"}, "hidden_act_param: missing"),
    "quantized weights": ({"quantization_config": {"bits": 4}}, "quantization_config: quantized checkpoints"),
    "longrope": ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, r"rope_scaling\.short_factor: missing"),
    "axial": ({"rope_scaling": {"type": "axial", "factor": 2}}, r"rope_scaling\.type: 'axial' is not supported"),
    "yarn without its factor": ({"rope_parameters": {"rope_type": "yarn"}}, r"rope_parameters\.factor: missing"),
    "half a llama3": (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8}},
        r"rope_scaling\.low_freq_factor: missing",
    ),
    "partial rotation": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: only heads that rotate"),
    "positions by kind of layer": (
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        r"rope_parameters\.full_attention: positions that differ",
    ),
    "two kinds of scaling": (
        {"rope_scaling": {"type": "linear", "rope_type": "default", "factor": 2}},
        r"rope_scaling\.type: 'linear' contradicts rope_type, 'default'",
    ),
    "an activation's threshold": ({"hidden_act_param": 0.01}, "hidden_act_param: is a threshold, which 'relu' does"),
    "feed-forward biases": ({"mlp_bias": True}, "ffn_bias: not supported with a gate and relu"),
    "biases that are not there": ({"attention_bias": True}, r"q_proj\.bias: the tensor is missing"),
    "another width": ({"hidden_size": 128}, r"has shape \[300, 64\], but the configuration needs \[300, 128\]"),
    "another vocabulary": ({"vocab_size": 301}, r"embed_tokens\.weight: has shape"),
    "one layer more": ({"num_hidden_layers": 3}, r"model\.layers\.2\..*: the tensor is missing"),
    "one layer less": ({"num_hidden_layers": 1}, r"model\.layers\.1\..*: a tensor that this architecture does not"),
    "heads that do not share": ({"num_key_value_heads": 3}, "query_heads: 2 is no multiple of key_heads, 3"),
    "an end token without embedding": ({"eos_token_id": 300}, "eos_token_id: 300 is no token id below 300"),
    "a width as text": ({"hidden_size": "64"}, "hidden_size: expected a whole number"),
}


@pytest.mark.parametrize("what", CONFIGS)
def test_what_the_engine_would_compute_wrongly_is_refused(what: str, source: Path) -> None:
    fields, message = CONFIGS[what]
    configure(source, **fields)
    refuse(source, message)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.layers.0.self_attn.o_proj.bias", "attention_bias: is not true, but .* biases of self_attn.o_proj"),
        ("model.layers.0.mlp.down_proj.bias", "mlp_bias: is not true, but .* biases of mlp.down_proj"),
        ("model.layers.0.self_attn.q_norm.weight", "q_norm.weight: a tensor that this architecture does not have"),
        ("model.layers.0.mlp.predictor.fc1.weight", "hidden_act: is 'relu', but the checkpoint has predictors"),
    ],
)
def test_tensors_that_change_the_result_are_not_ignored(name: str, message: str, source: Path) -> None:
    rewrite(source, lambda tensors: tensors.update({name: ("F32", (2,), bytes(8))}))
    refuse(source, message)


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.rotary_emb.inv_freq"])
def test_tables_that_old_checkpoints_carry_are_ignored(name: str, source: Path, tmp_path: Path) -> None:
    rewrite(source, lambda tensors: tensors.update({name: ("F32", (2,), bytes(8))}))
    convert(source, tmp_path / "p", quantization="q4")


def test_a_checkpoint_with_predictors_converts_once_the_activation_is_said(source: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.predictor.fc1.weight"
    rewrite(source, lambda tensors: tensors.update({name: ("F32", (2,), bytes(8))}))
    package = convert(source, tmp_path / "p", quantization="q4", activation="drelu", predictor=False)
    assert package.manifest.model.activation == "drelu"
    with pytest.raises(UserError, match=r"layers\.0\.mlp\.predictor\.fc2\.weight: the tensor is missing"):
        convert(source, tmp_path / "q", quantization="q4", activation="drelu")


@pytest.mark.parametrize("dtype", ["F64", "I8", "F8_E4M3"])
def test_a_dtype_that_is_not_understood_is_refused(dtype: str, source: Path) -> None:
    size = 8 if dtype == "F64" else 1
    rewrite(source, lambda tensors: tensors.update({"model.norm.weight": (dtype, (64,), bytes(64 * size))}))
    refuse(source, f"model.norm.weight: {dtype} is not supported; F32, F16, BF16")


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e8])
def test_values_no_model_has_are_refused(value: float, source: Path) -> None:
    values = np.ones((64, 100), np.float32)
    values[3, 7] = value
    down = "model.layers.1.mlp.down_proj.weight"
    rewrite(source, lambda tensors: tensors.update({down: ("F32", (64, 100), values.tobytes())}))
    refuse(source, r"model\.layers\.1\.mlp\.down_proj\.weight: (holds values|values too large).*: damaged")


def test_truncated_weights_are_found_before_anything_is_written(source: Path) -> None:
    path = source / "model.safetensors"
    data = path.read_bytes()
    for size in (len(data) - 1, len(data) // 2, 100, 9, 7, 0):
        path.write_bytes(data[:size])
        refuse(source, r"model\.safetensors: .*(truncated|damaged|not valid JSON)")
    path.unlink()
    refuse(source, r"model\.safetensors: cannot be read: No such file")


def test_a_missing_tokenizer_says_what_to_do(source: Path, tmp_path: Path) -> None:
    (source / "tokenizer.json").rename(tmp_path / "elsewhere.json")
    with pytest.raises(UserError, match=r"tokenizer\.json: missing; .* or pass --tokenizer FILE"):
        convert(source, tmp_path / "p", quantization="q4")
    package = convert(source, tmp_path / "p", quantization="q4", tokenizer=tmp_path / "elsewhere.json")
    assert package.tokenizer_path.read_bytes() == (tmp_path / "elsewhere.json").read_bytes()


@pytest.mark.parametrize("content", ["", "{}", "[1, 2]", "no json"])
def test_what_is_no_tokenizer_is_refused(content: str, source: Path) -> None:
    (source / "tokenizer.json").write_text(content)
    refuse(source, r"tokenizer\.json: not a tokenizer\.json")


def test_a_tokenizer_with_more_ids_than_embeddings_is_refused(source: Path) -> None:
    (source / "tokenizer.json").write_text(tokenizer(301).to_str())
    refuse(source, r"token id 300 has no embedding: the model's vocabulary is 300")


def test_shards_must_keep_what_the_index_promises(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", replace(TINY, shards=2))
    index = source / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"]["model.norm.weight"] = "model-00001-of-00002.safetensors"
    values["weight_map"]["lm_head.weight"] = "model-00002-of-00002.safetensors"
    index.write_text(json.dumps(values))
    refuse(source, r"(norm|lm_head)\.weight: missing, though model\.safetensors\.index\.json promises it")
    values["weight_map"]["model.norm.weight"] = "../source/model-00001-of-00002.safetensors"
    index.write_text(json.dumps(values))
    refuse(source, "is not the name of a file beside it")


@pytest.mark.parametrize(("name", "activation"), [("relu", "relu"), ("drelu", "drelu"), ("swish", "silu")])
def test_activation_names(name: str, activation: Activation, source: Path) -> None:
    configure(source, hidden_act=name)
    with open_huggingface(source, Options()) as checkpoint:
        assert checkpoint.model.activation == activation


def test_bamboo_applies_relu_to_gate_and_up_and_nothing_else(source: Path) -> None:
    configure(source, architectures=["BambooForCausalLM"], sliding_window=None)
    with open_huggingface(source, Options()) as checkpoint:
        assert checkpoint.model.activation == "drelu"
    configure(source, hidden_act="silu")
    refuse(source, r"hidden_act: is 'silu', but Bamboo says relu and means drelu; .*--activation relu\|drelu")


@pytest.mark.parametrize(
    ("fields", "window_tokens"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 9}, 9),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, 0),
        ({"architectures": ["MistralForCausalLM"]}, 4096),  # missing is not null
        ({"architectures": ["BambooForCausalLM"]}, 4096),  # TurboSparse-Mistral's own configuration lacks it
        ({"sliding_window": 9}, 0),  # LlamaForCausalLM does not read it
    ],
)
def test_windows_follow_the_class(fields: dict[str, Any], window_tokens: int, source: Path) -> None:
    configure(source, **fields)
    with open_huggingface(source, Options()) as checkpoint:
        assert set(checkpoint.model.windows_tokens) == {window_tokens}


@pytest.mark.parametrize(
    ("fields", "window_tokens"),
    [
        ({}, 0),
        ({"use_sliding_window": True}, 0),  # from layer 28 on, by default
        ({"use_sliding_window": True, "max_window_layers": 0}, 4096),
        ({"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 9}, 9),
        ({"use_sliding_window": True, "max_window_layers": 0, "sliding_window": None}, 0),
        ({"use_sliding_window": True, "layer_types": ["sliding_attention"] * 2, "sliding_window": 9}, 9),
        ({"use_sliding_window": True, "max_window_layers": 0, "layer_types": ["full_attention"] * 2}, 0),
    ],
)
def test_windows_of_qwen2(fields: dict[str, Any], window_tokens: int, tmp_path: Path) -> None:
    """As transformers 5.23's Qwen2Config makes layer_types of them."""
    source = write_checkpoint(tmp_path / "source", QWEN2)
    configure(source, **fields)
    with open_huggingface(source, Options()) as checkpoint:
        assert set(checkpoint.model.windows_tokens) == {window_tokens}


def test_layers_may_differ_in_their_windows(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", QWEN2)
    configure(source, use_sliding_window=True, max_window_layers=1, sliding_window=9)
    with open_huggingface(source, Options()) as checkpoint:
        assert checkpoint.model.windows_tokens == (0, 9)
    configure(source, layer_types=["sliding_attention", "full_attention"])
    with open_huggingface(source, Options()) as checkpoint:
        assert checkpoint.model.windows_tokens == (9, 0)


def test_layers_with_different_windows_are_refused(source: Path) -> None:
    configure(source, architectures=["MistralForCausalLM"], sliding_window=9)
    configure(source, layer_types=["sliding_attention", "full_attention"])
    refuse(source, "layer_types: layers with different attention windows")


def test_generation_config_knows_the_end_tokens_best(source: Path) -> None:
    (source / "generation_config.json").write_text('{"eos_token_id": [298, 299, 298]}')
    with open_huggingface(source, Options()) as checkpoint:
        assert ids(checkpoint) == (298, 299)
    (source / "generation_config.json").write_text("{}")
    with open_huggingface(source, Options()) as checkpoint:
        assert ids(checkpoint) == (299,)


def test_every_source_that_names_an_end_is_believed(source: Path) -> None:
    """Chat models whose configuration names the end of documents alone went on and played the user."""
    shorter = tokenizer(295)
    shorter.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|im_end|>x", "<eot>"])
    (source / "tokenizer.json").write_text(shorter.to_str())
    (source / "generation_config.json").write_text('{"eos_token_id": 294}')
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<eot>"}, "chat_template": "x"}))
    examined: list[str] = []

    def examine(template: ChatTemplate) -> TemplateFacts:
        examined.append(template.text)
        return TemplateFacts(closing="<|im_end|>\n<|im_start|>user")

    with open_huggingface(source, Options(examine_template=examine)) as checkpoint:
        assert examined == ["x"]
        assert [(end.token, end.text, end.why) for end in checkpoint.ends] == [
            (294, END_TOKEN, "generation_config.json: eos_token_id"),
            (298, "<eot>", "tokenizer_config.json: eos_token"),
            (296, "<|im_end|>", CLOSES),
        ]


def test_in_channels_the_end_of_a_message_does_not_end_the_answer() -> None:
    whole = {"<|channel|>": 1, "<|end|>": 2, "<|return|>": 3, "<|call|>": 4}
    declared = [(2, "eot"), (3, "eos")]
    assert [end.token for end in end_tokens(declared, [], "<|end|>", whole)] == [3, 4]
    del whole["<|channel|>"]
    assert [end.token for end in end_tokens(declared, [], "<|end|>", whole)] == [2, 3]
