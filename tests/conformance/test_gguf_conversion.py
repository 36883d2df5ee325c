"""The same weights through GGUF and through safetensors give the same package."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from neuronpipe.launch.cli import main
from neuronpipe.plans.convert import Encoded, convert
from neuronpipe.plans.convert.encodings import BLOCK_WEIGHTS_BYTES, decode_stored, same_values
from neuronpipe.plans.convert.quantize import decode
from neuronpipe.plans.models.spec import LayerKind, runs_of
from neuronpipe.plans.package.layout import Quantization
from neuronpipe.plans.package.manifest import MANIFEST, Manifest
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.package.tensors import fixed_matrices
from neuronpipe.plans.quantization_choice import (
    BITS_CHOICES,
    LOSSLESS,
    Choice,
    attention_quantization,
    default_quantization,
    why,
)
from neuronpipe.plans.reference.engine import ReferenceEngine
from neuronpipe.plans.reference.weights import PackageWeights
from neuronpipe.protocol.errors import UserError

from tests.conformance.checkpoints import RECIPES, Recipe, tensors, tokens, write_checkpoint
from tests.conformance.gguf_files import (
    ARCHITECTURES,
    SCALE_PLACES,
    gemma4_keys,
    gguf_name,
    latent_keys,
    llama3_factors,
    random_blocks,
    stacked_experts,
    write_gguf,
)
from tests.conformance.random_tensors import Array
from tests.conformance.test_golden_logits import GOLDEN

WIDE = Recipe("wide", "LlamaForCausalLM", "silu", 256, 512, 1, 4, 2, 64, vocabulary=300)


def same_weights(one: Package, other: Package) -> bool:
    """Whether two packages hold the same bytes; only the rope tables may differ in the last place."""
    fixed = [
        {name: package.fixed_path.read_bytes()[entry.start : entry.stop] for name, entry in package.fixed.items()}
        for package in (one, other)
    ]
    for name in ("rope.inverse_frequency", "rope.local_inverse_frequency"):
        tables = [np.frombuffer(tensors.pop(name, b""), "<f4") for tensors in fixed]
        np.testing.assert_allclose(*tables, rtol=1e-6)
    return fixed[0] == fixed[1] and one.bundles_path.read_bytes() == other.bundles_path.read_bytes()


@pytest.mark.parametrize(
    "name", ["awkward", "qwen2", "relu2", "llama3", "qwen3", "ernie4_5", "hunyuan dense", "seed-oss"]
)
def test_gguf_and_safetensors_give_the_same_package(
    name: str, tmp_path: Path, converted: Callable[[str, str], Package]
) -> None:
    recipe = RECIPES[name]
    extra = {"rope_freqs.weight": llama3_factors(recipe)} if name == "llama3" else {}
    source = write_gguf(tmp_path / "m.gguf", recipe, recipe.dtype, extra=extra)
    expected = converted(name, "q8")
    package = convert(source, tmp_path / "p", quantization="q8", activation=expected.manifest.model.activation)
    assert same_weights(package, expected)
    # GGUF keeps epsilon as float32, and has no word for windows of some layers.
    told = replace(
        expected.manifest.model, norm_epsilon=float(np.float32(1e-5)), layer_kinds=(LayerKind(recipe.layers),)
    )
    assert package.manifest.model == told
    assert package.manifest.end_tokens == expected.manifest.end_tokens


@pytest.mark.parametrize("name", ["falcon 7b", "falcon 40b", "nemotron", "arcee"])
def test_models_without_a_gate_are_the_same_package(
    name: str, tmp_path: Path, converted: Callable[[str, str], Package]
) -> None:
    """Falcon's joined queries, keys and values and its one or two norms; Nemotron's norms, which have their 1 there,
    and its part of a head; Arcee's permuted rows and its YaRN."""
    recipe, expected = RECIPES[name], converted(name, "q8")
    source = write_gguf(tmp_path / "m.gguf", recipe, recipe.dtype)
    said = "relu" if name.startswith("falcon") else None
    package = convert(source, tmp_path / "p", quantization="q8", activation=said)
    assert same_weights(package, expected)
    assert package.manifest.model == replace(expected.manifest.model, norm_epsilon=float(np.float32(1e-5)))


@pytest.mark.parametrize(
    ("name", "metadata"),
    [
        ("stablelm", {}),
        ("stablelm parallel", {}),
        ("gpt neox", {"gptneox.use_parallel_residual": True}),
        ("starcoder2", {"starcoder2.attention.sliding_window": 9}),
        ("olmo", {"olmo.attention.clamp_kqv": 1.25}),
        ("olmo unclipped", {}),
        ("cohere", {"command-r.logit_scale": 0.5}),
        ("cohere2", {"cohere2.logit_scale": 0.75, "cohere2.attention.sliding_window": 9}),
    ],
)
def test_models_with_layer_norm_are_the_same_package(
    name: str, metadata: dict[str, Any], tmp_path: Path, converted: Callable[[str, str], Package]
) -> None:
    recipe, expected = RECIPES[name], converted(name, "q8")
    source = write_gguf(tmp_path / "m.gguf", recipe, recipe.dtype, metadata=metadata)
    package = convert(source, tmp_path / "p", quantization="q8")
    assert same_weights(package, expected)
    ours, theirs = asdict(package.manifest.model), asdict(expected.manifest.model)
    assert ours == {name: pytest.approx(value) if isinstance(value, float) else value for name, value in theirs.items()}


GEMMA3 = RECIPES["gemma3"]
NORMED: dict[str, tuple[Recipe, dict[str, Any]]] = {
    "gemma2": (
        RECIPES["gemma2"],
        {
            "gemma2.attention.sliding_window": 9,
            "gemma2.attn_logit_softcapping": 4.0,
            "gemma2.final_logit_softcapping": 15.0,
        },
    ),
    "gemma3": (
        replace(
            GEMMA3,
            layers=7,
            config=GEMMA3.config | {"rope_local_base_freq": 10_000.0, "sliding_window_pattern": 6},
        ),
        {"gemma3.attention.sliding_window": 9},
    ),
    "olmo2": (RECIPES["olmo2"], {}),
    "exaone4": (
        RECIPES["exaone4"],
        {
            "exaone4.attention.sliding_window": 9,
            "exaone4.attention.sliding_window_pattern": [True, True, True, False, True],
        },
    ),
    "exaone4 without windows": (RECIPES["exaone4 without windows"], {}),
}


@pytest.mark.parametrize("name", NORMED)
def test_models_that_norm_outputs_are_the_same_package(name: str, tmp_path: Path) -> None:
    """Gemma's norms have their 1 there. The factor of scores, which files lack, is by the number of layers."""
    recipe, metadata = NORMED[name]
    extra = {"rope_freqs.weight": llama3_factors(recipe)} if name == "exaone4" else {}
    source = write_gguf(tmp_path / "m.gguf", recipe, recipe.dtype, metadata=metadata, extra=extra)
    expected = convert(write_checkpoint(tmp_path / "model", recipe), tmp_path / "e", quantization="q8")
    package = convert(source, tmp_path / "p", quantization="q8")
    assert same_weights(package, expected)
    told = replace(expected.manifest.model, norm_epsilon=float(np.float32(1e-5)), attention_scale=1.0)
    told = replace(told, local_attention_scale=1.0)
    assert package.manifest.model == told


@pytest.mark.parametrize("name", ["gemma4", "gemma4 moe"])
@pytest.mark.parametrize("joint", [True, False])
def test_gemma_4_is_the_same_package(
    name: str, joint: bool, tmp_path: Path, converted: Callable[[str, str], Package]
) -> None:
    """Newer files have gate and up of all experts in one tensor."""
    source = write_gguf(tmp_path / "m.gguf", RECIPES[name], "F32", metadata=gemma4_keys(RECIPES[name]), joint=joint)
    expected, package = converted(name, "q8"), convert(source, tmp_path / "p", quantization="q8")
    assert same_weights(package, expected)
    assert package.manifest.model == replace(expected.manifest.model, norm_epsilon=float(np.float32(1e-5)))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"attention.shared_kv_layers": 2}, "gemma4.attention.shared_kv_layers: is 2: layers that share keys and"),
        (
            {"embedding_length_per_layer_input": 256},
            "embedding_length_per_layer_input: is 256: embeddings of each layer",
        ),
        ({"attention.sliding_window_pattern": [True]}, "sliding_window_pattern: expected one value, or a list"),
        ({"attention.head_count_kv": [2, 2, 0, 2, 1]}, "head_count_kv: expected one value, or a list"),
        ({"rope.dimension_count_swa": 16}, "rope.dimension_count_swa: differs from the width of a head, 32"),
    ],
)
def test_what_a_file_of_gemma_4_must_say(change: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    metadata = gemma4_keys(RECIPES["gemma4"]) | {f"gemma4.{key}": value for key, value in change.items()}
    with pytest.raises(UserError, match=complaint):
        convert(write_gguf(tmp_path / "m.gguf", RECIPES["gemma4"], metadata=metadata), tmp_path / "p")


@pytest.mark.parametrize(("name", "layers", "width"), [("gemma2", 46, 32), ("gemma3", 62, 32)])
def test_the_largest_gemmas_have_another_factor_of_scores(name: str, layers: int, width: int, tmp_path: Path) -> None:
    recipe = replace(NORMED[name][0], layers=layers, width=width, neurons=32, head_width=32, query_heads=4)
    package = convert(write_gguf(tmp_path / "m.gguf", recipe, metadata=NORMED[name][1]), tmp_path / "p")
    assert package.manifest.model.attention_scale == pytest.approx(2)  # 32 / (32 / 4), its root
    assert package.manifest.model.local_attention_scale == pytest.approx(2 if name == "gemma3" else 1)


@pytest.mark.parametrize(
    ("name", "metadata", "why"),
    [
        (
            "gemma3",
            {"gemma3.attention.sliding_window": 9, "gemma3.attention.sliding_window_pattern": 3},
            "pattern: dif",
        ),
        ("olmo2", {"olmo2.attention.sliding_window_pattern": [True, True, False]}, "sliding_window_pattern: differs"),
        (
            "exaone4",
            {"exaone4.attention.sliding_window": 9, "exaone4.attention.sliding_window_pattern": [True] * 5},
            "sliding_window_pattern: differs",
        ),
    ],
)
def test_windows_of_other_layers_are_refused(name: str, metadata: dict[str, Any], why: str, tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "m.gguf", NORMED[name][0], metadata=metadata)
    with pytest.raises(UserError, match=why):
        convert(source, tmp_path / "p")


@pytest.mark.parametrize("name", ["arcee", "qwen2", "smollm3"])
def test_joined_queries_keys_and_values_are_the_same_package(
    name: str, tmp_path: Path, converted: Callable[[str, str], Package]
) -> None:
    """The converter joins them with --fuse-qkv, after it has put the rows of each head in pairs."""
    source = write_gguf(tmp_path / "m.gguf", RECIPES[name], RECIPES[name].dtype, joined=True)
    assert same_weights(convert(source, tmp_path / "p", quantization="q8"), converted(name, "q8"))


def test_yarns_factor_concerns_heads_that_rotate_alone(tmp_path: Path) -> None:
    """Each fourth layer of a SmolLM3 does not rotate."""
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 64}
    metadata = {f"smollm3.rope.scaling.{key}": value for key, value in scaling.items()}
    model = convert(
        write_gguf(tmp_path / "m.gguf", RECIPES["smollm3"], metadata=metadata), tmp_path / "p"
    ).manifest.model
    assert {True, False} == set(model.rotary_layers)
    assert (model.rotary_scale, model.attention_scale) == (pytest.approx(0.1 * np.log(4) + 1), 1.0)


def test_gemmas_that_state_no_window_have_the_usual_one_or_none(tmp_path: Path) -> None:
    windows = {}
    for name in ("gemma2", "gemma3"):
        recipe, metadata = NORMED[name]
        stated = {key: value for key, value in metadata.items() if not key.endswith("sliding_window")}
        package = convert(write_gguf(tmp_path / f"{name}.gguf", recipe, metadata=stated), tmp_path / name)
        windows[name] = set(package.manifest.model.windows_tokens)
    assert windows == {"gemma2": {4096, 0}, "gemma3": {0}}


def test_layers_with_windows_have_the_base_that_the_file_states(tmp_path: Path) -> None:
    recipe, metadata = NORMED["gemma3"]
    stated = {"gemma3.rope.freq_base_swa": 300.0}
    package = convert(write_gguf(tmp_path / "m.gguf", recipe, metadata=metadata | stated), tmp_path / "p")
    table = PackageWeights(package).vector("rope.local_inverse_frequency")
    width = recipe.head_width
    np.testing.assert_allclose(table, 300.0 ** (-np.arange(0, width, 2) / width), rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "metadata", "why"),
    [
        ("cohere2", {"attention.sliding_window": 9, "rope.freq_base_swa": 300.0}, "freq_base_swa: differs from rope"),
        ("cohere2", {}, r"cohere2\.attention\.sliding_window: missing"),
        ("cohere2", {"attention.sliding_window": 0}, r"attention\.sliding_window: 0 is outside 1\.\."),
        ("qwen2", {"attention.causal": False}, "attention.causal: is false"),
        (
            "qwen2",
            {"attention.sliding_window_pattern": [True, False, True]},
            "window_pattern: differs from the windows",
        ),
    ],
)
def test_positions_and_masks_of_other_architectures_are_refused(
    name: str, metadata: dict[str, Any], why: str, tmp_path: Path
) -> None:
    stated = {f"{name}.{key}": value for key, value in metadata.items()}
    extra = {"cohere2.logit_scale": 0.75} if name == "cohere2" else {}
    with pytest.raises(UserError, match=why):
        convert(write_gguf(tmp_path / "m.gguf", RECIPES[name], metadata=stated | extra), tmp_path / "p")
    assert not (tmp_path / "p").exists()


def test_layers_with_windows_of_an_olmo_have_no_scaling(tmp_path: Path) -> None:
    """llama.cpp reads OLMo 3 as an OLMo 2 with windows."""
    metadata = {
        "olmo2.attention.sliding_window": 9,
        "olmo2.rope.freq_base": 10_000.0,
        "olmo2.rope.scaling.type": "linear",
        "olmo2.rope.scaling.factor": 4.0,
    }
    recipe = replace(RECIPES["olmo3"], config={"rope_parameters": {}})
    package = convert(write_gguf(tmp_path / "m.gguf", recipe, metadata=metadata), tmp_path / "p")
    assert package.manifest.model.layer_kinds == (
        LayerKind(3, 9, local_positions=True),
        LayerKind(1),
        LayerKind(1, 9, local_positions=True),
    )
    weights = PackageWeights(package)
    table, local = (weights.vector(f"rope.{name}inverse_frequency") for name in ("", "local_"))
    np.testing.assert_allclose(local, 4 * table, rtol=1e-6)


def test_a_falcon_is_not_run_with_relu_unasked(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "m.gguf", RECIPES["falcon 7b"])
    with pytest.raises(UserError, match=r"'falcon' means GELU, which is not supported; .* --activation relu"):
        convert(source, tmp_path / "p")
    stated = write_gguf(tmp_path / "n.gguf", RECIPES["falcon 7b"], metadata={"falcon.hidden_activation": "relu"})
    assert convert(stated, tmp_path / "p").manifest.model.activation == "relu"


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("arcee.rope.scaling.attn_factor", 1.5, "is not 1: not supported"),
        ("arcee.rope.scaling.yarn_ext_factor", 0.5, "is not 1: not supported"),
        ("arcee.rope.scaling.yarn_log_multiplier", 0.1, "is not 0: not supported"),
        ("arcee.rope.dimension_count", 32, "differs from the width of a head, 64"),
    ],
)
def test_yarn_that_would_be_computed_otherwise_is_refused_by_its_key(
    key: str, value: float, why: str, tmp_path: Path
) -> None:
    source = write_gguf(tmp_path / "m.gguf", RECIPES["arcee"], metadata={key: value})
    with pytest.raises(UserError, match=f"{key}: {why}"):
        convert(source, tmp_path / "p")


def test_yarns_own_factor_is_that_of_config_json(tmp_path: Path) -> None:
    metadata = {"arcee.rope.scaling.yarn_attn_factor": 1.25}
    source = write_gguf(tmp_path / "m.gguf", RECIPES["arcee"], metadata=metadata)
    assert convert(source, tmp_path / "p").manifest.model.attention_scale == pytest.approx(1.25**2)


@pytest.mark.parametrize(
    ("name", "metadata"),
    [
        ("mixtral", {"llama.expert_count": 5, "llama.expert_used_count": 2}),
        (
            "qwen3moe",
            {
                "qwen3moe.expert_count": 9,
                "qwen3moe.expert_used_count": 3,
                "qwen3moe.expert_feed_forward_length": 90,
                "qwen3moe.feed_forward_length": 777,
            },
        ),
        (
            "smallthinker",
            {
                "smallthinker.expert_count": 7,
                "smallthinker.expert_used_count": 3,
                "smallthinker.expert_gating_func": 2,
                "smallthinker.attention.sliding_window": 9,
            },
        ),
    ],
)
@pytest.mark.parametrize("joint", [False, True])
def test_a_mixture_whose_experts_lie_in_one_tensor_is_the_same_package(
    name: str, metadata: dict[str, int], joint: bool, tmp_path: Path, converted: Callable[[str, str], Package]
) -> None:
    """Newer files have gate and up of all experts in one tensor."""
    recipe, expected = RECIPES[name], converted(name, "q8")
    source = write_gguf(tmp_path / "m.gguf", recipe, recipe.dtype, metadata=metadata, joint=joint)
    package = convert(source, tmp_path / "p", quantization="q8")
    assert same_weights(package, expected)
    told = replace(
        expected.manifest.model,
        family=package.manifest.model.family,  # mixtral's architecture is llama there
        norm_epsilon=float(np.float32(1e-5)),
    )
    if name == "smallthinker":  # every fourth layer is without window and rotary positions, there
        told = replace(told, layer_kinds=(LayerKind(1, 0, False), LayerKind(3, 9)))
    assert package.manifest.model == told


MIXTURES: dict[str, dict[str, Any]] = {
    "glm4moe": {"expert_weights_norm": True, "expert_weights_scale": 1.8, "leading_dense_block_count": 1},
    "glm4moe groups": {"expert_weights_scale": 0.6, "expert_group_count": 4, "expert_group_used_count": 2},
    "qwen2moe": {},
    "olmoe": {},
    "ernie4_5moe": {"expert_weights_norm": True, "expert_gating_func": 1},
    "dots1": {"expert_gating_func": 2},
    "minimax-m2": {"expert_gating_func": 2, "expert_weights_norm": True},
    "hunyuan moe": {},
    "bailing": {"expert_weights_norm": True, "expert_weights_scale": 1.0, "expert_shared_count": 2},
    "bailing v2": {
        "expert_weights_norm": True,
        "expert_gating_func": 2,
        "expert_group_count": 4,
        "expert_group_used_count": 2,
    },
    "granitemoe": {
        "embedding_scale": 1.5,
        "logit_scale": 0.5,
        "residual_scale": 0.8,
        "attention.scale": 0.3,
    },
}


LATENTS: dict[str, dict[str, Any]] = {
    "deepseek v2 groups": {"expert_group_count": 4, "expert_group_used_count": 2, "expert_weights_scale": 4.0},
    "deepseek v3": {
        "expert_gating_func": 2, "expert_weights_norm": True, "expert_group_count": 4, "expert_group_used_count": 2,
        "expert_weights_scale": 2.5, "rope.scaling.yarn_log_multiplier": 0.1, "rope.scaling.yarn_beta_slow": 1.0,
    },
}  # fmt: skip


def keys_of_latents(name: str, *, joint: bool) -> dict[str, Any]:
    recipe = RECIPES[name]
    keys = {
        **LATENTS[name],
        **latent_keys(recipe, joint=joint),
        "expert_count": recipe.experts,
        "expert_used_count": recipe.config["num_experts_per_tok"],
        "expert_feed_forward_length": recipe.neurons,
    }
    return {f"deepseek2.{key}": value for key, value in keys.items()}


def test_a_router_with_biases_beside_latents_is_a_sigmoid_if_no_key_says_it(tmp_path: Path) -> None:
    metadata = keys_of_latents("deepseek v3", joint=True)
    del metadata["deepseek2.expert_gating_func"]
    model = convert(write_gguf(tmp_path / "m.gguf", RECIPES["deepseek v3"], metadata=metadata), tmp_path / "p")
    assert (model.manifest.model.router, model.manifest.model.groups_by_best) == ("sigmoid", False)


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("name", LATENTS)
def test_latents_are_the_same_package_however_keys_and_values_are_stored(
    name: str, joint: bool, tmp_path: Path, converted: Callable[[str, str], Package]
) -> None:
    recipe, expected = RECIPES[name], converted(name, "q8")
    metadata = keys_of_latents(name, joint=joint)
    source = write_gguf(tmp_path / "m.gguf", recipe, recipe.dtype, metadata=metadata, joint_latents=joint)
    package = convert(source, tmp_path / "p", quantization="q8")
    assert same_weights(package, expected)
    ours, theirs = asdict(package.manifest.model), asdict(expected.manifest.model)
    assert ours == {name: pytest.approx(value) if isinstance(value, float) else value for name, value in theirs.items()}


@pytest.mark.parametrize("name", MIXTURES)
def test_shared_experts_layers_without_routers_and_routers_are_the_same_package(
    name: str, tmp_path: Path, converted: Callable[[str, str], Package]
) -> None:
    recipe, expected = RECIPES[name], converted(name, "q8").manifest.model
    architecture = ARCHITECTURES[recipe.architecture]
    keys = {"expert_count": expected.experts, "expert_used_count": expected.experts_per_token, **MIXTURES[name]}
    if expected.routed_scale != 1:
        keys["expert_weights_scale"] = expected.routed_scale
    if name == "dots1":
        keys["expert_weights_norm"] = expected.normalized_shares
        expected = replace(expected, layer_kinds=runs_of([0] * 4, None, [4, 0, 0, 0]))  # files state no windows
    keys["expert_feed_forward_length"] = recipe.neurons
    metadata = {f"{architecture}.{key}": value for key, value in keys.items()}
    source = write_gguf(tmp_path / "m.gguf", recipe, recipe.dtype, metadata=metadata)
    package = convert(source, tmp_path / "p", quantization="q8")
    assert same_weights(package, converted(name, "q8"))
    ours, theirs = asdict(package.manifest.model), asdict(expected)
    assert ours == {name: pytest.approx(value) if isinstance(value, float) else value for name, value in theirs.items()}


@pytest.mark.parametrize(
    ("name", "metadata"),
    [
        ("smollm3", {}),
        (
            "granite",
            {
                "granite.embedding_scale": 3.0,
                "granite.logit_scale": 0.25,
                "granite.residual_scale": 0.6,
                "granite.attention.scale": 0.3,
            },
        ),
    ],
)
def test_facts_that_only_some_files_state_give_the_same_package(
    name: str, metadata: dict[str, float], tmp_path: Path, converted: Callable[[str, str], Package]
) -> None:
    """SmolLM3's layers without positions, which no file states; Granite's factors, which are float32 there."""
    recipe, expected = RECIPES[name], converted(name, "q8")
    package = convert(
        write_gguf(tmp_path / "m.gguf", recipe, recipe.dtype, metadata=metadata), tmp_path / "p", quantization="q8"
    )
    assert same_weights(package, expected)
    ours, theirs = asdict(package.manifest.model), asdict(expected.manifest.model)
    assert ours == {name: pytest.approx(value) if isinstance(value, float) else value for name, value in theirs.items()}


def test_gpt_oss_is_the_same_package_from_either_source(
    tmp_path: Path, converted: Callable[[str, str], Package]
) -> None:
    recipe, expected = RECIPES["gpt-oss"], converted("gpt-oss", "q8")
    metadata = {"gpt-oss.expert_count": 6, "gpt-oss.expert_used_count": 3, "gpt-oss.attention.sliding_window": 9}
    source = write_gguf(tmp_path / "m.gguf", recipe, recipe.dtype, metadata=metadata)
    package = convert(source, tmp_path / "p", quantization="q8")
    assert same_weights(package, expected)
    told = {"norm_epsilon": float(np.float32(1e-5)), "activation_limit": 7.0}  # files do not state the limit
    assert package.manifest.model == replace(expected.manifest.model, **told)


PHIMOE = RECIPES["phimoe"]


def write_phimoe(path: Path, **changes: Any) -> Path:
    """Write the recipe, with the tables of divisors and the keys of llama.cpp's converter. changes: by keys without
    `phimoe.`; None leaves one out."""
    factor = PHIMOE.config["rope_scaling"]["short_mscale"]
    keys = {
        "expert_count": 6, "expert_used_count": 2, "attention.sliding_window": 0,
        "rope.scaling.original_context_length": 64, "rope.scaling.attn_factor": factor,
    } | changes  # fmt: skip
    metadata = {f"phimoe.{key}": value for key, value in keys.items() if value is not None}
    return write_gguf(path, PHIMOE, "F32", metadata=metadata, extra=longrope_divisors(PHIMOE))


def longrope_divisors(recipe: Recipe) -> dict[str, Array]:
    """Return the tensors that llama.cpp's converter makes of the factors of "longrope"."""
    rope = recipe.config["rope_scaling"]
    return {f"rope_factors_{kind}.weight": np.array(rope[f"{kind}_factor"], np.float32) for kind in ("short", "long")}


def test_phimoe_is_the_same_package(tmp_path: Path, converted: Callable[[str, str], Package]) -> None:
    """llama.cpp computes such files with RMS norms and a softmax; what the model was trained with follows from the
    architecture. Files do not state the jitter."""
    source, expected = write_phimoe(tmp_path / "m.gguf"), converted("phimoe", "f16")
    package = convert(source, tmp_path / "p", quantization="f16")
    assert same_weights(package, expected)
    ours, theirs = asdict(package.manifest.model), asdict(replace(expected.manifest.model, router_jitter=0.01))
    assert ours == {name: pytest.approx(value) if isinstance(value, float) else value for name, value in theirs.items()}
    engine = ReferenceEngine(package)
    engine._model = replace(engine._model, router_jitter=expected.manifest.model.router_jitter)
    assert np.abs(engine.run(tokens(PHIMOE)).logits - GOLDEN["phimoe"]).max() < 1e-3
    longer = convert(source, tmp_path / "longer", context_tokens=128)
    tables = [PackageWeights(each).vector("rope.inverse_frequency") for each in (package, longer)]
    np.testing.assert_allclose(tables[0] * (1 + 0.25 * np.arange(16)), tables[1] * (2 + np.arange(16)), rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"rope.scaling.original_context_length": None}, "rope.scaling.original_context_length: missing"),
        ({"rope.scaling.attn_factor": 0.0}, "rope.scaling.attn_factor: "),
        ({"expert_used_count": None}, "expert_used_count: missing"),
        ({"expert_used_count": 3}, "expert_used_count: is 3; sparsemixer chooses 2"),
    ],
)
def test_what_a_file_of_phimoe_must_say(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"m\.gguf: phimoe\.{why}"):
        convert(write_phimoe(tmp_path / "m.gguf", **changes), tmp_path / "p")


@pytest.mark.parametrize("context_tokens", [None, 96])
def test_phi3_is_the_same_package(
    context_tokens: int | None, tmp_path: Path, converted: Callable[[str, str], Package]
) -> None:
    """Queries, keys and values are one tensor, gate and up another. The factor of positions concerns the part of a head
    that rotates, and its divisors depend on the context."""
    recipe, expected = RECIPES["phi3"], converted("phi3", "q8")
    if context_tokens is not None:
        write_checkpoint(tmp_path / "checkpoint", recipe)
        expected = convert(tmp_path / "checkpoint", tmp_path / "e", quantization="q8", context_tokens=context_tokens)
    factor = expected.manifest.model.rotary_scale
    assert factor > 1
    metadata = {
        "phi3.attention.sliding_window": 9,
        "phi3.rope.scaling.original_context_length": 64,
        "phi3.rope.scaling.attn_factor": factor,
    }
    source = write_gguf(tmp_path / "m.gguf", recipe, recipe.dtype, metadata=metadata, extra=longrope_divisors(recipe))
    package = convert(source, tmp_path / "p", quantization="q8", context_tokens=context_tokens)
    assert same_weights(package, expected)
    ours, theirs = asdict(package.manifest.model), asdict(expected.manifest.model)
    assert ours == {name: pytest.approx(value) if isinstance(value, float) else value for name, value in theirs.items()}


SMALLTHINKER = {
    "smallthinker.expert_count": 7,
    "smallthinker.expert_used_count": 3,
    "smallthinker.attention.sliding_window": 9,
}


def test_the_file_of_smallthinkers_own_engine_is_the_same_package(
    tmp_path: Path, converted: Callable[[str, str], Package]
) -> None:
    """Its converter transposes Down under the same name, says nothing of a router of sigmoids, and adds a predictor of
    logits, without which they are exact."""
    recipe = RECIPES["smallthinker"]
    stacks = {gguf_name(name): values for name, values in stacked_experts(recipe) if "ffn_down_exps" in name}
    source = write_gguf(
        tmp_path / "m.gguf",
        recipe,
        recipe.dtype,
        metadata=SMALLTHINKER,
        instead={name: np.ascontiguousarray(values.swapaxes(1, 2)) for name, values in stacks.items()},
        extra={"lm_head_profiler.weight": np.ones(320, np.float32)},
    )
    package, expected = convert(source, tmp_path / "p", quantization="q8"), converted("smallthinker", "q8")
    assert same_weights(package, expected)
    assert package.manifest.model.router == expected.manifest.model.router == "sigmoid"


def test_down_that_may_lie_either_way_is_refused(tmp_path: Path) -> None:
    recipe = replace(RECIPES["smallthinker"], neurons=96)
    source = write_gguf(tmp_path / "m.gguf", recipe, recipe.dtype, metadata=SMALLTHINKER)
    with pytest.raises(UserError, match=r"expert_feed_forward_length: is embedding_length, 96: .*Down is transposed"):
        convert(source, tmp_path / "p")


def test_a_smallthinkers_router_is_what_either_source_says(tmp_path: Path) -> None:
    recipe = replace(RECIPES["smallthinker"], config={**RECIPES["smallthinker"].config})
    recipe.config["moe_primary_router_apply_softmax"] = True
    package = convert(write_checkpoint(tmp_path / "source", recipe), tmp_path / "p", quantization="f16")
    metadata = {**SMALLTHINKER, "smallthinker.expert_gating_func": 1}
    source = write_gguf(tmp_path / "m.gguf", recipe, recipe.dtype, metadata=metadata)
    same = convert(source, tmp_path / "q", quantization="f16")
    assert package.manifest.model.router == same.manifest.model.router == "softmax"
    logits = ReferenceEngine(package).run(tokens(recipe)).logits
    assert np.abs(logits - GOLDEN["smallthinker"]).max() > 0.1


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("llama.expert_used_count", 6, "6 is outside 1..5"),
        ("llama.expert_shared_count", 1, "is not 0, but `blk.0.ffn_up_shexp.weight` is missing"),
        ("llama.expert_group_count", 2, "2 groups of 5 experts"),
        ("llama.expert_gating_func", 4, "4 is not supported"),
    ],
)
def test_a_mixture_that_contradicts_itself_is_refused_by_its_key(
    key: str, value: int, why: str, tmp_path: Path
) -> None:
    metadata = {"llama.expert_count": 5, "llama.expert_used_count": 2} | {key: value}
    source = write_gguf(tmp_path / "m.gguf", RECIPES["mixtral"], "F16", metadata=metadata)
    with pytest.raises(UserError, match=f"{key}: {why}"):
        convert(source, tmp_path / "p", quantization="q8")
    assert not (tmp_path / "p").exists()


def test_interleaved_queries_and_keys_reach_the_golden_logits(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "m.gguf", RECIPES["awkward"])
    package = convert(source, tmp_path / "p", quantization="f16", activation="relu")
    logits = ReferenceEngine(package).run(tokens(RECIPES["awkward"])).logits
    assert np.abs(logits - GOLDEN["awkward"]).max() < 1e-3


@pytest.mark.parametrize("by_neuron", [False, True])
@pytest.mark.parametrize(("encoding", "quantization"), [("Q4_0", "q4"), ("Q8_0", "q8")])
def test_the_packages_own_encodings_pass_unchanged(
    encoding: str, quantization: str, by_neuron: bool, tmp_path: Path
) -> None:
    """By neuron, Down is stored transposed, so its groups are others than the source's."""
    source = write_gguf(tmp_path / "m.gguf", WIDE, encoding)
    package = convert(source, tmp_path / "p", quantization=quantization, by_neuron=by_neuron)
    errors = package.manifest.quantization_error
    assert {kind for kind, error in errors.items() if error} == ({"down"} if by_neuron else set())
    gate, _, _ = PackageWeights(package).neurons(0)
    stored = stored_values(WIDE, "model.layers.0.mlp.gate_proj.weight", encoding)
    np.testing.assert_array_equal(gate, stored)


def stored_values(recipe: Recipe, name: str, encoding: str) -> np.ndarray:
    """What a tensor decodes to once it was stored in an encoding."""
    from gguf.quants import quantize

    kind = GGMLQuantizationType[encoding]
    return dequantize(quantize(dict(tensors(recipe))[name], kind), kind)


@pytest.mark.parametrize(
    ("encoding", "quantization"), [("Q4_K", "q4k"), ("Q4_K", "q5k"), ("Q5_K", "q5k"), ("Q4_K", "q6k"), ("Q5_K", "q6k")]
)
def test_values_with_minima_pass_unchanged_along_the_sources_axis(
    encoding: str, quantization: Quantization, tmp_path: Path
) -> None:
    source = write_gguf(tmp_path / "m.gguf", WIDE, encoding)
    gate, up, _ = PackageWeights(convert(source, tmp_path / "p", quantization=quantization)).neurons(0)
    for values in (gate, up):
        expected = dequantize(random_blocks(encoding, 512, 256), GGMLQuantizationType[encoding])
        np.testing.assert_array_equal(values, expected)


def test_values_with_fp16_scales_pass_unchanged_along_the_sources_axis(tmp_path: Path) -> None:
    """The scales of IQ4_XS are products of fp16 and six bits, which are rounded."""
    for encoding in ("IQ4_NL", "IQ4_XS", "MXFP4", "Q4_1", "Q5_0", "Q5_1"):
        source = write_gguf(tmp_path / f"{encoding}.gguf", WIDE, encoding)
        package = convert(source, tmp_path / encoding)
        gate, up, _ = PackageWeights(package).neurons(0)
        assert package.manifest.quantization == LOSSLESS[encoding]
        for values, name in ((gate, "gate"), (up, "up")):
            if encoding not in SCALE_PLACES:
                expected = stored_values(WIDE, f"model.layers.0.mlp.{name}_proj.weight", encoding)
            else:
                expected = dequantize(random_blocks(encoding, 512, 256), GGMLQuantizationType[encoding])
            np.testing.assert_allclose(values, expected, rtol=2**-11 if encoding == "IQ4_XS" else 0)


def test_mxfp4_whose_scales_exceed_fp16_is_encoded_again_and_smaller_ones_are_zero() -> None:
    stored = np.full((1, 17), 128, dtype=np.uint8)
    for exponent, fits in (
        (128 - 24, True),
        (128 - 25, True),
        (128 + 15, True),
        (128 + 16, False),
        (255, False),
        (0, True),
    ):
        stored[0, 0] = exponent
        rows = same_values("MXFP4", "mxfp4", stored)
        assert (rows is not None) == fits
        if rows is not None:
            expected = decode_stored("MXFP4", stored)
            np.testing.assert_array_equal(decode("mxfp4", rows), expected if exponent >= 128 - 24 else 0 * expected)


@pytest.mark.parametrize(("encoding", "largest"), [("IQ4_XS", 65504 / 32), ("Q5_0", 65504 / 16)])
def test_scales_beyond_fp16_are_encoded_again(encoding: str, largest: float) -> None:
    stored = np.zeros((1, BLOCK_WEIGHTS_BYTES[encoding][1]), dtype=np.uint8)  # the scale's six bits are -32
    for scale, fits in ((largest, True), (2 * largest, False), (np.nan, False)):
        stored[0, :2] = np.array([scale], dtype="<f2").view(np.uint8)
        assert (same_values(encoding, LOSSLESS[encoding], stored) is not None) == fits


def test_attention_has_more_bits_where_the_source_has(tmp_path: Path) -> None:
    """As in a file of Q4_K_M, whose values of attention are Q6_K in some layers."""

    def chosen(quantization: Quantization, encodings: dict[str, int], *, main: str, may_differ: bool) -> Quantization:
        return attention_quantization(quantization, {main: 1000, **encodings}, encodings, may_differ=may_differ)

    for may_differ in (False, True):
        assert chosen("q4k", {"Q4_K": 8, "Q6_K": 2}, main="Q4_K", may_differ=may_differ) == "q6k"
        assert chosen("q4k", {"Q4_K": 8, "Q5_K": 2}, main="Q4_K", may_differ=may_differ) == "q5k"
        assert chosen("q6k", {"Q4_K": 1}, main="Q6_K", may_differ=may_differ) == "q6k"
        assert chosen("q4k", {"F32": 1, "BF16": 1}, main="BF16", may_differ=may_differ) == "q4k"
        assert chosen("q4", {"Q6_K": 1}, main="Q4_K", may_differ=may_differ) == "q4"  # the user's choice
    assert chosen("q5k", {"Q4_K": 1}, main="Q5_K", may_differ=True) == "q5k"
    for encoding, wanted in (
        ("Q4_1", "q4h"),
        ("Q8_0", "q8"),
        ("BF16", "q8"),
        ("Q5_K", "q5k"),
        ("Q6_K", "q6k"),
        ("MXFP4", "mxfp4"),
    ):
        assert chosen("mxfp4", {encoding: 1}, main="MXFP4", may_differ=True) == wanted
        assert chosen("mxfp4", {encoding: 1}, main="MXFP4", may_differ=False) == "mxfp4"


@pytest.mark.parametrize("encoding", ["F32", "F16", "BF16", "Q4_1", "Q5_0", "Q5_1", "MXFP4"])
def test_encodings_decode_to_what_was_stored(encoding: str, tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "m.gguf", WIDE, encoding)
    weights = PackageWeights(convert(source, tmp_path / "p", quantization="f16"))
    _, up, down = weights.neurons(0)
    for values, name in ((up, "up"), (down.T, "down")):
        stored = stored_values(WIDE, f"model.layers.0.mlp.{name}_proj.weight", encoding)
        np.testing.assert_array_equal(values, stored.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("encoding", SCALE_PLACES)
def test_k_quants_decode_as_the_gguf_library_says(encoding: str, tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "m.gguf", WIDE, encoding)
    gate, up, down = PackageWeights(convert(source, tmp_path / "p", quantization="f16")).neurons(0)
    for values, shape in ((gate, (512, 256)), (up, (512, 256)), (down.T, (256, 512))):
        expected = dequantize(random_blocks(encoding, *shape), GGMLQuantizationType[encoding])
        np.testing.assert_array_equal(values, expected.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize(
    ("encoding", "expected"),
    [
        ("F16", "q4k"),
        *((encoding, {**LOSSLESS, "Q6_K": "q6k"}.get(encoding, "q8")) for encoding in BLOCK_WEIGHTS_BYTES),
    ],
)
def test_a_quantized_source_becomes_what_keeps_its_values(encoding: str, expected: str, tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "m.gguf", WIDE, encoding)
    choices: list[Choice] = []
    manifest = convert(source, tmp_path / "p", chosen=choices.append).manifest
    (choice,) = choices
    assert manifest.quantization == choice.quantization == expected
    assert choice.alternative == ("q4k" if expected == "q8" else "q8")
    assert choice.package_bytes == written_bytes(tmp_path / "p")
    assert choice.alternative_bytes == written_bytes(
        convert(source, tmp_path / "o", quantization=choice.alternative).path
    )
    assert manifest.source.weights == ({} if encoding == "F16" else {encoding: weights_of_matrices(manifest)})
    assert convert(source, tmp_path / "q", quantization="f16").manifest.quantization == "f16"


def test_a_number_of_bits_chooses_the_package_that_is_nearest(tmp_path: Path) -> None:
    source, bits = write_gguf(tmp_path / "m.gguf", WIDE, "F16"), {}
    for quantization in BITS_CHOICES:
        package = convert(source, tmp_path / quantization, quantization=quantization)
        bits[quantization] = 8 * written_bytes(package.path) / weights_of_matrices(package.manifest)
    for wanted in (1.0, 5.5, 6.5, 7.0, 9.0, 99.0):
        chosen = convert(source, tmp_path / str(wanted), quantization=wanted).manifest.quantization
        assert abs(bits[chosen] - wanted) == min(abs(each - wanted) for each in bits.values())


def written_bytes(package: Path) -> int:
    """The length of a package's files but its manifest."""
    return sum(file.stat().st_size for file in package.iterdir() if file.name != MANIFEST)


def weights_of_matrices(manifest: Manifest) -> int:
    """How many weights the matrices of a model have."""
    model = manifest.model
    neurons = model.layers * model.neurons * model.width * len(model.ffn_matrices)
    return neurons + sum(rows * columns for _, rows, columns in fixed_matrices(model))


@pytest.mark.parametrize("encoding", ["F16", "Q4_K", "Q8_0", "Q4_0"])
def test_embedding_and_output_of_a_package_in_q4_have_what_keeps_the_source(encoding: str, tmp_path: Path) -> None:
    package = convert(write_gguf(tmp_path / "m.gguf", WIDE, encoding), tmp_path / "p", quantization="q4")
    manifest, own = package.manifest, {"Q4_0": "q4", "Q4_K": "q4k"}.get(encoding, "q8")
    assert manifest.quantizations == ({} if own == "q4" else {"embedding": own, "output": own})
    assert [manifest.quantization_of(name) for name in ("embedding", "output", "layers.0.qkv")] == [own, own, "q4"]
    dtypes = [package.fixed[f"{name}.quants"].dtype for name in ("embedding", "output", "layers.0.qkv")]
    assert dtypes == ["I8" if own == "q8" else "U8"] * 2 + ["U8"]
    assert Package.open(package.path).manifest == manifest
    lost = manifest.quantization_error
    assert max(lost["embedding"], lost["output"]) < 0.01


def test_most_weights_decide_where_encodings_are_mixed() -> None:
    assert default_quantization({"Q4_K": 80, "Q6_K": 20, "F32": 1}) == "q4k"  # Q4_K_M
    assert default_quantization({"Q4_0": 70, "Q6_K": 30}) == "q4"  # as llama.cpp has the output of a Q4_0
    assert default_quantization({"Q4_0": 40, "Q3_K": 60}) == "q8"
    assert default_quantization({"F16": 60, "Q8_0": 40}) == "q4k"


def test_the_reason_for_a_quantization_names_what_the_source_stores() -> None:
    assert why({"BF16": 1}, "q4") == "the source is not quantized"
    assert why({"Q4_0": 9, "Q6_K": 1}, "q4") == "the source stores Q4_0 90%, Q6_K 10%, and q4 keeps the values of Q4_0"
    assert why({"Q4_K": 8, "Q6_K": 2}, "q8") == "the source stores Q4_K 80%, Q6_K 20%, which q8 keeps almost exactly"
    assert why({"Q4_K": 1}, "q4k") == "the source stores Q4_K 100%, and q4k keeps the values of Q4_K"
    assert "expect clearly worse text" in why({"Q4_K": 8, "Q6_K": 2}, "q4")
    assert "Q3_K 40%, Q4_K 30%, Q5_K 20% and others" in why({"Q5_K": 2, "Q4_K": 3, "Q3_K": 4, "Q6_K": 1}, "q8")


def test_the_error_of_encoding_again_is_told_against_what_the_source_stores(tmp_path: Path) -> None:
    reports: list[Encoded] = []
    source = write_gguf(tmp_path / "m.gguf", WIDE, "Q4_K")
    package = convert(source, tmp_path / "p", quantization="q4", report=reports.append)
    measured = {}
    for name, values, shape in zip(
        ("gate", "up", "down"), PackageWeights(package).neurons(0), ((512, 256), (512, 256), (256, 512)), strict=True
    ):
        stored = dequantize(random_blocks("Q4_K", *shape), GGMLQuantizationType.Q4_K)
        lost = stored - (values.T if name == "down" else values)
        measured[name] = float(np.linalg.norm(lost) / np.linalg.norm(stored))
    told = package.manifest.quantization_error
    assert {name: told[name] for name in measured} == pytest.approx(measured, rel=1e-3)
    (report,) = reports
    assert report.worst_error >= max(told.values()) > 0.02
    assert re.fullmatch(r"(token_embd|output|blk\.0\.\w+)\.weight", report.worst_tensor)
    assert report.source_was_quantized
    assert set(report.source_weights) == {"Q4_K"}


def test_convert_shows_what_encoding_again_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_gguf(tmp_path / "m.gguf", WIDE, "Q4_K")
    assert main(["convert", str(source), "-o", str(tmp_path / "p"), "--quantization", "q4"]) == 0
    said, chosen = capsys.readouterr()
    assert "quantization q4: the source stores Q4_K 100%, which q4 cannot keep: expect clearly worse text" in chosen
    assert "--quantization q8 loses less and takes" in chosen
    assert re.search(r"^worst +\d+\.\d{4}%  \S+\.weight$", said, re.MULTILINE)
    assert "the source is quantized itself (Q4_K 100%)" in said
    assert "`--quantization q8` adds far less" in said
    assert main(["convert", str(source), "-o", str(tmp_path / "q"), "--quantization", "q8", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["worst_tensor"]["error"] < 0.01
    assert set(told["source_weights"]) == {"Q4_K"}
    assert told["quantization_reason"] == "the source stores Q4_K 100%, which q8 keeps almost exactly"
    assert main(["inspect", str(tmp_path / "q")]) == 0
    assert "the source stores Q4_K 100%, which q8 keeps almost exactly" in capsys.readouterr().out
    assert main(["convert", str(write_gguf(tmp_path / "m.gguf", WIDE)), "-o", str(tmp_path / "r")]) == 0
    assert "quantized itself" not in capsys.readouterr().out


def test_the_worst_tensor_is_named_where_one_is_worse_than_its_kind(tmp_path: Path) -> None:
    recipe = replace(WIDE, layers=2)
    wild = np.tile(np.where(np.arange(256) % 32 == 0, 16, 0.9), (512, 1)).astype(np.float32)  # steps of 2
    source = write_gguf(tmp_path / "m.gguf", recipe, instead={"blk.1.ffn_up.weight": wild})
    reports: list[Encoded] = []
    package = convert(source, tmp_path / "p", quantization="q4", report=reports.append)
    assert reports[0].worst_tensor == "blk.1.ffn_up.weight"
    assert not reports[0].source_was_quantized
    assert package.manifest.quantization_error["up"] == pytest.approx(reports[0].worst_error, rel=0.01)


def test_block_sizes_are_those_of_the_gguf_library() -> None:
    for encoding, sizes in BLOCK_WEIGHTS_BYTES.items():
        assert sizes == GGML_QUANT_SIZES[GGMLQuantizationType[encoding]]


def test_a_tied_gguf_model_has_no_output(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "m.gguf", replace(WIDE, tied=True))
    assert convert(source, tmp_path / "p", quantization="q4").manifest.model.tied_embeddings
