"""Whether a plan may send prompts to this machine's neural processor without being told to: where what it loses was
measured (`profile --npu`) and is within the wish of `--quality`."""

from __future__ import annotations

from collections.abc import Callable

from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.planner.mode_choice import Quality, allows_npu, show_quality
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen

NPU = "onnx:qnn"


@frozen
class Prompts:
    """Who computes prompts beside the cores, and why it does, or does not; None and "": nothing is to be said."""

    backend: str | None = None
    reason: str = ""


CORES = Prompts()


def processor_here() -> str | None:
    """This machine's chip, where a runtime for its neural processor is installed."""
    from neuronpipe.services.offload.npu.chips import find_chip
    from neuronpipe.services.offload.npu.providers import Provider, require_modules

    found = find_chip()
    if found is None or found.chip is None:
        return None
    try:
        require_modules(Provider("qnn", found.chip))
    except UserError:
        return None
    return found.chip.name


def prompts_here(
    package: Package, quality: Quality | None, processor: Callable[[], str | None] = processor_here
) -> Prompts:
    """For a plan that names no backend for prompts. Asks for the processor only where the wish allows a loss."""
    manifest: Manifest = package.manifest
    if quality is None or isinstance(quality, str) or (chip := processor()) is None:
        return CORES
    wish = show_quality(quality)
    if manifest.npu is None:
        measure = f"`neuronpipe profile {package.path} --npu` measures it"
        return Prompts(reason=f"prompts stay on the cores: what {chip} loses was never measured; {measure}")
    lost = f"perplexity {manifest.npu.loss_share:+.3%} measured, with --quality {wish}"
    if not allows_npu(manifest, quality):
        return Prompts(reason=f"prompts stay on the cores: {chip} would lose more than is wished: {lost}")
    return Prompts(NPU, f"prompts go to {chip}'s neural processor: {lost}")
