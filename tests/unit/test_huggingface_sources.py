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
from neuronpipe.plans.convert.checkpoint import Options
from neuronpipe.plans.convert.huggingface import open_huggingface
from neuronpipe.plans.package.manifest import Activation
from neuronpipe.plans.package.safetensors_header import read_header
from neuronpipe.protocol.errors import UserError

from tests.conformance.checkpoints import TINY, tokenizer, write_checkpoint, write_safetensors


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
    """Change the tensors of model.safetensors: name -> (dtype, shape, bytes)."""
    path = source / "model.safetensors"
    data = path.read_bytes()
    stored: dict[str, Any] = {
        name: (entry.dtype, entry.shape, data[entry.start : entry.stop]) for name, entry in read_header(path).items()
    }
    change(stored)
    write_safetensors(path, stored)


def refuse(source: Path, message: str) -> None:
    """The source is refused, and nothing was written."""
    with pytest.raises(UserError, match=message):
        convert(source, source.parent / "package", quantization="q4")
    assert [path.name for path in source.parent.iterdir()] == ["source"]


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "another architecture": ({"architectures": ["FalconForCausalLM"]}, r"architectures: .*is not supported; Llama"),
    "ProSparse's class": ({"architectures": ["SparseLlamaForCausalLM"]}, "architectures: "),
    "no architecture": ({"architectures": ...}, "architectures: missing"),
    "an unknown activation": ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported"),
    "a shifted threshold": ({"hidden_act": "fatrelu"}, "hidden_act: 'fatrelu' is not supported"),
    "quantized weights": ({"quantization_config": {"bits": 4}}, "quantization_config: quantized checkpoints"),
    "yarn": ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, r"rope_scaling\.rope_type: 'yarn' is not supp"),
    "dynamic": ({"rope_scaling": {"type": "dynamic", "factor": 2}}, r"rope_scaling\.type: 'dynamic'"),
    "yarn in the new form": ({"rope_parameters": {"rope_type": "yarn"}}, r"rope_parameters\.rope_type: 'yarn'"),
    "half a llama3": (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8}},
        r"rope_scaling\.low_freq_factor: missing",
    ),
    "partial rotation": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: only heads that rotate"),
    "feed-forward biases": ({"mlp_bias": True}, "mlp_bias: "),
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
        ("model.layers.0.self_attn.o_proj.bias", "attention_bias: a bias of self_attn.o_proj is not supported"),
        ("model.layers.0.mlp.down_proj.bias", "mlp_bias: a bias of mlp.down_proj is not supported"),
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
    package = convert(source, tmp_path / "p", quantization="q4", activation="drelu")
    assert package.manifest.activation == "drelu"


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
        assert checkpoint.activation == activation


def test_bamboo_applies_relu_to_gate_and_up_and_nothing_else(source: Path) -> None:
    configure(source, architectures=["BambooForCausalLM"], sliding_window=None)
    with open_huggingface(source, Options()) as checkpoint:
        assert checkpoint.activation == "drelu"
    configure(source, hidden_act="silu")
    refuse(source, "hidden_act: is 'silu', but Bamboo's class")


@pytest.mark.parametrize(
    ("fields", "window_tokens"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 9}, 9),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, 0),
        ({"sliding_window": 9}, 0),  # LlamaForCausalLM does not read it
    ],
)
def test_windows_follow_the_class(fields: dict[str, Any], window_tokens: int, source: Path) -> None:
    configure(source, **fields)
    with open_huggingface(source, Options()) as checkpoint:
        assert checkpoint.shape.window_tokens == window_tokens


def test_layers_with_different_windows_are_refused(source: Path) -> None:
    configure(source, architectures=["MistralForCausalLM"], sliding_window=9)
    configure(source, layer_types=["sliding_attention", "full_attention"])
    refuse(source, "layer_types: layers with different windows")


def test_generation_config_knows_the_end_tokens_best(source: Path) -> None:
    (source / "generation_config.json").write_text('{"eos_token_id": [298, 299, 298]}')
    with open_huggingface(source, Options()) as checkpoint:
        assert checkpoint.end_tokens == (298, 299)
    (source / "generation_config.json").write_text("{}")
    with open_huggingface(source, Options()) as checkpoint:
        assert checkpoint.end_tokens == (299,)
