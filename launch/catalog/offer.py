"""Advice for a user who named no model: the demo runs, and a small model answers. A terminal offers that one once."""

from __future__ import annotations

import sys
from pathlib import Path

from neuronpipe.launch.formats import show_bytes
from neuronpipe.launch.generation.notices import first_time
from neuronpipe.launch.planning import DEMO
from neuronpipe.launch.planning.options import PlanOptions
from neuronpipe.launch.planning.shapes import pulled_names
from neuronpipe.launch.progress import note_output
from neuronpipe.plans.device.process_limits import read_memory
from neuronpipe.plans.planner.device_facts import MEMORY_SHARE
from neuronpipe.plans.pull.catalog import catalog
from neuronpipe.plans.pull.package_library import FIRST_MODEL, package_path
from neuronpipe.protocol.errors import UserError

FIRST_MODEL_MEMORY_BYTES = 2 << 30
"""A memory limit in which FIRST_MODEL runs on every device. A test asks the planner: to ask it here would take half a
second, and memory that counts in the run."""
DEMO_IS = "the demo, a self-test of 11 million parameters that completes Python code and answers nothing"
MAX_NAMED = 3


def package_or_offer(path: Path, options: PlanOptions, *, may_ask: bool) -> Path:
    """Return the package to run: `path`, or the pulled FIRST_MODEL if the user accepts it.

    It is offered once to a user who named no model and has none, if it fits the memory.

    may_ask: whether a person may read the question; in a script nobody would answer

    Raises UserError if the download fails.
    """
    if path is not DEMO or not may_ask or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return path
    if pulled_names() or not _fits(options) or not first_time("offer", FIRST_MODEL):
        return path
    size = show_bytes(catalog()[FIRST_MODEL].download_bytes)
    print(
        f"neuronpipe: no model was named, and none is on this disk; {FIRST_MODEL} is the smallest good one, {size} to "
        f"download\nneuronpipe: download it? Otherwise this runs {DEMO_IS} [y/N] ",
        end="",
        file=sys.stderr,
        flush=True,
    )
    accepted = sys.stdin.readline().strip().lower() in ("y", "yes")
    note_output()
    if not accepted:
        first_time("demo", "run")  # the question has said it
        return path
    import subprocess  # imported here: a run whose user accepts nothing need not pay for it

    # A process of its own: the memory of a conversion must not count in the run.
    if subprocess.run([sys.executable, "-m", "neuronpipe.launch", "pull", FIRST_MODEL], check=False).returncode:
        raise UserError(f"{FIRST_MODEL}: was not downloaded; the same command without a model now runs the demo")
    note_output()
    return package_path(FIRST_MODEL)


def demo_notice(options: PlanOptions) -> str:
    """Return the notice for users who named no model: that this is the demo, and how to get or name another model."""
    if names := pulled_names():
        more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        return f"no model was named, so this is {DEMO_IS}; name one of yours: {', '.join(names[:MAX_NAMED])}{more}"
    listing = "`neuronpipe models` shows what this machine can run"
    if not _fits(options):
        return f"no model was named, so this is {DEMO_IS}; {listing}"
    size = show_bytes(catalog()[FIRST_MODEL].download_bytes)
    return (
        f"no model was named, so this is {DEMO_IS}; `neuronpipe pull {FIRST_MODEL}` gets a small model that "
        f"answers ({size}), and {listing}"
    )


def _fits(options: PlanOptions) -> bool:
    """Return True if FIRST_MODEL fits the memory limit, or what a run takes without one."""
    limit_bytes = options.memory_bytes if options.has_fixed_limit else None
    if limit_bytes is None:
        limit_bytes = int(MEMORY_SHARE * read_memory(Path("/")).available_bytes)
    return limit_bytes >= FIRST_MODEL_MEMORY_BYTES
