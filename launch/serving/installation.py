"""`serve --install` and `--uninstall`: shows and writes the file of a service, and runs the commands around it."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from neuronpipe.launch.formats import as_typed, shell_line
from neuronpipe.launch.serving.login_service import MARK, Command, LoginService, login_service, server_words
from neuronpipe.plans.package.atomic_output import whole_file
from neuronpipe.protocol.errors import UserError

PROGRAM = (sys.executable, "-m", "neuronpipe.launch")
COMMAND_TIMEOUT_S = 60.0
MAX_FILE_BYTES = 64 << 10  # a longer file is none of ours


def install(words: Sequence[str], key: str | None, *, as_json: bool) -> None:
    """Install the server that these words start.

    words: those of the command line, `serve` with --install
    key: the key of clients

    Raises UserError if another program's file is in the way, or if a file cannot be written.
    """
    service = _service([*PROGRAM, *server_words(words)], key)
    former = _former(service.path)
    if not as_json:
        print(f"{'replaces' if former is not None else 'writes'} {service.path}:\n")
        print("\n".join(f"    {line}" for line in _without_key(service.text, key).splitlines()), flush=True)
    try:
        service.path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{service.path.parent}: cannot be made: {error.strerror}") from None
    with whole_file(service.path) as place:
        descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o700)
        with open(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(descriptor, 0o700 if service.text.startswith("#!") else 0o600)  # it may hold the key
            file.write(service.text)
    failures = _run_all(service.begin, plain=as_json)
    if as_json:
        facts = {"installed": str(service.path), "replaced": former is not None, "failures": failures}
        print(json.dumps({**facts, "log": service.log}), flush=True)
        return
    print(f"\nmessages of the server: {service.log}")
    if service.text.startswith("#!"):
        print("install the app Termux:Boot and open it once; the server starts when the phone does")
    print(as_typed("`neuronpipe serve --uninstall` takes all of this back"), flush=True)


def uninstall(*, as_json: bool) -> None:
    """End the installed server and remove its file. Raises UserError if there is none."""
    service = _service(PROGRAM, None)
    if _former(service.path) is None:
        raise UserError(f"--uninstall: {service.path} does not exist, so no server was installed")
    failures = _run_all(service.end, plain=as_json)
    try:
        service.path.unlink()
    except OSError as error:
        raise UserError(f"{service.path}: cannot be removed: {error.strerror}") from None
    failures += _run_all(service.begin[:1], plain=as_json)
    if as_json:
        print(json.dumps({"removed": str(service.path), "failures": failures}), flush=True)
    else:
        print(f"removed {service.path}", flush=True)


def _service(program: Sequence[str], key: str | None) -> LoginService:
    try:
        home, user = Path.home(), pwd.getpwuid(os.getuid()).pw_name
        folder = Path.cwd()
    except (RuntimeError, KeyError, OSError) as error:
        raise UserError(f"--install: the home folder or the current folder of this user is unknown: {error}") from None
    return login_service(os.environ, home, user, program, folder, key)


def _former(path: Path) -> str | None:
    """Return the file that a former installation wrote; None if there is none. Raises UserError for any other file."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            text = file.read(MAX_FILE_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    if MARK not in text.splitlines()[:2]:
        raise UserError(f"{path}: exists, and `neuronpipe serve --install` did not write it; move it away first")
    return text


def _without_key(text: str, key: str | None) -> str:
    return text if key is None else text.replace(key, "(the key)")


def _run_all(commands: Sequence[Command], *, plain: bool) -> list[str]:
    """Run commands; return what does not work because of those that failed, and print it unless `plain`."""
    failures = []
    for command in commands:
        problem = _problem(command)
        if not plain:
            print(f"{'ran' if problem is None else 'failed'}: {shell_line(command.words)}", flush=True)
        if problem is not None:
            failures.append(problem)
            if not plain:
                print(f"neuronpipe: {problem}", file=sys.stderr, flush=True)
    return failures


def _problem(command: Command) -> str | None:
    """Run a command; return what does not work because it failed, or None."""
    if shutil.which(command.words[0]) is None:
        return f"{command.purpose}: there is no {command.words[0]}"
    try:
        result = subprocess.run(command.words, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command.purpose}: {error}"
    if result.returncode == 0:
        return None
    lines = result.stderr.strip().splitlines() or [f"exit code {result.returncode}"]
    return f"{command.purpose}: {lines[0]}"
