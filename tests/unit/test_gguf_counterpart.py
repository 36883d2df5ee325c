"""The GGUF counterpart of a shape: our own reader accepts it, and its weights are finite and of sensible size."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from neuronpipe.plans.convert.checkpoint import Options
from neuronpipe.plans.convert.conversion import convert
from neuronpipe.plans.convert.gguf.gguf_model import open_gguf
from neuronpipe.plans.lab import counterpart_weights
from neuronpipe.plans.lab.gguf_counterpart import MIN_VOCABULARY, write_gguf_counterpart
from neuronpipe.plans.lab.synth.routing import frequencies, routing_of
from neuronpipe.plans.lab.synth.shapes import SHAPES
from neuronpipe.plans.models.spec import LayerKind, ModelSpec, runs_of
from neuronpipe.plans.package.manifest import EMBEDDINGS
from neuronpipe.plans.reference.expert_shares import expert_shares
from neuronpipe.protocol.errors import UserError
from tokenizers import Tokenizer

TINY = ModelSpec(
    family="llama",
    width=256,
    neurons=320,
    layer_kinds=(LayerKind(2),),
    query_heads=4,
    key_heads=2,
    head_width=64,
    vocabulary=600,
    context_tokens=512,
    norm_epsilon=2.0**-17,  # GGUF keeps float32
    activation="silu",
)


SMALLTHINKER = replace(
    TINY,
    family="smallthinker",
    layer_kinds=(LayerKind(1, 0, False), LayerKind(3, 4096), LayerKind(1, 0, False)),
    experts=6,
    experts_per_token=2,
    router="sigmoid",
    router_reads="layer",
    activation="relu",
)
MIXTURES = {
    "llama": replace(TINY, experts=4, experts_per_token=2),
    "qwen3": replace(TINY, family="qwen3", head_norm=True),
    "qwen3moe": replace(TINY, family="qwen3", head_norm=True, experts=8, experts_per_token=3),
    "gpt-oss": replace(
        TINY,
        family="gpt_oss",
        layer_kinds=(LayerKind(1, 128), LayerKind(1)),
        experts=4,
        experts_per_token=2,
        activation="clamped_swiglu",
        activation_limit=7.0,
        qkv_bias=True,
        output_bias=True,
        ffn_bias=True,
        router_bias=True,
        attention_sinks=True,
    ),
    "glm4moe": replace(
        TINY,
        family="glm4_moe",
        layer_kinds=(LayerKind(1, dense_experts=2), LayerKind(1)),
        experts=4,
        experts_per_token=2,
        shared_experts=2,
        router="sigmoid",
        choosing_bias=True,
        qkv_bias=True,
    ),
    "olmoe": replace(TINY, family="olmoe", experts=4, experts_per_token=2, joint_norm=True, normalized_shares=False),
    "gemma4": replace(
        SHAPES["gemma-4-100m"],
        layer_kinds=SHAPES["gemma-4-100m"].layer_kinds[:2],
        vocabulary=600,
        norm_epsilon=2.0**-17,
        embedding_scale=math.sqrt(512),
    ),
    "qwen35moe": replace(
        TINY,
        family="qwen3_next",
        layer_kinds=runs_of([0] * 4, mixers=["deltanet", "deltanet", "attention", "deltanet"]),
        experts=8,
        experts_per_token=3,
        shared_experts=1,
        shared_gate=True,
        head_norm=True,
        gated_attention=True,
        state_heads=4,
        state_key_heads=2,
        state_key_width=32,
        state_value_width=32,
        convolution_tokens=4,
    ),
    "lfm2moe": replace(
        TINY,
        family="lfm2",
        layer_kinds=runs_of([0] * 3, dense_experts=[3, 0, 0], mixers=["convolution", "attention", "convolution"]),
        experts=8,
        experts_per_token=3,
        router="sigmoid",
        choosing_bias=True,
        head_norm=True,
        convolution_tokens=3,
    ),
    "nemotron_h_moe": replace(
        TINY,
        family="nemotron_h",
        layer_kinds=runs_of(
            [0] * 3,
            [True, False, True],
            mixers=["mamba2", "attention", "mamba2"],
            feed_forward=[True, True, False],
        ),
        activation="relu2",
        gated=False,
        experts=8,
        experts_per_token=3,
        shared_experts=2,
        router="sigmoid",
        choosing_bias=True,
        routed_scale=2.5,
        state_heads=8,
        state_key_heads=2,
        state_key_width=32,
        state_value_width=16,
        state_norm_groups=2,
        convolution_tokens=4,
        convolution_bias=True,
    ),
    "deepseek2": replace(
        TINY,
        family="deepseek",
        layer_kinds=(LayerKind(1, dense_experts=3), LayerKind(1)),
        experts=4,
        experts_per_token=2,
        shared_experts=1,
        router="sigmoid",
        choosing_bias=True,
        routed_scale=1.5,
        key_heads=1,
        head_width=96,
        latent_width=64,
        rotary_width=32,
        value_width=64,
        query_rank=96,
    ),
    "kimi-linear": replace(
        TINY,
        family="kimi_linear",
        layer_kinds=runs_of([0] * 3, [True, True, False], dense_experts=[3, 0, 0], mixers=["kda", "kda", "attention"]),
        experts=4,
        experts_per_token=2,
        shared_experts=1,
        router="sigmoid",
        choosing_bias=True,
        routed_scale=1.5,
        key_heads=1,
        head_width=96,
        latent_width=64,
        rotary_width=32,
        value_width=64,
        state_heads=TINY.query_heads,
        state_key_heads=TINY.query_heads,
        state_key_width=32,
        state_value_width=32,
        state_rank=32,
        convolution_tokens=4,
    ),
    "granitehybrid": replace(
        TINY,
        family="granite_hybrid",
        layer_kinds=runs_of([0] * 3, [True, False, True], mixers=["mamba2", "attention", "mamba2"]),
        experts=8,
        experts_per_token=3,
        shared_experts=2,
        state_heads=8,
        state_key_heads=1,
        state_key_width=32,
        state_value_width=64,
        state_norm_groups=1,
        convolution_tokens=4,
        convolution_bias=True,
        residual_scale=0.25,
        attention_scale=0.5,
    ),
    "smallthinker": SMALLTHINKER,
    "smallthinker without windows": replace(SMALLTHINKER, layer_kinds=(LayerKind(3),)),
}
MIXTURES["deepseek2 without a latent of queries"] = replace(
    MIXTURES["deepseek2"], query_rank=0, router="softmax", choosing_bias=False, normalized_shares=False
)


@pytest.fixture(scope="module")
def counterpart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("twin") / "tiny.gguf"
    write_gguf_counterpart(path, TINY, seed=3)
    return path


def test_our_own_reader_finds_the_shape_and_every_tensor(counterpart: Path) -> None:
    with open_gguf(counterpart, Options()) as checkpoint:
        assert checkpoint.model == TINY
        assert [end.token for end in checkpoint.ends] == [2]


@pytest.mark.parametrize("kind", MIXTURES)
def test_each_architecture_of_the_peer_holds_its_shape(kind: str, tmp_path: Path) -> None:
    write_gguf_counterpart(tmp_path / "t.gguf", MIXTURES[kind], seed=1)
    with open_gguf(tmp_path / "t.gguf", Options()) as checkpoint:
        assert checkpoint.source.architecture == kind.split()[0]
        assert checkpoint.model == MIXTURES[kind]
        routers = [parts for name, parts in checkpoint.vectors.items() if name.endswith(".router")]
        assert all(part.encoding == "F32" for parts in routers for part in parts)
        assert len(routers) == sum(
            checkpoint.model.routed_experts(layer) > 0 for layer in range(checkpoint.model.layers)
        )


def test_experts_in_mxfp4_and_what_is_in_q8_0_beside_them_keep_their_values(tmp_path: Path) -> None:
    file = tmp_path / "t.gguf"
    write_gguf_counterpart(file, MIXTURES["gpt-oss"], seed=1, preset="MXFP4")
    with open_gguf(file, Options()) as checkpoint:
        encodings = {name: {part.encoding for part in parts} for name, parts in checkpoint.matrices.items()}
        assert all(found == ({"MXFP4"} if ".experts." in name else {"Q8_0"}) for name, found in encodings.items())
        lengths = [np.linalg.norm(p[0].values(np.arange(64)), axis=1).mean() for p in checkpoint.matrices.values()]
        assert 0.8 < min(lengths) <= max(lengths) < 1.6
    kept = convert(file, tmp_path / "kept").manifest
    assert (kept.quantization, *(kept.quantization_of(name) for name in EMBEDDINGS)) == ("mxfp4", "q8", "q8")
    asked = convert(file, tmp_path / "asked", quantization="q4k").manifest
    assert {asked.quantization_of(name) for name in EMBEDDINGS} == {"q6k"}


def test_a_twins_router_chooses_hot_experts_as_often_as_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counterpart_weights, "PIECE_BYTES", 10_000)
    model = replace(SMALLTHINKER, experts=64, experts_per_token=6)
    write_gguf_counterpart(tmp_path / "t.gguf", model, seed=1)
    with open_gguf(tmp_path / "t.gguf", Options()) as checkpoint:
        (part,) = checkpoint.vectors["layers.2.router"]
        router = part.vector().reshape(64, -1)
    x = np.random.default_rng(0).standard_normal((2000, router.shape[1])).astype(np.float32)
    often = np.sort((expert_shares(model, x @ router.T) > 0).mean(axis=0))[::-1]
    asked = frequencies(model, routing_of(model))
    assert often[:13].sum() == pytest.approx(asked[:13].sum(), rel=0.1)
    assert often[20:].max() < 0.14


def test_a_twin_made_in_many_pieces_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counterpart_weights, "PIECE_BYTES", 1000)
    model, told = MIXTURES["qwen3moe"], list[tuple[int, int]]()
    write_gguf_counterpart(tmp_path / "t.gguf", model, seed=1, progress=lambda *bytes_: told.append(bytes_))
    assert told[-1][0] == told[-1][1]
    with open_gguf(tmp_path / "t.gguf", Options()) as checkpoint:
        for parts in checkpoint.matrices.values():
            for part in parts:
                values = part.values(np.arange(part.rows, dtype=np.int64))
                assert 0.8 < np.linalg.norm(values, axis=1).mean() < 1.25


def test_encodings_are_those_of_the_q4_0_preset(counterpart: Path) -> None:
    with open_gguf(counterpart, Options()) as checkpoint:
        encodings = {name: {part.encoding for part in parts} for name, parts in checkpoint.matrices.items()}
        assert encodings.pop("output") == {"Q6_K"}
        assert all(found == {"Q4_0"} for found in encodings.values())


def test_rows_that_are_no_whole_blocks_have_the_encodings_that_llama_cpp_takes(tmp_path: Path) -> None:
    write_gguf_counterpart(tmp_path / "t.gguf", replace(TINY, width=288), seed=1, preset="Q4_K_M")
    with open_gguf(tmp_path / "t.gguf", Options()) as checkpoint:
        encodings = {name: {part.encoding for part in parts} for name, parts in checkpoint.matrices.items()}
    assert encodings["output"] == {"Q8_0"}
    assert encodings["layers.0.up"] == {"Q5_0"}
    assert encodings["layers.0.attention_output"] == {"Q4_K"}


def test_phimoe_has_the_biases_that_llama_cpp_requires(tmp_path: Path) -> None:
    model = replace(SHAPES["phi-moe-100m"], layer_kinds=(LayerKind(1),), vocabulary=600)
    write_gguf_counterpart(tmp_path / "t.gguf", model, seed=1)
    reader = GGUFReader(tmp_path / "t.gguf")
    shapes = {tensor.name: [int(size) for size in tensor.shape] for tensor in reader.tensors}
    assert reader.fields["general.architecture"].contents() == "phimoe"
    assert "phimoe.expert_gating_func" not in reader.fields
    for name, length in (("output", 600), ("output_norm", 512), ("blk.0.attn_norm", 512), ("blk.0.ffn_norm", 512)):
        assert shapes[f"{name}.bias"] == [length]
    assert shapes["blk.0.attn_output.bias"] == shapes["blk.0.attn_q.bias"] == [512]
    assert shapes["blk.0.ffn_gate_exps.weight"] == [512, 256, 16]


def test_rows_have_a_length_near_one_and_lean_to_no_side(counterpart: Path) -> None:
    with open_gguf(counterpart, Options()) as checkpoint:
        for name, parts in checkpoint.matrices.items():
            rows = np.concatenate([part.values(np.arange(part.rows, dtype=np.int64)) for part in parts])
            lengths = np.linalg.norm(rows, axis=1)  # values() refuses what is not finite
            assert 0.8 < lengths.mean() < 1.25, name
            assert abs(rows.mean()) < 0.01, name


def test_the_tokenizer_reads_numbers_as_single_tokens(counterpart: Path) -> None:
    with open_gguf(counterpart, Options()) as checkpoint:
        tokenizer = Tokenizer.from_str(checkpoint.tokenizer.decode())
    assert tokenizer.get_vocab_size() == TINY.vocabulary
    first = MIN_VOCABULARY
    assert tokenizer.encode("0 7 12 329", add_special_tokens=False).ids == [first, first + 7, first + 12, first + 329]


def test_a_seed_makes_the_same_bytes_and_another_seed_others(counterpart: Path, tmp_path: Path) -> None:
    for seed, same in ((3, True), (4, False)):
        write_gguf_counterpart(tmp_path / "again.gguf", TINY, seed)
        assert ((tmp_path / "again.gguf").read_bytes() == counterpart.read_bytes()) == same


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 272}, "width is 272, no multiple of 32 as GGUF's encodings need"),
        ({"neurons": 100}, "neurons is 100, no multiple of 32 as GGUF's encodings need"),
        ({"vocabulary": 200}, "vocabulary is 200; the tokenizer of GGUF needs 270"),
        ({"layer_kinds": (LayerKind(2, 128),)}, "layer_kinds: has attention windows .128 tokens"),
        (
            {"layer_kinds": (LayerKind(2, 4096),), "router_reads": "layer"},
            "a GGUF counterpart has none, or those of llama.cpp's",
        ),
    ],
)
def test_a_shape_that_a_twin_cannot_have_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        write_gguf_counterpart(tmp_path / "t.gguf", replace(TINY, **changes), seed=0)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_missing_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere/t\.gguf: cannot be written: No such file"):
        write_gguf_counterpart(tmp_path / "nowhere" / "t.gguf", TINY, seed=0)
