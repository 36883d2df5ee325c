"""The options of the backend `onnx`: the provider of ONNX Runtime and the chip. This module imports no runtime.

cpu                   the runtime's own CPU provider, a test double
qnn[:SOC]             this machine's Hexagon; its chip is detected unless it is named
qnn-emulated[:SOC]    a Hexagon that QNN emulates on x86-64, by default a v73 of no particular chip
"""

from __future__ import annotations

import importlib.util
import shlex
import sys

from neuronpipe.plans.plan.runtime_memory import OFFLOAD_GRAPH_TOKENS
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen
from neuronpipe.services.offload.npu.chips import Chip, chip_of, find_chip

QNN = ("onnx", "onnxruntime", "onnxruntime_qnn")
PROVIDERS = {
    "cpu": ("CPUExecutionProvider", ("onnx", "onnxruntime")),
    "qnn": ("QNNExecutionProvider", QNN),
    "qnn-emulated": ("QNNExecutionProvider", QNN),
}
"""The runtime's name of each provider, and the modules it needs."""


@frozen
class Provider:
    """One of PROVIDERS, and the chip for which it computes; None means no particular chip."""

    name: str
    chip: Chip | None = None

    def __str__(self) -> str:
        return f"backend onnx:{self.name}"

    @property
    def runtime_name(self) -> str:
        return PROVIDERS[self.name][0]

    @property
    def install(self) -> str:
        """The command to show if modules are missing or do not load."""
        return f"install it with: {shlex.quote(sys.executable)} -m pip install {' '.join(PROVIDERS[self.name][1])}"

    @property
    def is_plugin(self) -> bool:
        """True if the provider is a library that must be registered."""
        return self.name != "cpu"

    @property
    def needs_device(self) -> bool:
        """True if it needs a real device, not an emulator."""
        return self.name == "qnn"

    @property
    def device(self) -> str:
        """The name of the device, for people."""
        if self.name == "cpu":
            return "ONNX Runtime on the CPU"
        chip = "a Hexagon v73" if self.chip is None else str(self.chip)
        return chip if self.needs_device else f"{chip}, emulated"

    @property
    def offload_graph_tokens(self) -> tuple[int, ...]:
        """The lengths of an accelerator's graphs in tokens, all of which give a token the same bits.

        The CPU provider's graph of one token sums in another order, so a single token is padded to a longer graph.
        """
        return OFFLOAD_GRAPH_TOKENS[1:] if self.name == "cpu" else OFFLOAD_GRAPH_TOKENS

    @property
    def numerics(self) -> str:
        """The numerics of its products. Those of a device are not known to equal its emulator's."""
        if self.name == "cpu":
            return "onnx-cpu"
        if self.chip is None:
            return "htp-v73"
        return f"hexagon-v{self.chip.arch}" if self.needs_device else self.chip.emulated_numerics


def provider_of(options: str) -> Provider:
    """Return the provider that the backend's options name. Raises UserError for an unknown provider or chip, and for
    missing modules."""
    name, colon, soc = options.partition(":")
    if name not in PROVIDERS or (name == "cpu" and colon):
        problem = f"backend onnx:{options}" if options else "backend onnx: names no provider, as onnx:cpu does"
        raise UserError(f"{problem}: the providers are {', '.join(PROVIDERS)}; with a chip, qnn:57")
    provider = Provider(name, chip_of(soc) if colon else None)
    require_modules(provider)
    if provider.needs_device and provider.chip is None:
        return Provider(name, _own_chip())
    return provider


def require_modules(provider: Provider) -> None:
    """Raise UserError if modules of the provider are missing. Nothing is imported."""
    if missing := [name for name in PROVIDERS[provider.name][1] if importlib.util.find_spec(name) is None]:
        raise UserError(f"{provider}: {' and '.join(missing)} cannot be found; {provider.install}")


def _own_chip() -> Chip:
    detected = find_chip()
    if detected is None:
        raise UserError("backend onnx:qnn: this machine has no chip of Qualcomm's; onnx:qnn-emulated emulates one")
    if detected.chip is None:
        raise UserError(
            f"backend onnx:qnn: this machine's chip, {detected.description}, is not known here; name one that is like "
            "it, as in onnx:qnn:57"
        )
    return detected.chip
