"""What ./launch/test leaves out when it is to be quick, and the line at its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.everything import ROOT, Background, mixed, summary
from tests.pipeline import Shell


def report(path: Path, **counts: int) -> Path:
    """As pytest --junitxml writes it."""
    attributes = " ".join(f'{name}="{count}"' for name, count in counts.items())
    path.write_text(f'<?xml version="1.0"?><testsuites name="pytest tests"><testsuite {attributes} /></testsuites>')
    return path


def test_a_test_that_is_given_a_shell_is_one_with_a_pipeline(request: pytest.FixtureRequest, shell: Shell) -> None:
    assert request.node.get_closest_marker("pipeline")


def test_any_other_test_is_not(request: pytest.FixtureRequest) -> None:
    assert not request.node.get_closest_marker("pipeline")


def test_the_last_line_sums_up_all_python_tests(tmp_path: Path) -> None:
    first = report(tmp_path / "1", tests=1300, failures=0, errors=0, skipped=2)
    second = report(tmp_path / "2", tests=361, failures=0, errors=0, skipped=0)
    assert summary([first, second], 500.123) == "1659 passed, 2 skipped in 500.12s (0:08:20)"


def test_the_last_line_names_what_failed_and_what_broke(tmp_path: Path) -> None:
    only = report(tmp_path / "1", tests=10, failures=2, errors=1, skipped=0)
    assert summary([only], 3.0) == "2 failed, 7 passed, 1 errors in 3.00s (0:00:03)"


@pytest.mark.parametrize(
    ("code", "ci", "passed"), [(0, "", True), (1, "", False), (77, "", True), (77, "true", False), (0, "true", True)]
)
def test_a_build_machine_lacks_no_tools(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, code: int, ci: str, passed: bool
) -> None:
    monkeypatch.setenv("CI", ci)
    assert Background("C tests", ("sh", "-c", f"echo said; exit {code}")).passed() is passed
    assert capfd.readouterr().out == "said\n"


def test_what_is_not_waited_for_ends_with_all_that_it_started() -> None:
    one = Background("C tests", ("sh", "-c", "sleep 1000; true"))
    one.end()  # reads to the end of what was said, which the sleep holds open
    one.end()


def test_files_of_a_folder_are_spread_among_those_of_others() -> None:
    files = [Path(folder) / name for folder, names in (("a", "12"), ("b", "1234")) for name in names]
    assert [str(file) for file in mixed(reversed(files))] == ["a/1", "b/1", "b/2", "a/2", "b/3", "b/4"]


def test_the_last_files_are_short_ones() -> None:
    every = mixed(ROOT.glob("tests/*/test_*.py"))
    assert len(every) == len(set(every)) > 180
    assert {file.parent.name for file in every[-2:]} <= {"unit", "integration"}
    assert every[-1].parent.name == "unit"
