"""The kernels as Python calls them, against numpy. The exhaustive comparison is in tests/native/test_kernels.c."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from neuronpipe.native import ffi, lib

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

ISA_NAMES: list[str] = ffi.string(lib.np_isa_names()).decode().split(",")
TYPES = {"f16": lib.NP_F16, "q8": lib.NP_Q8, "q4": lib.NP_Q4}


@pytest.fixture(params=ISA_NAMES, autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set of this machine in turn; the one that was in use comes back afterwards."""
    before = lib.np_isa_name()
    assert ffi.string(lib.np_isa_select(request.param.encode())).decode() == request.param
    yield request.param
    lib.np_isa_select(before)


def random_rows(type_name: str, rows: int, n: int) -> tuple[Bytes, Bytes, Floats]:
    """Quants and scales as stored, and the [rows, n] weights that they stand for."""
    random = np.random.default_rng(1)
    if type_name == "f16":
        halves = random.standard_normal((rows, n)).astype(np.float16)
        return halves.view(np.uint8), np.zeros(0, np.uint8), halves.astype(np.float32)
    scales = (0.01 * random.random((rows, n // 32)) + 0.001).astype(np.float16)
    if type_name == "q8":
        quants = random.integers(-128, 128, (rows, n), dtype=np.int8)
        values = quants.astype(np.float32)
        packed = quants.view(np.uint8)
    else:
        packed = random.integers(0, 256, (rows, n // 2), dtype=np.uint8)
        groups = packed.reshape(rows, n // 32, 16)
        values = np.concatenate([groups & 15, groups >> 4], axis=2).astype(np.float32).reshape(rows, n) - 8
    return packed, scales.view(np.uint8), values * np.repeat(scales.astype(np.float32), 32, axis=1)


def prepared(type_name: str, x: Floats) -> Bytes:
    """The activations of the [tokens, n] rows of x, one padded row of bytes each."""
    stride = lib.np_activation_bytes(TYPES[type_name], x.shape[1])
    activations = np.zeros((x.shape[0], stride), np.uint8)
    for row, activation in zip(x, activations, strict=True):
        lib.np_activation_prepare(
            TYPES[type_name],
            ffi.from_buffer("float[]", row),
            x.shape[1],
            ffi.from_buffer(activation, require_writable=True),
        )
    return activations


@pytest.mark.parametrize("type_name", TYPES)
def test_dot_rows_agrees_with_a_matrix_product(type_name: str) -> None:
    rows, n, tokens = 5, 320, 3
    quants, scales, weights = random_rows(type_name, rows, n)
    x = np.random.default_rng(2).standard_normal((tokens, n)).astype(np.float32)
    activations = prepared(type_name, x)
    out = np.zeros((tokens, rows), np.float32)
    lib.np_dot_rows(
        TYPES[type_name],
        ffi.from_buffer(quants),
        ffi.from_buffer(scales),
        rows,
        n,
        ffi.from_buffer(activations),
        activations.shape[1],
        tokens,
        ffi.NULL,
        ffi.from_buffer("float[]", out),
        rows,
    )
    if type_name != "f16":  # what the dot product reads: x in steps of a 127th of its group's largest magnitude
        groups = x.reshape(tokens, -1, 32)
        steps = np.abs(groups).max(axis=2, keepdims=True) / 127
        x = (np.rint(groups / steps) * steps).reshape(tokens, n)
    np.testing.assert_allclose(out, x @ weights.T, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("type_name", TYPES)
def test_rows_decode_and_add(type_name: str) -> None:
    n = 352
    quants, scales, weights = random_rows(type_name, 1, n)
    decoded, y = np.zeros(n, np.float32), np.ones(n, np.float32)
    row = (TYPES[type_name], ffi.from_buffer(quants), ffi.from_buffer(scales), n)
    lib.np_decode_row(*row, ffi.from_buffer("float[]", decoded))
    quants_at, scales_at = ffi.new("void *[]", [row[1]]), ffi.new("void *[]", [row[2]])
    lib.np_add_rows(row[0], quants_at, scales_at, ffi.new("float[]", [0.5]), 1, n, ffi.from_buffer("float[]", y))
    np.testing.assert_array_equal(decoded, weights[0])
    np.testing.assert_allclose(y, 1 + 0.5 * weights[0], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("type_name", TYPES)
def test_scattered_rows_and_panels_have_the_bits_of_rows_in_order(type_name: str) -> None:
    kind, rows, n, tokens = TYPES[type_name], 21, 352, 19
    quants, scales, _ = random_rows(type_name, rows, n)
    activations = prepared(type_name, np.random.default_rng(4).standard_normal((tokens, n)).astype(np.float32))
    quants_at, scales_at = ffi.new("void *[]", rows), ffi.new("void *[]", rows)
    for row in range(rows):
        quants_at[row] = ffi.from_buffer(quants) + row * lib.np_quant_bytes(kind, n)
        scales_at[row] = ffi.from_buffer(scales) + row * lib.np_scale_bytes(kind, n)
    panel = np.zeros(lib.np_panel_bytes(kind, n, tokens), np.uint8)
    in_order, of_panel = np.zeros((2, tokens, rows), np.float32)
    scattered = np.zeros((tokens, rows), np.float32)
    matrix = (kind, ffi.from_buffer(quants), ffi.from_buffer(scales), rows, n)
    floats = [ffi.from_buffer("float[]", array, require_writable=True) for array in (in_order, of_panel, scattered)]
    all_activations = ffi.from_buffer(activations)
    lib.np_dot_rows(*matrix, all_activations, activations.shape[1], tokens, ffi.NULL, floats[0], rows)
    lib.np_panel_prepare(kind, all_activations, activations.shape[1], tokens, n, ffi.from_buffer(panel))
    lib.np_dot_panel(kind, quants_at, scales_at, rows, n, ffi.from_buffer(panel), tokens, ffi.NULL, floats[1], rows)
    assert of_panel.tobytes() == in_order.tobytes()
    alone = np.zeros((tokens, rows), np.float32)
    stride = activations.shape[1]
    for token in range(tokens):
        one, out = all_activations + token * stride, ffi.from_buffer("float[]", alone[token], require_writable=True)
        lib.np_dot_rows(*matrix, one, stride, 1, ffi.NULL, out, rows)
    assert in_order.tobytes() == alone.tobytes()
    for count in range(1, tokens + 1):
        scattered[:] = 7.0
        lib.np_dot_scattered(
            kind, quants_at, scales_at, rows, n, ffi.NULL, all_activations, stride, count, floats[2], rows
        )
        assert scattered[:count].tobytes() == alone[:count].tobytes()
        assert (scattered[count:] == 7.0).all()


def test_attention_agrees_with_softmax() -> None:
    positions, width = 37, 64
    random = np.random.default_rng(3)
    query = random.standard_normal(width).astype(np.float32)
    keys, values = random.standard_normal((2, positions, width)).astype(np.float16)
    scores, out = np.zeros(8 * (positions + 1), np.float32), np.zeros(width, np.float32)
    job = ffi.new("np_attend_job *")
    job.queries, job.out = ffi.from_buffer("float[]", query), ffi.from_buffer("float[]", out)
    job.keys, job.values = ffi.from_buffer("uint16_t[]", keys), ffi.from_buffer("uint16_t[]", values)
    job.scores = ffi.from_buffer("float[]", scores)
    job.heads, job.tokens, job.positions, job.width, job.scale = 1, 1, positions, width, 0.125
    lib.np_attend(job)
    weights = np.exp(keys.astype(np.float64) @ query * 0.125)
    np.testing.assert_allclose(out, weights @ values.astype(np.float64) / weights.sum(), rtol=1e-4, atol=1e-6)


def test_an_unknown_instruction_set_is_refused(isa: str) -> None:
    assert lib.np_isa_select(b"abacus") == ffi.NULL
    assert ffi.string(lib.np_isa_name()).decode() == isa
