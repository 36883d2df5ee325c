"""What ./launch/test runs, and in which order; its last line sums up all Python tests as pytest does.

    python -m tests.everything           style, types, C tests, Python tests
    python -m tests.everything --quick   without C tests, and of the Python tests those of tests/unit that are
                                         not slow and start no pipeline

Types, C tests and most Python tests keep the processors busy side by side; the output of the first two is shown when
they have ended. What measures time or memory comes after, one by one. Ends with 1 when anything failed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("protocol", "native", "plans", "services", "launch")
SKIPPED = 77  # the exit status of tests/native/run.sh when it lacks tools for a part
TYPES = ("mypy", *(word for name in PACKAGES for word in ("-p", f"neuronpipe.{name}")))
QUICK_LEAVES_OUT = ("pipeline", "browser", "slow")
C_TESTS = ("sh", "tests/native/run.sh")
# Beside other tests numpy's threads spin for each other, which took three times the processor time.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}


def say(text: str) -> None:
    """A line for the person who waits."""
    print(f"neuronpipe: {text}", file=sys.stderr, flush=True)


def run(*words: str, **variables: str) -> bool:
    """Run a program, its output as it comes. Whether it succeeded."""
    return subprocess.run(words, cwd=ROOT, env=os.environ | variables).returncode == 0


class Background:
    """A program beside others, which go first; `passed` waits for it and shows what it said."""

    def __init__(self, name: str, words: Sequence[str]) -> None:
        self._name = name
        self._process = subprocess.Popen(
            ("nice", *words), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )

    def passed(self) -> bool:
        """Whether it succeeded. A part of the C tests may be skipped for want of tools, but not on a build machine."""
        said, _ = self._process.communicate()
        code = self._process.returncode
        say(self._name)
        sys.stdout.buffer.write(said)
        sys.stdout.flush()
        if code == SKIPPED and os.environ.get("CI") != "true":
            say(f"a part of the {self._name} was skipped")
            return True
        return code == 0

    def end(self) -> None:
        """End it with all that it started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            self._process.communicate()


@contextlib.contextmanager
def background(name: str, words: Sequence[str] | None) -> Iterator[Background | None]:
    """A program beside what is done meanwhile; nothing where there is none."""
    one = Background(name, words) if words else None
    try:
        yield one
    finally:
        if one:
            one.end()


def pytest(report: Path, *words: str, **variables: str) -> bool:
    """Some of the Python tests. Whether they passed."""
    return run(sys.executable, "-m", "pytest", f"--junitxml={report}", *words, **variables)


def mixed(files: Iterable[Path]) -> list[Path]:
    """Files in an order in which those of each folder are spread evenly, since what they do is alike: tests of faults
    wait, those of conformance compute, and side by side they take the time of one. The last ones are of unit/, the
    largest folder, and short, so that all processes end together."""
    places: list[tuple[float, Path]] = []
    for _, of_folder in itertools.groupby(sorted(files), lambda file: file.parent):
        names = list(of_folder)
        places += [(place / len(names), name) for place, name in enumerate(names)]
    return [file for _, file in sorted(places)]


def tests_side_by_side(report: Path, quick: bool) -> bool:
    """Three at a time: two leave the two processors of a build machine idle for a quarter of the time, since many tests
    wait for something. Whole files, whose tests share what they need."""
    say("unit tests without pipelines, browsers and slow ones" if quick else "Python tests, three at a time")
    left_out = ("alone", "nightly", *(QUICK_LEAVES_OUT if quick else ()))
    which = " and ".join(f"not {mark}" for mark in left_out)
    files = mixed(ROOT.glob("tests/unit/test_*.py" if quick else "tests/*/test_*.py"))
    words = ("-m", which, "-n", "3", "--dist", "loadfile", "--no-loadscope-reorder", *map(str, files))
    return pytest(report, *words, **ONE_THREAD)


def tests_alone(report: Path) -> bool:
    """One by one, with nothing beside them. Only their files are collected: all would take seconds."""
    say("Python tests that must be alone")
    files = [str(file) for file in sorted(ROOT.glob("tests/*/test_*.py")) if "mark.alone" in file.read_text()]
    return pytest(report, "-m", "alone and not nightly", *files)


def summary(reports: Sequence[Path], seconds: float) -> str:
    """The reports' sum as pytest writes it: "2 failed, 1650 passed, 3 skipped in 500.12s (0:08:20)"."""
    counts: Counter[str] = Counter()
    for report in filter(Path.exists, reports):
        for suite in ElementTree.parse(report).getroot().iter("testsuite"):
            counts.update({key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")})
    passed = counts["tests"] - counts["failures"] - counts["errors"] - counts["skipped"]
    words = {"failed": counts["failures"], "passed": passed, "skipped": counts["skipped"], "errors": counts["errors"]}
    said = ", ".join(f"{count} {word}" for word, count in words.items() if count or word == "passed")
    minutes, rest = divmod(int(seconds), 60)
    return f"{said} in {seconds:.2f}s ({minutes // 60}:{minutes % 60:02}:{rest:02})"


def everything(quick: bool, reports: Path) -> bool:
    """Whether all is well. What only looks at the source comes first: it takes a second."""
    say("style")
    if not (run("ruff", "check", ".") and run("ruff", "format", "--check", ".")):
        return False
    began = time.monotonic()
    parts = [reports / "beside.xml", *([] if quick else [reports / "alone.xml"])]
    with (
        background("types", TYPES) as types,
        background("C tests", None if quick else C_TESTS) as native,
    ):
        passed = tests_side_by_side(parts[0], quick)
        others = [one.passed() for one in (types, native) if one]
    if not all(others):
        return False
    if not quick:
        passed = tests_alone(parts[1]) and passed
    print(summary(parts, time.monotonic() - began), flush=True)
    return passed


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(prog="./launch/test", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="unit tests alone, without C tests, and nothing slow")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each of two thousand processes would compile all it imports
    try:
        with tempfile.TemporaryDirectory(prefix="np-") as reports:
            sys.exit(not everything(parser.parse_args().quick, Path(reports)))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
