"""`neuronpipe profile --npu`: measure how much prompts lose on a neural processor, whose activations are integers.

Two ways of scaling activations are measured on held-out text. The package stores the better one for runs and `compile`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Set
from pathlib import Path
from typing import Any

from neuronpipe.launch.profile.profile_arguments import read_calibration_texts, refuse_combination, text_name
from neuronpipe.launch.progress import Progress
from neuronpipe.plans.package.npu_section import SCALINGS, Scaling
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.errors import UserError

AUTO = "auto"
SCALING_NAMES = {"token": "a scale of each token's own", "static": "ranges of calibration text"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("neural processor", "what it loses, instead of a predictor")
    group.add_argument(
        "--npu",
        action="store_true",
        help="measure what prompts on a neural processor lose (by ONNX Runtime on the CPU), with a scale of each "
        "token's own and within ranges of calibration text, and keep the better way in the package",
    )
    group.add_argument(
        "--scaling", choices=(AUTO, *SCALINGS), default=AUTO, help="keep this way instead (default: %(default)s)"
    )


def refuse_unrelated(changed: Set[str]) -> None:
    """Raise UserError for arguments that have no effect with --npu.

    changed: names of the arguments with values other than their defaults
    """
    if "npu" not in changed:
        raise UserError("--scaling: says something about --npu; give that too")
    refuse_combination("--npu", changed, {"package", "npu", "scaling", "text", "tokens", "json"})


def main(package: Package, *, text: Path | None, tokens: int | None, scaling: Scaling | None, as_json: bool) -> int:
    """Measure, store the profile and print it.

    scaling: the one to store; None stores the better one
    """
    _require_supported(package)
    from neuronpipe.services.offload.npu.accuracy_measurement import keep, measure
    from neuronpipe.services.offload.npu.providers import Provider
    from neuronpipe.services.offload.npu.sessions import Runtime

    texts = read_calibration_texts(package, text, tokens)
    with Progress("measuring", "tokens", plain=as_json, steady=True) as progress:
        profile = measure(
            package,
            texts,
            Runtime(Provider("cpu")).session,
            text=text_name(package, text),
            scaling=scaling,
            progress=progress,
        )
    package = keep(package, profile)
    profile_values = dataclasses.asdict(profile) | {"loss_share": profile.loss_share}
    result = {"package": str(package.path), "id": package.manifest.id, "npu": profile_values}
    print(json.dumps(result) if as_json else render(profile_values))
    return 0


def _require_supported(package: Package) -> None:
    """Raise UserError if no neural processor can compute this package, or if the runtime is missing."""
    from neuronpipe.services.offload.npu.backend import OnnxBackend
    from neuronpipe.services.offload.npu.providers import Provider, require_modules

    require_modules(Provider("cpu"))
    if why := OnnxBackend("cpu").supports(package.manifest, "prefill"):
        raise UserError(f"{package.path}: {why}")


def render(npu: dict[str, Any]) -> str:
    lines = [f"{'activations with':<28} {'perplexity':>11} {'change':>9} {'likeliest':>10} {'again':>8} {'error':>14}"]
    for loss in npu["losses"]:
        change, errors = loss["perplexity"] / npu["exact_perplexity"] - 1, loss["error_by_layer"]
        lines.append(
            f"{SCALING_NAMES[loss['scaling']]:<28} {loss['perplexity']:>11.4f} {change:>+9.3%} "
            f"{loss['agreement']:>10.2%} {loss['recomputed_share']:>8.2%} {min(errors):>6.2%}-{max(errors):.2%}"
        )
    lines += [
        "likeliest: tokens that are the exact model's likeliest; again: products that the engine computes again;",
        "error: of products, from layer to layer",
        f"on {npu['held_out_tokens']:,} held-out tokens of {npu['text']}; exact: {npu['exact_perplexity']:.4f} "
        "(reference engine)",
        f"kept: {SCALING_NAMES[npu['scaling']]}; `neuronpipe compile` makes contexts that fit",
    ]
    return "\n".join(lines)
