"""The test suite: whole runs with the candidate as its role's processes, among ordinary, slow, garbling, stopped or
killed peers.

The candidate's first answers must agree with those of the built-in implementations: to the bit in the same numerics,
within the tolerances of agreement.py in others. All later answers must have the bits of its first ones.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from neuronpipe.launch.conformance import peers
from neuronpipe.launch.conformance.agreement import Answers, compare
from neuronpipe.launch.conformance.probe import Probe
from neuronpipe.launch.supervisor.start import started_run
from neuronpipe.plans.package.manifest import BUNDLES
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.document import Plan
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.messages.client import Status
from neuronpipe.services.runtime.implementations import SWAPPABLE, Implementation, Implementations, Use

TEXT_TOKENS = 24
TEXTS = 3
SOURCE, COPY = 1000, 2000  # numbers of prompts that share no beginning with those of other questions
COPIED = "a text that begins with another's keys and values"
IDLE_S, BEATS = 1.5, 3  # at least BEATS beats within IDLE_S; four are requested per second
STOPPED_S = 0.5
DAMAGE_STRIDE_BYTES = 4096


class Failed(Exception):
    """Raised when a check fails."""


@frozen
class Result:
    """The result of one check.

    why: the reason of a failure; empty if it passed
    """

    name: str
    why: str
    seconds: float


class Suite:
    """All checks of one role.

    use: the candidate, for all processes of the role; None tests the built-in implementation
    patience_s: time limit of each client's answers, in seconds
    """

    def __init__(self, package: Package, plan: Plan, role: str, use: Implementation | None, patience_s: float) -> None:
        self._package, self._plan, self._role, self._patience_s = package, plan, role, patience_s
        self._uses = [] if use is None else [Use(role, None, use)]
        roles = {spec.role for spec in plan.compute.processes}
        self._peer_roles = [peer for peer in ("coordinator", *SWAPPABLE) if peer in roles - {role}]
        self._expected = Answers({})
        self._results: list[Result] = []
        self._report: Callable[[Result], None] = lambda result: None
        self._progress: Callable[[int, int], None] = lambda done, total: None

    def run(self, report: Callable[[Result], None], progress: Callable[[int, int], None]) -> list[Result]:
        """Run all checks.

        report: called with each result
        progress: called with the number of finished checks and of all checks, also while none finishes

        Raises UserError if the run of the built-in implementations fails.
        """
        self._report, self._progress = report, progress
        self._show_progress()
        with tempfile.TemporaryDirectory(prefix="np-") as folder:
            with self._probe(self._plan, [], Path(folder)) as (probe, _):
                self._expected = self._answers(probe)
            self._run_checks("ordinary peers", Path(folder), [], self._ordinary)
            self._run_checks("garbling peers", Path(folder), self._faulty_peers("Garbling"), self._same_bits)
            self._run_checks("slow peers", Path(folder), self._faulty_peers("Slow"), self._same_bits_slowly)
            if self._role == "loader":
                self._run_checks("damaged flash", Path(folder), [], self._refuses_damage, self._damaged(Path(folder)))
        return self._results

    @property
    def checks(self) -> int:
        """Number of checks if none fails: with ordinary peers, with two kinds of faulty peers, with damaged flash."""
        processes = sum(spec.role == self._role for spec in self._plan.compute.processes)
        ordinary = 6 + (self._role == "prefill") + 2 * len(self._peer_roles) + processes
        return ordinary + 2 + 2 * (self._role == "loader")

    # ---- runs ------------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def _probe(
        self, plan: Plan, uses: list[Use], folder: Path, package: Package | None = None
    ) -> Iterator[tuple[Probe, Path]]:
        record = folder / "record"
        record.unlink(missing_ok=True)
        os.environ[peers.RECORD] = str(record)
        package = package or self._package
        with started_run(package, plan, folder / "run", stays=False, uses=Implementations(uses)) as run:
            yield Probe(run, package, plan), record

    def _run_checks(
        self,
        name: str,
        folder: Path,
        uses: list[Use],
        checks: Callable[[Probe, Path], Iterator[str]],
        package: Package | None = None,
    ) -> None:
        """Do the checks of one run. `checks` yields the names of those that passed; the first failure ends the run."""
        self._began = time.monotonic()
        witness = Use("coordinator", None, _peer("Witness"))
        try:
            with self._probe(self._plan, [witness, *uses, *self._uses], folder, package) as (probe, record):
                for check in checks(probe, record):
                    self._note(f"{name}: {check}", "")
            if name == "ordinary peers":
                self._drained(record)
                self._note(f"{name}: drains when told to", "")
        except (Failed, UserError) as error:
            self._note(name, str(error))

    def _note(self, name: str, why: str) -> None:
        result = Result(name, why, time.monotonic() - self._began)
        self._began = time.monotonic()
        self._results.append(result)
        self._report(result)
        self._show_progress()

    def _show_progress(self, *_: int) -> None:
        self._progress(len(self._results), self.checks)

    def _faulty_peers(self, kind: str) -> list[Use]:
        """Return faulty implementations of the roles that the candidate communicates with."""
        roles = {"loader": ("coordinator", "cache"), "cache": ("coordinator", "loader")}
        return [Use(role, None, _peer(kind + role.capitalize())) for role in roles.get(self._role, ("coordinator",))]

    def _damaged(self, folder: Path) -> Package:
        """Return a copy of the package with a wrong bit in every part of every cluster."""
        self._package.require_bundles("the check of damaged flash")
        copy = folder / "damaged"
        shutil.copytree(self._package.path, copy)
        with (copy / BUNDLES).open("r+b") as stream:
            content = bytearray(stream.read())
            for offset in range(0, len(content), DAMAGE_STRIDE_BYTES):
                content[offset] ^= 4
            stream.seek(0)
            stream.write(content)
        return Package.open(copy)

    # ---- checks ----------------------------------------------------------------------------------------------
    def _ordinary(self, probe: Probe, record: Path) -> Iterator[str]:
        with probe.client(self._patience_s) as client:
            status = client.status()
        self._greeted(record, status)
        yield "greets, is welcomed, is ready"
        yield self._agrees(self._answers(probe))
        self._at_once(probe)
        yield f"{TEXTS} texts at once are what each is alone"
        if self._role == "prefill":
            self._copy(probe)
            yield "copies keys and values when told to"
        self._beats(record)
        yield "gives signs of life while idle"
        for role in self._peer_roles:
            self._disturb(probe, f"{role}.0", signal.SIGSTOP)
            yield f"bears {role}.0 standing still"
            self._disturb(probe, f"{role}.0", signal.SIGKILL)
            yield f"bears {role}.0 being killed"
        for name in self._role_processes(status):
            self._disturb(probe, name, signal.SIGKILL)
            yield f"is started again after {name} was killed"
        self._compare(self._answers(probe))
        yield "computes the same bits after all that"

    def _same_bits(self, probe: Probe, record: Path) -> Iterator[str]:
        self._compare(self._answers(probe))
        yield "computes the same bits"

    def _same_bits_slowly(self, probe: Probe, record: Path) -> Iterator[str]:
        """Compare a single text, because each of its reads waits for slow peers."""
        self._compare(self._answers(probe, texts=1))
        yield "computes the same bits"

    def _refuses_damage(self, probe: Probe, record: Path) -> Iterator[str]:
        try:
            with probe.client(self._patience_s) as client:
                probe.text(client)
        except UserError as error:
            if BUNDLES not in str(error):
                raise
        else:
            raise Failed("a text was computed from bundles that do not match their checksums")
        yield "a part that does not match its checksum is not given out"
        with probe.client(self._patience_s) as client:
            client.status()
        yield "the run lives on"

    def _agrees(self, answers: Answers) -> str:
        """Compare with the built-in implementations, and take the answers as the expectation of later comparisons."""
        agreement = compare(self._expected, answers)
        self._expected = answers
        return "computes the bits that our own implementations compute" if agreement is None else str(agreement)

    def _answers(self, probe: Probe, texts: int = TEXTS) -> Answers:
        answers = probe.answers(self._patience_s, self._show_progress)
        with probe.client(self._patience_s) as client:
            for number in range(texts):
                answers.texts[f"text {number}"] = probe.text(client, TEXT_TOKENS, 100 * number, self._show_progress)
        return answers

    def _compare(self, answers: Answers) -> None:
        compare(self._expected, answers)

    def _compare_texts(self, texts: dict[str, str]) -> None:
        self._compare(Answers(self._expected.numerics, texts=texts))

    def _at_once(self, probe: Probe) -> None:
        answers: dict[str, str] = {}
        errors: list[str] = []

        def generate(number: int) -> None:
            try:
                with probe.client(self._patience_s) as client:
                    answers[f"text {number}"] = probe.text(client, TEXT_TOKENS, 100 * number)
            except UserError as error:
                errors.append(str(error))

        threads = [threading.Thread(target=generate, args=(number,)) for number in range(TEXTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if len(answers) < TEXTS:
            why = "".join(f": {error}" for error in errors[:1])
            raise Failed(f"{TEXTS - len(answers)} of {TEXTS} texts at once were not answered{why}")
        self._compare_texts(answers)

    def _copy(self, probe: Probe) -> None:
        """Compare texts with and without a shared prefix.

        The first text is much longer than the shared prefix, so that the second one gets its own KV slot.
        """
        with probe.client(self._patience_s) as client:
            probe.text(client, TEXT_TOKENS, SOURCE)
            text = probe.text(client, TEXT_TOKENS, COPY, like=SOURCE)
            self._expected.texts[COPIED] = probe.text(client, TEXT_TOKENS, COPY, like=SOURCE, share=False)
            self._compare_texts({COPIED: text})

    def _disturb(self, probe: Probe, name: str, number: signal.Signals) -> None:
        """Compare a text during which the process `name` is stopped for a while, or killed."""
        is_under_way = threading.Event()
        texts: list[str] = []
        errors: list[str] = []

        def generate() -> None:
            try:
                with probe.client(self._patience_s) as client:
                    texts.append(probe.text(client, TEXT_TOKENS, 0, is_under_way.set))
            except UserError as error:
                errors.append(str(error))
            is_under_way.set()

        with probe.client(self._patience_s) as client:
            pid = next(p.pid for p in client.status().processes if f"{p.role}.{p.index}" == name)
        thread = threading.Thread(target=generate)
        thread.start()
        is_under_way.wait()
        os.kill(pid, number)
        if number == signal.SIGSTOP:
            time.sleep(STOPPED_S)
            os.kill(pid, signal.SIGCONT)
        thread.join()
        if errors:
            raise Failed(errors[0])
        self._compare_texts({"text 0": texts[0]})

    # ---- the witness's record -------------------------------------------------------------------------
    def _role_processes(self, status: Status) -> list[str]:
        return [f"{p.role}.{p.index}" for p in status.processes if p.role == self._role]

    def _messages(self, record: Path) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]
        return [line for line in lines if line["peer"].rpartition("-")[0] == self._role]

    def _greeted(self, record: Path, status: Status) -> None:
        for name in self._role_processes(status):
            role, _, index = name.partition(".")
            lines = [line for line in self._messages(record) if line["peer"] == f"{role}-{index}"]
            names = [line.get("received") or line["sent"] for line in lines]
            if names[0] != "Hello":
                raise Failed(f"{name}: its first message was {names[0]}")
            hello = lines[0]
            for field, expected in (
                ("role", role),
                ("index", int(index)),
                ("incarnation", 0),
                ("pid", hello["expected_pid"]),
            ):
                if hello[field] != expected:
                    raise Failed(f"{name}: Hello.{field} is {hello[field]!r}, expected {expected!r}")
            if role in ("decode", "prefill") and hello["slots"] < 1:
                raise Failed(f"{name}: Hello.slots is {hello['slots']}: it takes no work")
            welcome = names.index("Welcome")
            if early := {message for message in names[:welcome] if message != "Hello"}:
                raise Failed(f"{name}: sent {min(early)} before it was welcomed")
            if names[welcome:].count("Ready") < 1:
                raise Failed(f"{name}: was welcomed and never sent Ready")

    def _beats(self, record: Path) -> None:
        began = time.monotonic()
        time.sleep(IDLE_S)
        for index in range(len([spec for spec in self._plan.compute.processes if spec.role == self._role])):
            peer = f"{self._role}-{index}"
            lines = [line for line in self._messages(record) if line["peer"] == peer and line["at"] > began]
            count = sum(line.get("received") == "Beat" for line in lines)
            if count < BEATS:
                raise Failed(f"{peer}: {count} beats in {IDLE_S} s, without work; four are requested per second")

    def _drained(self, record: Path) -> None:
        lines = self._messages(record)
        drain_sent = {line["peer"] for line in lines if line.get("sent") == "Drain"}
        drained = {line["peer"] for line in lines if line.get("received") == "Drained"}
        if undrained := drain_sent - drained:
            raise Failed(f"{min(undrained)} got Drain, and ended without Drained")
        if not drain_sent:
            raise Failed("the run ended without Drain")


def _peer(name: str) -> Implementation:
    return Implementation(f"{peers.__name__}:{name}", "/")
