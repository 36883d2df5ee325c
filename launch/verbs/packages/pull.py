"""`neuronpipe pull NAME|ORG/NAME[:FILE.gguf][@REVISION]`: download a model from a hub and convert it to a package.

A name without a slash is one of the catalog, as `neuronpipe models` shows them.
It states the sizes and asks before a large download. An interrupted pull continues when the command is repeated.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack

from neuronpipe.launch.formats import show_bytes
from neuronpipe.launch.planning.source_package import choice_line
from neuronpipe.launch.progress import Progress
from neuronpipe.launch.verbs.packages.convert import (
    add_conversion_arguments,
    conversion_options,
    conversion_words,
    package_facts,
    render,
)
from neuronpipe.plans.convert import Encoded
from neuronpipe.plans.pull.catalog import known_short_name
from neuronpipe.plans.pull.package_library import VARIABLE, checked_name, unfinished_pull
from neuronpipe.plans.pull.pull import Need, pull
from neuronpipe.plans.pull.repository import Reference
from neuronpipe.protocol.errors import UserError

ASK_ABOVE_BYTES = 2 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "reference",
        metavar="NAME|ORG/NAME[:FILE.gguf][@REVISION]",
        help="a name that `neuronpipe models` shows; or a repository at the hub (HF_ENDPOINT, or huggingface.co), one "
        "GGUF file of it, and a branch, tag or commit",
    )
    parser.add_argument("--name", help="name of the package (default: that name, the repository's or the file's)")
    add_conversion_arguments(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace the package that has this name")
    parser.add_argument("--yes", action="store_true", help="do not ask before a large download")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(arguments: argparse.Namespace) -> int:
    reference, default_name = _resolved(arguments)
    name = checked_name(arguments.name or default_name)
    reports: list[Encoded] = []
    with ExitStack() as progress:
        bars = [progress.enter_context(Progress("asking the hub", "bytes", plain=arguments.json, steady=True))]

        def agree(need: Need) -> None:
            progress.close()
            _confirm(need, is_confirmed=arguments.yes)
            bars[0] = progress.enter_context(Progress("pulling", "bytes", plain=arguments.json, steady=True))

        try:
            package, need = pull(
                reference,
                name,
                quantization=arguments.quantization,
                gates=arguments.gates,
                by_neuron=arguments.by_neuron,
                options=conversion_options(arguments),
                command=_command(arguments, name),
                overwrite=arguments.overwrite,
                agree=agree,
                progress=lambda done, total: bars[0](done, total),
                report=reports.append,
                tell=lambda line: bars[0].note(line),
            )
        except KeyboardInterrupt:
            progress.close()
            if unfinished_pull(name) is not None:
                print("neuronpipe: the download is kept: the same command continues it", file=sys.stderr)
            raise
    (encoded,) = reports
    if arguments.json:
        pulled = {
            "name": name,
            "repository": need.snapshot.repository,
            "commit": need.snapshot.commit,
            "downloaded_bytes": need.download_bytes,
            "disk_bytes": need.disk_bytes,
        }
        print(json.dumps(pulled | package_facts(package, encoded)))
    else:
        print(render(package.path, package.manifest, encoded, name))
    return 0


def _resolved(arguments: argparse.Namespace) -> tuple[Reference, str]:
    """Return the reference that was named, also by a short name, and the default name of the package.

    A short name may set --context, too. Raises UserError for an unknown short name, and what names no repository.
    """
    text = arguments.reference
    if "/" not in text and not text.endswith(".gguf"):
        model = known_short_name(text)
        if arguments.context is None and model.context_tokens:
            arguments.context = model.context_tokens
        return Reference.parse(model.reference), model.name
    reference = Reference.parse(text)
    return reference, reference.name


def _command(arguments: argparse.Namespace, name: str) -> list[str]:
    """Return the words of the command that continues this pull, from any folder."""
    words = ["pull", arguments.reference, "--name", name, *conversion_words(arguments)]
    return words + (["--overwrite"] if arguments.overwrite else [])


def _confirm(need: Need, *, is_confirmed: bool) -> None:
    """Print the sizes, and ask before a large download. Raises UserError if it is refused or does not fit."""
    finished = f", {show_bytes(need.present_bytes)} of it are there already" if need.resumes else ""
    sizes = (
        f"{show_bytes(need.download_bytes)} to download in {need.files} file{'s' if need.files != 1 else ''}, "
        f"a package of {show_bytes(need.choice.package_bytes)}; at most {show_bytes(need.disk_bytes)} of disk at a "
        f"time{finished}"
    )
    free = f"{show_bytes(need.free_bytes)} are free"
    if need.missing_bytes:
        raise UserError(
            f"{need.snapshot}: {sizes}; but {free} in {need.folder}: make room for {show_bytes(need.missing_bytes)}, "
            f"or set {VARIABLE} to a folder on another disk"
        )
    is_large = need.download_bytes > ASK_ABOVE_BYTES and not is_confirmed
    # Elsewhere nobody would answer: a script must say --yes.
    can_ask = is_large and sys.stdin.isatty() and sys.stderr.isatty()
    if is_large and not can_ask:
        raise UserError(f"{need.snapshot}: {sizes}; {free}: add --yes to download that much")
    print(f"neuronpipe: {need.snapshot}: {sizes}; {free}", file=sys.stderr)
    print(f"neuronpipe: {choice_line(need.choice, f'--quantization {need.choice.alternative}')}", file=sys.stderr)
    if can_ask:
        print("neuronpipe: download it? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise UserError("nothing was downloaded")
