"""Who does a role's work: our class, another one, or any program that speaks the protocol.

    package.module:Class        called in a process that the supervisor forks: Class(job).serve()
    argv:"./decoder --run {run}"
                                a program in any language, started in that process's place; see SPEC.md section 5

Modules are imported by the process that needs them and by nobody else, so that a fresh process runs the code as it is
on disk by then.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

from neuronpipe.protocol.errors import UserError, quoted
from neuronpipe.protocol.frozen import frozen
from neuronpipe.services.runtime.job import Job
from neuronpipe.services.runtime.listener import KEY_VARIABLE

OURS = {
    "loader": "neuronpipe.services.loader.loader_service:LoaderService",
    "cache": "neuronpipe.services.cache.cache_service:CacheService",
    "decode": "neuronpipe.services.worker.decode:DecodeService",
    "prefill": "neuronpipe.services.worker.prefill:PrefillService",
    "accelerator": "neuronpipe.services.offload.accelerator:AcceleratorService",
    "coordinator": "neuronpipe.services.coordinator.coordinator_service:CoordinatorService",
    "gateway": "neuronpipe.services.gateway.gateway_service:GatewayService",
}
"""The class that does each role's work unless another one is asked for, in the order in which they start."""

SWAPPABLE = ("decode", "prefill", "accelerator", "loader", "cache")
"""Roles whose processes may be replaced while a run is live. Clients' requests live in the others."""

PROGRAM = "argv:"
_CLASS = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_PROCESS = re.compile(r"([a-z]+)(?:\.(\d+))?")


class Service(Protocol):
    """What a class must offer to be used: it is called with its job, then serves until drained."""

    def serve(self) -> None:
        """Return when drained. Raises UserError for what a person can put right, which ends the run."""


@frozen
class Implementation:
    """One way to do a role's work. folder: where it was named; modules and programs are looked for from there."""

    text: str
    folder: str

    @classmethod
    def parse(cls, text: str, folder: Path | str) -> Implementation:
        """Check how it is written. Raises UserError."""
        if text.startswith(PROGRAM):
            try:
                words = shlex.split(text[len(PROGRAM) :])
            except ValueError as error:
                raise UserError(f"--use {quoted(text)}: {error}") from None
            if not words:
                raise UserError(f"--use {quoted(text)}: names no program; write argv:'./my-worker --run {{run}}'")
        elif not _CLASS.fullmatch(text):
            raise UserError(f"--use {quoted(text)}: neither package.module:Class nor argv:COMMAND")
        return cls(text, str(Path(folder).resolve()))

    def serve(self, job: Job) -> None:
        """Be this implementation: return when drained, or become another program and never return. Raises UserError
        when there is no such module, class or program."""
        if self.text.startswith(PROGRAM):
            self._execute(job)
        self._class()(job).serve()

    def _class(self) -> Any:
        module, _, name = self.text.partition(":")
        if self.folder not in sys.path:
            sys.path.insert(0, self.folder)
        try:
            return getattr(importlib.import_module(module), name)
        except ImportError as error:
            raise UserError(f"{self.text}: cannot be imported in {self.folder}: {error}") from error
        except AttributeError:
            raise UserError(f"{self.text}: module {module} has no {name}") from None

    def _execute(self, job: Job) -> NoReturn:
        variables = job.variables()
        words = shlex.split(self.text[len(PROGRAM) :])
        for name, value in variables.items():
            words = [word.replace(f"{{{name}}}", value) for word in words]
        environment = os.environ | {f"NEURONPIPE_{name.upper()}": value for name, value in variables.items()}
        if job.listener is not None:
            os.set_inheritable(job.listener.descriptor, True)
            environment |= {} if job.listener.key is None else {KEY_VARIABLE: job.listener.key}
        try:
            os.chdir(self.folder)
            os.execvpe(words[0], words, environment)
        except OSError as error:
            raise UserError(f"{self.text}: {words[0]} cannot be started in {self.folder}: {error.strerror}") from error


@frozen
class Use:
    """One `--use`. index None: every process of the role."""

    role: str
    index: int | None
    implementation: Implementation

    @classmethod
    def parse(cls, text: str, folder: Path) -> Use:
        """`ROLE=IMPLEMENTATION` or `ROLE.INDEX=IMPLEMENTATION`. Raises UserError."""
        process, equals, rest = text.partition("=")
        if not equals:
            raise UserError(f"--use {quoted(text)}: write ROLE=package.module:Class or ROLE=argv:COMMAND")
        role, index = parse_process(process)
        return cls(role, index, Implementation.parse(rest, folder))


def parse_process(text: str) -> tuple[str, int | None]:
    """`decode` or `decode.1`. Raises UserError naming the roles there are."""
    found = _PROCESS.fullmatch(text)
    if not found or found[1] not in OURS:
        raise UserError(f"{quoted(text)} is no role; the roles are {', '.join(OURS)}, one process of them ROLE.INDEX")
    return found[1], None if found[2] is None else int(found[2])


def implementation_facts(processes: Mapping[tuple[str, int], Implementation]) -> dict[str, Sequence[str]]:
    """Which implementation each process has, in JSON: how it is written, and the folder where it was named."""
    return {f"{role}.{index}": (one.text, one.folder) for (role, index), one in processes.items()}


class Implementations:
    """Which implementation each process has: what was asked for, the last one first, else ours."""

    def __init__(self, uses: Iterable[Use] = ()) -> None:
        self._uses = tuple(uses)

    @classmethod
    def from_facts(cls, facts: Mapping[str, Sequence[str]]) -> Implementations:
        """From the answer of a supervisor: see `implementation_facts`."""
        processes = {name: parse_process(name) for name in facts}
        return cls(Use(*processes[name], Implementation(*facts[name])) for name in facts)

    def of(self, role: str, index: int) -> Implementation:
        """That of one process."""
        for use in reversed(self._uses):
            if use.role == role and use.index in (None, index):
                return use.implementation
        return Implementation(OURS[role], "/")

    def check(self, processes: Iterable[tuple[str, int]]) -> None:
        """Raises UserError when one is meant for a process that the plan does not have."""
        known = set(processes)
        for use in self._uses:
            if use.index is not None and (use.role, use.index) not in known:
                here = ", ".join(f"{role}.{index}" for role, index in sorted(known) if role == use.role)
                raise UserError(f"--use {use.role}.{use.index}: this plan has {here or f'no {use.role}'}")
