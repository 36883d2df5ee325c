"""llama.cpp as a library: perplexities of GGUF files, and files in other quantizations, by ctypes.

The folder has libllama, libggml and libggml-base with a CPU backend, as a build of llama.cpp or the npm package
@node-llama-cpp/linux-x64 has them. llama.cpp's parameters are structs that grow from version to version: they are
passed as blocks of 1 KiB that llama.cpp itself fills with defaults, of which only the first fields are changed.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

STRUCT_BYTES = 1024
FILE_TYPES = {
    "Q4_0": 2,
    "Q4_1": 3,
    "Q8_0": 7,
    "Q5_0": 8,
    "Q5_1": 9,
    "Q4_K_M": 15,
    "Q5_K_M": 17,
    "Q6_K": 18,
    "IQ4_NL": 25,
    "IQ4_XS": 30,
}
"""llama_ftype of llama.h."""
QUANTIZE_THREADS, QUANTIZE_TYPE, ALLOW_REQUANTIZE = 0, 1, 16  # two int32 and a byte's offset
IMATRIX = 3  # a pointer, in eights of bytes
CONTEXT, BATCH, MICRO_BATCH, SEQUENCES = range(4)  # uint32 of llama_context_params
ERROR_LEVEL = 4


class Parameters(ctypes.Structure):
    """Any of llama.cpp's structs of parameters."""

    _fields_ = (("data", ctypes.c_uint8 * STRUCT_BYTES),)

    def numbers(self) -> Any:
        """Return the fields as uint32, as far as all of them have four bytes."""
        return np.frombuffer(self.data, dtype="<u4")


class ImatrixEntry(ctypes.Structure):
    """llama_model_imatrix_data."""

    _fields_ = (("name", ctypes.c_char_p), ("values", ctypes.c_void_p), ("count", ctypes.c_size_t))


class Batch(ctypes.Structure):
    """llama_batch."""

    _fields_ = (
        ("tokens", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("ids", "embeddings", "positions", "counts", "sequences", "logits")),
    )


class LlamaLibrary:
    """llama.cpp's functions, from the libraries in a folder."""

    def __init__(self, folder: Path) -> None:
        (backend,) = sorted(folder.glob("libggml-cpu-haswell.so*")) or sorted(folder.glob("libggml-cpu.so*"))[:1]
        libraries = [
            ctypes.CDLL(str(sorted(folder.glob(f"{name}.*"))[0]), mode=ctypes.RTLD_GLOBAL)
            for name in ("libggml-base", "libggml", "libllama")
        ]
        _, ggml, self._library = libraries
        _declare(ggml, "ggml_backend_load", ctypes.c_void_p, ctypes.c_char_p)(str(backend).encode())
        log = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
        self._log = log(lambda level, text, _: print(text.decode(), end="") if level >= ERROR_LEVEL else None)
        self._library.llama_log_set(self._log, None)
        self._library.llama_backend_init()

    def requantize(
        self, source: Path, target: Path, name: str, imatrix: Mapping[str, NDArray[np.float32]] | None = None
    ) -> None:
        """Write a GGUF file in one of FILE_TYPES, from another of any quantization. Raises RuntimeError.

        imatrix: mean squares of the inputs of each column, by the names of the file's tensors
        """
        parameters = self._call("llama_model_quantize_default_params", Parameters)
        parameters.numbers()[[QUANTIZE_THREADS, QUANTIZE_TYPE]] = 2, FILE_TYPES[name]
        parameters.data[ALLOW_REQUANTIZE] = 1
        entries = (ImatrixEntry * (len(imatrix or ()) + 1))()  # the last one has no name
        for entry, (tensor, values) in zip(entries, (imatrix or {}).items(), strict=False):
            entry.name, entry.values, entry.count = tensor.encode(), values.ctypes.data, values.size
        parameters.numbers().view("<u8")[IMATRIX] = ctypes.addressof(entries) if imatrix else 0
        paths = str(source).encode(), str(target).encode()
        if self._call("llama_model_quantize", ctypes.c_uint32, *paths, ctypes.byref(parameters)):
            raise RuntimeError(f"{source}: llama.cpp did not quantize it as {name}")

    def perplexity(self, file: Path, text: str, *, context_tokens: int, max_tokens: int) -> tuple[float, int]:
        """Return the perplexity of a text's first tokens and their number. The first of each context is not scored."""
        with self._model(file) as model:
            vocabulary = self._call("llama_model_get_vocab", ctypes.c_void_p, model)
            tokens = self._tokens(vocabulary, text)[:max_tokens]
            width = self._call("llama_vocab_n_tokens", ctypes.c_int32, vocabulary)
            with self._context(model, context_tokens) as context:
                nll = [
                    loss
                    for first in range(0, len(tokens), context_tokens)
                    for loss in self._losses(context, tokens[first : first + context_tokens], width)
                ]
        return math.exp(math.fsum(nll) / len(nll)), len(tokens)

    def _losses(self, context: int, window: Sequence[int], width: int) -> Iterator[float]:
        """Yield the negative log-likelihood of each token but the first."""
        count = len(window)
        memory = self._call("llama_get_memory", ctypes.c_void_p, context)
        self._call("llama_memory_clear", None, memory, ctypes.c_bool(True))
        ids, positions, counts = (
            np.asarray(values, dtype=np.int32) for values in (window, range(count), np.ones(count))
        )
        sequence, wanted = ctypes.c_int32(0), np.ones(count, dtype=np.int8)
        sequences = (ctypes.c_void_p * (count + 1))(*[ctypes.addressof(sequence)] * count, None)
        place = ctypes.addressof(sequences)
        batch = Batch(
            count, ids.ctypes.data, None, positions.ctypes.data, counts.ctypes.data, place, wanted.ctypes.data
        )
        if code := self._call("llama_decode", ctypes.c_int32, context, batch):
            raise RuntimeError(f"llama_decode: {code}")
        address = self._call("llama_get_logits", ctypes.POINTER(ctypes.c_float), context)
        logits = np.ctypeslib.as_array(address, shape=(count, width))
        for row, following in zip(logits, window[1:], strict=False):
            values = row.astype(np.float64)
            yield float(values.max() + np.log(np.exp(values - values.max()).sum()) - values[following])

    def _tokens(self, vocabulary: int, text: str) -> list[int]:
        data = text.encode()
        ids = (ctypes.c_int32 * (len(data) + 8))()
        flags = ctypes.c_bool(True), ctypes.c_bool(False)  # add a token for the beginning; markup is text
        count = self._call("llama_tokenize", ctypes.c_int32, vocabulary, data, len(data), ids, len(ids), *flags)
        return list(ids[:count])

    @contextmanager
    def _model(self, file: Path) -> Iterator[int]:
        parameters = self._call("llama_model_default_params", Parameters)
        model = self._call("llama_model_load_from_file", ctypes.c_void_p, str(file).encode(), parameters)
        if not model:
            raise RuntimeError(f"{file}: llama.cpp does not read it")
        yield model
        self._call("llama_model_free", None, model)

    @contextmanager
    def _context(self, model: int, context_tokens: int) -> Iterator[int]:
        parameters = self._call("llama_context_default_params", Parameters)
        parameters.numbers()[[CONTEXT, BATCH, MICRO_BATCH, SEQUENCES]] = *(context_tokens,) * 3, 1
        context = self._call("llama_init_from_model", ctypes.c_void_p, model, parameters)
        yield context
        self._call("llama_free", None, context)

    def _call(self, name: str, result: Any, *arguments: Any) -> Any:
        return _declare(self._library, name, result)(
            *(ctypes.c_void_p(value) if isinstance(value, int) and value > 1 << 31 else value for value in arguments)
        )


def _declare(library: ctypes.CDLL, name: str, result: Any, *parameters: Any) -> Any:
    function = getattr(library, name)
    function.restype = result
    if parameters:
        function.argtypes = parameters
    return function
