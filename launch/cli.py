"""The command line `neuronpipe VERB ...`: parse it, run the verb, and turn errors into one line and an exit code.

Exit codes: 0 done, 1 failed, 2 wrong usage or input, 3 no such run, 130 interrupted, 141 the reader of stdout is gone,
143 and 129 ended by SIGTERM and SIGHUP. The verbs of `ENDED_IN_ORDER` live as long as a run. These two signals are the
usual way to end them, so they exit with 0 then, and a service manager sees no failure.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import resource
import signal
import sys
from collections.abc import Iterator
from typing import NoReturn

from neuronpipe.launch.arguments.command_line import parse
from neuronpipe.launch.arguments.parser import cut
from neuronpipe.launch.arguments.verbs import find_verb, parsers, verb_module
from neuronpipe.launch.formats import as_typed
from neuronpipe.launch.progress import begin_command
from neuronpipe.protocol.errors import UserError

ENDED_IN_ORDER = ("run", "chat", "serve", "up", "watch", "bench")
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)


class Terminated(KeyboardInterrupt):
    """Raised for SIGTERM and SIGHUP. It is a KeyboardInterrupt, so that a command cleans up as after Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = signal.Signals(number)


def main(arguments: list[str] | None = None) -> int:
    """Run one verb, and return the exit code. A mistake of the user is one line on stderr, never a traceback.

    arguments: the words of the command line; None: those of this process
    """
    words = sys.argv[1:] if arguments is None else arguments
    if arguments is None:
        begin_command()
    try:
        with _signals_raised():
            return _run(words)
    except Terminated as signalled:
        print(f"neuronpipe: ended by {signalled.number.name}", file=sys.stderr)
        return 0 if find_verb(words) in ENDED_IN_ORDER else 128 + signalled.number
    except UserError as error:
        print(f"neuronpipe: {as_typed(str(error))}{_remedy(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("neuronpipe: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _discard_output()  # the reader has closed the pipe: not an error to report
        return 141
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            print(f"neuronpipe: {cut(str(error.filename))!r}: {error.strerror}", file=sys.stderr)
            return UserError.exit_code
        if error.errno in TOO_MANY_FILES:
            print(f"neuronpipe: {error.strerror}; raise the limit with `ulimit -n 1024`", file=sys.stderr)
            return UserError.exit_code
        if (message := _temporary_folder_problem(error)) is not None:
            print(f"neuronpipe: {message}", file=sys.stderr)
            return UserError.exit_code
        if error.errno not in NO_ROOM:
            raise
        _discard_output()
        file, reason = error.filename or "the output", str(error.strerror)
        print(f"neuronpipe: {file}: cannot be written: {reason}{_remedy(reason)}", file=sys.stderr)
        return UserError.exit_code


def _remedy(message: str) -> str:
    """Return advice to append to a message that a file is too large; empty for other messages, or without a limit."""
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if os.strerror(errno.EFBIG) not in message or limit_bytes == resource.RLIM_INFINITY:
        return ""
    return f"; this shell allows files of {limit_bytes:,} bytes at most (`ulimit -f`): allow larger ones, and try again"


def _temporary_folder_problem(error: OSError) -> str | None:
    """Return the message if Python found no folder for temporary files; None for other errors."""
    if error.errno != errno.ENOENT or "temporary directory" not in str(error.strerror):
        return None
    too_large = _remedy(os.strerror(errno.EFBIG))
    return f"no file can be written in /tmp or another temporary folder; set TMPDIR to one{too_large}"


def _run(words: list[str]) -> int:
    _prepare_streams()
    if not words:
        parsers(None)[0].print_help(sys.stderr)
        return UserError.exit_code
    arguments = parse(words)
    code = verb_module(arguments.verb).main(arguments)
    sys.stdout.flush()
    return int(code)


def _prepare_streams() -> None:
    """Open descriptors 0 to 2 if they are closed, and let stdout escape what it cannot encode.

    A socket would take the place of a closed descriptor. Raises UserError if stdout is closed (`>&-`).
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - open as long as the process
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115
    if sys.stdout is None:
        raise UserError("standard output is closed: let it go to a file, or to /dev/null")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def _signals_raised() -> Iterator[None]:
    """Raise SIGTERM and SIGHUP as `Terminated`, also in the first process of a container, which ignores them otherwise.

    A signal that is ignored stays ignored: that is the purpose of `nohup`.
    """

    def handle(number: int, _: object) -> NoReturn:
        raise Terminated(number)

    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _discard_output() -> None:
    """Redirect stdout to /dev/null, because Python writes its buffer again at exit, and would report the error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
