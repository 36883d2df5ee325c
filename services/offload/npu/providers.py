"""The options of the backend `onnx`: which provider of ONNX Runtime computes, and for which chip. Imports no runtime.

cpu                   the runtime's own, a test double
qnn[:SOC]             this machine's Hexagon; its chip is found where it is not named
qnn-emulated[:SOC]    one that QNN emulates on x86-64, by default a v73 of no certain chip
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
"""How the runtime calls each, and the modules it takes."""


@frozen
class Provider:
    """One of PROVIDERS, and the chip it computes for; None: no certain one."""

    name: str
    chip: Chip | None = None

    def __str__(self) -> str:
        return f"backend onnx:{self.name}"

    @property
    def runtime_name(self) -> str:
        """As the runtime has it."""
        return PROVIDERS[self.name][0]

    @property
    def install(self) -> str:
        """What to do where its modules are missing or do not load."""
        return f"install it with: {shlex.quote(sys.executable)} -m pip install {' '.join(PROVIDERS[self.name][1])}"

    @property
    def is_plugin(self) -> bool:
        """Whether it comes with a library of its own."""
        return self.name != "cpu"

    @property
    def needs_device(self) -> bool:
        """Whether an emulated processor will not do."""
        return self.name == "qnn"

    @property
    def device(self) -> str:
        """Who computes, as people call it."""
        if self.name == "cpu":
            return "ONNX Runtime on the CPU"
        chip = "a Hexagon v73" if self.chip is None else str(self.chip)
        return chip if self.needs_device else f"{chip}, emulated"

    @property
    def held_tokens(self) -> tuple[int, ...]:
        """Lengths of an accelerator's graphs, which compute a token alike. The CPU's of one token sums in another order
        than its longer ones, so one text goes with an empty place."""
        return OFFLOAD_GRAPH_TOKENS[1:] if self.name == "cpu" else OFFLOAD_GRAPH_TOKENS

    @property
    def numerics(self) -> str:
        """The arithmetic of its products. A device's is not known to be its emulator's."""
        if self.name == "cpu":
            return "onnx-cpu"
        if self.chip is None:
            return "htp-v73"
        return f"hexagon-v{self.chip.arch}" if self.needs_device else self.chip.emulated_numerics


def provider_of(options: str) -> Provider:
    """What the backend's options name. Raises UserError for a provider or a chip that nobody knows, or whose modules
    are missing."""
    name, colon, soc = options.partition(":")
    if name not in PROVIDERS or (name == "cpu" and colon):
        wrong = f"backend onnx:{options}" if options else "backend onnx: does not say which provider, as onnx:cpu does"
        raise UserError(f"{wrong}: the providers are {', '.join(PROVIDERS)}; of a chip qnn:57")
    provider = Provider(name, chip_of(soc) if colon else None)
    require_modules(provider)
    if provider.needs_device and provider.chip is None:
        return Provider(name, _chip_here())
    return provider


def require_modules(provider: Provider) -> None:
    """Raises UserError where some are missing. Imports none of them."""
    if missing := [name for name in PROVIDERS[provider.name][1] if importlib.util.find_spec(name) is None]:
        raise UserError(f"{provider}: {' and '.join(missing)} cannot be found; {provider.install}")


def _chip_here() -> Chip:
    found = find_chip()
    if found is None:
        raise UserError("backend onnx:qnn: this machine has no chip of Qualcomm's; onnx:qnn-emulated emulates one")
    if found.chip is None:
        raise UserError(
            f"backend onnx:qnn: nobody here knows this machine's chip, {found.said}; name one that is like it, as in "
            "onnx:qnn:57"
        )
    return found.chip
