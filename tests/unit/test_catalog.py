"""The catalog of models: what its file says is true of the models as their families read them, and names find them."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from neuronpipe.launch.catalog.estimates import estimate
from neuronpipe.launch.catalog.offer import FIRST_MODEL_MEMORY_BYTES
from neuronpipe.launch.cli import main
from neuronpipe.plans.convert.checkpoint import Options
from neuronpipe.plans.convert.conversion import Conversion, open_checkpoint
from neuronpipe.plans.inspect import parameters
from neuronpipe.plans.lab.devices.device_description import planner_device
from neuronpipe.plans.lab.devices.device_file import known_devices, read_device
from neuronpipe.plans.lab.shapes.models import EXPERTS_FIRED, model_named
from neuronpipe.plans.lab.shapes.pulled_manifest import manifest_of_pulled, manifest_of_pulled_shape, shape_assumptions
from neuronpipe.plans.lab.synth.shapes import SHAPES
from neuronpipe.plans.models.registry import ARCHITECTURES
from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.pull.catalog import CatalogModel, catalog, known_short_name, nearest_names
from neuronpipe.plans.pull.package_library import FIRST_MODEL, NAME
from neuronpipe.plans.pull.repository import Reference
from neuronpipe.protocol.errors import UserError

from tests.bench.catalog import SYNTH_NAMES
from tests.conformance.checkpoints import RECIPES, write_checkpoint

# A synthetic package has an output matrix of its own, and embeddings as large as the residual stream.
NOT_OF_SHAPES = {"tied_embeddings", "embedding_scale", "logit_scale", "family", "norm_epsilon", "vocabulary"}
PUBLISHED_PARAMETERS = {
    "smollm2-135m": 134_515_008,
    "qwen3.6-35b-a3b": 34_660_610_688,
    "smallthinker-21b": 21_507_000_000,
    "qwen3-8b": 8_190_000_000,
    "gpt-oss-120b": 116_800_000_000,
    "glm-4.7-flash": 29_943_000_000,
    "nemotron-3-nano": 31_580_000_000,
    "phi-3.5-moe": 41_870_000_000,
    "deepseek-v2-lite": 15_710_000_000,
    "granite-4-h-tiny": 6_940_000_000,
}
BITS_PER_WEIGHT = {
    "BF16": (15.9, 16.2),
    "Q8_0": (8.4, 8.6),
    "Q4_K_M": (4.6, 5.4),
    "Q4_K_S": (4.5, 4.8),
    "MXFP4": (4.3, 4.7),
}


def without_idle_windows(spec: ModelSpec) -> ModelSpec:
    """The model without the windows that its context never fills."""
    kinds = (
        dataclasses.replace(kind, window_tokens=0) if kind.window_tokens >= spec.context_tokens else kind
        for kind in spec.layer_kinds
    )
    return dataclasses.replace(spec, layer_kinds=tuple(kinds))


every_model = pytest.mark.parametrize("model", catalog().values(), ids=catalog())


@every_model
def test_a_family_reads_every_model(model: CatalogModel) -> None:
    assert model.config["architectures"][0] in ARCHITECTURES  # type: ignore[index]
    assert model.spec.context_tokens >= 2048


@pytest.mark.parametrize("name", catalog())
def test_models_are_those_that_synth_knows(name: str) -> None:
    spec, shape = without_idle_windows(catalog()[name].spec), SHAPES[SYNTH_NAMES.get(name, name)]
    differing = {
        field.name: (getattr(spec, field.name), getattr(shape, field.name))
        for field in dataclasses.fields(shape)
        if field.name not in NOT_OF_SHAPES and getattr(spec, field.name) != getattr(shape, field.name)
    }
    assert differing == {}
    assert spec.vocabulary == pytest.approx(shape.vocabulary, rel=0.01)


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_parameters_are_the_published_ones(name: str) -> None:
    assert parameters(manifest_of_pulled(catalog()[name])) == pytest.approx(PUBLISHED_PARAMETERS[name], rel=0.01)


@every_model
def test_a_download_has_the_bits_of_its_encodings(model: CatalogModel) -> None:
    spec, whole = model.spec, parameters(manifest_of_pulled(model))
    whole += model.predictor_rank * (spec.width + spec.neurons) * spec.ffns
    low, high = BITS_PER_WEIGHT[model.file_type]
    assert low < 8 * model.download_bytes / whole < high


@every_model
def test_a_package_is_about_as_large_as_a_quantized_download(model: CatalogModel) -> None:
    size_bytes = manifest_of_pulled(model).size_bytes
    if model.file is None:
        assert size_bytes < 0.4 * model.download_bytes
    else:
        assert size_bytes == pytest.approx(model.download_bytes, rel=0.1)


@every_model
def test_names_and_references_are_what_pull_takes(model: CatalogModel) -> None:
    assert NAME.fullmatch(model.name)
    assert model.name == model.name.casefold()
    assert Reference.parse(model.reference) == Reference(model.repository, model.file)
    assert len(model.note) <= 50, "the line of the table fits a terminal"
    assert model.licence


@pytest.mark.parametrize("recipe", ["smollm3", "qwen3moe", "gpt-oss", "bamboo"])
def test_the_expected_package_is_the_one_that_a_conversion_makes(recipe: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "source", RECIPES[recipe])
    model = dataclasses.replace(
        catalog()[FIRST_MODEL],
        file=None,
        file_type="BF16",
        context_tokens=0,
        predictor_rank=0,
        config=json.loads((folder / "config.json").read_text()),
    )
    expected = manifest_of_pulled(model)
    with open_checkpoint(folder, Options(predictor=False)) as checkpoint:
        made = Conversion(checkpoint).manifest
    assert (expected.quantization, expected.all_quantizations) == (made.quantization, made.all_quantizations)
    assert expected.layout == made.layout
    assert expected.model.expert_counts == made.model.expert_counts


@pytest.mark.parametrize("name", sorted(set(catalog()) & set(SHAPES)))
def test_a_shape_of_the_catalog_is_planned_as_the_package_that_pull_makes(name: str) -> None:
    shape = model_named(name)
    manifest = manifest_of_pulled_shape(shape)
    assert manifest == manifest_of_pulled(catalog()[name])
    (assumptions,) = shape_assumptions(shape, manifest)
    assert f"for the {manifest.quantization} package that `pull` makes of {catalog()[name].reference}, " in assumptions
    fires = None if shape.spec.all_neurons_fire else (EXPERTS_FIRED,) * shape.spec.layers
    assert manifest.fired_by_layer == fires


@pytest.mark.parametrize("name", sorted(set(catalog()) - set(SHAPES)))
def test_every_name_that_pull_takes_can_be_planned_before_it_is_pulled(name: str) -> None:
    assert manifest_of_pulled_shape(model_named(name.upper())) == manifest_of_pulled(catalog()[name])


def test_other_shapes_are_planned_as_16_bit_weights_that_pull_converts() -> None:
    manifest = manifest_of_pulled_shape(model_named("glm-4.5-air"))
    assert (manifest.quantization, manifest.predictor, manifest.fired_by_layer) == ("q4k", None, (1.0,) * 46)
    assert {name: manifest.quantization_of(name) for name in ("output", "layers.1.qkv")} == {
        "output": "q6k", "layers.1.qkv": "q4k",
    }  # fmt: skip
    sparse = model_named("turbosparse-mixtral-47b")
    manifest = manifest_of_pulled_shape(sparse)
    assert manifest.predictor is not None
    assert manifest.fired_by_layer == (sparse.active,) * 32
    assert {place.name: place.quantization for place in manifest.layout.matrices}["down"] == "q5k"


def test_the_first_model_fits_its_memory_on_every_device_with_its_whole_context() -> None:
    for name in known_devices():
        device = read_device(name)
        first = estimate(
            catalog()[FIRST_MODEL],
            lambda manifest, device=device: planner_device(device, manifest),  # type: ignore[misc]
            limit_bytes=FIRST_MODEL_MEMORY_BYTES,
            context_tokens=1 << 20,
        )
        assert first.runs, first.problem
        assert first.context_tokens == catalog()[FIRST_MODEL].spec.context_tokens


# ---- names -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("qwen3.6", "qwen3.6-35b-a3b"),
        ("smolm2-135m", "smollm2-135m"),
        ("qwen3:8b", "qwen3-8b"),
        ("GPT-OSS", "gpt-oss-120b"),
        ("lfm2-8b", "lfm2-8b-a1b"),
    ],
)
def test_an_unknown_short_name_suggests_the_nearest(text: str, nearest: str) -> None:
    assert nearest_names(text)[0] == nearest
    with pytest.raises(UserError, match=rf"no model has this short name; did you mean {re.escape(nearest)}"):
        known_short_name(text)


def test_a_name_like_no_other_is_told_where_the_names_are() -> None:
    with pytest.raises(
        UserError, match=r"short name; `neuronpipe models --all` shows all, and a hub has others as ORG/"
    ):
        known_short_name("zzz")


def test_case_does_not_matter_in_a_short_name() -> None:
    assert known_short_name("Qwen3-0.6B") is catalog()["qwen3-0.6b"]


@pytest.mark.parametrize("verb", ["run", "chat", "serve", "inspect"])
def test_a_model_that_was_not_pulled_is_named_with_its_pull(
    verb: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NEURONPIPE_DATA", str(tmp_path))
    assert main([verb, "qwen3-4b"]) == 2
    assert "qwen3-4b: is not on this disk; `neuronpipe pull qwen3-4b` downloads it" in capsys.readouterr().err
