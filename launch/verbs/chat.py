"""`neuronpipe chat [PACKAGE]`: talk to a model in the terminal, with a run that is live or with one of its own."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from neuronpipe.launch.chat.conversation import Conversation
from neuronpipe.launch.chat.session import Chat
from neuronpipe.launch.client import Client, run_ended
from neuronpipe.launch.formats import as_typed
from neuronpipe.launch.generation import MAX_TOKENS, add_conversation_arguments, sampled_as_asked
from neuronpipe.launch.planning import (
    DEMO,
    add_package_argument,
    add_plan_arguments,
    add_use_argument,
    asked_of_plan,
    implementations,
    open_package,
    package_and_plan,
    what_the_demo_is,
)
from neuronpipe.launch.supervisor.start import started_run
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.errors import NotRunning, UserError
from neuronpipe.protocol.links import CONTROL
from neuronpipe.protocol.messages.request import MAX_TOKENS as TO_THE_END
from neuronpipe.protocol.messages.request import Generate
from neuronpipe.protocol.run_directory import RunDirectory, RunFile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_package_argument(parser)
    add_conversation_arguments(
        parser, max_tokens=None, shown=f"as many as fit; {MAX_TOKENS} of a base model", logprobs=False
    )
    add_plan_arguments(parser)
    add_use_argument(parser)
    parser.add_argument(
        "--run",
        type=Path,
        metavar="DIR",
        help="directory of a live run, or of a new one (default: the live run of the model, or else a new one)",
    )


def main(arguments: argparse.Namespace) -> int:
    as_the_model_ends = arguments.max_tokens is None
    if as_the_model_ends:
        arguments.max_tokens = TO_THE_END
    options = sampled_as_asked(arguments)
    with _run(arguments) as (client, package, joined):
        conversation = Conversation(package, arguments.system)
        if as_the_model_ends and not conversation.has_roles:
            options["max_tokens"] = MAX_TOKENS
        _say(f"{'with the run' if joined else 'a new run'} of {package.manifest.name}; /help shows what can be typed")
        if not conversation.has_roles:
            _say("a base model: it goes on with what you type, and answers no questions")
        if not joined and arguments.package is DEMO:
            _say(what_the_demo_is())
        Chat(client, conversation, Generate(request="1", prompt="", **options), _say).hold()
    return 0


def _say(line: str) -> None:
    """For a person, beside what the model says."""
    said = f"[{as_typed(line)}]"
    if sys.stderr.isatty():
        columns = max(20, shutil.get_terminal_size().columns - 1)
        said = textwrap.fill(said, columns, break_long_words=False, break_on_hyphens=False)
    print(said, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _run(arguments: argparse.Namespace) -> Iterator[tuple[Client, Package, bool]]:
    """A client of the run to talk with, its package, and whether it was live already."""
    if (found := _live(arguments)) is not None:
        directory, run_file = found
        package = Package.open(Path(run_file.package))
        with Client(directory.endpoint(CONTROL), run_ended(directory)) as client:
            yield client, package, True
        return
    package, plan = package_and_plan(arguments)
    uses = implementations(arguments.use, plan)
    with (
        started_run(package, plan, arguments.run, stays=False, uses=uses) as live,
        Client(live.directory.endpoint(CONTROL), live.failed) as client,
    ):
        yield client, package, False


def _live(arguments: argparse.Namespace) -> tuple[RunDirectory, RunFile] | None:
    """The live run that is meant, if one is: the one at --run, or else that of the package, or else any. Who asks for a
    plan wants a run of their own."""
    asked = [*asked_of_plan(arguments), *(["--use"] if arguments.use else [])]
    package = None if arguments.package is DEMO else open_package(arguments.package).path.resolve()
    try:
        if arguments.run is not None:
            return _checked(*RunDirectory.find(arguments.run), package, asked)
        live = [] if asked else RunDirectory.live()
    except NotRunning:
        return None
    meant = [found for found in live if package is None or Path(found[1].package).resolve() == package]
    if len(meant) > 1:
        places = ", ".join(str(directory.path) for directory, _ in meant)
        raise UserError(f"several runs are live, name one with --run: {places}")
    return meant[0] if meant else None


def _checked(
    directory: RunDirectory, run_file: RunFile, package: Path | None, asked: list[str]
) -> tuple[RunDirectory, RunFile]:
    """A live run that was named. Raises UserError for wishes that it does not meet."""
    for option in asked:
        raise UserError(f"{option}: the run at {directory.path} is live and keeps its plan; leave {option} out")
    if package is not None and Path(run_file.package).resolve() != package:
        raise UserError(f"{package}: the run at {directory.path} has another package, {run_file.package}")
    return directory, run_file
