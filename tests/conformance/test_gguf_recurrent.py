"""Models with recurrent layers: the same weights through GGUF and through safetensors give the same package."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from neuronpipe.plans.convert import convert
from neuronpipe.plans.convert.checkpoint import Options
from neuronpipe.plans.convert.encodings import decode_stored
from neuronpipe.plans.convert.gguf.gguf_model import open_gguf
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.reference.engine import ReferenceEngine
from neuronpipe.protocol.errors import UserError

from tests.conformance.checkpoints import RECIPES, tokens
from tests.conformance.gguf_recurrent_files import ARCHITECTURES, blocks_of, keys, write_recurrent_gguf
from tests.conformance.test_gguf_conversion import same_weights
from tests.conformance.test_golden_logits import GOLDEN


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_recurrent_layers_are_the_same_package(
    name: str, tmp_path: Path, converted: Callable[[str, str], Package]
) -> None:
    """Heads of DeltaNet in another order, norms with their 1, decays instead of logarithms, blocks of one part."""
    recipe, expected = RECIPES[name], converted(name, "q8")
    package = convert(
        write_recurrent_gguf(tmp_path / "m.gguf", recipe, recipe.dtype), tmp_path / "p", quantization="q8"
    )
    assert same_weights(package, expected)
    # Files say neither what bounds times, nor that shares are not divided by their sum or multiplied.
    told = replace(expected.manifest.model, min_time_step=0.0)
    told = replace(told, normalized_shares=True, routed_scale=told.routed_scale if "lfm2" not in name else 1.0)
    ours, theirs = asdict(package.manifest.model), asdict(told)
    assert ours == {name: pytest.approx(value) if isinstance(value, float) else value for name, value in theirs.items()}


def test_values_of_key_heads_reach_the_golden_logits(tmp_path: Path) -> None:
    recipe = RECIPES["qwen3.5"]
    package = convert(write_recurrent_gguf(tmp_path / "m.gguf", recipe), tmp_path / "p", quantization="f16")
    logits = ReferenceEngine(package).run(tokens(recipe)).logits
    assert np.abs(logits - GOLDEN["qwen3.5"]).max() < 1e-3


def test_older_files_of_qwen3_next_are_the_same_package(
    tmp_path: Path, converted: Callable[[str, str], Package]
) -> None:
    recipe = RECIPES["qwen3 next"]
    source = write_recurrent_gguf(tmp_path / "m.gguf", recipe, recipe.dtype, older=True)
    assert same_weights(convert(source, tmp_path / "p", quantization="q8"), converted("qwen3 next", "q8"))


@pytest.mark.parametrize(
    ("encoding", "head_width", "is_decoded"),
    [("Q8_0", 32, False), ("Q8_0", 16, True), ("Q4_0", 32, False), ("BF16", 16, False), ("F32", 16, False)],
)
def test_columns_of_heads_are_reordered_in_their_encoding(
    encoding: str, head_width: int, is_decoded: bool, tmp_path: Path
) -> None:
    """Whole blocks are moved; blocks that reach into two heads are decoded."""
    recipe = RECIPES["qwen3.5"]
    recipe = replace(recipe, neurons=192, config=recipe.config | {"linear_value_head_dim": head_width})
    places = [write_recurrent_gguf(tmp_path / f"{each}.gguf", recipe, each) for each in {"F32", encoding}]
    with ExitStack() as files:
        checkpoints = {place.stem: files.enter_context(open_gguf(place, Options())) for place in places}
        (stored,), (exact,) = (checkpoints[each].matrices["layers.0.recurrent_output"] for each in (encoding, "F32"))
        rows = np.arange(stored.rows)
        assert stored.encoding == ("F32" if is_decoded else encoding)
        values = decode_stored(stored.encoding, stored.stored(rows))
        np.testing.assert_array_equal(values, stored.values(rows))
        scale = np.abs(exact.values(rows)).max()
        assert np.abs(values - exact.values(rows)).max() < scale * (0.2 if encoding == "Q4_0" else 0.01)


def test_layers_that_predict_further_tokens_are_left_out(
    tmp_path: Path, converted: Callable[[str, str], Package]
) -> None:
    recipe = RECIPES["nemotron-h"]
    more = {
        "block_count": len(blocks_of(recipe)) + 1,
        "nextn_predict_layers": 1,
        "attention.head_count_kv": [*keys(recipe)["attention.head_count_kv"], 2],
        "feed_forward_length": [*keys(recipe)["feed_forward_length"], 200],
    }
    source = write_recurrent_gguf(tmp_path / "m.gguf", recipe, recipe.dtype, instead=more)
    assert same_weights(convert(source, tmp_path / "p", quantization="q8"), converted("nemotron-h", "q8"))


def test_a_nemotron_may_state_its_epsilon_by_either_key(tmp_path: Path) -> None:
    epsilon = "attention.layer_norm_epsilon"
    for number, without in enumerate((f"{epsilon}", "attention.layer_norm_rms_epsilon")):
        stated = {epsilon: 1e-3, "attention.layer_norm_rms_epsilon": 1e-5}
        source = write_recurrent_gguf(
            tmp_path / f"{number}.gguf", RECIPES["nemotron-h"], instead=stated, without=(without,)
        )
        with open_gguf(source, Options()) as checkpoint:
            assert checkpoint.model.norm_epsilon == pytest.approx((1e-5, 1e-3)[number])


def test_a_list_of_recurrent_layers_precedes_the_interval(tmp_path: Path) -> None:
    recipe = RECIPES["qwen3.5"]
    listed = {"attention.recurrent_layers": [True, False, True, False], "full_attention_interval": 4}
    package = convert(write_recurrent_gguf(tmp_path / "m.gguf", recipe, instead=listed), tmp_path / "p")
    assert package.manifest.model.mixers == ("deltanet", "attention") * 2


@pytest.mark.parametrize(
    ("name", "instead", "without", "why"),
    [
        ("qwen3.5", {}, ("ssm.state_size",), r"qwen35\.ssm\.state_size: "),
        ("qwen3.5", {"ssm.inner_size": 127}, (), r"qwen35\.ssm\.inner_size: 127 is no multiple of"),
        ("qwen3.5", {"ssm.group_count": 3}, (), r"qwen35\.ssm\.time_step_rank: 4 is no multiple of ssm.group_count, 3"),
        ("qwen3.5", {"attention.recurrent_layers": [True]}, (), r"recurrent_layers: is not true or false for"),
        ("qwen3.5", {"full_attention_interval": 9}, (), r"qwen35\.attention\.head_count_kv: no layer has attention"),
        ("lfm2", {"attention.head_count_kv": 2}, (), r"lfm2\.attention\.head_count_kv: is no list of a number"),
        ("lfm2", {"attention.head_count_kv": [0, 2, 0]}, (), r"head_count_kv: .* is not a number from 0 to"),
        ("lfm2", {"attention.head_count_kv": [0, 2, 1, 0]}, (), r"lfm2\.attention\.head_count_kv: differs between"),
        ("lfm2", {}, ("shortconv.l_cache",), r"lfm2\.shortconv\.l_cache: "),
        ("nemotron-h", {"feed_forward_length": 200}, (), r"nemotron_h\.feed_forward_length: expected a list"),
        ("kimi linear", {}, ("kda.head_dim",), r"kimi-linear\.kda\.head_dim: "),
        ("kimi linear", {"attention.head_count_kv": 1}, (), r"kimi-linear\.attention\.head_count_kv: is no list of a"),
        ("kimi linear", {"ssm.conv_kernel": 99}, (), r"kimi-linear\.ssm\.conv_kernel: "),
        (
            "nemotron-h moe",
            {"feed_forward_length": [0, 40, 0, 0, 40, 0, 0, 40]},
            (),
            r"nemotron_h_moe\.feed_forward_length: is 0 for layer 5, but blk\.5\.ffn_up\.weight is there: not",
        ),
        ("nemotron-h moe", {"moe_latent_size": 64}, (), r"nemotron_h_moe\.moe_latent_size: experts that read a latent"),
    ],
)  # fmt: skip
def test_recurrent_layers_that_contradict_themselves_are_refused_by_their_key(
    name: str, instead: dict[str, Any], without: tuple[str, ...], why: str, tmp_path: Path
) -> None:
    source = write_recurrent_gguf(tmp_path / "m.gguf", RECIPES[name], instead=instead, without=without)
    with pytest.raises(UserError, match=why):
        convert(source, tmp_path / "p")
    assert not (tmp_path / "p").exists()
