"""The plan beside a sweep of its own knobs: within a limit, is what the planner chose the fastest that there is? And
for a speed that is asked for: is it reached, and with the least memory?

    python tests/bench/sweep.py PACKAGE --memory 3GiB,4GiB [--quality predicted] [--rows FILE.jsonl]
    python tests/bench/sweep.py PACKAGE --resident 50,75,100
    python tests/bench/sweep.py PACKAGE --target-speed 5,10

Knobs: of each way to compute and read (mode, workers, bundle) the best plan; of the chosen way every chunk of prompts
and every depth, one changed at a time. Each is a plan file of its own and a `neuronpipe bench` of one repetition, all
by turns. Then the finals: the chosen one and the fastest others once more, so that the best is none by chance.

A line of the file for each as soon as it is measured; the same command goes on from there, and --table prints what
there is. Not a test: it asserts nothing. Nothing else may run meanwhile.
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

from neuronpipe.launch.arguments.values import parse_bytes, parse_share, parse_speed  # noqa: E402
from neuronpipe.launch.formats import show_bytes  # noqa: E402
from neuronpipe.launch.planning import DEMO  # noqa: E402
from neuronpipe.launch.planning.options import add_plan_arguments, plan_options  # noqa: E402
from neuronpipe.launch.planning.package_argument import open_package  # noqa: E402
from neuronpipe.launch.planning.plan import PlanResult, plan_here  # noqa: E402
from neuronpipe.plans.number_format import show_number  # noqa: E402
from neuronpipe.plans.plan.document import Plan  # noqa: E402
from neuronpipe.plans.planner.candidates import USUAL, Candidate, SearchResult  # noqa: E402
from neuronpipe.plans.planner.plan_options import LimitTooSmall  # noqa: E402
from neuronpipe.plans.planner.search import Search  # noqa: E402
from neuronpipe.protocol.errors import UserError  # noqa: E402

from tests.bench.ablations import bench  # noqa: E402
from tests.bench.planned import Asked, Row, add_line, done_cell, read_lines, table_line  # noqa: E402

KNOBS = ("mode", "workers", "bundle", "chunk", "depth")
WAY = ("mode", "workers", "bundle")
FINALISTS = 3  # besides the chosen one
TARGET = 0.05  # of the best found, and of a speed asked for
MEMORY_TARGET = 0.1
LIMIT_FACTORS = (1.0, 0.7, 0.8, 0.85, 0.9, 0.95, 1.05, 1.1, 1.2)  # of the limit of the plan for a speed

Trial = tuple[dict[str, Any], Plan]
"""What names a plan within its case, and the plan."""


# ---- what is tried -------------------------------------------------------------------------------------------
def knobs(made: Plan) -> dict[str, Any]:
    """A plan's, by name."""
    compute, flash = made.compute, made.flash
    values = compute.mode, len(compute.decode_workers()), flash.bundle, compute.prefill_chunk_tokens, flash.depth
    return dict(zip(KNOBS, values, strict=True))


def trials(search: Search, found: SearchResult, names: Iterable[str] = KNOBS) -> list[Trial]:
    """The chosen plan first; then the best of every other way, and those of its own way with one knob turned. Only the
    knobs named are turned."""
    chosen, turned = knobs(found.chosen.plan), set(names)
    made = [chosen | {"chosen": True}]
    plans = [found.chosen.plan]
    for one in (*found.candidates, *search.refinements(found.chosen)):
        others = knobs(one.plan)
        differ = {name for name in KNOBS if others[name] != chosen[name]}
        by_way = differ & set(WAY)
        if others | {"chosen": False} in made or not (by_way or differ) <= turned or not (by_way or len(differ) == 1):
            continue
        made.append(others | {"chosen": False})
        plans.append(one.plan)
    return list(zip(made, plans, strict=True))


def trials_of_limits(search: Search, chosen: Candidate) -> list[Trial]:
    """For a speed: the plan for it, and what is best within other limits."""
    limit = chosen.plan.memory.limit_bytes
    made: list[Trial] = [({"limit_bytes": limit, "chosen": True}, chosen.plan)]
    for factor in LIMIT_FACTORS[1:]:
        try:
            other = search.best(int(factor * limit))
        except LimitTooSmall:
            continue
        made.append(({"limit_bytes": int(factor * limit), "chosen": False}, other.plan))
    return made


# ---- measuring -----------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Case:
    """A limit or a speed. words: what asks `neuronpipe plan` for it."""

    name: str
    words: tuple[str, ...]
    target_tokens_per_s: float | None = None


def cases(given: argparse.Namespace) -> list[Case]:
    """What the command line asks for."""
    found = [Case(f"memory={text}", ("--memory", text)) for text in given.memory]
    found += [Case(f"resident={text}%", ("--ffn-resident", f"{text}%")) for text in given.resident]
    found += [Case(f"speed={text}", ("--target-speed", text), float(text)) for text in given.target_speed]
    return found


def planned_case(package: Path, words: Iterable[str]) -> PlanResult:
    """Make the plan as `neuronpipe plan` does."""
    parser = argparse.ArgumentParser()
    add_plan_arguments(parser)
    return plan_here(open_package(package), plan_options(parser.parse_args([*words])), plain=False)


def measure_all(package: Path, file: Path, shared: Asked, tried: list[Trial], *, rounds: int, final: bool) -> None:
    """Each trial once a round, where the file does not have it yet."""
    asked_for = [shared | name | {"final": final, "round": number} for number in range(rounds) for name, _ in tried]
    plans = {json.dumps(name): made for name, made in tried}
    names = [name for _ in range(rounds) for name, _ in tried]
    lines = read_lines(file)
    for number, (asked, name) in enumerate(zip(asked_for, names, strict=True), 1):
        if done_cell(lines, asked) is not None:
            continue
        what = " ".join(f"{key}={value}" for key, value in name.items())
        print(f"{shared['case']}{' finals' * final}, {number} of {len(names)}: {what} ...", file=sys.stderr, flush=True)
        line = add_line(file, asked, _bench(package, plans[json.dumps(name)], asked))
        if line["refused"] is not None:
            print(f"refused: {line['refused']}", file=sys.stderr)


def _bench(package: Path, made: Plan, asked: Asked) -> list[Row] | str:
    with tempfile.NamedTemporaryFile("w", suffix=".json", prefix="sweep-") as plan_file:
        plan_file.write(made.to_json())
        plan_file.flush()
        words = ["--plan", plan_file.name, "--tests", asked["tests"], "--repetitions", "1"]
        if asked["workload"] is not None:
            words += ["--workload", asked["workload"]]
        return bench(package, tuple(words))


def finalists(lines: Iterable[Row], shared: Asked, tried: list[Trial]) -> list[Trial]:
    """The chosen one, and the fastest others by the median of their rounds."""
    speeds = {json.dumps(name): _speed(_answers(lines, shared | name | {"final": False})) for name, _ in tried}
    others = sorted(tried[1:], key=lambda one: -(speeds[json.dumps(one[0])] or 0.0))
    return [tried[0], *others[:FINALISTS]]


def _answers(lines: Iterable[Row], asked: Asked) -> list[float]:
    """Tokens/s of every round of this; of a round that was measured twice, both."""
    return [
        line["row"]["tokens_per_s"]
        for line in lines
        if line["row"] is not None and all(line["asked"].get(key) == value for key, value in asked.items())
    ]


def _speed(answers: list[float]) -> float | None:
    return statistics.median(answers) if answers else None


# ---- tables --------------------------------------------------------------------------------------------------
def markdown(lines: list[Row]) -> str:
    """Of limits: chosen, best found, ratio. Of speeds: what is reached, and the smallest limit that reaches it."""
    by_case: dict[str, list[Row]] = {}
    for line in lines:
        shared = {key: line["asked"][key] for key in ("case", "package", "quality", "context", "tests", "workload")}
        by_case.setdefault(json.dumps(shared), []).append(line)
    limits = [(json.loads(key), some) for key, some in by_case.items() if not key.startswith('{"case": "speed=')]
    speeds = [(json.loads(key), some) for key, some in by_case.items() if key.startswith('{"case": "speed=')]
    shown = []
    if limits:
        shown += _limits_table(limits)
    if speeds:
        shown += _speeds_table(speeds)
    return "\n".join(shown) + "\n"


def _limits_table(of_cases: list[tuple[Asked, list[Row]]]) -> list[str]:
    heads = ("limit", "test", "chosen", "tokens/s", "best found", "tokens/s", "chosen / best", "tried")
    shown, ratios = [table_line(heads), "|---" * len(heads) + "|"], []
    for shared, lines in of_cases:
        final = [line for line in lines if line["asked"]["final"]] or lines
        speeds = _speeds_of(final)
        chosen = _last_chosen(final)
        if chosen not in speeds:
            shown.append(table_line((shared["case"], shared["tests"], "refused", *"-----")))
            continue
        best = max(speeds, key=lambda name: statistics.median(speeds[name]))
        ratio = statistics.median(speeds[chosen]) / statistics.median(speeds[best])
        ratios.append(ratio)
        of_chosen, of_best = (_said(name, speeds[name]) for name in (chosen, best))
        shown.append(
            table_line(
                (shared["case"], shared["tests"], *of_chosen, *of_best, f"{ratio:.2f}", str(len(_speeds_of(lines))))
            )
        )
    within = sum(ratio >= 1 - TARGET for ratio in ratios)
    return [*shown, "", f"- {within} of {len(ratios)} within {TARGET:.0%} of the best found", ""]


def _speeds_table(of_cases: list[tuple[Asked, list[Row]]]) -> list[str]:
    heads = ("asked for", "limit of the plan", "reached", "reached / asked", "smallest limit", "limit / smallest")
    shown, reached_all, small_all = [table_line(heads), "|---" * len(heads) + "|"], 0, 0
    for shared, lines in of_cases:
        wanted = float(shared["case"].removeprefix("speed="))
        limits = {json.loads(name)["limit_bytes"]: _speed(some) or 0.0 for name, some in _speeds_of(lines).items()}
        chosen = json.loads(_last_chosen(lines))["limit_bytes"]
        if chosen not in limits:
            shown.append(table_line((show_number(wanted), show_bytes(chosen), "refused", *"---")))
            continue
        enough = [limit for limit, speed in limits.items() if speed >= (1 - TARGET) * wanted]
        least = min(enough, default=None)
        ratio = None if least is None else chosen / least
        reached_all += limits[chosen] >= (1 - TARGET) * wanted
        small_all += ratio is not None and ratio <= 1 + MEMORY_TARGET
        shown.append(
            table_line(
                (
                    show_number(wanted),
                    show_bytes(chosen),
                    show_number(limits[chosen]),
                    f"{limits[chosen] / wanted:.2f}",
                    "none" if least is None else show_bytes(least),
                    "-" if ratio is None else f"{ratio:.2f}",
                )
            )
        )
    return [
        *shown,
        "",
        f"- {reached_all} of {len(of_cases)} reach the speed within {TARGET:.0%}; {small_all} with at most "
        f"{MEMORY_TARGET:.0%} more than the smallest limit that does",
        "",
    ]


def _name(asked: Asked) -> str:
    """Of a trial within its case: its knobs or its limit."""
    return json.dumps({key: asked[key] for key in (*KNOBS, "limit_bytes") if key in asked})


def _speeds_of(lines: Iterable[Row]) -> dict[str, list[float]]:
    speeds: dict[str, list[float]] = {}
    for line in lines:
        if line["row"] is not None:
            speeds.setdefault(_name(line["asked"]), []).append(line["row"]["tokens_per_s"])
    return speeds


def _last_chosen(lines: list[Row]) -> str:
    return next(_name(line["asked"]) for line in reversed(lines) if line["asked"]["chosen"])


def _said(name: str, speeds: list[float]) -> tuple[str, str]:
    one = json.loads(name)
    reads = "clusters whole" if one["bundle"] else "parts apart"
    said = f"{one['mode']}, {one['workers']} workers, {reads}, prompt by {one['chunk']}, {one['depth']} reads at once"
    spread = f" ({show_number(min(speeds))} to {show_number(max(speeds))})" if len(speeds) > 1 else ""
    return said, show_number(statistics.median(speeds)) + spread


# ---- all of it -----------------------------------------------------------------------------------------------
def _checked(parse: Any, suffix: str = "") -> Any:
    """A list, each of its words as `parse` takes it, kept as it was typed."""

    def words(text: str) -> list[str]:
        found = [word.strip().removesuffix("%") for word in text.split(",")]
        for word in found:
            parse(word + suffix)
        return found

    return words


def _knob_names(text: str) -> list[str]:
    found = [word.strip() for word in text.split(",")]
    if unknown := set(found) - set(KNOBS):
        raise argparse.ArgumentTypeError(f"{min(unknown)!r} is none of {', '.join(KNOBS)}")
    return found


def sweep(given: argparse.Namespace, case: Case, file: Path) -> None:
    """One case: every trial by turns, and the finals."""
    words = [*case.words]
    for name in ("quality", "context"):
        words += [f"--{name}", str(getattr(given, name))] if getattr(given, name) is not None else []
    made = planned_case(given.package, words)
    assert made.search is not None
    search, found = made.search
    context = found.chosen.plan.compute.context_tokens
    of_request = f"pp{min(USUAL.prompt_tokens, context - USUAL.answer_tokens)}+tg{USUAL.answer_tokens}"
    tests = given.tests or (of_request if case.target_tokens_per_s is None else f"tg{USUAL.answer_tokens}")
    shared = {
        "case": case.name,
        "package": made.manifest.id,
        "quality": given.quality,
        "context": given.context,
        "tests": tests,
        "workload": given.workload,
    }
    if case.target_tokens_per_s is not None:
        tried = trials_of_limits(search, found.chosen)
        measure_all(given.package, file, shared, tried, rounds=given.rounds, final=False)
        return
    tried = trials(search, found, given.knobs)
    measure_all(given.package, file, shared, tried, rounds=given.rounds, final=False)
    last = finalists(read_lines(file), shared, tried)
    measure_all(given.package, file, shared, last, rounds=given.rounds, final=True)


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
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # which ends the `bench` under way as well
    file = given.rows or Path(f"sweep-{given.package.resolve().name}.jsonl")
    asked = cases(given)
    if not asked and not given.table:
        parser.error("nothing to sweep: name --memory, --resident or --target-speed")
    try:
        try:
            for case in [] if given.table else asked:
                sweep(given, case, file)
        except KeyboardInterrupt:
            print("interrupted; the same command goes on from here", file=sys.stderr)
        print(markdown(read_lines(file)), end="")
    except UserError as error:
        sys.exit(f"sweep.py: {error}")


if __name__ == "__main__":
    main()
