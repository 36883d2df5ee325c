"""ONNX Runtime: sessions over graphs, each on one provider altogether, or not at all.

A runtime that cannot place an operation where it should gives it to the CPU and says nothing, or lists a provider whose
library did not load. So the CPU may not stand in, and where each operation went is looked at.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuronpipe.native import lib
from neuronpipe.protocol.errors import UserError
from neuronpipe.services.offload.npu.chips import Chip
from neuronpipe.services.offload.npu.providers import Provider

if TYPE_CHECKING:
    from neuronpipe.services.offload.npu.graphs import Graph

ERRORS_ONLY = 3
OPTIMIZED = "htp_graph_finalization_optimization_mode"
AT_START, ONCE = {OPTIMIZED: "1"}, {OPTIMIZED: "3"}
"""How long the runtime may think about a graph: when a run waits, and when it is prepared for all runs. Bits are the
same."""

MAX_REASON = 200
ARM = ("aarch64", "arm64")
LARGE_BYTES = 1 << 20
"""What the runtime allocates for a product, and frees after it, is given back to the system from this size on."""

Contexts = Callable[["Graph"], bytes]
"""What a graph was prepared as, for this runtime and chip."""


class Runtime:
    """ONNX Runtime with one provider. Raises UserError when it does not load."""

    def __init__(self, provider: Provider) -> None:
        if provider.needs_device and platform.machine() not in ARM:  # where the same library emulates one
            raise UserError(f"{provider}: this machine is no 64-bit Arm; onnx:qnn-emulated emulates one")
        self._provider = provider
        lib.np_memory_map_from(LARGE_BYTES)
        try:
            self._ort: Any = importlib.import_module("onnxruntime")
            self._library = ""
            self._devices: list[Any] = []
            if provider.is_plugin:
                self._library, self._devices = self._register()
        except (ImportError, OSError, RuntimeError) as error:
            raise UserError(f"{provider}: the runtime does not load: {_one_line(error)}; {provider.install}") from None

    def qnn_version(self) -> str:
        """The version of the Hexagon's library, as it says itself: of QNN's interface, and of its own. It is the
        runtime's to load first: a library that comes before it makes it crash. Raises UserError."""
        interfaces, count = ctypes.POINTER(ctypes.POINTER(_Interface))(), ctypes.c_uint32()
        try:
            with _quiet():
                ask = ctypes.CDLL(self._library).QnnInterface_getProviders
                failed = ask(ctypes.byref(interfaces), ctypes.byref(count))
        except (OSError, AttributeError) as error:
            raise UserError(f"{self._library}: does not load: {_one_line(error)}; {self._provider.install}") from None
        if failed or not count.value:
            raise UserError(f"{self._library}: does not say its version; {self._provider.install}")
        return f"{interfaces[0][0].core}-{interfaces[0][0].backend}"

    def session(self, graph: Graph) -> Session:
        """The graph, ready to be computed. Raises UserError when this provider does not take all of it."""
        chip = self._provider.chip
        options = {"htp_arch": "73"} if chip is None else {"soc_model": str(chip.soc)}
        return Session(self._made(graph.model, options | AT_START))

    def prepared(self, contexts: Contexts) -> Callable[[Graph], Session]:
        """The same from what graphs were prepared as."""
        return lambda graph: Session(self._made(contexts(graph), {}))

    def prepare(self, graph: Graph, chip: Chip) -> bytes:
        """What this graph becomes for a chip, which need not be here: a model of one node, with the chip's program in
        it. Raises UserError."""
        with tempfile.TemporaryDirectory() as folder, _quiet():
            file = Path(folder) / "context.onnx"
            config = {"ep.context_enable": "1", "ep.context_file_path": str(file), "ep.context_embed_mode": "1"}
            self._made(graph.model, {"soc_model": str(chip.soc)} | ONCE, config)
            if not file.is_file():
                raise UserError(f"{self._provider}: the runtime made no context of {graph.name} for {chip}")
            context = file.read_bytes()
        if f"soc_type={chip.name};arch={chip.arch};".encode() not in context:
            raise UserError(
                f"{self._provider}: this runtime does not know {chip}: it prepared {graph.name} for another"
            )
        return context

    def _made(self, model: bytes, provider_options: Mapping[str, str], config: Mapping[str, str] | None = None) -> Any:
        options = self._ort.SessionOptions()
        options.log_severity_level = ERRORS_ONLY
        options.intra_op_num_threads = 1
        # Each session would keep an arena of its own for good: three times the memory, and no time saved.
        options.enable_cpu_mem_arena = options.enable_mem_pattern = False
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        for name, value in (config or {}).items():
            options.add_session_config_entry(name, value)
        if self._devices:
            options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
            options.add_provider_for_devices(self._devices, {"backend_path": self._library, **provider_options})
        try:
            made = self._ort.InferenceSession(
                model, options, **({} if self._devices else {"providers": [self._provider.runtime_name]})
            )
        except Exception as error:  # the runtime's own classes, which derive from nothing else
            raise UserError(f"{self._provider}: a graph is refused: {_one_line(error)}") from None
        self._check_placement(made)
        return made

    def _register(self) -> tuple[str, list[Any]]:
        """The file of the Hexagon's library, on the CPU's side, and the devices."""
        name, qnn = self._provider.runtime_name, importlib.import_module("onnxruntime_qnn")
        if not (devices := self._found()):  # a library is registered once in a process
            self._ort.register_execution_provider_library(name, qnn.get_library_path())
            devices = self._found()
        if not devices:
            raise RuntimeError(f"{name} finds no device")
        return qnn.get_qnn_htp_path(), devices[:1]

    def _found(self) -> list[Any]:
        return [device for device in self._ort.get_ep_devices() if device.ep_name == self._provider.runtime_name]

    def _check_placement(self, made: Any) -> None:
        wanted = self._provider.runtime_name
        placed = {part.ep_name for part in made.get_provider_graph_assignment_info()}
        if placed != {wanted}:
            went = ", ".join(sorted(placed)) or "nobody"
            raise UserError(f"{self._provider}: its graphs went to {went} and not to {wanted} alone")


class Session:
    """A graph on its provider."""

    def __init__(self, made: Any) -> None:
        self._made = made
        self._names = [output.name for output in made.get_outputs()]

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The outputs, by name."""
        return dict(zip(self._names, self._made.run(self._names, dict(inputs)), strict=True))


class _ApiVersion(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint32) for name in ("major", "minor", "patch"))

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}"


class _Interface(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint32), ("name", ctypes.c_char_p), ("core", _ApiVersion), ("backend", _ApiVersion))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What the vendor's libraries print goes to stderr: stdout is the command's."""
    sys.stdout.flush()
    flush = ctypes.CDLL(None).fflush
    kept = os.dup(1)
    flush(None)
    os.dup2(2, 1)
    try:
        yield
    finally:
        flush(None)
        os.dup2(kept, 1)
        os.close(kept)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]}..."
