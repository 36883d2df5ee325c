"""The modes that a run may use, given how much quality of the output may be lost."""

from __future__ import annotations

from typing import Literal

from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import Mode
from neuronpipe.protocol.errors import UserError

Quality = Literal["exact", "predicted"] | float
"""The allowed loss: none, any loss of a predictor, or the share by which the perplexity of held-out text may grow."""


def allowed_modes(manifest: Manifest, quality: Quality) -> tuple[Mode, ...]:
    """Return the allowed modes of this package, exact first.

    Quality `predicted` allows the predictor without a measurement. A number allows predicted and thresholded mode if
    their measured loss is no larger.

    Raises UserError if the predictor's loss would have to be known and was not measured.
    """
    predictor, silent = manifest.predictor, manifest.silent
    modes: list[Mode] = ["exact"]
    if quality == "exact":
        return tuple(modes)
    if predictor is not None and (quality == "predicted" or _within(predictor.loss_share, quality, manifest)):
        modes.append("predicted")
    if silent is not None and quality != "predicted" and silent.loss_share <= quality:
        modes.append("thresholded")
    return tuple(modes)


def allows_npu(manifest: Manifest, quality: Quality) -> bool:
    """Return True if a neural processor may compute prompts: its loss was measured and is small enough."""
    return not isinstance(quality, str) and manifest.npu is not None and manifest.npu.loss_share <= quality


def _within(loss_share: float | None, max_loss: float, manifest: Manifest) -> bool:
    if loss_share is None:
        raise UserError(
            f"--quality {show_quality(max_loss)}: what the predictor of the package {manifest.name!r} costs was never "
            "measured, or by an older release; `neuronpipe profile PACKAGE --calibrate` measures it"
        )
    return loss_share <= max_loss


def show_quality(quality: Quality) -> str:
    """Return the quality as a user types it: `predicted`, `1%`."""
    return quality if isinstance(quality, str) else f"{100 * quality:g}%"
