"""`neuronpipe compile [PACKAGE] [--soc SOC]`: the graphs that a neural processor computes a package's prompts with, and
what they become for a chip: made once, so that no run has to.

The chip need not be here. Models of one shape have the same graphs: only what is not there yet is made.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from neuronpipe.launch.formats import as_typed, show_bytes
from neuronpipe.launch.planning import DEMO, add_package_argument, open_package
from neuronpipe.launch.progress import Progress
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.document import read_plan
from neuronpipe.plans.plan.segment_sizes import product_blocks
from neuronpipe.protocol.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_package_argument(parser)
    parser.add_argument(
        "--soc",
        metavar="SOC",
        help="the chip, as QNN numbers it or by its name: 57 or SM8650; here: this machine's. Without it the graphs "
        "alone are made, which a worker without Python needs",
    )
    parser.add_argument(
        "--plan", type=Path, metavar="FILE", help="the plan whose windows they are to fit (default: the largest)"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="where they go (default: into the package's folder npu)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(arguments: argparse.Namespace) -> int:
    from neuronpipe.services.offload.npu import graph_files as files
    from neuronpipe.services.offload.npu.backend import OnnxBackend
    from neuronpipe.services.offload.npu.chips import Chip, chip_of, find_chip
    from neuronpipe.services.offload.npu.providers import Provider, require_modules
    from neuronpipe.services.offload.npu.sessions import Runtime

    if arguments.package is DEMO and arguments.output is None:
        raise UserError("compile: name the package to which the graphs belong, or a folder for them with -o DIR")

    def chip_asked() -> Chip | None:
        if arguments.soc != "here":
            return None if arguments.soc is None else chip_of(arguments.soc)
        found = find_chip()
        if found is None or found.chip is None:
            said = "no chip of Qualcomm's" if found is None else f"{found.description}, which is not known here"
            raise UserError(f"--soc here: this machine has {said}; name the chip, as in --soc 57")
        return found.chip

    package = open_package(arguments.package, plain=arguments.json)
    require_modules(Provider("cpu"))
    if why := OnnxBackend("cpu").supports(package.manifest, "prefill"):
        raise UserError(f"{package.path}: {why}")
    chip, neurons = chip_asked(), _neurons(package, arguments.plan)
    folder = arguments.output or files.folder_of(package.path, chip, neurons)
    began, made = time.monotonic(), True
    if chip is None:
        files.write_graphs(folder, package.manifest, neurons)
    else:
        require_modules(provider := Provider("qnn-emulated", chip))
        runtime = Runtime(provider)
        qnn = runtime.qnn_version()
        if made := not files.suit(folder, package.manifest, chip, neurons, qnn):
            with Progress("compiling", "graphs", plain=arguments.json, steady=True) as progress:
                files.write_graphs(
                    folder,
                    package.manifest,
                    neurons,
                    chip=chip,
                    qnn=qnn,
                    prepare=lambda graph: runtime.prepare(graph, chip),
                    progress=progress,
                )
    size = sum(file.stat().st_size for file in folder.iterdir())
    result = {
        "folder": str(folder),
        "chip": None if chip is None else {"soc": chip.soc, "name": chip.name, "arch": chip.arch},
        "neurons": neurons,
        "bytes": size,
        "made": made,
        "seconds": round(time.monotonic() - began, 1),
    }
    if arguments.json:
        print(json.dumps(result))
        return 0
    what = "graphs" if chip is None else f"contexts for {chip}"
    done = f"made in {result['seconds']} s" if made else "were there already"
    print(as_typed(f"{folder}: {what}, {neurons} neurons at once, {show_bytes(size)}: {done}"))
    return 0


def _neurons(package: Package, plan: Path | None) -> int:
    """Of the feed-forward graph, as runs of this plan compute it."""
    layout = package.manifest.layout
    blocks = layout.blocks if plan is None else read_plan(plan).compute.prefill_window_blocks
    return product_blocks(layout, blocks) * layout.block_neurons
