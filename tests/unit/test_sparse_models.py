"""Models whose configuration does not tell their activation: the right one, or a refusal that says what to pass."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from neuronpipe.plans.convert.checkpoint import Options
from neuronpipe.plans.convert.huggingface import open_huggingface
from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.package.safetensors_header import read_header
from neuronpipe.protocol.errors import UserError

from tests.conformance.checkpoints import RECIPES, TINY, Recipe, write_checkpoint, write_safetensors

PROSPARSE, SPARSE_LM = RECIPES["prosparse"], RECIPES["sparse lm"]


def read(directory: Path, recipe: Recipe, options: Options = Options(), **fields: Any) -> ModelSpec:  # noqa: B008
    """The recipe as it is described, once config.json has these fields; ... removes one."""
    path = write_checkpoint(directory, recipe) / "config.json"
    values = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not ...}))
    with open_huggingface(directory, options) as checkpoint:
        return checkpoint.model


def test_prosparse_has_its_threshold_and_sparselm_has_none_whatever_its_files_say(tmp_path: Path) -> None:
    prosparse, sparse_lm = read(tmp_path / "a", PROSPARSE), read(tmp_path / "b", SPARSE_LM)
    assert (prosparse.activation, prosparse.activation_threshold) == ("relu", 0.0469)
    for fields in ({"hidden_act": "silu"}, {"hidden_act": "gelu"}, {"hidden_act": "fatrelu", "hidden_act_param": 0.1}):
        assert read(tmp_path / "b", SPARSE_LM, **fields) == sparse_lm
    assert (sparse_lm.activation, sparse_lm.activation_threshold, sparse_lm.gated) == ("relu", 0, True)


def test_a_sparselm_without_gate_has_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gate_proj\.weight: a tensor that this architecture does not have"):
        read(tmp_path / "source", SPARSE_LM, sparsity_gated_mlp=False)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"model_type": "llama"}, r"model_type: is 'llama'; .*ProSparse's with sparsellama.*--activation relu\|"),
        ({"model_type": ...}, "model_type: missing"),
        ({"hidden_act_param": ...}, "hidden_act_param: missing"),
        ({"hidden_act_param": -0.1}, "hidden_act_param: -0.1 is outside"),
        ({"hidden_act": "silu"}, "hidden_act_param: is a threshold, which 'silu' does not have"),
        ({"sparsity_new_intermediate_size": 64}, "sparsity_new_intermediate_size: is not supported"),
    ],
)
def test_which_of_two_families_a_sparse_llama_is_must_be_clear(
    fields: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=complaint):
        read(tmp_path / "source", PROSPARSE, **fields)


def test_what_a_person_says_settles_it(tmp_path: Path) -> None:
    model = read(tmp_path / "source", PROSPARSE, Options(activation="drelu"), model_type=...)
    assert (model.activation, model.activation_threshold) == ("drelu", 0)


def test_minicpms_scales_are_what_its_class_makes_of_its_keys(tmp_path: Path) -> None:
    recipe = RECIPES["minicpm"]
    model = read(tmp_path / "source", recipe)
    assert (model.activation, model.activation_threshold) == ("relu", 0.0562)
    assert (model.embedding_scale, model.residual_scale) == (12, pytest.approx(1.4 / 3**0.5))
    assert model.logit_scale == pytest.approx(96 / 160)
    plain = read(tmp_path / "source", recipe, scale_emb=..., scale_depth=..., dim_model_base=160)
    assert (plain.embedding_scale, plain.residual_scale, plain.logit_scale) == (1, pytest.approx(3**-0.5), 1)
    with pytest.raises(UserError, match=r"scale_depth: 0 is outside 1e-06\.\.1000000\.0"):
        read(tmp_path / "source", recipe, scale_depth=0)


def test_any_class_with_a_gate_may_have_a_threshold(tmp_path: Path) -> None:
    recipe = replace(TINY, activation="fatrelu")
    model = read(tmp_path / "source", recipe, hidden_act_param=0.01)
    assert (model.activation, model.activation_threshold) == ("relu", 0.01)


def with_predictors(directory: Path, recipe: Recipe) -> Path:
    """A checkpoint with predictors of two ranks among its tensors, as TurboSparse has them."""
    path = write_checkpoint(directory, recipe) / "model.safetensors"
    data = path.read_bytes()
    stored = {
        name: (entry.dtype, entry.shape, data[entry.start : entry.stop]) for name, entry in read_header(path).items()
    }
    for layer in range(recipe.layers):
        rank = 8 + layer
        for name, shape in (("fc1", (rank, recipe.width)), ("fc2", (recipe.neurons, rank))):
            stored[f"model.layers.{layer}.mlp.predictor.{name}.weight"] = ("F16", shape, bytes(2 * shape[0] * shape[1]))
    write_safetensors(path, stored)
    return directory


BAMBOO = replace(TINY, architecture="BambooForCausalLM")


@pytest.mark.parametrize("made", [write_checkpoint, with_predictors])
def test_bamboo_and_turbosparse_mistral_say_relu_and_mean_drelu(
    made: Callable[[Path, Recipe], Path], tmp_path: Path
) -> None:
    with open_huggingface(made(tmp_path / "source", BAMBOO), Options()) as checkpoint:
        assert checkpoint.model.activation == "drelu"
        assert checkpoint.model.windows_tokens == (4096, 4096)


@pytest.mark.parametrize(("made", "who"), [(write_checkpoint, "Bamboo"), (with_predictors, "TurboSparse-Mistral")])
def test_what_their_class_is_not_known_to_say_is_refused_by_the_name_that_the_tensors_give(
    made: Callable[[Path, Recipe], Path], who: str, tmp_path: Path
) -> None:
    source = made(tmp_path / "source", replace(BAMBOO, activation="silu"))
    with pytest.raises(UserError, match=rf"hidden_act: is 'silu', but {who} says relu and means drelu.*--activation"):
        open_huggingface(source, Options())
    with open_huggingface(source, Options(activation="silu")) as checkpoint:
        assert checkpoint.model.activation == "silu"


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"])
@pytest.mark.parametrize("said", ["relu", "silu"])
def test_predictors_speak_against_what_any_other_class_says(architecture: str, said: str, tmp_path: Path) -> None:
    biased = architecture == "Qwen2ForCausalLM"
    source = with_predictors(
        tmp_path / "source", replace(TINY, architecture=architecture, activation=said, bias=biased)
    )
    with pytest.raises(UserError, match=f"hidden_act: is '{said}', but .*--activation.*drelu: SparseQwen2"):
        open_huggingface(source, Options())
    with open_huggingface(source, Options(activation="drelu")) as checkpoint:
        assert checkpoint.model.activation == "drelu"
