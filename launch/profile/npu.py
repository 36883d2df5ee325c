"""`neuronpipe profile --npu`: what prompts on a neural processor lose, and how their activations become integers.

Two ways are measured on held-out text, and the better one is kept in the package: its runs, and `compile`, take that.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Set
from typing import Any

from neuronpipe.launch.profile.profile_arguments import read_calibration_texts, refuse_combination, text_name
from neuronpipe.launch.progress import Progress
from neuronpipe.plans.package.npu_section import SCALINGS
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.errors import UserError

AUTO = "auto"
WAYS = {"token": "a scale of each token's own", "static": "ranges of calibration text"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What of `profile` is about neural processors."""
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


def refuse_unrelated(given: Set[str]) -> None:
    """Raises UserError for arguments that mean nothing here. given: those that are not what they are by default."""
    if "npu" not in given:
        raise UserError("--scaling: says something about --npu; give that too")
    refuse_combination("--npu", given, {"package", "npu", "scaling", "text", "tokens", "json"})


def main(arguments: argparse.Namespace, package: Package) -> int:
    """Measure, keep, and say what was found."""
    _require_supported(package)
    from neuronpipe.services.offload.npu.accuracy_measurement import keep, measure
    from neuronpipe.services.offload.npu.providers import Provider
    from neuronpipe.services.offload.npu.sessions import Runtime

    texts = read_calibration_texts(arguments, package)
    with Progress("measuring", "tokens", plain=arguments.json, steady=True) as progress:
        profile = measure(
            package,
            texts,
            Runtime(Provider("cpu")).session,
            text=text_name(package, arguments.text),
            scaling=None if arguments.scaling == AUTO else arguments.scaling,
            progress=progress,
        )
    package = keep(package, profile)
    found = dataclasses.asdict(profile) | {"loss_share": profile.loss_share}
    result = {"package": str(package.path), "id": package.manifest.id, "npu": found}
    print(json.dumps(result) if arguments.json else render(found))
    return 0


def _require_supported(package: Package) -> None:
    """Raises UserError for a package that no neural processor can compute here, or where the runtime is missing."""
    from neuronpipe.services.offload.npu.backend import OnnxBackend
    from neuronpipe.services.offload.npu.providers import Provider, require_modules

    require_modules(Provider("cpu"))
    if why := OnnxBackend("cpu").supports(package.manifest, "prefill"):
        raise UserError(f"{package.path}: {why}")


def render(npu: dict[str, Any]) -> str:
    """For a person."""
    lines = [f"{'activations with':<28} {'perplexity':>11} {'change':>9} {'likeliest':>10} {'again':>8} {'error':>14}"]
    for loss in npu["losses"]:
        change, errors = loss["perplexity"] / npu["exact_perplexity"] - 1, loss["error_by_layer"]
        lines.append(
            f"{WAYS[loss['scaling']]:<28} {loss['perplexity']:>11.4f} {change:>+9.3%} {loss['agreement']:>10.2%} "
            f"{loss['recomputed_share']:>8.2%} {min(errors):>6.2%}-{max(errors):.2%}"
        )
    lines += [
        "likeliest: tokens that are the exact model's likeliest; again: products that the engine computes again;",
        "error: of products, from layer to layer",
        f"on {npu['held_out_tokens']:,} held-out tokens of {npu['text']}; exact: {npu['exact_perplexity']:.4f} "
        "(reference engine)",
        f"kept: {WAYS[npu['scaling']]}; `neuronpipe compile` makes contexts that fit",
    ]
    return "\n".join(lines)
