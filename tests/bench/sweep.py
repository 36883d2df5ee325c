"""The plan and a sweep of its own knobs: is the planner's choice within a limit the fastest, and is a requested speed
reached, with the least memory?

    python tests/bench/sweep.py PACKAGE --memory 3GiB,4GiB [--quality predicted] [--rows FILE.jsonl]
    python tests/bench/sweep.py PACKAGE --resident 50,75,100
    python tests/bench/sweep.py PACKAGE --target-speed 5,10

Tried are, for each combination of mode, workers and bundle, the best plan; for the chosen combination every prompt
chunk and every depth, one changed at a time. Each trial is a plan file and a `neuronpipe bench` of one repetition, in
turns. In the finals the chosen plan and the fastest others are measured once more, so that the best is not best by
chance.

Each measurement is appended to a file of JSON lines. The same command continues from there, and --table prints the
tables of a file. Not a test: it asserts nothing. Nothing else may run meanwhile.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from neuronpipe.launch.arguments.plan_arguments import add_plan_arguments, plan_options  # noqa: E402
from neuronpipe.launch.arguments.values import parse_bytes, parse_share, parse_speed  # noqa: E402
from neuronpipe.launch.formats import show_bytes  # noqa: E402
from neuronpipe.launch.planning import DEMO  # noqa: E402
from neuronpipe.launch.planning.package_argument import open_package  # noqa: E402
from neuronpipe.launch.planning.plan import PlanResult, plan_here  # noqa: E402
from neuronpipe.plans.number_format import show_number  # noqa: E402
from neuronpipe.plans.plan.document import Plan  # noqa: E402
from neuronpipe.plans.planner.candidates import USUAL, Candidate, SearchResult  # noqa: E402
from neuronpipe.plans.planner.plan_options import LimitTooSmall  # noqa: E402
from neuronpipe.plans.planner.search import Search  # noqa: E402
from neuronpipe.protocol.errors import UserError  # noqa: E402

from tests.bench.ablations import bench  # noqa: E402
from tests.bench.planned import CellKey, Row, add_line, done_cell, read_lines, table_line  # noqa: E402

KNOBS = ("mode", "workers", "bundle", "chunk", "depth")
WAY = ("mode", "workers", "bundle")
FINALISTS = 3  # besides the chosen plan
TARGET = 0.05  # relative to the best trial, and to a requested speed
MEMORY_TARGET = 0.1
LIMIT_FACTORS = (1.0, 0.7, 0.8, 0.85, 0.9, 0.95, 1.05, 1.1, 1.2)  # of the limit of the plan for a speed

Trial = tuple[dict[str, Any], Plan]
"""The fields that name a plan within its case, and the plan."""


# ---- what is tried -------------------------------------------------------------------------------------------
def knobs(plan: Plan) -> dict[str, Any]:
    """Return a plan's knobs by name."""
    compute, flash = plan.compute, plan.flash
    values = compute.mode, len(compute.decode_workers()), flash.bundle, compute.prefill_chunk_tokens, flash.depth
    return dict(zip(KNOBS, values, strict=True))


def trials(search: Search, search_result: SearchResult, names: Iterable[str] = KNOBS) -> list[Trial]:
    """Return the chosen plan, then the best of every other combination, then plans with one knob changed.

    Only the knobs in `names` are changed.
    """
    chosen, turned = knobs(search_result.chosen.plan), set(names)
    tried = [chosen | {"chosen": True}]
    plans = [search_result.chosen.plan]
    for candidate in (*search_result.candidates, *search.refinements(search_result.chosen)):
        candidate_knobs = knobs(candidate.plan)
        differ = {name for name in KNOBS if candidate_knobs[name] != chosen[name]}
        by_way = differ & set(WAY)
        if (
            candidate_knobs | {"chosen": False} in tried
            or not (by_way or differ) <= turned
            or not (by_way or len(differ) == 1)
        ):
            continue
        tried.append(candidate_knobs | {"chosen": False})
        plans.append(candidate.plan)
    return list(zip(tried, plans, strict=True))


def trials_of_limits(search: Search, chosen: Candidate) -> list[Trial]:
    """Return the plan for a speed, then the best plans within other limits."""
    limit = chosen.plan.memory.limit_bytes
    limit_trials: list[Trial] = [({"limit_bytes": limit, "chosen": True}, chosen.plan)]
    for factor in LIMIT_FACTORS[1:]:
        try:
            candidate = search.best(int(factor * limit))
        except LimitTooSmall:
            continue
        limit_trials.append(({"limit_bytes": int(factor * limit), "chosen": False}, candidate.plan))
    return limit_trials


# ---- measuring -----------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Case:
    """A limit or a speed. words: the options of `neuronpipe plan` for it."""

    name: str
    words: tuple[str, ...]
    target_tokens_per_s: float | None = None


def cases(arguments: argparse.Namespace) -> list[Case]:
    """Return the cases of the command line."""
    cases_so_far = [Case(f"memory={text}", ("--memory", text)) for text in arguments.memory]
    cases_so_far += [Case(f"resident={text}%", ("--ffn-resident", f"{text}%")) for text in arguments.resident]
    cases_so_far += [Case(f"speed={text}", ("--target-speed", text), float(text)) for text in arguments.target_speed]
    return cases_so_far


def planned_case(package: Path, words: Iterable[str]) -> PlanResult:
    """Return the result of `neuronpipe plan` with these options."""
    parser = argparse.ArgumentParser()
    add_plan_arguments(parser)
    return plan_here(open_package(package), plan_options(parser.parse_args([*words])), plain=False)


def measure_all(
    package: Path, file: Path, shared: CellKey, trial_list: list[Trial], *, rounds: int, final: bool
) -> None:
    """Measure each trial once a round, unless the file has it."""
    keys = [shared | name | {"final": final, "round": number} for number in range(rounds) for name, _ in trial_list]
    plans = {json.dumps(name): plan for name, plan in trial_list}
    names = [name for _ in range(rounds) for name, _ in trial_list]
    lines = read_lines(file)
    for number, (key, name) in enumerate(zip(keys, names, strict=True), 1):
        if done_cell(lines, key) is not None:
            continue
        what = " ".join(f"{key}={value}" for key, value in name.items())
        print(f"{shared['case']}{' finals' * final}, {number} of {len(names)}: {what} ...", file=sys.stderr, flush=True)
        line = add_line(file, key, _bench(package, plans[json.dumps(name)], key))
        if line["refused"] is not None:
            print(f"refused: {line['refused']}", file=sys.stderr)


def _bench(package: Path, plan: Plan, key: CellKey) -> list[Row] | str:
    with tempfile.NamedTemporaryFile("w", suffix=".json", prefix="sweep-") as plan_file:
        plan_file.write(plan.to_json())
        plan_file.flush()
        words = ["--plan", plan_file.name, "--tests", key["tests"], "--repetitions", "1"]
        if key["workload"] is not None:
            words += ["--workload", key["workload"]]
        return bench(package, tuple(words))


def finalists(lines: Iterable[Row], shared: CellKey, trial_list: list[Trial]) -> list[Trial]:
    """Return the chosen trial, and the fastest others by the median of their rounds."""
    speeds = {json.dumps(name): _speed(_answers(lines, shared | name | {"final": False})) for name, _ in trial_list}
    fastest = sorted(trial_list[1:], key=lambda trial: -(speeds[json.dumps(trial[0])] or 0.0))
    return [trial_list[0], *fastest[:FINALISTS]]


def _answers(lines: Iterable[Row], fields: CellKey) -> list[float]:
    """Return the tokens/s of all lines with these fields, also of a round that was measured twice."""
    return [
        line["row"]["tokens_per_s"]
        for line in lines
        if line["row"] is not None and all(line["asked"].get(key) == value for key, value in fields.items())
    ]


def _speed(answers: list[float]) -> float | None:
    return statistics.median(answers) if answers else None


# ---- tables --------------------------------------------------------------------------------------------------
def markdown(lines: list[Row]) -> str:
    """Return the tables: for limits chosen, best and ratio; for speeds the reached one and the smallest limit for
    it."""
    by_case: dict[str, list[Row]] = {}
    for line in lines:
        shared = {key: line["asked"][key] for key in ("case", "package", "quality", "context", "tests", "workload")}
        by_case.setdefault(json.dumps(shared), []).append(line)
    limits = [(json.loads(key), some) for key, some in by_case.items() if not key.startswith('{"case": "speed=')]
    speeds = [(json.loads(key), some) for key, some in by_case.items() if key.startswith('{"case": "speed=')]
    table_lines = []
    if limits:
        table_lines += _limits_table(limits)
    if speeds:
        table_lines += _speeds_table(speeds)
    return "\n".join(table_lines) + "\n"


def _limits_table(of_cases: list[tuple[CellKey, list[Row]]]) -> list[str]:
    heads = ("limit", "test", "chosen", "tokens/s", "best found", "tokens/s", "chosen / best", "tried")
    table_lines, ratios = [table_line(heads), "|---" * len(heads) + "|"], []
    for shared, lines in of_cases:
        final = [line for line in lines if line["asked"]["final"]] or lines
        speeds = _speeds_of(final)
        chosen = _last_chosen(final)
        if chosen not in speeds:
            table_lines.append(table_line((shared["case"], shared["tests"], "refused", *"-----")))
            continue
        best = max(speeds, key=lambda name: statistics.median(speeds[name]))
        ratio = statistics.median(speeds[chosen]) / statistics.median(speeds[best])
        ratios.append(ratio)
        of_chosen, of_best = (_description(name, speeds[name]) for name in (chosen, best))
        table_lines.append(
            table_line(
                (shared["case"], shared["tests"], *of_chosen, *of_best, f"{ratio:.2f}", str(len(_speeds_of(lines))))
            )
        )
    within = sum(ratio >= 1 - TARGET for ratio in ratios)
    return [*table_lines, "", f"- {within} of {len(ratios)} within {TARGET:.0%} of the best found", ""]


def _speeds_table(of_cases: list[tuple[CellKey, list[Row]]]) -> list[str]:
    heads = ("asked for", "limit of the plan", "reached", "reached / asked", "smallest limit", "limit / smallest")
    table_lines, reached_all, small_all = [table_line(heads), "|---" * len(heads) + "|"], 0, 0
    for shared, lines in of_cases:
        target_tokens_per_s = float(shared["case"].removeprefix("speed="))
        limits = {json.loads(name)["limit_bytes"]: _speed(some) or 0.0 for name, some in _speeds_of(lines).items()}
        chosen = json.loads(_last_chosen(lines))["limit_bytes"]
        if chosen not in limits:
            table_lines.append(table_line((show_number(target_tokens_per_s), show_bytes(chosen), "refused", *"---")))
            continue
        enough = [limit for limit, speed in limits.items() if speed >= (1 - TARGET) * target_tokens_per_s]
        min_limit = min(enough, default=None)
        ratio = None if min_limit is None else chosen / min_limit
        reached_all += limits[chosen] >= (1 - TARGET) * target_tokens_per_s
        small_all += ratio is not None and ratio <= 1 + MEMORY_TARGET
        table_lines.append(
            table_line(
                (
                    show_number(target_tokens_per_s),
                    show_bytes(chosen),
                    show_number(limits[chosen]),
                    f"{limits[chosen] / target_tokens_per_s:.2f}",
                    "none" if min_limit is None else show_bytes(min_limit),
                    "-" if ratio is None else f"{ratio:.2f}",
                )
            )
        )
    return [
        *table_lines,
        "",
        f"- {reached_all} of {len(of_cases)} reach the speed within {TARGET:.0%}; {small_all} with at most "
        f"{MEMORY_TARGET:.0%} more than the smallest limit that does",
        "",
    ]


def _name(fields: CellKey) -> str:
    """Return a trial's name within its case: its knobs or its limit."""
    return json.dumps({key: fields[key] for key in (*KNOBS, "limit_bytes") if key in fields})


def _speeds_of(lines: Iterable[Row]) -> dict[str, list[float]]:
    speeds: dict[str, list[float]] = {}
    for line in lines:
        if line["row"] is not None:
            speeds.setdefault(_name(line["asked"]), []).append(line["row"]["tokens_per_s"])
    return speeds


def _last_chosen(lines: list[Row]) -> str:
    return next(_name(line["asked"]) for line in reversed(lines) if line["asked"]["chosen"])


def _description(name: str, speeds: list[float]) -> tuple[str, str]:
    values = json.loads(name)
    reads = "clusters whole" if values["bundle"] else "parts apart"
    words = (
        f"{values['mode']}, {values['workers']} workers, {reads}, prompt by {values['chunk']}, "
        f"{values['depth']} reads at once"
    )
    spread = f" ({show_number(min(speeds))} to {show_number(max(speeds))})" if len(speeds) > 1 else ""
    return words, show_number(statistics.median(speeds)) + spread


# ---- all of it -----------------------------------------------------------------------------------------------
def _checked(parse: Any, suffix: str = "") -> Any:
    """Return a parser of comma-separated words that checks each with `parse` and returns them as typed."""

    def words(text: str) -> list[str]:
        words_list = [word.strip().removesuffix("%") for word in text.split(",")]
        for word in words_list:
            parse(word + suffix)
        return words_list

    return words


def _knob_names(text: str) -> list[str]:
    names = [word.strip() for word in text.split(",")]
    if unknown := set(names) - set(KNOBS):
        raise argparse.ArgumentTypeError(f"{min(unknown)!r} is none of {', '.join(KNOBS)}")
    return names


def sweep(arguments: argparse.Namespace, case: Case, file: Path) -> None:
    """Measure a case: every trial in turns, and the finals."""
    words = [*case.words]
    for name in ("quality", "context"):
        words += [f"--{name}", str(getattr(arguments, name))] if getattr(arguments, name) is not None else []
    plan_result = planned_case(arguments.package, words)
    assert plan_result.search is not None
    search, search_result = plan_result.search
    context = search_result.chosen.plan.compute.context_tokens
    of_request = f"pp{min(USUAL.prompt_tokens, context - USUAL.answer_tokens)}+tg{USUAL.answer_tokens}"
    tests = arguments.tests or (of_request if case.target_tokens_per_s is None else f"tg{USUAL.answer_tokens}")
    shared = {
        "case": case.name,
        "package": plan_result.manifest.id,
        "quality": arguments.quality,
        "context": arguments.context,
        "tests": tests,
        "workload": arguments.workload,
    }
    if case.target_tokens_per_s is not None:
        trial_list = trials_of_limits(search, search_result.chosen)
        measure_all(arguments.package, file, shared, trial_list, rounds=arguments.rounds, final=False)
        return
    trial_list = trials(search, search_result, arguments.knobs)
    measure_all(arguments.package, file, shared, trial_list, rounds=arguments.rounds, final=False)
    last = finalists(read_lines(file), shared, trial_list)
    measure_all(arguments.package, file, shared, last, rounds=arguments.rounds, final=True)


def main() -> None:
    """Measure what is missing, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("package", nargs="?", type=Path, default=DEMO, help="package directory (default: the demo)")
    parser.add_argument(
        "--memory", type=_checked(parse_bytes), default=[], metavar="LIST", help="limits, e.g. 3GiB,4GiB"
    )
    parser.add_argument(
        "--resident",
        type=_checked(parse_share, "%"),
        default=[],
        metavar="LIST",
        help="feed-forward shares, e.g. 50,75",
    )
    parser.add_argument("--target-speed", type=_checked(parse_speed), default=[], metavar="LIST", help="tokens/s")
    parser.add_argument("--quality", metavar="exact|predicted|LOSS", help="as for `neuronpipe plan`")
    parser.add_argument("--context", type=int, metavar="TOKENS", help="(default: the package's)")
    parser.add_argument("--knobs", type=_knob_names, default=KNOBS, metavar="LIST", help=f"of {','.join(KNOBS)}")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="turns, and of the finals (default: 3)")
    parser.add_argument("--tests", metavar="TEST", help="one (default: pp512+tg128, for a speed tg128)")
    parser.add_argument("--workload", metavar="PRESET", help="of a synthetic package (default: its default)")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="JSON lines (default: sweep-PACKAGE.jsonl)")
    parser.add_argument("--table", action="store_true", help="print what the file has and measure nothing")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # which ends the `bench` under way as well
    file = arguments.rows or Path(f"sweep-{arguments.package.resolve().name}.jsonl")
    case_list = cases(arguments)
    if not case_list and not arguments.table:
        parser.error("nothing to sweep: name --memory, --resident or --target-speed")
    try:
        try:
            for case in [] if arguments.table else case_list:
                sweep(arguments, case, file)
        except KeyboardInterrupt:
            print("interrupted; the same command goes on from here", file=sys.stderr)
        print(markdown(read_lines(file)), end="")
    except UserError as error:
        sys.exit(f"sweep.py: {error}")


if __name__ == "__main__":
    main()
