"""`neuronpipe profile [PACKAGE]`: count which neurons fire on a text, and give the package a predictor of them.

The predictor is fitted without training on one part of the text and judged on the other; the package's manifest gets a
new id, so plans made before are refused.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from neuronpipe.launch.formats import as_typed
from neuronpipe.launch.planning import DEMO, add_package_argument, open_package
from neuronpipe.launch.progress import Progress
from neuronpipe.plans.inspect import low_recall
from neuronpipe.plans.package.layout import GROUP_WEIGHTS
from neuronpipe.plans.package.manifest import QUANTIZATIONS
from neuronpipe.plans.package.predictor_writer import DEFAULT_RECALL
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.errors import UserError

MAX_DEFAULT_TOKENS = 16384
DEFAULT_VALUES = 1 << 25  # gate values of one layer kept at a time: 128 MiB, a few times over while fitting
DEFAULT_RANK_PART = 11  # of the width, in groups: 352 of 4096 is the published choice


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_package_argument(parser)
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="UTF-8; its last fifth is held out (default: the demo's own corpus)"
    )
    parser.add_argument("--rank", type=int, help="rank of the factors, a multiple of 32 (default: about width / 11)")
    parser.add_argument(
        "--quantization", choices=QUANTIZATIONS, default="q8", help="of the factors (default: %(default)s)"
    )
    parser.add_argument(
        "--recall",
        type=float,
        default=DEFAULT_RECALL,
        help="share of the active neurons that the predictor is to find (default: %(default)s)",
    )
    parser.add_argument(
        "--reads",
        choices=("attention", "feed_forward"),
        default="feed_forward",
        help="the predictor's input: attention's is known earlier, the feed-forward's predicts better (default)",
    )
    parser.add_argument(
        "--sides", choices=("auto", "trigger", "both"), default="auto", help="predict gates, or gates and ups (drelu)"
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
        help="the imported predictor was trained on normed vectors, not on the residual stream",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(arguments: argparse.Namespace) -> int:
    from neuronpipe.plans.predictor.imported import open_imported
    from neuronpipe.plans.predictor.profile import profile

    package = open_package(arguments.package)
    if not 0.5 <= arguments.recall < 1:
        raise UserError(f"--recall {arguments.recall}: expected a share from 0.5 to below 1")
    if arguments.tokens is None:
        arguments.tokens = min(MAX_DEFAULT_TOKENS, DEFAULT_VALUES // package.manifest.model.neurons)
    if arguments.tokens < GROUP_WEIGHTS:
        raise UserError(f"--tokens {arguments.tokens}: expected {GROUP_WEIGHTS} or more")
    width = package.manifest.model.width
    default_rank = min(width, max(2, width // (DEFAULT_RANK_PART * GROUP_WEIGHTS)) * GROUP_WEIGHTS)
    with Progress("profiling", "tokens", plain=arguments.json, steady=True) as progress:
        profiled = profile(
            package,
            _texts(arguments, package),
            rank=arguments.rank or default_rank,
            quantization=arguments.quantization,
            recall=arguments.recall,
            reads=arguments.reads,
            sides=arguments.sides,
            imported=open_imported(arguments.imported, package.manifest) if arguments.imported else None,
            imported_reads_normed=arguments.import_reads_normed,
            progress=progress,
        )
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
        "warnings": [said] if (said := low_recall(manifest.predictor, arguments.recall)) else [],
    }
    print(json.dumps(result) if arguments.json else render(result))
    return 0


def _texts(arguments: argparse.Namespace, package: Package) -> Any:
    from neuronpipe.plans.predictor import texts

    if arguments.text is not None:
        return texts.from_file(package, arguments.text, arguments.tokens)
    if package.manifest.name == Package.open(DEMO).manifest.name:
        return texts.from_demo(package, arguments.tokens)
    return texts.from_workload(package.manifest, arguments.tokens)


def render(result: dict[str, Any]) -> str:
    """The page for a person."""
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
