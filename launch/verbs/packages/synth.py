"""`neuronpipe synth NAME [-o DIR]`: make a package with a real model's shape and published activation statistics.

--gguf writes a GGUF counterpart for other engines, with or without the package: the same dense work, in llama.cpp's
architecture for the shape, as Q4_0 or as --quantization says.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from neuronpipe.launch.formats import line_to_paste, show_bytes
from neuronpipe.launch.progress import Progress
from neuronpipe.plans.lab.synth.shapes import SHAPES
from neuronpipe.plans.package.manifest import GATE_QUANTIZATIONS, PREDICTOR_QUANTIZATIONS
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.errors import UserError

GGUF_PRESETS = ("Q4_0", "Q4_K_M", "Q6_K", "Q8_0", "MXFP4")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", choices=SHAPES, help=f"one of {', '.join(SHAPES)}")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="package directory to make (with --gguf it may be left out)"
    )
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="write a GGUF of the same shape, for other engines")
    parser.add_argument(
        "--quantization",
        choices=GGUF_PRESETS,
        default="Q4_0",
        help="encodings of the GGUF's weights, by the name of a preset of llama.cpp (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="random seed of the weights (default: %(default)s)")
    parser.add_argument(
        "--gates",
        choices=GATE_QUANTIZATIONS,
        help="quantization of the gate matrices (default: q4, like the others)",
    )
    parser.add_argument(
        "--predictor-quantization",
        choices=PREDICTOR_QUANTIZATIONS,
        default="q4",
        help="quantization of the predictor's factors, if the shape has one (default: %(default)s)",
    )
    parser.add_argument(
        "--reads", choices=("attention", "feed_forward"), default="attention", help="input of the predictor"
    )
    parser.add_argument(
        "--by-neuron", action="store_true", help="store feed-forwards neuron by neuron, also if all neurons fire"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing package")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(arguments: argparse.Namespace) -> int:
    if arguments.output is None and arguments.gguf is None:
        raise UserError("synth: give -o DIR for the package, --gguf FILE for a GGUF counterpart, or both")
    # The blocks of neurons keep every core busy: the library's own threads would only spin.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy is imported
    package = None if arguments.output is None else _synthesize(arguments)
    if arguments.gguf is not None:
        with Progress("writing the GGUF", "bytes", plain=arguments.json, steady=True) as progress:
            from neuronpipe.plans.lab.gguf_counterpart import write_gguf_counterpart

            shape, preset = SHAPES[arguments.name], arguments.quantization
            write_gguf_counterpart(arguments.gguf, shape, arguments.seed, progress, preset=preset)
    result = {} if package is None else _package_facts(package)
    if arguments.gguf is not None:
        result |= {"gguf": str(arguments.gguf), "gguf_bytes": arguments.gguf.stat().st_size}
    if arguments.json:
        print(json.dumps(result))
        return 0
    if package is not None:
        print(
            f"{package.path}: {package.manifest.name}, {show_bytes(result['bytes'])}, "
            f"{result['activity']:.1%} of neurons active"
        )
        print(f"look at it: {line_to_paste('inspect', package.path, '--activations')}")
        print(f"run it: {line_to_paste('run', package.path, '-p', 'default0')}")
    if arguments.gguf is not None:
        print(f"{arguments.gguf}: GGUF counterpart of {arguments.name}, {show_bytes(result['gguf_bytes'])}")
    return 0


def _synthesize(arguments: argparse.Namespace) -> Package:
    with Progress("making", "bytes", plain=arguments.json, steady=True) as progress:
        # Imported here, with the progress already shown, because it takes a while.
        from neuronpipe.plans.lab.synth.synthesize import synthesize

        return synthesize(
            arguments.name,
            SHAPES[arguments.name],
            arguments.output,
            seed=arguments.seed,
            gates=arguments.gates,
            by_neuron=arguments.by_neuron,
            reads=arguments.reads,
            predictor_quantization=arguments.predictor_quantization,
            overwrite=arguments.overwrite,
            progress=progress,
        )


def _package_facts(package: Package) -> dict[str, Any]:
    manifest = package.manifest
    assert manifest.fired_by_layer is not None
    assert manifest.workload is not None
    return {
        "package": str(package.path),
        "id": manifest.id,
        "bytes": sum(entry.bytes for entry in manifest.files.values()),
        "activity": sum(manifest.fired_by_layer) / len(manifest.fired_by_layer),
        "presets": {name: place[0] for name, place in manifest.workload.presets.items()},
    }
