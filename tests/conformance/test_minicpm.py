"""GGUF files of MiniCPM: three factors, and two tables of divisors of which one holds for the original context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from neuronpipe.plans.convert import convert
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.errors import UserError

from tests.conformance.checkpoints import RECIPES
from tests.conformance.gguf_files import write_gguf
from tests.conformance.test_gguf_conversion import same_weights

RECIPE = RECIPES["minicpm"]
SCALES = {
    "minicpm.embedding_scale": 12.0,
    "minicpm.residual_scale": 1.4 / 3**0.5,
    "minicpm.logit_scale": 160 / 96,
}


def test_a_gguf_file_is_the_same_package(tmp_path: Path, converted: Callable[[str, str], Package]) -> None:
    """But for the threshold of ReLU, for which the file has no word."""
    expected = converted("minicpm", "q8")
    source = write_gguf(tmp_path / "m.gguf", RECIPE, RECIPE.dtype, metadata=SCALES)
    package = convert(source, tmp_path / "p", quantization="q8", activation="relu")
    assert same_weights(package, expected)
    ours = asdict(package.manifest.model)
    theirs = asdict(replace(expected.manifest.model, activation_threshold=0.0))
    assert ours == {name: pytest.approx(value) if isinstance(value, float) else value for name, value in theirs.items()}


@pytest.mark.parametrize("missing", SCALES)
def test_a_file_without_a_factor_is_refused(missing: str, tmp_path: Path) -> None:
    """A factor of 1 would be another model."""
    metadata = {key: value for key, value in SCALES.items() if key != missing}
    source = write_gguf(tmp_path / "m.gguf", RECIPE, RECIPE.dtype, metadata=metadata)
    with pytest.raises(UserError, match=rf"m\.gguf: {missing}: missing"):
        convert(source, tmp_path / "p", quantization="q8")
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize(
    ("original_tokens", "requested_tokens", "context_tokens", "divisor"),
    [(None, None, 128, 2.0), (64, None, 64, 2.0), (64, 128, 128, 8.0)],
)
def test_sequences_up_to_the_original_context_have_the_first_table(
    original_tokens: int | None,
    requested_tokens: int | None,
    context_tokens: int,
    divisor: float,
    tmp_path: Path,
    converted: Callable[[str, str], Package],
) -> None:
    """The converter of llama.cpp leaves that length out where it is that of the context."""
    stated = {} if original_tokens is None else {"minicpm.rope.scaling.original_context_length": original_tokens}
    divisors = {
        f"rope_factors_{name}.weight": np.full(16, value, np.float32) for name, value in (("short", 2.0), ("long", 8.0))
    }
    metadata = {**SCALES, "minicpm.rope.scaling.type": "longrope", **stated}
    source = write_gguf(tmp_path / "m.gguf", RECIPE, RECIPE.dtype, metadata=metadata, extra=divisors)
    package = convert(source, tmp_path / "p", quantization="q8", activation="relu", context_tokens=requested_tokens)
    assert package.manifest.model.context_tokens == context_tokens
    table, plain = (
        np.frombuffer(one.fixed_path.read_bytes(), "<f4", 16, one.fixed["rope.inverse_frequency"].start)
        for one in (package, converted("minicpm", "q8"))
    )
    np.testing.assert_allclose(table * divisor, plain, rtol=1e-6)
