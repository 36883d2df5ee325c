"""`neuronpipe compile [PACKAGE] [--soc SOC]`: write the ONNX graphs by which a neural processor computes a package's
prompts.

With --soc the graphs are also compiled into contexts for a chip, which need not be in this machine; otherwise each
start prepares them. The files go to the package's folder npu or to -o, and nothing else of the package changes. Models
of one shape share graphs. Contexts that fit are not made again.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from neuronpipe.launch.formats import as_typed, show_bytes
from neuronpipe.launch.planning import DEMO
from neuronpipe.launch.planning.package_argument import add_package_argument, open_package
from neuronpipe.launch.progress import Progress
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.document import read_plan
from neuronpipe.plans.plan.segment_sizes import product_blocks
from neuronpipe.protocol.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_package_argument(parser, has_default=False)
    parser.add_argument(
        "--soc",
        metavar="SOC",
        help="the chip, by QNN's number or by name, e.g. 57 or SM8650; here: this machine's chip (default: make only "
        "the graphs, which a worker without Python needs)",
    )
    parser.add_argument(
        "--plan",
        type=Path,
        metavar="FILE",
        help="the plan whose prefill windows the graphs fit (default: the largest windows)",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="DIR",
        help="write the graphs to this folder (default: the package's folder npu)",
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

    def find_named_chip() -> Chip | None:
        if arguments.soc != "here":
            return None if arguments.soc is None else chip_of(arguments.soc)
        match = find_chip()
        if match is None or match.chip is None:
            chip = "no chip of Qualcomm's" if match is None else f"{match.description}, which is not known"
            raise UserError(f"--soc here: this machine has {chip}; name the chip, as in --soc 57")
        return match.chip

    package = open_package(arguments.package, plain=arguments.json)
    require_modules(Provider("cpu"))
    if reason := OnnxBackend("cpu").supports(package.manifest, "prefill"):
        raise UserError(f"{package.path}: {reason}")
    chip, neurons = find_named_chip(), _neurons(package, arguments.plan)
    folder = arguments.output or files.folder_of(package.path, chip, neurons)
    began, is_new = time.monotonic(), True
    if chip is None:
        files.write_graphs(folder, package.manifest, neurons)
    else:
        require_modules(provider := Provider("qnn-emulated", chip))
        runtime = Runtime(provider)
        qnn = runtime.qnn_version()
        if is_new := not files.suit(folder, package.manifest, chip, neurons, qnn):
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
        "made": is_new,
        "seconds": round(time.monotonic() - began, 1),
    }
    if arguments.json:
        print(json.dumps(result))
        return 0
    kind = "graphs" if chip is None else f"contexts for {chip}"
    outcome = f"made in {result['seconds']} s" if is_new else "existed already"
    print(as_typed(f"{folder}: {kind}, {neurons} neurons at once, {show_bytes(size)}: {outcome}"))
    return 0


def _neurons(package: Package, plan: Path | None) -> int:
    """Return the number of neurons of the feed-forward graph, as runs of this plan compute it."""
    layout = package.manifest.layout
    blocks = layout.blocks if plan is None else read_plan(plan).compute.prefill_window_blocks
    return product_blocks(layout, blocks) * layout.block_neurons
