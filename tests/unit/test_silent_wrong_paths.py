"""Where other readers of sparse models load a file and compute something else: each path, and the test that fails if
we do too. What no other test pins is below.

Paths that were seen in PowerInfer, the SmallThinker engine and stock converters:

a  sums of several threads lost: test_same_tokens::test_any_number_of_workers_says_the_same
b  a batch with the first token's expert shares:
   test_spec_logits::test_every_kind_of_model_has_the_logits_of_the_reference_and_the_same_bits_on_every_path
c  statistics on other layers, by names sorted as text:
   test_conversion::test_the_model_with_more_than_ten_layers_keeps_each_layers_own_order,
   test_silent_wrong_paths::test_predictors_of_more_than_ten_layers_are_each_their_layers
d  any encoding read as another: test_gguf_conversion::test_k_quants_decode_as_the_gguf_library_says,
   test_gguf_conversion::test_encodings_decode_to_what_was_stored,
   test_gguf_sources::test_an_encoding_that_is_not_understood_is_refused
e  SiLU on the dense path of a ReLU model:
   test_same_tokens::test_every_kind_of_model_says_what_the_reference_engine_says
f  sigmoid routers as softmax: test_gguf_conversion::test_a_smallthinkers_router_is_what_either_source_says,
   test_gguf_conversion::test_the_file_of_smallthinkers_own_engine_is_the_same_package
g  another routine below 1,000 neurons: the description `many neurons` beside smaller ones, in b's test
h  SiLU or GELU for a ReLU model whose file cannot say so: test_gguf_sources::test_a_relu_model_is_not_run_with_silu,
   test_gguf_conversion::test_a_falcon_is_not_run_with_relu_unasked,
   test_models::test_what_a_family_cannot_be_is_refused_by_its_field
i  FATReLU's threshold left out: test_golden_logits::test_logits_at_f16_agree_with_transformers (prosparse, minicpm),
   test_powerinfer_conversion::test_a_threshold_that_the_file_cannot_tell_is_asked_for
j  Down transposed under the same name:
   test_gguf_conversion::test_the_file_of_smallthinkers_own_engine_is_the_same_package,
   test_gguf_conversion::test_down_that_may_lie_either_way_is_refused,
   test_gguf_sources::test_down_with_its_sides_swapped_is_refused
k  predictors given another vector than they were trained on:
   test_predictor::test_an_imported_predictor_is_read_from_the_residual_stream_and_calibrated,
   test_predictor::test_an_imported_predictor_reads_what_enters_layer_norm
l  skipped logits counted as 0: there are none; the predictor of logits in a file changes nothing (f's second test)
m  BitNet with SiLU: test_gguf_sources::test_another_architecture_is_refused,
   test_bad_input::test_an_unknown_activation_is_refused
n  server and command line differ: test_gateway::test_a_completion_is_what_the_command_line_gives
o  rows of queries and keys permuted or not: test_gguf_conversion::test_gguf_and_safetensors_give_the_same_package,
   test_gguf_conversion::test_interleaved_queries_and_keys_reach_the_golden_logits
p  Nemotron's norms with or without their 1: test_gguf_conversion::test_models_without_a_gate_are_the_same_package,
   test_models::test_the_weights_of_nemotrons_norms_get_their_one_and_biases_do_not

Rules for what checkpoints misstate:

1  SparseQwen2 says relu and means dReLU:
   test_huggingface_sources::test_a_qwen2_that_says_relu_may_be_sparseqwen2_and_needs_a_word,
   test_gguf_sources::test_a_qwen2_that_says_relu_may_be_sparseqwen2_and_needs_a_word
   SparseLM says silu and runs ReLU; one class name, two families:
   test_sparse_models::test_prosparse_has_its_threshold_and_sparselm_has_none_whatever_its_files_say,
   test_sparse_models::test_which_of_two_families_a_sparse_llama_is_must_be_clear
   Bamboo and TurboSparse say relu: test_sparse_models::test_bamboo_and_turbosparse_mistral_say_relu_and_mean_drelu,
   test_silent_wrong_paths::test_turbosparse_mixtral_says_relu_and_means_drelu
   what stays open is settled by a flag: test_sparse_models::test_what_a_person_says_settles_it,
   test_sparse_models::test_predictors_speak_against_what_any_other_class_says
2  a threshold must be exceeded: test_predictor::test_what_does_not_exceed_the_threshold_counts_as_silent,
   test_sparse_models::test_any_class_with_a_gate_may_have_a_threshold
3  ranks from shapes: test_predictor::test_what_cannot_be_imported_is_refused_by_name,
   test_silent_wrong_paths::test_predictors_of_more_than_ten_layers_are_each_their_layers,
   test_checkpoint_predictors::test_predictors_that_do_not_fit_are_refused_by_name_and_nothing_is_left
   vocabulary, theta and windows from the configuration:
   test_silent_wrong_paths::test_sizes_are_the_configurations_and_not_the_base_models,
   test_huggingface_sources::test_windows_follow_the_class
4  predictors inside a checkpoint are found:
   test_powerinfer_conversion::test_predictors_inside_are_imported_and_find_what_fires,
   test_checkpoint_predictors::test_predicted_mode_computes_what_the_checkpoints_predictors_say
   and hints in exact mode: test_spec_logits::test_hints_of_a_predictor_change_no_bit_of_exact_mode
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from neuronpipe.plans.convert import convert
from neuronpipe.plans.convert.checkpoint import Options
from neuronpipe.plans.convert.huggingface import open_huggingface
from neuronpipe.plans.predictor.imported_predictor import open_imported
from safetensors.numpy import save_file

from tests.conformance.checkpoints import RECIPES, TINY, write_checkpoint

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize(("file", "test"), sorted(set(re.findall(r"(test_\w+)::(test_\w+)", __doc__))))
def test_the_test_that_pins_a_path_exists(file: str, test: str) -> None:
    (path,) = TESTS.rglob(f"{file}.py")
    assert f"def {test}(" in path.read_text()


def test_predictors_of_more_than_ten_layers_are_each_their_layers(tmp_path: Path) -> None:
    """Sorted as text, layer 10 comes before layer 2. Each layer has its own rank, too."""
    recipe = replace(TINY, layers=12, neurons=40)
    manifest = convert(write_checkpoint(tmp_path / "source", recipe), tmp_path / "p").manifest
    random, factors = np.random.default_rng(1), {}
    for layer in range(12):
        factors[f"{layer}.fc1.weight"] = random.standard_normal((3 + layer, recipe.width)).astype(np.float32)
        factors[f"{layer}.fc2.weight"] = random.standard_normal((recipe.neurons, 3 + layer)).astype(np.float32)
    save_file(factors, tmp_path / "fc.safetensors")
    imported = open_imported(tmp_path / "fc.safetensors", manifest)
    assert imported.ranks == (32,) * 12  # in whole groups
    for layer in range(12):
        first, second = imported.of_ffn(layer)
        np.testing.assert_array_equal(first[: 3 + layer], factors[f"{layer}.fc1.weight"])
        np.testing.assert_array_equal(second[:, : 3 + layer], factors[f"{layer}.fc2.weight"])
        assert not first[3 + layer :].any()


def test_turbosparse_mixtral_says_relu_and_means_drelu(tmp_path: Path) -> None:
    with open_huggingface(write_checkpoint(tmp_path / "source", RECIPES["turbosparse"]), Options()) as checkpoint:
        assert json.loads((tmp_path / "source" / "config.json").read_text())["hidden_act"] == "relu"
        assert checkpoint.model.activation == "drelu"


def test_sizes_are_the_configurations_and_not_the_base_models(tmp_path: Path) -> None:
    """TurboSparse-Mixtral has another vocabulary than Mixtral, SparseQwen2 another theta than Qwen2, Bamboo a window
    that TurboSparse-Mistral has not."""
    base = RECIPES["turbosparse"]
    recipe = replace(base, vocabulary=777, config={**base.config, "rope_theta": 1e6, "sliding_window": 31})
    with open_huggingface(write_checkpoint(tmp_path / "source", recipe), Options()) as checkpoint:
        assert checkpoint.model.vocabulary == 777
        assert set(checkpoint.model.windows_tokens) == {31}
        assert checkpoint.inverse_frequency is not None
        expected = 1e6 ** (-np.arange(0, base.head_width, 2) / base.head_width)
        np.testing.assert_allclose(checkpoint.inverse_frequency, expected, rtol=1e-6)
