"""From a model's own files to a package: who names a GGUF file or a Hugging Face folder in place of a package gets the
one that is made of it once."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol

from neuronpipe.launch.formats import line_to_paste, show_bytes
from neuronpipe.launch.progress import Elapsed, Progress, heard
from neuronpipe.native import lib
from neuronpipe.plans.pull.package_library import VARIABLE
from neuronpipe.plans.pull.source_models import PackageRequest, Work, existing_package, make, make_as_requested
from neuronpipe.protocol.errors import UserError, escaped
from neuronpipe.services.gateway.templates.single_job import examine_template

if TYPE_CHECKING:
    from neuronpipe.plans.convert.block_conversion import Progress as Told
    from neuronpipe.plans.convert.conversion import Encoded, Report
    from neuronpipe.plans.package.reader import Package
    from neuronpipe.plans.quantization_choice import Choice

_OPTION = re.compile(
    r"--(activation|tokenizer|no-predictor|context)\b"
)  # of `convert`, as errors of conversion name them


def package_of(source: Path, *, plain: bool) -> Path:
    """The package of a model on this disk: the one that was made before, or one that is made now, with progress on
    stderr. plain: lines, not a bar. Raises UserError.

    It is made in a process of its own: what conversion takes of memory must not count in the run that follows.
    """
    if (made := existing_package(source)) is not None:
        return made
    _in_a_process_of_its_own(source, lambda: _make(source, plain=plain))
    made = existing_package(source)
    if made is None:
        raise UserError(f"{source}: has changed while a package was made of it; try again when it is whole")
    size_bytes = sum(file.stat().st_size for file in made.iterdir())
    said = f"made {made}, {show_bytes(size_bytes)}, called {made.name} from now on"
    print(f"neuronpipe: {said}; `{line_to_paste('rm', made.name)}` removes it", file=sys.stderr, flush=True)
    heard()
    return made


def package_as_asked(source: Path, asked: PackageRequest, *, plain: bool, report: Report) -> Package:
    """The package that `package_of` finds from now on, made in the way that was asked for; in this process. Raises
    UserError."""
    return _told(source, partial(make_as_requested, source, asked, report=report), "", plain=plain)


class _Making(Protocol):
    """Makes a package; tells what it takes, for whom it waits, and how far it is."""

    def __call__(self, *, agree: Callable[[Work], None], waiting: Callable[[str], None], progress: Told) -> Package: ...


def _agree(source: Path, work: Work, why_anew: str) -> None:
    """Say what making a package takes. Raises UserError where the disk has too little room for it."""
    takes, free = show_bytes(work.choice.package_bytes), show_bytes(work.free_bytes)
    if work.missing_bytes:
        old = f", `neuronpipe rm {work.name}` removes the one of the model as it was," if work.replaces else ""
        raise UserError(
            f"{source}: a package of it takes {takes}, and {free} are free in {work.folder}: make room for "
            f"{show_bytes(work.missing_bytes)}{old} or set {VARIABLE} to a folder on another disk"
        )
    why = f"{why_anew}its package is made anew" if work.replaces else "a package is made of it, once"
    print(
        f"neuronpipe: {escaped(str(source))}: {why}: {takes} in {work.folder / work.name}; {free} are free",
        file=sys.stderr,
        flush=True,
    )
    how = f"`{line_to_paste('convert', source, '--quantization', work.choice.alternative or '')}`"
    print(f"neuronpipe: {choice_line(work.choice, how)}", file=sys.stderr, flush=True)


def choice_line(choice: Choice, how: str) -> str:
    """Which quantization a package gets, why, and how to get the other one."""
    reason = f"quantization {choice.quantization}: {choice.why}"
    if choice.alternative is None:
        return reason
    less = "loses less and " if choice.alternative == "q8" else ""
    sizes = f"{show_bytes(choice.alternative_bytes)} instead of {show_bytes(choice.package_bytes)}"
    return f"{reason}; {how} {less}takes {sizes}"


def _told(source: Path, making: _Making, why_anew: str, *, plain: bool) -> Package:
    """Make a package, and say on stderr what it takes and how far it is."""
    with Elapsed(plain=plain) as elapsed, Progress("converting", "bytes", plain=plain, steady=True) as progress:

        def begin(work: Work) -> None:
            elapsed.end()
            _agree(source, work, why_anew)

        def waiting(name: str) -> None:
            elapsed.say(f"waiting for another command that makes the package {name}")

        return making(agree=begin, waiting=waiting, progress=progress)


def _make(source: Path, *, plain: bool) -> None:
    from neuronpipe.plans.convert.checkpoint import Options  # numpy: only for this

    options = Options(examine_template=examine_template)
    making = partial(make, source, options=options, report=_print_notes)
    try:
        _told(source, making, "the model has changed: ", plain=plain)
    except UserError as error:
        if _OPTION.search(str(error)) is None:
            raise
        raise UserError(f"{error}; options are of `{line_to_paste('convert', source)}`, then try again") from None


def _print_notes(encoded: Encoded) -> None:
    for note in encoded.notes:
        print(f"neuronpipe: note: {note}", file=sys.stderr, flush=True)


def _in_a_process_of_its_own(source: Path, work: Callable[[], None]) -> None:
    """Do it, and return when it is done. Raises UserError with its words; interrupted, it ends in order as well."""
    reading, writing = os.pipe()
    parent = os.getpid()
    process = os.fork()
    if not process:
        os.close(reading)
        _serve(work, parent, writing)
    os.close(writing)
    try:
        with os.fdopen(reading, "rb") as pipe:
            said = pipe.read().decode(errors="replace")
        _, status = os.waitpid(process, 0)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGTERM)
        os.waitpid(process, 0)
        raise
    if said:
        raise UserError(said)
    if status:
        raise UserError(f"{source}: the process that converts was ended; the same command tries again")


def _serve(work: Callable[[], None], parent: int, pipe: int) -> NoReturn:
    """In the child: the words of an error go through the pipe, and nothing where there was none."""

    def end(*_: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    code = 1
    try:
        lib.np_process_die_with(parent)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal interrupts both, and the parent ends this one
        signal.signal(signal.SIGTERM, end)
        work()
        code = 0
    except KeyboardInterrupt:
        pass
    except UserError as error:
        os.write(pipe, str(error).encode(errors="replace"))
    except OSError as error:
        said = f"{error.filename or 'the package'}: cannot be written: {error.strerror}"
        os.write(pipe, said.encode(errors="replace"))
    except Exception as error:
        os.write(pipe, f"conversion failed: {type(error).__name__}: {error}".encode(errors="replace"))
    finally:
        os._exit(code)
