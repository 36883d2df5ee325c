"""Sessions of ONNX Runtime over graphs. A graph runs on one provider as a whole or is refused.

The runtime silently places operations on the CPU if a provider does not support them, and lists providers whose library
did not load. So fallback to the CPU is disabled, and the placement of every operation is checked.
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
"""Options that make the runtime optimize a graph fast, while a run starts, or thoroughly, when it is compiled. The bits
are equal."""

MAX_REASON = 200
ARM = ("aarch64", "arm64")
LARGE_BYTES = 1 << 20
"""From this size on, memory that the runtime allocates and frees for a product returns to the system."""

Contexts = Callable[["Graph"], bytes]
"""A function from a graph to its context for this runtime and chip."""


class Runtime:
    """ONNX Runtime with one provider. Raises UserError if it does not load."""

    def __init__(self, provider: Provider) -> None:
        if provider.needs_device and platform.machine() not in ARM:  # on x86-64 the same library is the emulator
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
        """Return the version of the Hexagon's library: that of QNN's interface, and its own.

        The runtime must have loaded the library before, else the process crashes. Raises UserError if the library does
        not load or reports no version.
        """
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
        """Return a session for the graph. Raises UserError if the provider does not compute all of it."""
        chip = self._provider.chip
        options = {"htp_arch": "73"} if chip is None else {"soc_model": str(chip.soc)}
        return Session(self._inference_session(graph.model, options | AT_START))

    def prepared(self, contexts: Contexts) -> Callable[[Graph], Session]:
        """Return a function that opens sessions from contexts instead of graphs."""
        return lambda graph: Session(self._inference_session(contexts(graph), {}))

    def prepare(self, graph: Graph, chip: Chip) -> bytes:
        """Return the context of this graph for a chip, which need not be present: a model of one node that contains the
        chip's program. Raises UserError if the runtime refuses the graph or does not know the chip."""
        with tempfile.TemporaryDirectory() as folder, _quiet():
            file = Path(folder) / "context.onnx"
            config = {"ep.context_enable": "1", "ep.context_file_path": str(file), "ep.context_embed_mode": "1"}
            self._inference_session(graph.model, {"soc_model": str(chip.soc)} | ONCE, config)
            if not file.is_file():
                raise UserError(f"{self._provider}: the runtime made no context of {graph.name} for {chip}")
            context = file.read_bytes()
        if f"soc_type={chip.name};arch={chip.arch};".encode() not in context:
            raise UserError(
                f"{self._provider}: this runtime does not know {chip}: it prepared {graph.name} for another"
            )
        return context

    def _inference_session(
        self, model: bytes, provider_options: Mapping[str, str], config: Mapping[str, str] | None = None
    ) -> Any:
        options = self._ort.SessionOptions()
        options.log_severity_level = ERRORS_ONLY
        options.intra_op_num_threads = 1
        # An arena per session would take three times the memory and save no time.
        options.enable_cpu_mem_arena = options.enable_mem_pattern = False
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        for name, value in (config or {}).items():
            options.add_session_config_entry(name, value)
        if self._devices:
            options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
            options.add_provider_for_devices(self._devices, {"backend_path": self._library, **provider_options})
        try:
            session = self._ort.InferenceSession(
                model, options, **({} if self._devices else {"providers": [self._provider.runtime_name]})
            )
        except Exception as error:  # the runtime's own classes derive from Exception only
            raise UserError(f"{self._provider}: a graph is refused: {_one_line(error)}") from None
        self._check_placement(session)
        return session

    def _register(self) -> tuple[str, list[Any]]:
        """Register the provider's library. Return the file of the Hexagon's CPU-side library, and the devices."""
        name, qnn = self._provider.runtime_name, importlib.import_module("onnxruntime_qnn")
        if not (devices := self._ep_devices()):  # a library can be registered once in a process
            self._ort.register_execution_provider_library(name, qnn.get_library_path())
            devices = self._ep_devices()
        if not devices:
            raise RuntimeError(f"{name} finds no device")
        return qnn.get_qnn_htp_path(), devices[:1]

    def _ep_devices(self) -> list[Any]:
        return [device for device in self._ort.get_ep_devices() if device.ep_name == self._provider.runtime_name]

    def _check_placement(self, session: Any) -> None:
        provider = self._provider.runtime_name
        placed = {part.ep_name for part in session.get_provider_graph_assignment_info()}
        if placed != {provider}:
            names = ", ".join(sorted(placed)) or "nobody"
            raise UserError(f"{self._provider}: its graphs went to {names} and not to {provider} alone")


class Session:
    """A graph on its provider, ready to run."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._names = [output.name for output in session.get_outputs()]

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return dict(zip(self._names, self._session.run(self._names, dict(inputs)), strict=True))


class _ApiVersion(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint32) for name in ("major", "minor", "patch"))

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}"


class _Interface(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint32), ("name", ctypes.c_char_p), ("core", _ApiVersion), ("backend", _ApiVersion))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Redirect what the vendor's libraries print to stderr, since stdout belongs to the command."""
    sys.stdout.flush()
    flush = ctypes.CDLL(None).fflush
    stdout = os.dup(1)
    flush(None)
    os.dup2(2, 1)
    try:
        yield
    finally:
        flush(None)
        os.dup2(stdout, 1)
        os.close(stdout)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]}..."
