"""`neuronpipe chat [PACKAGE]`: talk to a model in the terminal, with a live run or a new one."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from neuronpipe.launch.arguments import plan_arguments as planning
from neuronpipe.launch.arguments.generation_arguments import (
    DEFAULT_MAX_TOKENS,
    add_sampling_arguments,
    add_thinking_argument,
    sampling_options,
)
from neuronpipe.launch.catalog.offer import demo_notice, package_or_offer
from neuronpipe.launch.chat.session import Chat
from neuronpipe.launch.client import Client, run_ended
from neuronpipe.launch.formats import as_typed
from neuronpipe.launch.generation.conversation import Conversation
from neuronpipe.launch.planning import DEMO
from neuronpipe.launch.planning.implementations import add_use_argument, implementations
from neuronpipe.launch.planning.options import PlanOptions
from neuronpipe.launch.planning.package_argument import add_package_argument, open_package
from neuronpipe.launch.planning.plan import package_and_plan
from neuronpipe.launch.supervisor.start import started_run
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.errors import NotRunning, UserError
from neuronpipe.protocol.links import CONTROL
from neuronpipe.protocol.messages.request import MAX_TOKENS
from neuronpipe.protocol.run_directory import RunDirectory, RunFile, several_runs

COMMON_OPTIONS = ("package", "system", "max_tokens", "temperature", "seed", *planning.COMMON, "run")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_package_argument(parser)
    add_sampling_arguments(
        parser,
        max_tokens=None,
        default_shown=f"as many as fit the context; {DEFAULT_MAX_TOKENS} for a base model",
        has_logprobs=False,
    )
    add_thinking_argument(parser)
    planning.add_plan_arguments(parser)
    add_use_argument(parser)
    parser.add_argument(
        "--run",
        type=Path,
        metavar="DIR",
        help="directory of a live run, or of a new one (default: the package's live run, or else a new run)",
    )


def main(arguments: argparse.Namespace) -> int:
    has_limit = arguments.max_tokens is not None
    if not has_limit:
        arguments.max_tokens = MAX_TOKENS
    options = sampling_options(arguments)
    plan_options = planning.plan_options(arguments)
    with _open_run(arguments.package, plan_options, arguments.run, arguments.use) as (client, package, is_joined):
        conversation = Conversation(package, arguments.system)
        if not has_limit and not conversation.has_roles:
            options = dataclasses.replace(options, max_tokens=DEFAULT_MAX_TOKENS)
        run = "joined the live run" if is_joined else "a new run"
        _notify(f"{run} of {package.manifest.name}; /help lists the commands")
        if not conversation.has_roles:
            _notify("this is a base model: it continues your text and does not answer questions")
        if not is_joined and arguments.package is DEMO and package.path == DEMO:
            _notify(demo_notice(plan_options))
        Chat(client, conversation, options.request(""), _notify, hides_thinking=arguments.hide_thinking).run()
    return 0


def _notify(line: str) -> None:
    """Print a line that is not part of an answer: in brackets, on stderr."""
    notice = f"[{as_typed(line)}]"
    if sys.stderr.isatty():
        columns = max(20, shutil.get_terminal_size().columns - 1)
        notice = textwrap.fill(notice, columns, break_long_words=False, break_on_hyphens=False)
    print(notice, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _open_run(
    path: Path, options: PlanOptions, directory: Path | None, uses: list[str]
) -> Iterator[tuple[Client, Package, bool]]:
    """Yield a client of the run to talk to, its package, and whether the run was live before."""
    if (run := _find_live(path, options, directory, uses)) is not None:
        live_directory, run_file = run
        package = Package.open(Path(run_file.package))
        with Client(live_directory.endpoint(CONTROL), run_ended(live_directory)) as client:
            yield client, package, True
        return
    package, plan = package_and_plan(package_or_offer(path, options, may_ask=True), options, plain=False)
    with (
        started_run(
            package,
            plan,
            directory,
            stays=False,
            uses=implementations(uses, plan),
            keeps_history=options.keeps_history and not uses,
        ) as live,
        Client(live.directory.endpoint(CONTROL), live.failed) as client,
    ):
        yield client, package, False


def _find_live(
    path: Path, options: PlanOptions, directory: Path | None, uses: list[str]
) -> tuple[RunDirectory, RunFile] | None:
    """Return the live run at --run, else that of the package, else any; None for a new run, as plan options require."""
    plan_options = [*options.typed, *(["--use"] if uses else [])]
    package = None if path is DEMO else open_package(path).path.resolve()
    try:
        if directory is not None:
            return _checked(*RunDirectory.find(directory), package, plan_options)
        live = [] if plan_options else RunDirectory.live()
    except NotRunning:
        return None
    matches = [run for run in live if package is None or Path(run[1].package).resolve() == package]
    if len(matches) > 1:
        raise several_runs(matches)
    return matches[0] if matches else None


def _checked(
    directory: RunDirectory, run_file: RunFile, package: Path | None, plan_options: list[str]
) -> tuple[RunDirectory, RunFile]:
    """Return the live run at --run. Raises UserError if the other options do not fit it."""
    for option in plan_options:
        raise UserError(f"{option}: the run at {directory.path} is live and keeps its plan; leave {option} out")
    if package is not None and Path(run_file.package).resolve() != package:
        raise UserError(f"{package}: the run at {directory.path} has another package, {run_file.package}")
    return directory, run_file
