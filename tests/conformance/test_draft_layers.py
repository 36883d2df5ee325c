"""A draft layer is read, and computes what the same layer computes as a model of its own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from neuronpipe.plans.convert.conversion import convert
from neuronpipe.plans.inspect import describe, render
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.predictor.calibration_texts import Texts
from neuronpipe.plans.predictor.thresholds import set_thresholds
from neuronpipe.plans.reference.engine import ReferenceEngine
from neuronpipe.plans.reference.weights import Array, PackageWeights
from neuronpipe.protocol.errors import UserError
from numpy.typing import NDArray

from tests.conformance.checkpoints import RECIPES, Recipe, tokens, write_checkpoint
from tests.conformance.draft_tensors import draft_tensors, drafting, own_model
from tests.conformance.gguf_recurrent_files import write_recurrent_gguf
from tests.conformance.participants import Participants
from tests.conformance.test_gguf_conversion import same_weights

GOLDEN = np.load(Path(__file__).parent / "golden" / "logits.npz")
NAMES = ("qwen3 next", "qwen3.5", "qwen3.5 moe")


class EmbeddedWeights(PackageWeights):
    """The weights of a package whose tokens are positions in these vectors."""

    def __init__(self, package: Package, vectors: Array) -> None:
        super().__init__(package)
        self._vectors = vectors

    def rows(self, name: str, numbers: NDArray[np.int64]) -> Array:
        return self._vectors[numbers] if name == "embedding" else super().rows(name, numbers)

    def matrix(self, name: str) -> Array:
        return super().rows(name, np.arange(self.model.vocabulary)) if name == "embedding" else super().matrix(name)


def drafted(path: Path, recipe: Recipe) -> Package:
    source = write_checkpoint(path / "model", recipe, draft_tensors(recipe))
    return convert(source, path / "package", quantization="f16")


def normed(x: NDArray[np.float64], stored: Array) -> NDArray[np.float64]:
    """RMS norm with the weights of a checkpoint, which lack 1."""
    scaled: NDArray[np.float64] = x / np.sqrt(np.square(x).mean(axis=1, keepdims=True) + 1e-5)
    return scaled * (1 + stored.astype(np.float64))


@pytest.mark.parametrize("name", NAMES)
def test_a_draft_layer_computes_what_it_computes_as_a_model(name: str, tmp_path: Path) -> None:
    recipe, text = RECIPES[name], tokens(RECIPES[name])
    engine = ReferenceEngine(drafted(tmp_path, recipe))
    stored = own_model(recipe) | draft_tensors(recipe)
    hidden, _ = engine.hidden([text])
    halves = (
        normed(
            stored["model.embed_tokens.weight"][text[1:]].astype(np.float64), stored["mtp.pre_fc_norm_embedding.weight"]
        ),
        normed(engine.output_inputs(hidden)[:-1].astype(np.float64), stored["mtp.pre_fc_norm_hidden.weight"]),
    )
    vectors = np.concatenate(halves, axis=1) @ stored["mtp.fc.weight"].astype(np.float64).T
    alone = write_checkpoint(tmp_path / "alone", drafting(recipe), own_model(recipe))
    package = convert(alone, tmp_path / "of-its-own", quantization="f16")
    expected = ReferenceEngine(EmbeddedWeights(package, vectors.astype(np.float32))).run(range(len(vectors))).logits
    logits = engine.draft_logits(text)
    assert np.abs(expected).max() > 10
    assert np.abs(logits - expected).max() < 1e-3


def test_thresholds_leave_the_draft_layer_out(tmp_path: Path) -> None:
    package = drafted(tmp_path, RECIPES["qwen3.5"])
    text = tokens(RECIPES["qwen3.5"])
    silent = set_thresholds(package, Texts([text], [text[::-1]]), share=0.5, text="t").manifest.silent
    assert silent is not None
    assert [layer.threshold > 0 for layer in silent.by_layer] == [True] * 4 + [False]


def test_inspect_names_the_draft_layer(tmp_path: Path) -> None:
    package = drafted(tmp_path, RECIPES["qwen3.5"])
    assert "4 layers and a draft layer of width" in render(describe(package))


@pytest.mark.parametrize("name", NAMES)
def test_a_draft_layer_does_not_change_the_text(name: str, tmp_path: Path) -> None:
    package = drafted(tmp_path, RECIPES[name])
    model = package.manifest.model
    assert (model.draft_layers, model.text_layers) == (1, RECIPES[name].layers)
    logits = ReferenceEngine(package).run(tokens(RECIPES[name])).logits
    assert np.abs(logits - GOLDEN[name]).max() < 1e-3


@pytest.mark.parametrize(
    ("left_out", "complaint"),
    [
        ("mtp.norm.weight", r"mtp\.layers\.0\.norm\.weight: the tensor is missing"),
        ("mtp.layers.0.self_attn.o_proj.weight", r"mtp\.layers\.0\.self_attn\.o_proj\.weight: the tensor is missing"),
    ],
)
def test_a_draft_layer_that_lacks_a_tensor_is_refused(left_out: str, complaint: str, tmp_path: Path) -> None:
    recipe = RECIPES["qwen3.5"]
    kept = {name: values for name, values in draft_tensors(recipe).items() if name != left_out}
    source = write_checkpoint(tmp_path / "model", recipe, kept)
    with pytest.raises(UserError, match=complaint):
        convert(source, tmp_path / "package", quantization="f16")
    assert not (tmp_path / "package").exists()


def test_a_draft_layer_with_an_embedding_of_its_own_is_left_out(tmp_path: Path) -> None:
    recipe = RECIPES["qwen3.5"]
    more = draft_tensors(recipe) | {"mtp.embed_tokens.weight": own_model(recipe)["model.embed_tokens.weight"]}
    package = convert(write_checkpoint(tmp_path / "model", recipe, more), tmp_path / "package", quantization="f16")
    assert package.manifest.model.draft_layers == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_draft_layer_of_a_gguf_file_is_the_same(name: str, tmp_path: Path) -> None:
    recipe = RECIPES[name]
    source = write_recurrent_gguf(tmp_path / "m.gguf", recipe, recipe.dtype, drafts=draft_tensors(recipe))
    of_gguf = convert(source, tmp_path / "of-gguf", quantization="f16")
    assert same_weights(of_gguf, drafted(tmp_path, recipe))
    assert of_gguf.manifest.model.draft_layers == 1


@pytest.mark.parametrize(("count", "chunk"), [(1, 1), (1, 7), (2, 20), (3, 39)])
@pytest.mark.parametrize("name", NAMES)
def test_the_engine_drafts_the_tokens_of_the_reference(name: str, count: int, chunk: int, tmp_path: Path) -> None:
    """Both tokens, with any number of participants and any steps before; and logits have the bits of plain steps."""
    require_drafts_of_the_reference(RECIPES[name], count, chunk, tmp_path)


@pytest.mark.parametrize(("count", "chunk"), [(1, 7), (3, 39)])
def test_a_draft_layer_with_slices_drafts_the_tokens_of_the_reference(count: int, chunk: int, tmp_path: Path) -> None:
    require_drafts_of_the_reference(replace(RECIPES["qwen3.5"], neurons=768), count, chunk, tmp_path)


def require_drafts_of_the_reference(recipe: Recipe, count: int, chunk: int, path: Path) -> None:
    package, text = drafted(path, recipe), tokens(recipe)
    engine = ReferenceEngine(package)
    tokens_of_it = [int(engine.draft_logits(text)[-1].argmax())]
    tokens_of_it.append(int(engine.draft_logits(text, tokens_of_it)[-1].argmax()))
    participants = Participants(package, count=count, max_tokens=40)
    predicted, logits = participants.draft(text, chunk, 2)
    assert predicted == tokens_of_it
    plain = Participants(package, count=1, max_tokens=40).run([*text, *predicted], 40)
    assert np.array_equal(logits, plain[-3:])


def test_a_gguf_file_without_a_norm_of_its_draft_layer_is_read_without_the_layer(tmp_path: Path) -> None:
    recipe = RECIPES["qwen3.5"]
    fewer = {name: values for name, values in draft_tensors(recipe).items() if name != "mtp.norm.weight"}
    source = write_recurrent_gguf(tmp_path / "m.gguf", recipe, recipe.dtype, drafts=fewer)
    assert convert(source, tmp_path / "p", quantization="f16").manifest.model.draft_layers == 0


def test_a_draft_layer_may_lie_within_the_model(tmp_path: Path) -> None:
    recipe = RECIPES["qwen3.5"]
    within = {f"model.{name}": values for name, values in draft_tensors(recipe).items()}
    package = convert(write_checkpoint(tmp_path / "model", recipe, within), tmp_path / "p", quantization="f16")
    assert package.manifest.model.draft_layers == 1


def test_draft_layers_of_a_manifest_are_checked(tmp_path: Path) -> None:
    package = drafted(tmp_path, RECIPES["qwen3.5"])
    path = package.path / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["model"]["draft_layers"] = 2
    path.write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"draft_layers"):
        Package.open(package.path)
