"""`neuronpipe synth NAME TARGET`: a package with a real model's shape and published activation statistics.

With --gguf a shape twin for other engines is written as well: same dense work, architecture llama, Q4_0.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from neuronpipe.launch.formats import line_to_paste, show_bytes
from neuronpipe.launch.progress import Progress
from neuronpipe.plans.package.manifest import QUANTIZATIONS
from neuronpipe.plans.synth.shapes import SHAPES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", choices=SHAPES, help=f"one of {', '.join(SHAPES)}")
    parser.add_argument("target", type=Path, metavar="TARGET", help="package directory to make")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="also write a GGUF of the same shape")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random weights (default: %(default)s)")
    parser.add_argument(
        "--predictor-quantization", choices=QUANTIZATIONS, default="q4", help="of the factors (default: %(default)s)"
    )
    parser.add_argument(
        "--reads", choices=("attention", "feed_forward"), default="attention", help="what the predictor reads"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace TARGET if it is a package")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(arguments: argparse.Namespace) -> int:
    # Blocks of neurons keep every core busy. The library's own threads, which wait by spinning, would take their time.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy is imported
    from neuronpipe.plans.synth.make import synthesize

    with Progress("making", "bytes", plain=arguments.json, steady=True) as progress:
        package = synthesize(
            arguments.name,
            SHAPES[arguments.name],
            arguments.target,
            seed=arguments.seed,
            reads=arguments.reads,
            predictor_quantization=arguments.predictor_quantization,
            overwrite=arguments.overwrite,
            progress=progress,
        )
    if arguments.gguf is not None:
        from neuronpipe.plans.synth.twin import write_twin

        with Progress("making the twin", "bytes", plain=arguments.json, steady=True) as progress:
            write_twin(arguments.gguf, package.manifest.model, arguments.seed, progress)
    manifest = package.manifest
    size_bytes = sum(entry.bytes for entry in manifest.files.values())
    assert manifest.fired_by_layer is not None
    assert manifest.workload is not None
    activity = sum(manifest.fired_by_layer) / len(manifest.fired_by_layer)
    if arguments.json:
        result = {
            "package": str(package.path),
            "id": manifest.id,
            "bytes": size_bytes,
            "activity": activity,
            "presets": {name: place[0] for name, place in manifest.workload.presets.items()},
        }
        print(json.dumps(result))
    else:
        print(f"{package.path}: {manifest.name}, {show_bytes(size_bytes)}, {activity:.1%} of neurons active")
        print(f"look at it: {line_to_paste('inspect', package.path, '--activations')}")
        print(f"run it: {line_to_paste('run', package.path, '-p', 'default0')}")
    return 0
