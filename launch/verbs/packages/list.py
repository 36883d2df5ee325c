"""`neuronpipe list [--json]`: list the packages that have names, and unfinished pulls."""

from __future__ import annotations

import argparse
import json
from typing import Any

from neuronpipe.launch.formats import as_typed, shell_line, show_bytes
from neuronpipe.plans.package.atomic_output import disk_usage_bytes
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.pull.package_library import (
    is_under_way,
    package_names,
    packages_folder,
    pull_names,
    pulls_folder,
    unfinished_pull,
)
from neuronpipe.plans.pull.source_models import origin_of
from neuronpipe.protocol.errors import UserError, escaped


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(arguments: argparse.Namespace) -> int:
    listing = {
        "folder": str(packages_folder()),
        "packages": [_describe(name) for name in package_names()],
        "unfinished": [_describe_pull(name) for name in pull_names()],
    }
    print(json.dumps(listing) if arguments.json else as_typed(render(listing)))
    return 0


def _describe(name: str) -> dict[str, Any]:
    path = packages_folder() / name
    try:
        manifest, origin = Package.open(path).manifest, origin_of(path)
    except UserError as error:
        return {"name": name, "path": str(path), "error": str(error)}
    return {
        "name": name,
        "path": str(path),
        "id": manifest.id,
        "bytes": manifest.size_bytes,
        "quantization": manifest.precision,
        "activation": manifest.model.activation,
        "context_tokens": manifest.model.context_tokens,
        "predictor": manifest.predictor is not None,
        "source": manifest.source.name if origin is None else origin.path,
    }


def _describe_pull(name: str) -> dict[str, Any]:
    pull = unfinished_pull(name)
    return {
        "name": name,
        "reference": None if pull is None else pull.reference,
        "command": None if pull is None else list(pull.command),
        "bytes": disk_usage_bytes(pulls_folder() / name),
        "under_way": is_under_way(name),
    }


def render(listing: dict[str, Any]) -> str:
    lines = []
    if packages := listing["packages"]:
        width = max(4, *(len(package["name"]) for package in packages)) + 2
        kinds = 2 + max(len("weights"), *(len(package.get("quantization", "")) for package in packages))
        lines.append(f"{'name':<{width}}{'size':>10}  {'weights':<{kinds}}{'activation':<12}{'context':>8}  from")
        for package in packages:
            if "error" in package:
                lines.append(f"{package['name']:<{width}}{'damaged':>10}  {package['error']}")
                continue
            lines.append(
                f"{package['name']:<{width}}{show_bytes(package['bytes']):>10}  {package['quantization']:<{kinds}}"
                f"{package['activation']:<12}{package['context_tokens']:>8}  {escaped(package['source'])}"
            )
    else:
        lines.append(f"no packages in {listing['folder']} yet; `neuronpipe models` shows which there are")
    for pull in listing["unfinished"]:
        name, size = pull["name"], show_bytes(pull["bytes"])
        if pull["under_way"]:
            lines.append(f"\n{name} is being made; {size} are on disk")
        else:
            command_line = shell_line(pull["command"] or ["pull", "ORG/NAME", "--name", name])
            lines.append(
                f"\n{name} was interrupted; {size} are on disk: `neuronpipe {command_line}` continues, "
                f"`neuronpipe rm {name}` removes them"
            )
    return "\n".join(lines)
