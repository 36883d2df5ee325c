"""The backend that computes prompts if the options name none: the CPU, or this machine's neural processor.

The neural processor is chosen only if its loss was measured (`profile --npu`) and --quality allows that loss.
"""

from __future__ import annotations

from collections.abc import Callable

from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.planner.mode_choice import Quality, allows_npu, show_quality
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen

NPU = "onnx:qnn"


@frozen
class PromptBackend:
    """A backend for prompts.

    backend: None for the CPU
    reason: why it was chosen; empty if no neural processor was considered
    """

    backend: str | None = None
    reason: str = ""


ON_CPU = PromptBackend()


def local_npu() -> str | None:
    """Return the name of this machine's chip; None if no runtime for its neural processor is installed."""
    from neuronpipe.services.offload.npu.chips import find_chip
    from neuronpipe.services.offload.npu.providers import Provider, require_modules

    match = find_chip()
    if match is None or match.chip is None:
        return None
    try:
        require_modules(Provider("qnn", match.chip))
    except UserError:
        return None
    return match.chip.name


def choose_prompt_backend(
    package: Package, quality: Quality | None, find_npu: Callable[[], str | None] = local_npu
) -> PromptBackend:
    """Choose the backend for prompts. Looks for a neural processor only if the quality allows a loss."""
    if quality is None or isinstance(quality, str) or (chip := find_npu()) is None:
        return ON_CPU
    npu = package.manifest.npu
    if npu is None:
        advice = f"`neuronpipe profile {package.path} --npu` measures it"
        return PromptBackend(reason=f"prompts stay on the CPU: the loss of {chip} was never measured; {advice}")
    loss = f"perplexity {npu.loss_share:+.3%} measured, with --quality {show_quality(quality)}"
    if not allows_npu(package.manifest, quality):
        return PromptBackend(reason=f"prompts stay on the CPU: {chip} would lose more than is allowed: {loss}")
    return PromptBackend(NPU, f"prompts go to {chip}'s neural processor: {loss}")
