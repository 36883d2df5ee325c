"""The simulator beside real runs on this machine: `neuronpipe bench` of a package, and the same texts simulated under
the same plan, with the services' own cache and the planner's costs.

    python tests/bench/simulated.py PACKAGE [--resident 50+75+100] [--mode predicted+exact] [--tests tg64]

Prints a line of JSON for each cell as soon as it is there, then a Markdown table. The texts are those that `bench`
takes, recorded by the reference engine (a second for a token of a 7B). Times count only on a quiet machine with a
device profile (`neuronpipe profile device PACKAGE`); misses do not depend on either. Not a test: it asserts nothing.
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

from neuronpipe.launch.bench.cases import Case, Prompts, parse_cases  # noqa: E402
from neuronpipe.launch.bench.planned import relative_error  # noqa: E402
from neuronpipe.launch.bench.report import show_error  # noqa: E402
from neuronpipe.launch.formats import show_bytes  # noqa: E402
from neuronpipe.launch.planning.options import add_plan_arguments, plan_options  # noqa: E402
from neuronpipe.launch.planning.plan import plan_here  # noqa: E402
from neuronpipe.plans.activity.replacement_policies import Ids  # noqa: E402
from neuronpipe.plans.lab.simulate.device_file import this_machine  # noqa: E402
from neuronpipe.plans.lab.simulate.residency import Text  # noqa: E402
from neuronpipe.plans.lab.simulate.simulate import PlannedRun, Result, simulate_plan  # noqa: E402
from neuronpipe.plans.lab.simulate.wanted_neurons import record  # noqa: E402
from neuronpipe.plans.measure.probe import probe  # noqa: E402
from neuronpipe.plans.number_format import show_number  # noqa: E402
from neuronpipe.plans.package.reader import Package  # noqa: E402
from neuronpipe.plans.plan.document import Mode  # noqa: E402
from neuronpipe.protocol.errors import UserError  # noqa: E402

from tests.bench.ablations import bench  # noqa: E402

SHOWN = {
    "tokens_per_s": show_number,
    "miss_rate": "{:.2%}".format,
    "flash_bytes_per_token": show_bytes,
    "flash_reads_per_token": "{:,.0f}".format,
    "dram_bytes_per_token": show_bytes,
    "exposed_io_share": "{:.0%}".format,
}
"""Columns: names of a row of `bench`, and how they are shown."""


def simulated_row(result: Result) -> dict[str, float]:
    """The figures that a row of `bench` has as well."""
    row = {name: float(getattr(result, name)) for name in SHOWN if hasattr(result, name)}
    return row | {"exposed_io_share": result.exposed_io}


def texts_of(package: Package, mode: Mode, case: Case, repetitions: int, preset: str | None) -> list[Text]:
    """The warm-up's text and those of the repetitions, as `bench` asks for them: a prompt in one step, then tokens. Of
    a synthetic package the answer is known, it goes on as the prompt did."""
    prompts, length = Prompts(package, preset), case.prompt_tokens + case.decode_tokens
    texts = []
    for number in range(repetitions + 1):
        tokens = prompts.take(number, length, length)
        _, steps = record(package, mode, tokens, f"text {number}").by_cluster()
        prompt = [_together(layers) for layers in zip(*steps[: case.prompt_tokens], strict=True)]
        texts.append(Text(steps[case.prompt_tokens :], prompt))
        print(f"recorded {number + 1} of {repetitions + 1} texts, mode {mode}", file=sys.stderr, flush=True)
    return texts


def _together(wanted: tuple[Ids, ...]) -> Ids:
    return np.unique(np.concatenate(wanted))


def simulate_cell(package: Package, words: list[str], case: Case, texts: list[Text]) -> dict[str, float]:
    """What `bench` with these words would measure."""
    parser = argparse.ArgumentParser()
    add_plan_arguments(parser)
    device = probe(package.path)
    made = plan_here(package, plan_options(parser.parse_args([*words])), plain=False)
    assert made.search is not None
    run = PlannedRun(
        device=this_machine(device), manifest=package.manifest, plan=made.plan, facts=made.search[1].chosen.device
    )
    middle = case.prompt_tokens + case.decode_tokens / 2
    return simulated_row(simulate_plan(run, texts, 1, context_tokens=middle, prompt_tokens=case.prompt_tokens)[0])


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Markdown: simulated / measured and the error."""
    heads = ["package", "resident", "mode"]
    for name in SHOWN:
        heads += [f"{name.removesuffix('_per_token').replace('_', ' ')}, simulated / measured", "error"]
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for row in rows:
        cells = [row["package"], f"{row['resident']} %", row["mode"]]
        for name, show in SHOWN.items():
            mine, theirs = row["simulated"][name], row["measured"][name]
            cells += [f"{show(mine)} / {show(theirs)}", show_error(relative_error(mine, theirs))]
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
    given = parser.parse_args()
    rows = []
    try:
        package, case = Package.open(given.package), given.tests[0]
        for mode in given.mode.split("+"):
            texts = texts_of(package, mode, case, given.repetitions, given.workload)
            for resident in given.resident.split("+"):
                words = ["--ffn-resident", f"{resident}%", "--mode", mode, "--context", str(given.context)]
                asked = [*words, "--tests", case.name, "--repetitions", str(given.repetitions)]
                measured = bench(given.package, (*asked, *(("--workload", given.workload) if given.workload else ())))
                if isinstance(measured, str):
                    raise UserError(measured)
                row = {
                    "package": given.package.name,
                    "resident": resident,
                    "mode": mode,
                    "measured": {name: measured[0][name] for name in SHOWN},
                    "simulated": simulate_cell(package, words, case, texts),
                }
                rows.append(row)
                print(json.dumps(row), flush=True)
        print("\n".join(["", *table(rows)]))
    except UserError as error:
        sys.exit(f"simulated.py: {error}")


if __name__ == "__main__":
    main()
