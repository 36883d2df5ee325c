"""Import of PowerInfer's statistics: a folder with a file `activation_N.pt` for each layer N, which is a tensor with a
count per neuron.

A .pt file is a zip archive with a pickle, which may run any code when loaded. This reader accepts only the pickle of a
plain tensor. It resolves three kinds of names and calls no code of torch.
"""

from __future__ import annotations

import collections
import io
import math
import pickle
import pickletools
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from neuronpipe.plans.activity.recorded_profile import Frequencies, MeasuredProfile, binned, curve
from neuronpipe.plans.package.activity_profile import BATCHES, ActivityProfile
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.strict_json import one_line, open_file
from neuronpipe.protocol.errors import UserError, quoted
from numpy.typing import NDArray

MAX_PICKLE_BYTES = 1 << 16
MAX_MEMBERS = 64
MAX_STORAGE_BYTES = 1 << 28  # a layer's counts may be a view into the counts of all layers
MAX_NUMBER = 1 << 40
DTYPES = {
    "DoubleStorage": "<f8",
    "FloatStorage": "<f4",
    "HalfStorage": "<f2",
    "LongStorage": "<i8",
    "IntStorage": "<i4",
    "ShortStorage": "<i2",
}
SHOWN_DIGITS = 6


class _Storage(NamedTuple):
    dtype: str
    key: str
    values: int


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def _rebuild(storage: Any, offset: Any, shape: Any, stride: Any, *_ignored: Any) -> _Tensor:
    return _Tensor(storage, offset, shape, stride)


class _Unpickler(pickle.Unpickler):
    """Reader of the pickle of a tensor. Names that no tensor needs are refused before they are looked up."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        raise pickle.UnpicklingError(f"names {one_line(module)[:40]}.{one_line(name)[:40]}, which no tensor needs")

    def persistent_load(self, pid: Any) -> _Storage:
        if not (isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage" and pid[1] in DTYPES.values()):
            raise pickle.UnpicklingError("has a storage of an unknown kind")
        if not (isinstance(pid[2], str) and type(pid[4]) is int):
            raise pickle.UnpicklingError("has a storage without a name or a length")
        return _Storage(pid[1], pid[2], pid[4])


def read_counts(path: Path, neurons: int) -> NDArray[np.float64]:
    """Return the counts of a layer's neurons. Raises UserError, which names the file and the fault, if it is damaged or
    no plain tensor."""
    try:
        with open_file(path) as file, zipfile.ZipFile(file) as archive:
            return _counts(path, archive, neurons)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as wrong:
        raise UserError(
            f"{path}: is no file of torch.save ({one_line(str(wrong))[:80]}); files of torch before 1.6 are to be "
            "loaded and saved again"
        ) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def _counts(path: Path, archive: zipfile.ZipFile, neurons: int) -> NDArray[np.float64]:
    members = {info.filename: info for info in archive.infolist()}
    pickles = [name for name in members if name.endswith("/data.pkl")]
    if len(members) > MAX_MEMBERS or len(pickles) != 1:
        raise UserError(f"{path}: data.pkl: expected one, in a file of torch.save with one tensor")
    tensor = _unpickled(path, _member(path, archive, members[pickles[0]], MAX_PICKLE_BYTES))
    folder = pickles[0].removesuffix("data.pkl")
    order = members.get(f"{folder}byteorder")
    if order is not None and _member(path, archive, order, 16) != b"little":
        raise UserError(f"{path}: byteorder: only little-endian tensors are read")
    if math.prod(tensor.shape) != neurons or sum(length != 1 for length in tensor.shape) > 1:
        raise UserError(
            f"{path}: shape: {quoted(list(tensor.shape))}, but a layer of the package has {neurons} neurons"
        )
    storage = tensor.storage
    data = members.get(f"{folder}data/{storage.key}")
    value_bytes = np.dtype(storage.dtype).itemsize
    if storage.values * value_bytes > MAX_STORAGE_BYTES:
        raise UserError(
            f"{path}: data/{one_line(storage.key)[:20]}: {storage.values * value_bytes:,} bytes, at most "
            f"{MAX_STORAGE_BYTES:,} are read; save the tensor's clone()"
        )
    if data is None or data.file_size != storage.values * value_bytes:
        raise UserError(f"{path}: data/{one_line(storage.key)[:20]}: missing, or not {storage.values} values long")
    strides = [step for step, length in zip(tensor.stride, tensor.shape, strict=True) if length != 1]
    if strides not in ([1], []) or not 0 <= tensor.offset <= storage.values - neurons:
        raise UserError(f"{path}: stride: the values do not lie one behind the other; save the tensor's clone()")
    stored = np.frombuffer(_member(path, archive, data, data.file_size), storage.dtype)
    counts = stored[tensor.offset : tensor.offset + neurons].astype(np.float64)
    if not (np.isfinite(counts).all() and (counts >= 0).all()):
        raise UserError(f"{path}: data/{storage.key}: has counts that are negative or no finite numbers")
    return counts


def _member(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo, max_bytes: int) -> bytes:
    if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size or info.file_size > max_bytes:
        raise UserError(f"{path}: {one_line(info.filename)[:40]}: is packed, or larger than {max_bytes:,} bytes")
    return archive.read(info)


def _unpickled(path: Path, data: bytes) -> _Tensor:
    try:
        _require_small_memo(data)
        tensor = _Unpickler(io.BytesIO(data)).load()
    except Exception as wrong:  # a damaged pickle raises nearly anything
        raise UserError(f"{path}: data.pkl: {one_line(str(wrong))[:160] or type(wrong).__name__}") from None
    if not (isinstance(tensor, _Tensor) and isinstance(tensor.storage, _Storage) and _is_plain(tensor)):
        raise UserError(f"{path}: data.pkl: expected one tensor, as torch.save writes it")
    return tensor


def _require_small_memo(data: bytes) -> None:
    """Raise UnpicklingError if the memo has large indices.

    Python's reader allocates a list as long as the largest index, which can be billions in a hostile file. Writers of
    pickles count from 0.
    """
    for opcode, place, _ in pickletools.genops(data):
        if opcode.name in ("PUT", "LONG_BINPUT") and isinstance(place, int) and place > len(data):
            raise pickle.UnpicklingError(f"its memo has place {place}, in {len(data)} bytes")


def _is_plain(tensor: _Tensor) -> bool:
    shapes = (tensor.shape, tensor.stride)
    if not all(isinstance(shape, tuple) for shape in shapes) or len(tensor.shape) != len(tensor.stride):
        return False
    return all(type(n) is int and 0 <= n < MAX_NUMBER for n in (tensor.offset, *tensor.shape, *tensor.stride))


def import_activity(package: Package, folder: Path, tokens: int | None) -> MeasuredProfile:
    """Return PowerInfer's counts as a profile of exact mode. Frequencies of batches assume independent tokens. Raises
    UserError if files are missing or damaged, or do not fit the package.

    tokens: number of tokens that were counted; None: the greatest count
    """
    model = package.manifest.model
    _require_source_order(package)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; PowerInfer's has activation_0.pt and so on")
    files = [folder / f"activation_{layer}.pt" for layer in range(model.layers)]
    if (folder / f"activation_{model.layers}.pt").exists():
        raise UserError(f"{folder}: has activation_{model.layers}.pt, but the model has {model.layers} layers only")
    counts = np.stack([read_counts(file, model.neurons) for file in files])
    max_count = float(counts.max())
    if max_count == 0:
        raise UserError(f"{folder}: all counts are 0")
    if tokens is not None and max_count > tokens:
        layer = int(counts.max(axis=1).argmax())
        raise UserError(f"{files[layer]}: has a count of {max_count:,.0f}, more than --import-tokens {tokens}")
    return _profile(package, counts / (tokens or max_count), folder.absolute().name, tokens or math.ceil(max_count))


def _require_source_order(package: Package) -> None:
    if package.manifest.model.experts > 1:
        raise UserError(f"{package.path}: is a mixture, and PowerInfer's counts do not tell experts apart")
    if package.manifest.layout.neuron_order != "source":
        raise UserError(
            f"{package.path}: its neurons are stored by frequency, so that counts by number would belong to others; "
            "convert the model again in its own order"
        )


def _profile(package: Package, share: NDArray[np.float64], name: str, tokens: int) -> MeasuredProfile:
    model = package.manifest.model
    neurons = np.stack([1 - (1 - share) ** batch for batch in BATCHES]).astype(np.float32)
    frequencies = Frequencies(np.ones((len(BATCHES), model.layers), np.float32), neurons)
    fired = tuple(round(float(value), SHOWN_DIGITS) for value in share.mean(axis=1))
    profile = ActivityProfile(
        mode="exact",
        source="powerinfer",
        text=one_line(name),
        tokens=tokens,
        curve=curve(binned(package.manifest, neurons), model.neurons),
        wanted_by_layer=fired,
    )
    return MeasuredProfile(profile, frequencies, fired, fired)
