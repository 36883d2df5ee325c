"""`neuronpipe doctor [PACKAGE] [--json]`: check this machine, and give advice."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from neuronpipe.launch.doctor.checks import checks, render
from neuronpipe.launch.formats import as_typed
from neuronpipe.launch.planning.package_argument import add_package_argument, open_package
from neuronpipe.launch.progress import Progress
from neuronpipe.plans.pull.package_library import refuse_unknown
from neuronpipe.plans.pull.source_models import is_source
from neuronpipe.protocol.errors import UserError

if TYPE_CHECKING:
    from neuronpipe.launch.doctor.facts import Fact


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_package_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(arguments: argparse.Namespace) -> int:
    refuse_unknown(arguments.package)
    path = arguments.package
    directory = open_package(path, plain=arguments.json).path if is_source(path) else path
    with Progress("checking and measuring", "checks", plain=arguments.json, steady=True) as progress:
        findings = checks(directory, progress)
        facts, facts_text = _known_facts(directory)
    if arguments.json:
        fields = {
            "checks": [dataclasses.asdict(check) for check in findings],
            "facts": [dataclasses.asdict(fact) for fact in facts],
        }
        print(json.dumps(fields))
    else:
        print(as_typed(render(findings)), end="")
        print(as_typed(facts_text), end="")
    return int(any(check.state == "fail" for check in findings))


def _known_facts(directory: Path) -> tuple[list[Fact], str]:
    """Return the facts about this machine, and as text; none where the kernels or the cache cannot be read, which a
    check reports."""
    try:
        from neuronpipe.launch.doctor.facts import known_facts, render_facts
        from neuronpipe.plans.measure.probe import cache_state

        facts = known_facts(cache_state(directory), time.time())
    except (UserError, OSError, ImportError):
        return [], ""
    return facts, render_facts(facts)
