"""Packages made from a model's own files: a GGUF file or a Hugging Face folder that is named in place of a package is
converted once, and found by every later command."""

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
from neuronpipe.launch.progress import Elapsed, Progress, note_output
from neuronpipe.native import lib
from neuronpipe.plans.pull.package_library import VARIABLE
from neuronpipe.plans.pull.source_models import PackageRequest, Work, existing_package, make, make_as_requested
from neuronpipe.protocol.errors import UserError, escaped
from neuronpipe.services.gateway.templates.single_job import examine_template

if TYPE_CHECKING:
    from neuronpipe.plans.convert.block_conversion import Progress as ReportProgress
    from neuronpipe.plans.convert.conversion import Encoded, Report
    from neuronpipe.plans.package.reader import Package
    from neuronpipe.plans.quantization_choice import Choice

_CONVERT_OPTION = re.compile(r"--(activation|tokenizer|no-predictor|context)\b")
"""Options of `convert` that errors of a conversion name; other verbs do not have them."""


def package_of(source: Path, *, plain: bool) -> Path:
    """Return the package of a model on this disk; convert the model first, unless that was done before.

    plain: show progress on stderr as lines, not as a bar

    Raises UserError. The conversion runs in a process of its own, because its memory must not count in the run that
    follows.
    """
    if (package := existing_package(source)) is not None:
        return package
    _run_in_child(source, lambda: _convert(source, plain=plain))
    package = existing_package(source)
    if package is None:
        raise UserError(f"{source}: changed while it was converted; try again when it is complete")
    size_bytes = sum(file.stat().st_size for file in package.iterdir())
    result = f"made {package}, {show_bytes(size_bytes)}; its name is {package.name}"
    print(f"neuronpipe: {result}; `{line_to_paste('rm', package.name)}` removes it", file=sys.stderr, flush=True)
    note_output()
    return package


def convert_with_options(source: Path, options: PackageRequest, *, plain: bool, report: Report) -> Package:
    """Make the package that `package_of` finds from now on, with these options, in this process. Raises UserError."""
    return _report_conversion(source, partial(make_as_requested, source, options, report=report), "", plain=plain)


class _Conversion(Protocol):
    """Makes a package.

    agree: called with what the package takes, before the work begins; raises UserError to refuse
    waiting: called with the package's name while another command makes it
    """

    def __call__(
        self, *, agree: Callable[[Work], None], waiting: Callable[[str], None], progress: ReportProgress
    ) -> Package: ...


def _announce(source: Path, work: Work, reason: str) -> None:
    """Print the size and place of the package to make. Raises UserError if the disk has too little room for it."""
    package_size, free = show_bytes(work.choice.package_bytes), show_bytes(work.free_bytes)
    if work.missing_bytes:
        removal = f", `neuronpipe rm {work.name}` removes the outdated one," if work.replaces else ""
        raise UserError(
            f"{source}: a package of it takes {package_size}, and {free} are free in {work.folder}: make room for "
            f"{show_bytes(work.missing_bytes)}{removal} or set {VARIABLE} to a folder on another disk"
        )
    what = "its experts are read in place; converting the rest" if work.experts_in_place else "converting it"
    activity = f"{reason}{what} again" if work.replaces else f"{what}, once"
    print(
        f"neuronpipe: {escaped(str(source))}: {activity}: {package_size} in {work.folder / work.name}; {free} are free",
        file=sys.stderr,
        flush=True,
    )
    if work.experts_in_place:
        copying = line_to_paste("convert", source)
        print(f"neuronpipe: `{copying}` makes a package that needs the file no more", file=sys.stderr, flush=True)
    if work.why_copied:
        print(f"neuronpipe: experts are copied, not read in place: {work.why_copied}", file=sys.stderr, flush=True)
    alternative = f"`{line_to_paste('convert', source, '--quantization', work.choice.alternative or '')}`"
    print(f"neuronpipe: {choice_line(work.choice, alternative)}", file=sys.stderr, flush=True)


def choice_line(choice: Choice, alternative: str) -> str:
    """Return which quantization a package gets, the reason, and the command or option for the alternative."""
    from neuronpipe.plans.package.layout import BITS  # which other commands do not need

    reason = f"quantization {choice.quantization}: {choice.why}"
    if choice.alternative is None:
        return reason
    benefit = "loses less and " if BITS[choice.alternative] > BITS[choice.quantization] else ""
    sizes = f"{show_bytes(choice.alternative_bytes)} instead of {show_bytes(choice.package_bytes)}"
    return f"{reason}; {alternative} {benefit}takes {sizes}"


def _report_conversion(source: Path, conversion: _Conversion, reason: str, *, plain: bool) -> Package:
    """Make a package, and show on stderr what it takes and the progress.

    reason: why it is made again
    """
    with Elapsed(plain=plain) as elapsed, Progress("converting", "bytes", plain=plain, steady=True) as progress:

        def begin(work: Work) -> None:
            elapsed.end()
            _announce(source, work, reason)

        def waiting(name: str) -> None:
            elapsed.say(f"waiting for another command that makes the package {name}")

        return conversion(agree=begin, waiting=waiting, progress=progress)


def _convert(source: Path, *, plain: bool) -> None:
    from neuronpipe.plans.convert.checkpoint import Options  # imports numpy, which other commands do not need

    options = Options(examine_template=examine_template)
    conversion = partial(make, source, options=options, report=_print_notes)
    try:
        _report_conversion(source, conversion, "the model has changed: ", plain=plain)
    except UserError as error:
        if _CONVERT_OPTION.search(str(error)) is None:
            raise
        command = line_to_paste("convert", source)
        raise UserError(f"{error}; that is an option of `{command}`: convert first, then try again") from None


def _print_notes(encoded: Encoded) -> None:
    for note in encoded.notes:
        print(f"neuronpipe: note: {note}", file=sys.stderr, flush=True)


def _run_in_child(source: Path, work: Callable[[], None]) -> None:
    """Run the work in a forked process, and return when it is done.

    Raises the work's UserError again. If this process is interrupted, the child is ended in order first.
    """
    reading, writing = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if not child:
        os.close(reading)
        _be_child(work, parent, writing)
    os.close(writing)
    try:
        with os.fdopen(reading, "rb") as pipe:
            message = pipe.read().decode(errors="replace")
        _, status = os.waitpid(child, 0)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGTERM)
        os.waitpid(child, 0)
        raise
    if message:
        raise UserError(message)
    if status:
        raise UserError(f"{source}: the process that converts was ended; the same command tries again")


def _be_child(work: Callable[[], None], parent: int, pipe: int) -> NoReturn:
    """Do the work in the child process. The message of an error goes through the pipe."""

    def interrupt(*_: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    code = 1
    try:
        lib.np_process_die_with(parent)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal interrupts both, and the parent ends this one
        signal.signal(signal.SIGTERM, interrupt)
        work()
        code = 0
    except KeyboardInterrupt:
        pass
    except UserError as error:
        os.write(pipe, str(error).encode(errors="replace"))
    except OSError as error:
        message = f"{error.filename or 'the package'}: cannot be written: {error.strerror}"
        os.write(pipe, message.encode(errors="replace"))
    except Exception as error:
        os.write(pipe, f"conversion failed: {type(error).__name__}: {error}".encode(errors="replace"))
    finally:
        os._exit(code)
