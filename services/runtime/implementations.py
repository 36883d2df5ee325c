"""Implementations of roles: our class, another class, or any program that speaks the protocol.

    package.module:Class        called in a process that the supervisor forks: Class(job).serve()
    argv:"./decoder --run {run}"
                                a program in any language, started in that process's place; see SPEC.md section 5

Only the process that runs an implementation imports its module, so that a new process runs the code that is on disk
when it starts.
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
"""The default class of each role, in the order in which processes start."""

SWAPPABLE = ("decode", "prefill", "accelerator", "loader", "cache")
"""Roles whose processes may be replaced in a live run. The other roles hold the requests of clients."""

PROGRAM = "argv:"
_CLASS = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_PROCESS = re.compile(r"([a-z]+)(?:\.(\d+))?")


class Service(Protocol):
    """The interface of an implementation's class, which is constructed with its `Job`."""

    def serve(self) -> None:
        """Serve until drained, then return. Raise UserError for a mistake of the user; it ends the run."""


@frozen
class Implementation:
    """One implementation: its text as the user wrote it, and the folder in which modules and programs are looked up."""

    text: str
    folder: str

    @classmethod
    def parse(cls, text: str, folder: Path | str) -> Implementation:
        """Parse `package.module:Class` or `argv:COMMAND`. Raises UserError when it is neither."""
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
        """Run this implementation in the calling process: a class until it is drained; a program by exec, which never
        returns. Raises UserError when the module, class or program does not exist."""
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
    """One `--use` option.

    index: the index of a process; None for every process of the role
    """

    role: str
    index: int | None
    implementation: Implementation

    @classmethod
    def parse(cls, text: str, folder: Path) -> Use:
        """Parse `ROLE=IMPLEMENTATION` or `ROLE.INDEX=IMPLEMENTATION`. Raises UserError."""
        process, equals, implementation = text.partition("=")
        if not equals:
            raise UserError(f"--use {quoted(text)}: write ROLE=package.module:Class or ROLE=argv:COMMAND")
        role, index = parse_process(process)
        return cls(role, index, Implementation.parse(implementation, folder))


def parse_process(text: str) -> tuple[str, int | None]:
    """Split `decode` or `decode.1` into role and index. Raises UserError, which names the roles, for any other text."""
    match = _PROCESS.fullmatch(text)
    if not match or match[1] not in OURS:
        raise UserError(f"{quoted(text)} is no role; the roles are {', '.join(OURS)}, one process of them ROLE.INDEX")
    return match[1], None if match[2] is None else int(match[2])


def implementation_facts(processes: Mapping[tuple[str, int], Implementation]) -> dict[str, Sequence[str]]:
    """Return the text and the folder of each process's implementation, by process name, for JSON."""
    return {
        f"{role}.{index}": (implementation.text, implementation.folder)
        for (role, index), implementation in processes.items()
    }


class Implementations:
    """The implementation of every process: that of the last `--use` that applies, otherwise the default."""

    def __init__(self, uses: Iterable[Use] = ()) -> None:
        self._uses = tuple(uses)

    @classmethod
    def from_facts(cls, facts: Mapping[str, Sequence[str]]) -> Implementations:
        """Restore implementations from the result of `implementation_facts`, which a supervisor sends."""
        processes = {name: parse_process(name) for name in facts}
        return cls(Use(*processes[name], Implementation(*facts[name])) for name in facts)

    def of(self, role: str, index: int) -> Implementation:
        for use in reversed(self._uses):
            if use.role == role and use.index in (None, index):
                return use.implementation
        return Implementation(OURS[role], "/")

    def check(self, processes: Iterable[tuple[str, int]]) -> None:
        """Raise UserError if a `--use` names a process that the plan does not have."""
        plan_processes = set(processes)
        for use in self._uses:
            if use.index is not None and (use.role, use.index) not in plan_processes:
                same_role = ", ".join(f"{role}.{index}" for role, index in sorted(plan_processes) if role == use.role)
                raise UserError(f"--use {use.role}.{use.index}: this plan has {same_role or f'no {use.role}'}")
