"""The suite: whole runs with the candidate as its role's processes, and around it peers that are ordinary, slow,
garbling, stopped or killed. What counts is that every answer agrees with what our own implementations compute: to the
bit in the same numerics, within stated tolerances in others, and then to the bit with what the candidate itself
computed first.
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
SOURCE, COPY = 1000, 2000  # prompts that no other question has, nor their beginnings
COPIED = "a text that begins with another's keys and values"
IDLE_S, BEATS = 1.5, 3  # so many beats at least are heard in that time; four are asked for in each second
STOPPED_S = 0.5
DAMAGE_STRIDE_BYTES = 4096


class Failed(Exception):
    """A check found what must not be."""


@frozen
class Result:
    """One check. why: empty when it passed."""

    name: str
    why: str
    seconds: float


class Suite:
    """All checks of one role. uses: the candidate, as all of the role's processes. patience_s: for any one answer."""

    def __init__(self, package: Package, plan: Plan, role: str, use: Implementation | None, patience_s: float) -> None:
        self._package, self._plan, self._role, self._patience_s = package, plan, role, patience_s
        self._uses = [] if use is None else [Use(role, None, use)]
        there = {spec.role for spec in plan.compute.processes}
        self._others = [other for other in ("coordinator", *SWAPPABLE) if other in there - {role}]
        self._expected = Answers({})
        self._results: list[Result] = []
        self._tell: Callable[[Result], None] = lambda result: None
        self._progress: Callable[[int, int], None] = lambda done, total: None

    def run(self, tell: Callable[[Result], None], progress: Callable[[int, int], None]) -> list[Result]:
        """Try everything; `tell` hears of each check as it ends, `progress` of how many have ended, of how many there
        are, and as often while nothing ends. Raises UserError when our own run cannot be."""
        self._tell, self._progress = tell, progress
        self._goes_on()
        with tempfile.TemporaryDirectory(prefix="np-") as folder:
            with self._probe(self._plan, [], Path(folder)) as (probe, _):
                self._expected = self._answers(probe)
            self._with("ordinary peers", Path(folder), [], self._ordinary)
            self._with("garbling peers", Path(folder), self._bad("Garbling"), self._same_bits)
            self._with("slow peers", Path(folder), self._bad("Slow"), self._same_bits_slowly)
            if self._role == "loader":
                self._with("damaged flash", Path(folder), [], self._refuses_damage, self._damaged(Path(folder)))
        return self._results

    @property
    def checks(self) -> int:
        """How many there are when none fails: of an ordinary run, of two among bad peers, of damaged flash."""
        own = sum(spec.role == self._role for spec in self._plan.compute.processes)
        ordinary = 6 + (self._role == "prefill") + 2 * len(self._others) + own
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

    def _with(
        self,
        name: str,
        folder: Path,
        uses: list[Use],
        checks: Callable[[Probe, Path], Iterator[str]],
        package: Package | None = None,
    ) -> None:
        """The checks of one run, each of which ends with the name it yields. After one that fails the others of this
        run would say nothing more."""
        self._began = time.monotonic()
        witness = Use("coordinator", None, _peer("Witness"))
        try:
            with self._probe(self._plan, [witness, *uses, *self._uses], folder, package) as (probe, record):
                for passed in checks(probe, record):
                    self._note(f"{name}: {passed}", "")
            if name == "ordinary peers":
                self._drained(record)
                self._note(f"{name}: drains when told to", "")
        except (Failed, UserError) as error:
            self._note(name, str(error))

    def _note(self, name: str, why: str) -> None:
        result = Result(name, why, time.monotonic() - self._began)
        self._began = time.monotonic()
        self._results.append(result)
        self._tell(result)
        self._goes_on()

    def _goes_on(self, *_: int) -> None:
        self._progress(len(self._results), self.checks)

    def _bad(self, kind: str) -> list[Use]:
        """Whom of the others the candidate speaks with, misbehaving."""
        roles = {"loader": ("coordinator", "cache"), "cache": ("coordinator", "loader")}
        return [Use(role, None, _peer(kind + role.capitalize())) for role in roles.get(self._role, ("coordinator",))]

    def _damaged(self, folder: Path) -> Package:
        """A copy of the package with a wrong bit in every part of every cluster."""
        copy = folder / "damaged"
        shutil.copytree(self._package.path, copy)
        with (copy / BUNDLES).open("r+b") as stream:
            content = bytearray(stream.read())
            for place in range(0, len(content), DAMAGE_STRIDE_BYTES):
                content[place] ^= 4
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
        for role in self._others:
            self._through(probe, f"{role}.0", signal.SIGSTOP)
            yield f"bears {role}.0 standing still"
            self._through(probe, f"{role}.0", signal.SIGKILL)
            yield f"bears {role}.0 being killed"
        for name in self._own(status):
            self._through(probe, name, signal.SIGKILL)
            yield f"is started again after {name} was killed"
        self._compare(self._answers(probe))
        yield "computes the same bits after all that"

    def _same_bits(self, probe: Probe, record: Path) -> Iterator[str]:
        self._compare(self._answers(probe))
        yield "computes the same bits"

    def _same_bits_slowly(self, probe: Probe, record: Path) -> Iterator[str]:
        """With one text: each of its reads waits for somebody who takes his time."""
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
        """From now on the candidate is compared with itself: in the same numerics that is no difference."""
        agreement = compare(self._expected, answers)
        self._expected = answers
        return "computes the bits that our own implementations compute" if agreement is None else str(agreement)

    def _answers(self, probe: Probe, texts: int = TEXTS) -> Answers:
        answers = probe.answers(self._patience_s, self._goes_on)
        with probe.client(self._patience_s) as client:
            for number in range(texts):
                answers.texts[f"text {number}"] = probe.text(client, TEXT_TOKENS, 100 * number, self._goes_on)
        return answers

    def _compare(self, answers: Answers) -> None:
        compare(self._expected, answers)

    def _compare_texts(self, texts: dict[str, str]) -> None:
        self._compare(Answers(self._expected.numerics, texts=texts))

    def _at_once(self, probe: Probe) -> None:
        answers: dict[str, str] = {}
        problems: list[str] = []

        def ask(number: int) -> None:
            try:
                with probe.client(self._patience_s) as client:
                    answers[f"text {number}"] = probe.text(client, TEXT_TOKENS, 100 * number)
            except UserError as error:
                problems.append(str(error))

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(TEXTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if len(answers) < TEXTS:
            why = "".join(f": {problem}" for problem in problems[:1])
            raise Failed(f"{TEXTS - len(answers)} of {TEXTS} texts at once were not answered{why}")
        self._compare_texts(answers)

    def _copy(self, probe: Probe) -> None:
        """The first text is so much longer than what both share that the second gets a slot of its own."""
        with probe.client(self._patience_s) as client:
            probe.text(client, TEXT_TOKENS, SOURCE)
            copied = probe.text(client, TEXT_TOKENS, COPY, like=SOURCE)
            self._expected.texts[COPIED] = probe.text(client, TEXT_TOKENS, COPY, like=SOURCE, share=False)
            self._compare_texts({COPIED: copied})

    def _through(self, probe: Probe, name: str, number: signal.Signals) -> None:
        """A text, while this process is stopped for a while or killed."""
        under_way = threading.Event()
        said: list[str] = []

        def ask() -> None:
            try:
                with probe.client(self._patience_s) as client:
                    said.append(probe.text(client, TEXT_TOKENS, 0, under_way.set))
            except UserError as error:
                said.append(str(error))
            under_way.set()

        with probe.client(self._patience_s) as client:
            pid = next(p.pid for p in client.status().processes if f"{p.role}.{p.index}" == name)
        asking = threading.Thread(target=ask)
        asking.start()
        under_way.wait()
        os.kill(pid, number)
        if number == signal.SIGSTOP:
            time.sleep(STOPPED_S)
            os.kill(pid, signal.SIGCONT)
        asking.join()
        self._compare_texts({"text 0": said[0]}) if said[0][:1].isdigit() else self._fail(said[0])

    def _fail(self, why: str) -> None:
        raise Failed(why)

    # ---- what the witness wrote down -------------------------------------------------------------------------
    def _own(self, status: Status) -> list[str]:
        return [f"{p.role}.{p.index}" for p in status.processes if p.role == self._role]

    def _heard(self, record: Path) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]
        return [line for line in lines if line["peer"].rpartition("-")[0] == self._role]

    def _greeted(self, record: Path, status: Status) -> None:
        for name in self._own(status):
            role, _, index = name.partition(".")
            lines = [line for line in self._heard(record) if line["peer"] == f"{role}-{index}"]
            said = [line.get("said") or line["told"] for line in lines]
            if said[0] != "Hello":
                raise Failed(f"{name}: its first word was {said[0]}")
            hello = lines[0]
            for field, right in (
                ("role", role),
                ("index", int(index)),
                ("incarnation", 0),
                ("pid", hello["expected_pid"]),
            ):
                if hello[field] != right:
                    raise Failed(f"{name}: Hello.{field} is {hello[field]!r}, expected {right!r}")
            if role in ("decode", "prefill") and hello["slots"] < 1:
                raise Failed(f"{name}: Hello.slots is {hello['slots']}: it takes no work")
            welcome = said.index("Welcome")
            if early := {word for word in said[:welcome] if word != "Hello"}:
                raise Failed(f"{name}: said {min(early)} before it was welcomed")
            if said[welcome:].count("Ready") < 1:
                raise Failed(f"{name}: was welcomed and never said Ready")

    def _beats(self, record: Path) -> None:
        began = time.monotonic()
        time.sleep(IDLE_S)
        for index in range(len([spec for spec in self._plan.compute.processes if spec.role == self._role])):
            peer = f"{self._role}-{index}"
            heard = [line for line in self._heard(record) if line["peer"] == peer and line["at"] > began]
            count = sum(line.get("said") == "Beat" for line in heard)
            if count < BEATS:
                raise Failed(f"{peer}: {count} beats in {IDLE_S} s, without work; it is asked four times a second")

    def _drained(self, record: Path) -> None:
        lines = self._heard(record)
        told = {line["peer"] for line in lines if line.get("told") == "Drain"}
        said = {line["peer"] for line in lines if line.get("said") == "Drained"}
        if silent := told - said:
            raise Failed(f"{min(silent)} was told Drain, and was gone without Drained")
        if not told:
            raise Failed("the run ended without Drain")


def _peer(name: str) -> Implementation:
    return Implementation(f"{peers.__name__}:{name}", "/")
