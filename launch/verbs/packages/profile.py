"""`neuronpipe profile PACKAGE`: compute a text, and store in the package a predictor of the neurons that fire.

Another option stores something else instead:

--silent    thresholds of a SiLU model
--activity  access frequencies of neurons, measured in a run (launch/profile/activity.py)
--npu       the loss of prompts on a neural processor (launch/profile/npu.py)

Predictors and thresholds are fitted without training on one part of the text, and their quality is measured on the
other. The package gets a new id, so that earlier plans are refused. Devices are measured by profile_device.py.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from neuronpipe.launch.arguments.values import parse_share
from neuronpipe.launch.formats import as_typed
from neuronpipe.launch.planning import DEMO
from neuronpipe.launch.planning.package_argument import add_package_argument, open_package
from neuronpipe.launch.profile import activity, npu
from neuronpipe.launch.profile.profile_arguments import read_calibration_texts, refuse_combination, text_name
from neuronpipe.launch.progress import Progress
from neuronpipe.plans.inspect import describe, low_recall, silent_lines
from neuronpipe.plans.package.layout import GROUP_WEIGHTS
from neuronpipe.plans.package.manifest import DEFAULT_RECALL, MAX_SILENT_SHARE, PREDICTOR_QUANTIZATIONS
from neuronpipe.plans.package.optional_file import require_writable
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.errors import UserError

if TYPE_CHECKING:
    from neuronpipe.plans.predictor.profiling import ProfilingResult

DEFAULT_RANK_DIVISOR = 11  # the default rank is width / 11, rounded to groups, like the published 352 for width 4096


COMMON_OPTIONS = ("package", "text", "tokens", "silent", "activity", "npu", "json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "`neuronpipe profile device` measures this device; `neuronpipe profile diff` compares two device profiles."
    )
    add_package_argument(parser, has_default=False)
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="text to measure on, UTF-8; its last fifth is held out (default: the demo's corpus)",
    )
    parser.add_argument("--rank", type=int, help="rank of the factors, a multiple of 32 (default: about width / 11)")
    parser.add_argument(
        "--quantization",
        choices=PREDICTOR_QUANTIZATIONS,
        default="q8",
        help="quantization of the factors (default: %(default)s)",
    )
    parser.add_argument(
        "--recall",
        type=float,
        default=DEFAULT_RECALL,
        help="share of the active neurons that the predictor must find (default: %(default)s)",
    )
    parser.add_argument(
        "--reads",
        choices=("attention", "feed_forward"),
        default="feed_forward",
        help="input of the predictor: attention's is known earlier, the feed-forward layer's predicts better (default)",
    )
    parser.add_argument(
        "--sides",
        choices=("auto", "trigger", "both"),
        default="auto",
        help="matrices to predict: gate, or gate and up (drelu)",
    )
    parser.add_argument(
        "--tokens", type=int, metavar="N", help="tokens to calibrate on (default: 16384, fewer for wide models)"
    )
    parser.add_argument(
        "--import",
        dest="imported",
        type=Path,
        metavar="FILE",
        help="take fc1 and fc2 of a trained PowerInfer predictor from this safetensors file, and calibrate them",
    )
    parser.add_argument(
        "--import-reads-normed",
        action="store_true",
        help="the imported predictor was trained on normalized vectors, not on the residual stream",
    )
    parser.add_argument(
        "--silent",
        type=_parse_silent,
        metavar="SHARE",
        help="for a SiLU model: set thresholds that silence this share of the neurons, e.g. 50%%, for --mode "
        "thresholded; off: remove them",
    )
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="keep the package's factors, e.g. those of a checkpoint, and fit only their thresholds",
    )
    activity.add_arguments(parser)
    npu.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _parse_silent(text: str) -> float | Literal["off"]:
    if text == "off":
        return "off"
    share = parse_share(text)
    if not 0 < share <= MAX_SILENT_SHARE:
        raise argparse.ArgumentTypeError(f"{text!r}: a share above 0% and up to {MAX_SILENT_SHARE:.0%}, or off")
    return share


def main(arguments: argparse.Namespace) -> int:
    if arguments.package is DEMO:
        raise UserError("profile: name the package to change; `neuronpipe list` shows those that have names")
    if arguments.silent is not None:
        return _set_thresholds(arguments)
    if arguments.npu or arguments.scaling != npu.AUTO:
        npu.refuse_unrelated(_typed_names(arguments))
        scaling = None if arguments.scaling == npu.AUTO else arguments.scaling
        return npu.main(
            _open_to_change(arguments),
            text=arguments.text,
            tokens=arguments.tokens,
            scaling=scaling,
            as_json=arguments.json,
        )
    activity_options = _activity_options(arguments)
    if activity_options.is_requested:
        activity_options.refuse_unrelated(_typed_names(arguments))
        return activity.main(activity_options, _open_to_change(arguments))
    if arguments.mode or arguments.memory:
        raise UserError(f"--{'mode' if arguments.mode else 'memory'}: applies to the run of --activity; give that too")
    package = _open_to_change(arguments)
    if arguments.calibrate and (arguments.imported or arguments.rank):
        raise UserError("--calibrate: keeps the package's factors, so --import and --rank have no effect")
    if not 0.5 <= arguments.recall < 1:
        raise UserError(f"--recall {arguments.recall}: expected a share from 0.5 to below 1")
    with Progress("profiling", "tokens", plain=arguments.json, steady=True) as progress:
        profiled = _fit(arguments, package, progress)
    manifest = profiled.package.manifest
    assert manifest.predictor is not None
    result = {
        "package": str(package.path),
        "id": manifest.id,
        "predictor": asdict(manifest.predictor),
        "predictor_bytes": manifest.files["predictor.safetensors"].bytes,
        "activity_by_layer": manifest.fired_by_layer,
        "trigger_fired_by_layer": manifest.trigger_fired_by_layer,
        "candidates": [
            {
                "sides": list(candidate.sides),
                "rank": candidate.rank,
                "predicted": candidate.predicted,
                "by_layer": [asdict(layer) for layer in candidate.quality],
            }
            for candidate in profiled.candidates
        ],
        "exact_perplexity": profiled.exact_perplexity,
        "predicted_perplexity": profiled.predicted_perplexity,
        "wanted_recall": arguments.recall,
        "warnings": [warning] if (warning := low_recall(manifest.predictor, arguments.recall)) else [],
    }
    print(json.dumps(result) if arguments.json else render(result))
    return 0


def _fit(arguments: argparse.Namespace, package: Package, progress: Progress) -> ProfilingResult:
    # Imported here, with the progress already shown, because they take a while.
    from neuronpipe.plans.predictor.imported_predictor import open_imported
    from neuronpipe.plans.predictor.profiling import profile

    width = package.manifest.model.width
    default_rank = min(width, max(2, width // (DEFAULT_RANK_DIVISOR * GROUP_WEIGHTS)) * GROUP_WEIGHTS)
    return profile(
        package,
        read_calibration_texts(package, arguments.text, arguments.tokens),
        rank=arguments.rank or default_rank,
        quantization=arguments.quantization,
        recall=arguments.recall,
        reads=arguments.reads,
        sides=arguments.sides,
        imported=open_imported(arguments.imported, package.manifest) if arguments.imported else None,
        imported_reads_normed=arguments.import_reads_normed,
        calibrate=arguments.calibrate,
        text=text_name(package, arguments.text),
        progress=progress,
    )


def _open_to_change(arguments: argparse.Namespace) -> Package:
    package = open_package(arguments.package, plain=arguments.json)
    require_writable(package)
    return package


def _activity_options(arguments: argparse.Namespace) -> activity.ActivityOptions:
    return activity.ActivityOptions(
        measure=arguments.activity,
        text=arguments.text,
        tokens=arguments.tokens,
        mode=arguments.mode,
        memory_bytes=arguments.memory,
        imported=arguments.import_activity,
        import_tokens=arguments.import_tokens,
        reorder=arguments.reorder,
        as_json=arguments.json,
    )


def _typed_names(arguments: argparse.Namespace) -> set[str]:
    """Return the names of the arguments that differ from their defaults."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return {name for name, default in vars(parser.parse_args([])).items() if getattr(arguments, name) != default}


def _set_thresholds(arguments: argparse.Namespace) -> int:
    from neuronpipe.plans.predictor import thresholds

    allowed = {"package", "silent", "text", "tokens", "json"}
    refuse_combination("--silent", _typed_names(arguments), allowed, "thresholds need no predictor")
    package = _open_to_change(arguments)
    thresholds.require_silu(package)
    if arguments.silent == "off":
        package = thresholds.remove_thresholds(package)
    else:
        with Progress("setting thresholds", "tokens", plain=arguments.json, steady=True) as progress:
            package = thresholds.set_thresholds(
                package,
                read_calibration_texts(package, arguments.text, arguments.tokens),
                share=arguments.silent,
                text=text_name(package, arguments.text),
                progress=progress,
            )
    description = describe(package)
    result = {name: description[name] for name in ("path", "id", "silent")}
    if arguments.json:
        print(json.dumps(result))
    elif result["silent"] is None:
        print(f"{package.path}: has no thresholds now; --mode thresholded is refused")
    else:
        print("\n".join(silent_lines(result["silent"])))
    return 0


def render(result: dict[str, Any]) -> str:
    predictor = result["predictor"]
    exact, predicted = result["exact_perplexity"], result["predicted_perplexity"]
    lines = [
        f"predictor of {' and '.join(predictor['sides'])}, rank {predictor['rank']}, {predictor['quantization']}, "
        f"reads {predictor['reads']}: {result['predictor_bytes']:,} bytes",
        "",
        f"{'layer':>5} {'active':>8} {'gate fires':>11} {'recall':>8} {'precision':>10} {'predicted/active':>17}",
    ]
    shares = zip(result["activity_by_layer"], result["trigger_fired_by_layer"], predictor["by_layer"], strict=True)
    for number, (active, fired, layer) in enumerate(shares):
        ratio = layer["recall"] / layer["precision"] if layer["precision"] else 0.0
        quality = f"{layer['recall']:>8.1%} {layer['precision']:>10.1%} {ratio:>17.2f}"
        lines.append(f"{number:>5} {active:>8.1%} {fired:>11.1%} {quality}")
    lines += [""]
    for candidate in result["candidates"]:
        sides = " and ".join(candidate["sides"])
        lines.append(f"{sides}, rank {candidate['rank']}: {candidate['predicted']:.1%} of neurons predicted")
    change = predicted / exact - 1
    lines.append(f"held-out perplexity {exact:.4f} exact, {predicted:.4f} predicted ({change:+.2%}; reference engine)")
    for warning in result["warnings"]:
        lines += ["", as_typed(f"warning: {warning}")]
    return "\n".join(lines)
