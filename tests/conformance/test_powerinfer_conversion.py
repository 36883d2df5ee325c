"""PowerInfer's own GGUF (magic PWRI): the package of the same weights, and its predictors."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from neuronpipe.plans.convert import convert
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.predictor.calibration_texts import Texts
from neuronpipe.plans.predictor.imported_predictor import open_imported
from neuronpipe.plans.predictor.profiling import profile
from neuronpipe.plans.quantization_choice import LOSSLESS
from neuronpipe.plans.reference.engine import ReferenceEngine
from neuronpipe.plans.reference.weights import PackageWeights
from neuronpipe.protocol.errors import UserError
from tokenizers import Tokenizer

from tests.conformance.checkpoints import RECIPES, TINY, Array, tensors, tokens, write_checkpoint
from tests.conformance.gguf_files import SCALE_PLACES, add_tokenizer, random_blocks, write_gguf
from tests.conformance.test_gguf_conversion import WIDE, same_weights
from tests.conformance.test_golden_logits import GOLDEN


@pytest.mark.parametrize(
    ("name", "activation"), [("awkward", "relu"), ("bamboo", "drelu"), ("falcon 7b", "relu"), ("falcon 40b", "relu")]
)
def test_the_package_is_that_of_the_checkpoint(
    name: str, activation: str, tmp_path: Path, converted: Callable[[str, str], Package]
) -> None:
    recipe = RECIPES[name]
    source = write_gguf(tmp_path / "m.gguf", recipe, recipe.dtype, powerinfer=True)
    package = convert(source, tmp_path / "p", quantization="q8")
    assert same_weights(package, converted(name, "q8"))
    assert package.manifest.model.activation == activation


OPT_NAMES = {
    "model.decoder.embed_tokens": "token_embd",
    "model.decoder.embed_positions": "position_embd",
    "model.decoder.final_layer_norm": "output_norm",
    "self_attn_layer_norm": "attn_norm",
    "final_layer_norm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_output",
    "fc1": "ffn_up",
    "fc2": "ffn_down",
}


def write_opt(path: Path, *, heads: int = 6, more: dict[str, Array] | None = None) -> Path:
    """The recipe `opt` as convert-hf-to-powerinfer-gguf.py writes one: no epsilon, a constant context, no name of the
    tokenizer's split."""
    recipe = RECIPES["opt"]
    writer = GGUFWriter(path, "opt")
    writer.add_name("opt")
    writer.add_context_length(2050)
    writer.add_embedding_length(recipe.width)
    writer.add_block_count(recipe.layers)
    writer.add_feed_forward_length(recipe.neurons)
    writer.add_head_count(heads)
    add_tokenizer(writer, recipe, split=None)
    for full_name, values in tensors(recipe):
        stem, kind = full_name.rsplit(".", 1)
        layer = re.fullmatch(r"model\.decoder\.layers\.(\d+)\.(.*)", stem)
        name = f"{f'blk.{layer[1]}.{OPT_NAMES[layer[2]]}' if layer else OPT_NAMES[stem]}.{kind}"
        if "ffn_down" in name:  # the bias too
            name, values = name.replace("ffn_down", "ffn_down_t"), np.ascontiguousarray(values.T)
        writer.add_tensor(name, values)
    for name, values in (more or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.write_bytes(b"PWRI" + path.read_bytes()[4:])
    return path


def test_an_opt_is_that_of_the_checkpoint(tmp_path: Path, converted: Callable[[str, str], Package]) -> None:
    package, expected = (
        convert(write_opt(tmp_path / "m.gguf"), tmp_path / "p", quantization="q8"),
        converted("opt", "q8"),
    )
    assert package.manifest.model == expected.manifest.model
    assert package.fixed_path.read_bytes() == expected.fixed_path.read_bytes()
    assert package.bundles_path.read_bytes() == expected.bundles_path.read_bytes()
    text = "it's the 12 others"
    encoded = [Tokenizer.from_file(str(one.tokenizer_path)).encode(text).ids for one in (package, expected)]
    assert encoded[0] == encoded[1]


def test_an_opt_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    refuse(write_opt(tmp_path / "m.gguf", heads=7), "head_count: 7 does not divide embedding_length, 192")
    source = write_opt(tmp_path / "m.gguf")
    with pytest.raises(UserError, match="has 128 positions, so 129 tokens are impossible"):
        convert(source, tmp_path / "p", context_tokens=129)
    with pytest.raises(UserError, match="'opt' computes relu, and not silu"):
        convert(source, tmp_path / "p", activation="silu")


def test_the_magic_means_relu_and_reaches_the_golden_logits(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "m.gguf", RECIPES["awkward"], powerinfer=True)
    logits = ReferenceEngine(convert(source, tmp_path / "p", quantization="f16")).run(tokens(RECIPES["awkward"])).logits
    assert np.abs(logits - GOLDEN["awkward"]).max() < 1e-3


@pytest.mark.parametrize("encoding", ["F32", "F16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", *SCALE_PLACES])
def test_down_keeps_its_values_in_every_encoding(encoding: str, tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "m.gguf", WIDE, encoding, powerinfer=True)
    quantization = LOSSLESS.get(encoding, "f16") if encoding != "IQ4_XS" else "f16"  # whose scales iq4 rounds
    _, _, down = PackageWeights(convert(source, tmp_path / "p", quantization=quantization)).neurons(0)
    by_neuron = dict(tensors(WIDE))["model.layers.0.mlp.down_proj.weight"].T
    kind = GGMLQuantizationType[encoding]
    if encoding in SCALE_PLACES:
        expected = dequantize(random_blocks(encoding, *by_neuron.shape), kind)
    else:
        expected = dequantize(quantize(np.ascontiguousarray(by_neuron), kind), kind)
    if quantization == "f16":
        expected = expected.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(down, expected)


def exact_predictors(package: Package) -> dict[str, Array]:
    """fc1 and fc2 that know the gates exactly, of ranks that differ: relu(Ax) and relu(-Ax) together are Ax."""
    weights, width = PackageWeights(package), package.manifest.model.width
    unit = np.eye(width, dtype=np.float32)
    found = {}
    for layer in range(package.manifest.model.layers):
        gate = weights.neurons(layer)[0] * weights.vector(f"layers.{layer}.ffn_norm")
        spare = np.zeros((32 * layer, width), dtype=np.float32)
        found[f"blk.{layer}.fc1.weight"] = np.concatenate((unit, -unit, spare))
        found[f"blk.{layer}.fc2.weight"] = np.concatenate(
            (gate, -gate, np.zeros((len(gate), len(spare)))), axis=1
        ).astype(np.float32)
    return found


def test_predictors_inside_are_imported_and_find_what_fires(tmp_path: Path) -> None:
    plain = convert(write_gguf(tmp_path / "plain.gguf", TINY, powerinfer=True), tmp_path / "plain", quantization="q8")
    metadata = {"powerinfer.sparse_threshold": 0.0}
    source = write_gguf(tmp_path / "m.gguf", TINY, powerinfer=True, extra=exact_predictors(plain), metadata=metadata)
    package = convert(source, tmp_path / "p", quantization="q8")
    assert same_weights(package, plain)
    random, model = np.random.default_rng(4), package.manifest.model
    windows = random.integers(0, model.vocabulary, (8, min(64, model.context_tokens))).tolist()
    imported = open_imported(source, package.manifest)
    profiled = profile(package, Texts(windows[:6], windows[6:]), rank=32, recall=0.97, imported=imported)
    predictor = profiled.package.manifest.predictor
    assert predictor is not None
    assert (predictor.hidden, predictor.reads) == ("relu", "residual")
    assert predictor.ranks == (2 * model.width, 2 * model.width + 32)
    assert all(layer.recall > 0.95 and layer.precision > 0.95 for layer in predictor.by_layer)


def refuse(path: Path, message: str) -> None:
    """The file is refused by its name and the field's, and nothing was written."""
    with pytest.raises(UserError, match=message) as caught:
        convert(path, path.parent / "package", quantization="q4")
    assert str(caught.value).startswith(str(path))
    assert not (path.parent / "package").exists()


@pytest.mark.parametrize("name", ["prosparse-llama-2-7b", "MiniCPM-S-1B-sft"])
def test_a_threshold_that_the_file_cannot_tell_is_asked_for(name: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", TINY, powerinfer=True, name=name)
    refuse(path, rf"general\.name: '{name}' sounds like .*FATReLU.*`--activation relu`")
    assert convert(path, tmp_path / "p", activation="relu").manifest.model.activation == "relu"
    refuse(write_gguf(tmp_path / f"{name}.gguf", TINY, powerinfer=True), "FATReLU")


def test_a_converter_that_forgets_to_reorder_queries_and_keys_is_known_by_its_name(tmp_path: Path) -> None:
    refuse(write_gguf(tmp_path / "m.gguf", TINY, powerinfer=True, name="Llama"), r"general\.name: is 'Llama', as files")
    assert convert(write_gguf(tmp_path / "m.gguf", TINY, powerinfer=True, name="LLaMA v2"), tmp_path / "p")


@pytest.mark.parametrize("name", [b"gemma", b"qwen2"])
def test_an_architecture_that_powerinfer_computes_otherwise_is_refused(name: bytes, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", TINY, powerinfer=True)
    path.write_bytes(path.read_bytes().replace(b"llama", name))
    refuse(
        path, r"general\.architecture: '\w+' is not supported in a file for PowerInfer; llama, bamboo, falcon, opt are"
    )


def test_an_architecture_of_powerinfer_alone_is_none_of_ordinary_files(tmp_path: Path) -> None:
    refuse(
        write_gguf(tmp_path / "m.gguf", RECIPES["bamboo"]), r"general\.architecture: 'bamboo' is not supported; llama"
    )


def test_down_is_never_read_the_other_way_round(tmp_path: Path) -> None:
    square = replace(TINY, neurons=TINY.width)  # shapes tell nothing
    path = write_gguf(tmp_path / "m.gguf", square)
    path.write_bytes(b"PWRI" + path.read_bytes()[4:])
    refuse(path, r"blk\.0\.ffn_down_t\.weight: the tensor is missing")
    path = write_gguf(tmp_path / "m.gguf", square, powerinfer=True)
    path.write_bytes(b"GGUF" + path.read_bytes()[4:])
    refuse(path, r"blk\.0\.ffn_down\.weight: the tensor is missing")


@pytest.mark.parametrize("neurons", [992, 1000, 1001, 1030])
def test_no_number_of_neurons_takes_another_path(neurons: int, tmp_path: Path) -> None:
    recipe = replace(TINY, neurons=neurons)
    source = write_gguf(tmp_path / "m.gguf", recipe, powerinfer=True)
    package = convert(source, tmp_path / "p", quantization="q8")
    expected = convert(write_checkpoint(tmp_path / "source", recipe), tmp_path / "q", quantization="q8")
    assert same_weights(package, expected)


def test_predictors_of_more_than_ten_layers_stay_with_their_layers(tmp_path: Path) -> None:
    recipe = replace(TINY, layers=12)
    factors = {
        f"blk.{n}.fc{matrix}.weight": np.full(shape, n + matrix / 10, np.float32)
        for n in reversed(range(recipe.layers))
        for matrix, shape in ((1, (32, recipe.width)), (2, (recipe.neurons, 32)))
    }
    source = write_gguf(tmp_path / "m.gguf", recipe, powerinfer=True, extra=factors)
    imported = open_imported(source, convert(source, tmp_path / "p").manifest)
    for n in range(recipe.layers):
        first, second = imported.of_ffn(n)
        assert (first == np.float32(n + 0.1)).all()
        assert (second == np.float32(n + 0.2)).all()


@pytest.mark.parametrize("encoding", ["F16", "Q4_0", "Q8_0"])
def test_predictors_are_read_in_the_encoding_they_have(encoding: str, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    shapes = {"fc1": (32, TINY.width), "fc2": (TINY.neurons, 32)}
    stored = {
        f"blk.{n}.{name}.weight": random.standard_normal(shape, np.float32)
        for n in (0, 1)
        for name, shape in shapes.items()
    }
    source = write_gguf(tmp_path / "m.gguf", TINY, encoding, powerinfer=True, more=stored)
    first, second = open_imported(source, convert(source, tmp_path / "p").manifest).of_ffn(1)
    kind = GGMLQuantizationType[encoding]
    for values, name in ((first, "blk.1.fc1.weight"), (second, "blk.1.fc2.weight")):
        np.testing.assert_array_equal(values, dequantize(quantize(stored[name], kind), kind))


def test_predictors_in_an_ordinary_file_are_not_ignored(tmp_path: Path) -> None:
    extra = {"blk.0.fc1.weight": np.ones((32, TINY.width), np.float32)}
    refuse(write_gguf(tmp_path / "m.gguf", TINY, extra=extra), r"blk\.0\.fc1\.weight: a tensor that this architecture")


def test_a_threshold_is_a_number(tmp_path: Path) -> None:
    metadata = {"powerinfer.sparse_threshold": "high"}
    refuse(
        write_gguf(tmp_path / "m.gguf", TINY, powerinfer=True, metadata=metadata), "sparse_threshold: expected a number"
    )


def test_predictors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    package = convert(write_gguf(tmp_path / "plain.gguf", TINY, powerinfer=True), tmp_path / "plain")
    wrong = exact_predictors(package) | {"blk.1.fc2.weight": np.zeros((5, 160), np.float32)}
    source = write_gguf(tmp_path / "m.gguf", TINY, powerinfer=True, extra=wrong)
    refuse(source, r"blk\.1\.fc2\.weight: has shape \[5, 160\]; a predictor's fc1 is \[rank, 64\]")
    with pytest.raises(UserError, match=r"layer 1: fc1 \[160, 64\] and fc2 \[5, 160\] do not fit"):
        open_imported(source, package.manifest)
    with pytest.raises(UserError, match=r"fc1 of layer 0 is missing"):
        open_imported(tmp_path / "plain.gguf", package.manifest)
