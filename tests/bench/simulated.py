"""The simulator and real runs on this machine: `neuronpipe bench` of a package, and the same sequences simulated under
the same plan, with the services' own cache and the planner's costs.

    python tests/bench/simulated.py PACKAGE [--resident 50+75+100] [--mode predicted+exact] [--tests tg64]

Prints a JSON line for each cell when it is done, then a Markdown table. The sequences are those of `bench`, recorded by
the reference engine (a second for a token of a 7B). Times count only on a quiet machine with a device profile
(`neuronpipe profile device PACKAGE`); misses depend on neither. It asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from neuronpipe.launch.arguments.plan_arguments import add_plan_arguments, plan_options  # noqa: E402
from neuronpipe.launch.bench.cases import Case, Prompts, parse_cases  # noqa: E402
from neuronpipe.launch.bench.planned import relative_error  # noqa: E402
from neuronpipe.launch.bench.report import show_error  # noqa: E402
from neuronpipe.launch.formats import show_bytes  # noqa: E402
from neuronpipe.launch.planning.plan import plan_here  # noqa: E402
from neuronpipe.plans.activity.replacement_policies import Ids  # noqa: E402
from neuronpipe.plans.lab.devices.device_file import this_machine  # noqa: E402
from neuronpipe.plans.lab.simulate.recording import record  # noqa: E402
from neuronpipe.plans.lab.simulate.residency import SequenceDemand  # noqa: E402
from neuronpipe.plans.lab.simulate.simulate import PlannedRun, Result, simulate_plan  # noqa: E402
from neuronpipe.plans.measure.probe import probe  # noqa: E402
from neuronpipe.plans.number_format import show_number  # noqa: E402
from neuronpipe.plans.package.reader import Package  # noqa: E402
from neuronpipe.plans.plan.document import Mode  # noqa: E402
from neuronpipe.protocol.errors import UserError  # noqa: E402

from tests.bench.ablations import bench  # noqa: E402

FIGURES = {
    "tokens_per_s": show_number,
    "miss_rate": "{:.2%}".format,
    "flash_bytes_per_token": show_bytes,
    "flash_reads_per_token": "{:,.0f}".format,
    "dram_bytes_per_token": show_bytes,
    "exposed_io_share": "{:.0%}".format,
}
"""The columns: keys of a row of `bench`, and their formatting."""


def simulated_row(result: Result) -> dict[str, float]:
    """Return the figures that a row of `bench` has as well."""
    row = {name: float(getattr(result, name)) for name in FIGURES if hasattr(result, name)}
    return row | {"exposed_io_share": result.exposed_io}


def sequences_of(
    package: Package, mode: Mode, case: Case, repetitions: int, preset: str | None
) -> list[SequenceDemand]:
    """Record the sequences of the warm-up and of the repetitions of `bench`: a prompt in one step, then tokens.

    A synthetic package's answer is known: it continues the prompt.
    """
    prompts, length = Prompts(package, preset), case.prompt_tokens + case.decode_tokens
    sequences = []
    for number in range(repetitions + 1):
        tokens = prompts.take(number, length, length)
        _, steps = record(package, mode, tokens, f"text {number}").by_cluster()
        prompt = [_together(layers) for layers in zip(*steps[: case.prompt_tokens], strict=True)]
        sequences.append(SequenceDemand(steps[case.prompt_tokens :], prompt))
        print(f"recorded {number + 1} of {repetitions + 1} texts, mode {mode}", file=sys.stderr, flush=True)
    return sequences


def _together(ids: tuple[Ids, ...]) -> Ids:
    return np.unique(np.concatenate(ids))


def simulate_cell(package: Package, words: list[str], case: Case, sequences: list[SequenceDemand]) -> dict[str, float]:
    """Simulate what `bench` would measure with these options."""
    parser = argparse.ArgumentParser()
    add_plan_arguments(parser)
    device = probe(package.path)
    plan_result = plan_here(package, plan_options(parser.parse_args([*words])), plain=False)
    assert plan_result.search is not None
    run = PlannedRun(
        device=this_machine(device),
        manifest=package.manifest,
        plan=plan_result.plan,
        facts=plan_result.search[1].chosen.device,
    )
    middle = case.prompt_tokens + case.decode_tokens // 2
    return simulated_row(simulate_plan(run, sequences, 1, context_tokens=middle, prompt_tokens=case.prompt_tokens)[0])


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield Markdown lines: simulated / measured and the error."""
    heads = ["package", "resident", "mode"]
    for name in FIGURES:
        heads += [f"{name.removesuffix('_per_token').replace('_', ' ')}, simulated / measured", "error"]
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for row in rows:
        cells = [row["package"], f"{row['resident']} %", row["mode"]]
        for name, show in FIGURES.items():
            simulated, measured = row["simulated"][name], row["measured"][name]
            cells += [f"{show(simulated)} / {show(measured)}", show_error(relative_error(simulated, measured))]
        yield f"| {' | '.join(cells)} |"
    for name in ("tokens_per_s", "miss_rate"):
        errors = [relative_error(row["simulated"][name], row["measured"][name]) for row in rows]
        sizes = [abs(error) for error in errors if error is not None]
        if sizes:
            within = sum(size <= 0.1 for size in sizes)
            yield f"\n- {name}: {within} of {len(sizes)} within 10 %, median error {statistics.median(sizes):.0%}"


def main() -> None:
    """Measure and simulate every cell, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("package", type=Path)
    parser.add_argument("--resident", default="50+75+100", metavar="PERCENTS", help="(default: %(default)s)")
    parser.add_argument("--mode", default="predicted+exact", metavar="MODES", help="(default: %(default)s)")
    parser.add_argument("--tests", type=parse_cases, default="tg64", metavar="TEST", help="one (default: %(default)s)")
    parser.add_argument("--repetitions", type=int, default=2, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--context", type=int, default=1024, metavar="TOKENS", help="(default: %(default)s)")
    parser.add_argument("--workload", metavar="PRESET", help="of a synthetic package (default: its default)")
    arguments = parser.parse_args()
    rows = []
    try:
        package, case = Package.open(arguments.package), arguments.tests[0]
        for mode in arguments.mode.split("+"):
            sequences = sequences_of(package, mode, case, arguments.repetitions, arguments.workload)
            for resident in arguments.resident.split("+"):
                words = ["--ffn-resident", f"{resident}%", "--mode", mode, "--context", str(arguments.context)]
                bench_words = [*words, "--tests", case.name, "--repetitions", str(arguments.repetitions)]
                measured = bench(
                    arguments.package,
                    (*bench_words, *(("--workload", arguments.workload) if arguments.workload else ())),
                )
                if isinstance(measured, str):
                    raise UserError(measured)
                row = {
                    "package": arguments.package.name,
                    "resident": resident,
                    "mode": mode,
                    "measured": {name: measured[0][name] for name in FIGURES},
                    "simulated": simulate_cell(package, words, case, sequences),
                }
                rows.append(row)
                print(json.dumps(row), flush=True)
        print("\n".join(["", *table(rows)]))
    except UserError as error:
        sys.exit(f"simulated.py: {error}")


if __name__ == "__main__":
    main()
