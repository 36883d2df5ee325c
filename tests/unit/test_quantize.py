"""q4, q8 and f16: against definitions written out by hand, and against the gguf library's Q4_0 and Q8_0."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from neuronpipe.plans.convert.quantize import decode, encode
from neuronpipe.plans.package.layout import Quantization, quant_bytes, scale_bytes

WEIGHTS = arrays(np.float32, (2, 64), elements=st.floats(-1e4, 1e4, width=32))


def by_hand(quantization: str, group: np.ndarray) -> np.ndarray:
    """One group of 32, weight by weight."""
    peak = max(group, key=abs)
    scale = np.float32(np.float16(peak / -8 if quantization == "q4" else abs(peak) / 127))
    if scale == 0:
        return np.zeros(32, np.float32)
    low, high = (-8, 7) if quantization == "q4" else (-127, 127)
    return np.array([scale * np.float32(min(max(round(float(w / scale)), low), high)) for w in group])


@pytest.mark.parametrize("quantization", ["q4", "q8"])
@given(weights=WEIGHTS)
def test_a_group_is_rounded_to_its_own_grid(quantization: Quantization, weights: np.ndarray) -> None:
    decoded = decode(quantization, encode(quantization, weights)).reshape(-1, 32)
    for group, found in zip(weights.reshape(-1, 32), decoded, strict=True):
        expected = by_hand(quantization, group)
        # Multiplying by the inverse of the scale may round a tie to the other side.
        step = np.abs(expected).max() / (8 if quantization == "q4" else 127)
        assert np.abs(found - expected).max() <= step * 1.01
        assert np.mean(found != expected) <= 0.1


@pytest.mark.parametrize(("quantization", "encoding"), [("q4", "Q4_0"), ("q8", "Q8_0")])
def test_blocks_mean_what_the_gguf_library_says(quantization: Quantization, encoding: str) -> None:
    weights = np.random.default_rng(1).standard_normal((5, 96), dtype=np.float32)
    rows = encode(quantization, weights)
    scales, quants = rows.scales.reshape(5, 3, 2), rows.quants.reshape(5, 3, -1)
    blocks = np.concatenate((scales, quants), axis=2).reshape(5, -1)
    np.testing.assert_array_equal(decode(quantization, rows), dequantize(blocks, GGMLQuantizationType[encoding]))


@pytest.mark.parametrize("quantization", ["q4", "q8", "f16"])
def test_rows_have_the_bytes_that_the_layout_reserves(quantization: Quantization) -> None:
    rows = encode(quantization, np.ones((3, 64), np.float32))
    assert rows.quants.shape == (3, quant_bytes(quantization, 64))
    assert rows.scales.shape == (3, scale_bytes(quantization, 64))


@pytest.mark.parametrize(("quantization", "bound"), [("q4", 0.09), ("q8", 0.006), ("f16", 0.0003)])
def test_normal_weights_lose_as_much_as_expected(quantization: Quantization, bound: float) -> None:
    weights = np.random.default_rng(2).standard_normal((64, 512), dtype=np.float32)
    lost = decode(quantization, encode(quantization, weights)) - weights
    assert bound / 2 < np.linalg.norm(lost) / np.linalg.norm(weights) < bound


@pytest.mark.parametrize("quantization", ["q4", "q8", "f16"])
def test_zeros_and_tiny_weights_stay_finite(quantization: Quantization) -> None:
    weights = np.full((1, 32), 1e-30, np.float32)
    np.testing.assert_array_equal(decode(quantization, encode(quantization, weights)), np.zeros((1, 32)))


@pytest.mark.parametrize("quantization", ["q4", "q8", "f16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e9])
def test_what_fp16_cannot_hold_is_refused(quantization: Quantization, value: float) -> None:
    weights = np.ones((1, 32), np.float32)
    weights[0, 5] = value
    with pytest.raises(OverflowError):
        encode(quantization, weights)
