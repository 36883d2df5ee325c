"""Rows as GGUF stores them, converted by the native library, against the gguf library."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from neuronpipe.native import ROW_TYPES, ffi, lib
from neuronpipe.plans.convert.encodings import BLOCK_WEIGHTS_BYTES, decode_stored, row_bytes
from neuronpipe.plans.convert.quantize import decode, encode
from neuronpipe.plans.package.layout import BITS, Quantization, quant_bytes, scale_bytes
from neuronpipe.plans.package.writer import Rows
from numpy.typing import NDArray

from tests.conformance.gguf_files import SCALE_PLACES, random_blocks

Bytes = NDArray[np.uint8]

ENCODINGS = ("Q4_0", "Q5_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4")
SAME: tuple[tuple[str, Quantization], ...] = (
    ("Q4_0", "q4"),
    ("Q8_0", "q8"),
    ("Q4_K", "q4k"),
    ("Q4_K", "q5k"),
    ("Q4_K", "q6k"),
    ("Q5_K", "q5k"),
    ("Q5_K", "q6k"),
    ("IQ4_NL", "iq4"),
    ("IQ4_XS", "iq4"),
    ("MXFP4", "mxfp4"),
)
EXACT_Q8 = ("Q4_0", "Q5_0")
ENCODED_Q8 = ("Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4")
PAIRS = {*SAME, ("Q6_K", "q6k"), *((encoding, "q8") for encoding in (*EXACT_Q8, *ENCODED_Q8))}
ROWS, COLUMNS = 7, 1536


@pytest.fixture(params=ffi.string(lib.np_isa_names()).decode().split(","))
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set of this machine, selected."""
    before = lib.np_isa_name()
    lib.np_isa_select(request.param.encode())
    yield request.param
    lib.np_isa_select(before)


def number(encoding: str) -> int:
    """Return GGUF's number of an encoding."""
    return int(GGMLQuantizationType[encoding])


def blocks_of(encoding: str, rows: int = ROWS, columns: int = COLUMNS) -> Bytes:
    """Return rows of random blocks whose scales are of the sizes that weights of a model have."""
    if encoding in SCALE_PLACES:
        return random_blocks(encoding, rows, columns)
    draw = np.random.default_rng(columns)
    stored = draw.integers(0, 256, (rows, row_bytes(encoding, columns) or 0), dtype=np.uint8)
    blocks = stored.reshape(-1, BLOCK_WEIGHTS_BYTES[encoding][1])
    if encoding == "MXFP4":
        blocks[:, 0] = draw.integers(110, 128, len(blocks))
    else:
        blocks[:, 1] = blocks[:, 1] & 0x83 | 0x18
    return stored


def unpack(encoding: str, stored: Bytes, quantization: Quantization, columns: int = COLUMNS) -> Rows | None:
    """Return rows that the native library has converted, from an odd address; None if it refuses them."""
    count = len(stored)
    shifted = np.concatenate((np.zeros(1, np.uint8), stored.reshape(-1)))
    rows = Rows(
        np.full((count, quant_bytes(quantization, columns)), 0xA5, np.uint8),
        np.full((count, scale_bytes(quantization, columns)), 0xA5, np.uint8),
    )
    source, quants, scales = (ffi.from_buffer("uint8_t[]", array) for array in (shifted, *rows))
    kind = ROW_TYPES[quantization]
    status = lib.np_unpack_gguf_rows(number(encoding), source + 1, count, columns, kind, quants, scales)
    assert status in (lib.NP_OK, lib.NP_E_ARGUMENT)
    return rows if status == lib.NP_OK else None


def assert_same(rows: Rows | None, expected: Rows | None) -> None:
    """Check that both have the same bytes."""
    assert rows is not None
    assert expected is not None
    np.testing.assert_array_equal(rows.quants, expected.quants)
    np.testing.assert_array_equal(rows.scales, expected.scales)


def test_sizes_of_rows_are_those_of_the_gguf_library() -> None:
    for encoding in ENCODINGS:
        weights, size = BLOCK_WEIGHTS_BYTES[encoding]
        assert lib.np_gguf_row_bytes(number(encoding), 6 * weights) == 6 * size
        assert lib.np_gguf_row_bytes(number(encoding), 6 * weights + weights // 2) == 0
    for unknown in set(range(50)) - {number(encoding) for encoding in ENCODINGS}:
        assert lib.np_gguf_row_bytes(unknown, 256) == 0


def test_other_pairs_are_refused() -> None:
    for encoding in ENCODINGS:
        stored = blocks_of(encoding)
        for quantization in BITS:
            fits = (encoding, quantization) in PAIRS
            assert lib.np_gguf_fits(number(encoding), ROW_TYPES[quantization]) == fits
            assert (unpack(encoding, stored, quantization) is not None) == fits
    assert not any(lib.np_gguf_fits(kind, ROW_TYPES["q8"]) for kind in (-1, 0, 1, 3, 7, 30, 40))


@pytest.mark.parametrize(("encoding", "quantization"), SAME)
def test_rows_keep_their_values(encoding: str, quantization: Quantization) -> None:
    """The scales of IQ4_XS are products of fp16 and six bits, which are rounded."""
    stored = blocks_of(encoding)
    rows = unpack(encoding, stored, quantization)
    assert rows is not None
    expected = dequantize(stored, GGMLQuantizationType[encoding])
    np.testing.assert_allclose(decode(quantization, rows), expected, rtol=2**-11 if encoding == "IQ4_XS" else 0)


@pytest.mark.parametrize("encoding", EXACT_Q8)
def test_short_codes_are_widened_to_q8_without_a_loss(encoding: str) -> None:
    stored = blocks_of(encoding)
    rows = unpack(encoding, stored, "q8")
    assert rows is not None
    np.testing.assert_array_equal(decode("q8", rows), dequantize(stored, GGMLQuantizationType[encoding]))


@pytest.mark.parametrize("columns", [1536, 256, 768])
@pytest.mark.parametrize("encoding", ENCODED_Q8)
def test_q8_has_the_bytes_of_the_decoded_weights_encoded_again(encoding: str, columns: int, instructions: str) -> None:
    stored = blocks_of(encoding, columns=columns)
    expected = encode("q8", decode_stored(encoding, stored))
    assert_same(unpack(encoding, stored, "q8", columns), expected)


@pytest.mark.parametrize("groups", range(1, 18))
@pytest.mark.parametrize("encoding", ["IQ4_NL", "MXFP4"])
def test_q8_of_rows_of_any_number_of_groups(encoding: str, groups: int, instructions: str) -> None:
    stored = blocks_of(encoding, columns=32 * groups)
    expected = encode("q8", decode_stored(encoding, stored))
    assert_same(unpack(encoding, stored, "q8", 32 * groups), expected)


@pytest.mark.parametrize("encoding", ENCODED_Q8)
def test_scales_below_what_fp16_expresses_give_the_bytes_of_the_conversion(encoding: str, instructions: str) -> None:
    """Scales of q8 that are rounded to few bits or to zero."""
    stored = blocks_of(encoding)
    blocks = stored.reshape(-1, BLOCK_WEIGHTS_BYTES[encoding][1])
    draw = np.random.default_rng(5)
    if encoding == "MXFP4":
        blocks[:, 0] = draw.integers(0, 116, len(blocks))
    else:
        for place in SCALE_PLACES[encoding]:
            blocks[:, place] = draw.integers(0, 5, len(blocks))
            blocks[:, place - 1] = draw.integers(0, 256, len(blocks))
    blocks[3] = 0
    expected = encode("q8", decode_stored(encoding, stored))
    assert_same(unpack(encoding, stored, "q8"), expected)


def random_q6_k(like_weights: bool) -> Bytes:
    """Return rows of Q6_K; like_weights: as an encoder makes them, whose codes are the larger the rarer."""
    stored = random_blocks("Q6_K", ROWS, COLUMNS)
    if like_weights:
        draw = np.random.default_rng(1)
        blocks = stored.reshape(-1, BLOCK_WEIGHTS_BYTES["Q6_K"][1])
        codes = np.clip(np.rint(draw.normal(0, 12, (len(blocks), 2, 4, 32))), -32, 31).astype(np.int8) + np.int8(32)
        codes = codes.view(np.uint8)
        blocks[:, :128] = (codes[:, :, :2] & 15 | codes[:, :, 2:] << 4).reshape(len(blocks), 128)
        shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
        blocks[:, 128:192] = np.bitwise_or.reduce(codes >> 4 << shifts, axis=2).reshape(len(blocks), 64)
        blocks[:, 192:208] = draw.integers(40, 128, (len(blocks), 16)).astype(np.int8).view(np.uint8)
    return stored


@pytest.mark.parametrize("like_weights", [False, True])
def test_q6_k_loses_little_as_q6k(like_weights: bool, instructions: str) -> None:
    stored = random_q6_k(like_weights)
    weights = dequantize(stored, GGMLQuantizationType.Q6_K)
    rows = unpack("Q6_K", stored, "q6k")
    assert rows is not None
    errors = np.abs(decode("q6k", rows) - weights).reshape(ROWS, -1, 8, 32)
    groups = weights.reshape(errors.shape)
    minima = np.maximum(-groups.min(axis=3), 0)
    steps = (groups.max(axis=3) + minima) / 63
    # Half a step of the group, which is rounded up to a multiple of the block's, and half a unit of the minima.
    allowed = (steps + steps.max(axis=2, keepdims=True) / 63 * 1.01 + minima.max(axis=2, keepdims=True) / 63 * 1.01) / 2
    assert (errors.max(axis=3) <= allowed * 1.001 + 2**-23).all()
    if like_weights:
        fitted = decode("q6k", encode("q6k", weights)).reshape(groups.shape)
        power, fitted_power = np.square(errors).sum(), np.square(fitted - groups).sum()
        assert power < 1.15 * fitted_power  # least squares, as a conversion does it
        assert power < 0.021**2 * np.square(groups).sum()


def test_instruction_sets_give_the_same_q6k(instructions: str) -> None:
    rows = unpack("Q6_K", random_q6_k(True), "q6k")
    lib.np_isa_select(b"scalar")
    assert_same(rows, unpack("Q6_K", random_q6_k(True), "q6k"))


@pytest.mark.parametrize("encoding", [*EXACT_Q8, "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"])
def test_numbers_that_are_not_finite_are_refused(encoding: str, instructions: str) -> None:
    places = SCALE_PLACES.get(encoding, (1,))
    for quantization in BITS:
        if (encoding, quantization) not in PAIRS:
            continue
        for place in places:
            for bad in (np.inf, -np.inf, np.nan):
                stored = blocks_of(encoding)
                last = len(stored[0]) - BLOCK_WEIGHTS_BYTES[encoding][1]
                stored[-1, last + place - 1 : last + place + 1] = np.array([bad], "<f2").view(np.uint8)
                assert unpack(encoding, stored, quantization) is None


@pytest.mark.parametrize("quantization", ["q6k", "q8"])
def test_weights_too_large_for_scales_of_fp16_are_refused(quantization: Quantization, instructions: str) -> None:
    stored = np.full((1, 210), 0x7F, dtype=np.uint8)  # scales are 127 times the unit
    for unit, fits in ((1.0, True), (60000.0, False)):
        stored[0, 208:] = np.array([unit], "<f2").view(np.uint8)
        assert (unpack("Q6_K", stored, quantization, 256) is not None) == fits
