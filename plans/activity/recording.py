"""Recording of the neurons that each token accesses, in a folder beside the package.

The folder contains `of.json`, which identifies the recording, and `tokens.bin`, an array of `token_dtype`. An
interrupted recording continues with the first context window that is not complete. Analyses map the file and read layer
by layer, so that they need little memory.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Sequence
from hashlib import sha256
from types import TracebackType

import numpy as np
from neuronpipe.native import lib
from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.package.activity_profile import ProfileMode
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen
from numpy.typing import NDArray

NO_EXPERT = -1  # number of an expert in an unused place
Windows = Sequence[Sequence[int]]


def token_dtype(model: ModelSpec) -> np.dtype[np.void]:
    """Return the type of a token's record. All fields are [layers, experts per token], experts by ascending number; in
    layers where fewer experts compute a token, the last places are empty.

    expert: number of an expert that computed the token
    fired: number of its neurons whose trigger fired
    active: number of its neurons whose value is not 0
    wanted: one bit per neuron, lowest bit first: whether the token accessed it
    """
    places = (model.layers, model.most_active_experts)
    return np.dtype(
        [
            ("expert", "<i4", places),
            ("fired", "<u4", places),
            ("active", "<u4", places),
            ("wanted", "u1", (*places, -(-model.neurons // 8))),
        ]
    )


def token_record(flags: NDArray[np.uint8], model: ModelSpec, mode: ProfileMode) -> NDArray[np.void]:
    """Return the record of a token. Raises ValueError if too many experts computed it.

    flags: bits of np_activity [feed-forwards, at least neurons]
    """
    record = np.zeros((), token_dtype(model))
    record["expert"] = NO_EXPERT
    accessed_flag = lib.NP_TRIGGERED if mode == "predicted" else lib.NP_FIRED
    for layer in range(model.layers):
        layer_flags = flags[model.ffns_of(layer), : model.neurons]
        chosen = np.flatnonzero(layer_flags.any(axis=1))
        if len(chosen) > model.active_experts(layer):
            raise ValueError(f"layer {layer}: {len(chosen)} experts computed one token")
        places, expert_flags = np.s_[layer, : len(chosen)], layer_flags[chosen]
        record["expert"][places] = chosen
        record["fired"][places] = ((expert_flags & lib.NP_FIRED) != 0).sum(axis=1)
        record["active"][places] = ((expert_flags & lib.NP_ACTIVE) != 0).sum(axis=1)
        record["wanted"][places] = np.packbits((expert_flags & accessed_flag) != 0, axis=1, bitorder="little")
    return record


@frozen
class Recording:
    """A complete recording.

    windows: number of tokens of each context window
    tokens: records of `token_dtype` [tokens]
    """

    model: ModelSpec
    windows: tuple[int, ...]
    tokens: NDArray[np.void]

    def accessed_bits(self, layer: int, expert: int) -> NDArray[np.uint8]:
        """Return which neurons of a feed-forward each token accessed: [tokens, ceil(neurons / 8)], one bit per
        neuron, lowest bit first."""
        places = self.tokens["expert"][:, layer] == expert
        bits = np.zeros((len(self.tokens), self.tokens["wanted"].shape[-1]), np.uint8)
        tokens, place = np.nonzero(places)
        bits[tokens] = self.tokens["wanted"][tokens, layer, place]
        return bits

    def continued(self) -> NDArray[np.bool_]:
        """Return a mask of the tokens that are not the first of their context window."""
        mask = np.ones(len(self.tokens), bool)
        mask[np.cumsum((0, *self.windows[:-1]))] = False
        return mask


class RecordingFolder:
    """A context manager that records context windows, and continues an interrupted recording of the same windows.

    The folder stays until `remove` is called. Raises UserError for errors of the file system, and if another command
    profiles the package.
    """

    def __init__(self, package: Package, mode: ProfileMode, windows: Windows) -> None:
        place = package.path.absolute()
        self.path = place.with_name(f".{place.name}.activity-{mode}")
        self._locked = package.path
        self._model, self._windows = package.manifest.model, windows
        text = sha256(json.dumps([list(window) for window in windows]).encode()).hexdigest()
        self._of = json.dumps({"package": package.manifest.id, "mode": mode, "text": text})
        self._token_bytes = token_dtype(self._model).itemsize
        self.windows_done = 0

    def __enter__(self) -> RecordingFolder:
        self._lock()
        try:
            self._open()
        except BaseException:
            os.close(self._lock_descriptor)
            raise
        return self

    def _lock(self) -> None:
        """Lock the package, since another command would write to the same recording and overwrite the profile."""
        self._lock_descriptor = os.open(self._locked, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock_descriptor)
            raise UserError(f"{self._locked}: is being profiled by another command; wait for it, or end it") from None

    def _open(self) -> None:
        try:
            if not self._is_ours():
                shutil.rmtree(self.path, ignore_errors=True)
                self.path.mkdir(parents=True)
                (self.path / "of.json").write_text(self._of)
            self._file = (self.path / "tokens.bin").open("ab")
            self._go_on()
            self._require_space()
        except OSError as error:
            raise UserError(f"{self.path}: the recording cannot be written: {error.strerror}") from None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        os.close(self._lock_descriptor)

    @property
    def bytes(self) -> int:
        return sum(map(len, self._windows)) * self._token_bytes

    def add(self, window: Sequence[NDArray[np.void]]) -> None:
        """Append the records of the next context window. Raises ValueError if their number is wrong."""
        if len(window) != len(self._windows[self.windows_done]):
            raise ValueError(f"{len(window)} tokens of {len(self._windows[self.windows_done])}")
        try:
            # In one write, so that an interrupt cannot leave a part of the window, which would be recorded again.
            self._file.write(b"".join(token.tobytes() for token in window))
            self._file.flush()
        except OSError as error:
            raise UserError(f"{self.path}: the recording cannot be written: {error.strerror}") from None
        self.windows_done += 1

    def open_recording(self) -> Recording:
        tokens = np.memmap(self.path / "tokens.bin", token_dtype(self._model), "r")
        return Recording(self._model, tuple(map(len, self._windows)), tokens)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def _is_ours(self) -> bool:
        try:
            return (self.path / "of.json").read_text() == self._of
        except (OSError, UnicodeDecodeError):
            return False

    def _go_on(self) -> None:
        recorded_tokens, whole_windows_tokens = self._file.seek(0, 2) // self._token_bytes, 0
        for window in self._windows:
            if whole_windows_tokens + len(window) > recorded_tokens:
                break
            whole_windows_tokens += len(window)
            self.windows_done += 1
        self._file.truncate(whole_windows_tokens * self._token_bytes)

    def _require_space(self) -> None:
        needed_bytes = self.bytes - self._file.seek(0, 2)
        if (free := shutil.disk_usage(self.path).free) < needed_bytes:
            raise UserError(
                f"{self.path}: the recording needs {needed_bytes:,} bytes, but {free:,} are free on that disk; "
                "fewer --tokens need less"
            )
