"""`neuronpipe profile --activity`, `--import-activity` and `--reorder`: access frequencies of neurons on a text.

A run of the package is recorded: after each token, decode workers expose what each neuron did, and the run waits until
this process has read it (services/worker/recording.py). plans/activity makes a profile from the recording.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import sys
from collections.abc import Callable, Iterator, Set
from pathlib import Path
from typing import TYPE_CHECKING

from neuronpipe.launch.arguments.values import parse_bytes
from neuronpipe.launch.formats import show_bytes
from neuronpipe.launch.planning.options import PlanOptions
from neuronpipe.launch.planning.plan import plan_here
from neuronpipe.launch.profile.profile_arguments import is_demo, refuse_combination, text_name
from neuronpipe.launch.progress import Progress
from neuronpipe.plans.inspect import describe, profile_lines
from neuronpipe.plans.package.activity_profile import ProfileMode
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.document import MODES, Mode, Plan
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.links import CONTROL

if TYPE_CHECKING:
    import numpy as np
    from neuronpipe.plans.activity.recording import RecordingFolder, Windows
    from neuronpipe.plans.predictor.calibration_texts import Texts
    from neuronpipe.protocol.messages.client import Scored
    from numpy.typing import NDArray

DEFAULT_TOKENS = 2048
MIN_TOKENS, MAX_TOKENS = 64, 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("activity", "how often neurons are wanted, instead of a predictor")
    group.add_argument(
        "--activity",
        action="store_true",
        help="run the package on the text, token by token, and keep in it how often each neuron and expert is wanted "
        f"and what a cache would miss; goes on where it was interrupted (default: {DEFAULT_TOKENS:,} --tokens)",
    )
    group.add_argument("--mode", choices=MODES, help="of the run (default: exact); each mode has its own profile")
    group.add_argument("--memory", type=parse_bytes, metavar="BYTES", help="limit for the run, e.g. 4GiB")
    group.add_argument(
        "--import-activity",
        type=Path,
        metavar="DIR",
        help="take PowerInfer's counts, activation_N.pt for each layer N, instead of measuring",
    )
    group.add_argument(
        "--import-tokens",
        type=int,
        metavar="N",
        help="tokens on which these were counted (default: the greatest count, as if that neuron had fired for each)",
    )
    group.add_argument(
        "--reorder",
        action="store_true",
        help="rewrite the package with the neurons first that are wanted most often, by its profile of exact mode; may "
        "be given with --activity or --import-activity",
    )


@frozen(kw_only=True)
class ActivityOptions:
    """The options of `profile` for activity.

    measure: whether to measure activity in a run, with `text`, `tokens`, `mode` and `memory_bytes`
    imported: folder of PowerInfer's counts, to store them
    import_tokens: number of tokens on which these were counted
    reorder: whether to store the package hot-first, at last
    """

    measure: bool
    text: Path | None
    tokens: int | None
    mode: Mode | None
    memory_bytes: int | None
    imported: Path | None
    import_tokens: int | None
    reorder: bool
    as_json: bool

    @property
    def is_requested(self) -> bool:
        """True if `profile` is to do this instead of fitting a predictor."""
        return bool(self.measure or self.imported or self.reorder or self.import_tokens)

    def refuse_unrelated(self, changed: Set[str]) -> None:
        """Raise UserError for arguments that have no effect or contradict each other.

        changed: names of the arguments with values other than their defaults
        """
        if self.measure and self.imported:
            raise UserError("--activity and --import-activity: measure or import; leave one of the two out")
        if self.import_tokens is not None and not self.imported:
            raise UserError("--import-tokens: says something about --import-activity; give that too")
        if self.import_tokens is not None and self.import_tokens < 1:
            raise UserError(f"--import-tokens {self.import_tokens}: expected 1 or more")
        variants = {"activity", "import_activity", "reorder"} & changed
        accepted = {"package", "json", "reorder"}
        accepted |= {"activity", "text", "tokens", "mode", "memory"} if self.measure else set()
        accepted |= {"import_activity", "import_tokens"} if self.imported else set()
        refuse_combination(f"--{min(variants).replace('_', '-')}", changed, accepted)


def main(options: ActivityOptions, package: Package) -> int:
    """Measure or import, then reorder, as requested."""
    if options.reorder:
        package.require_neurons("another order of neurons")
    if options.measure:
        package = _measured(options, package)
    if options.imported:
        package = _imported(options.imported, options.import_tokens, package)
    if options.reorder:
        package = _reordered(package, as_json=options.as_json)
    description = describe(package)
    result = {name: description[name] for name in ("path", "id", "profiles")} | {
        "neuron_order": description["layout"]["neuron_order"],
        "activity_by_layer": description["activity_by_layer"],
        "trigger_fired_by_layer": description["trigger_fired_by_layer"],
    }
    if options.as_json:
        print(json.dumps(result))
    else:
        print("\n".join(profile_lines(description["profiles"])))
        if options.reorder:
            print(f"{package.path}: stored hot-first now, as {package.manifest.id[:12]}; plans made before are refused")
            if any(
                profile["misses"] is None and profile["source"] == "measured" for profile in description["profiles"]
            ):
                print("what a cache misses of its new clusters is not known yet; --activity measures it again")
    return 0


def _measured(options: ActivityOptions, package: Package) -> Package:
    from neuronpipe.plans.activity.recorded_profile import measure
    from neuronpipe.plans.activity.recording import RecordingFolder
    from neuronpipe.plans.activity.stored_profile import add_profile

    name, windows = _windows(options.text, options.tokens, package)
    plan_options = PlanOptions(memory_bytes=options.memory_bytes, mode=options.mode)
    plan = plan_here(package, plan_options, plain=options.as_json).plan
    mode: ProfileMode = plan.compute.mode
    with RecordingFolder(package, mode, windows) as folder:
        if folder.windows_done:
            print(f"neuronpipe: goes on after {folder.windows_done} of {len(windows)} texts", file=sys.stderr)
        with Progress("recording", "tokens", plain=options.as_json) as progress:
            record(package, plan, mode, windows, folder, progress)
        with Progress("counting", "checks", plain=options.as_json) as progress:
            package = add_profile(package, measure(package.manifest, folder.open_recording(), mode, name, progress))
        folder.remove()
    return package


def _windows(text: Path | None, tokens: int | None, package: Package) -> tuple[str, Windows]:
    from neuronpipe.plans.predictor import calibration_texts as texts

    tokens = DEFAULT_TOKENS if tokens is None else tokens
    if not MIN_TOKENS <= tokens <= MAX_TOKENS:
        raise UserError(f"--tokens {tokens}: between {MIN_TOKENS} and {MAX_TOKENS:,}")
    calibration_texts: Texts | None = None
    if text is not None:
        calibration_texts = texts.from_file(package, text, tokens)
    elif is_demo(package):
        calibration_texts = texts.from_demo(package, tokens)
    return text_name(package, text), texts.activity_windows(package, calibration_texts, tokens)


def _imported(folder: Path, tokens: int | None, package: Package) -> Package:
    from neuronpipe.plans.activity.powerinfer_statistics import import_activity
    from neuronpipe.plans.activity.stored_profile import add_profile

    measured = import_activity(package, folder, tokens)
    if tokens is None:
        print(
            f"neuronpipe: the counts are taken to be of {measured.profile.tokens:,} tokens, the greatest of them; "
            "--import-tokens N says better",
            file=sys.stderr,
        )
    return add_profile(package, measured)


def _reordered(package: Package, *, as_json: bool) -> Package:
    from neuronpipe.plans.activity.reorder import needed_bytes, reorder

    print(
        f"neuronpipe: the package is written anew beside the old one, {show_bytes(needed_bytes(package))}",
        file=sys.stderr,
    )
    with Progress("reordering", "bytes", plain=as_json) as progress:
        return reorder(package, progress)


def record(
    package: Package,
    plan: Plan,
    mode: ProfileMode,
    windows: Windows,
    folder: RecordingFolder,
    progress: Callable[[int, int], None],
) -> None:
    """Score the windows that `folder` lacks, token by token by the decode workers, and add their activity to `folder`.

    progress: called with the number of scored tokens and of all tokens
    """
    from neuronpipe.launch.client import Client
    from neuronpipe.launch.planning.implementations import implementations
    from neuronpipe.launch.scoring import score
    from neuronpipe.launch.supervisor.start import started_run
    from neuronpipe.plans.activity.recording import token_record
    from neuronpipe.services.worker.recording import RECORDING, activity_file

    total, done_tokens = sum(map(len, windows)), sum(map(len, windows[: folder.windows_done]))
    progress(done_tokens, total)
    if folder.windows_done == len(windows):
        return
    with (
        started_run(package, plan, None, stays=False, uses=implementations([f"decode={RECORDING}"], plan)) as run,
        Client(run.directory.endpoint(CONTROL), run.failed) as client,
        contextlib.ExitStack() as maps,
    ):
        mappings: list[mmap.mmap] = []

        def flags() -> NDArray[np.uint8]:
            if not mappings:  # the workers exist, since a token has been computed
                for worker in plan.compute.decode_workers():
                    mappings.append(maps.enter_context(_mapped(activity_file(run.directory.path, worker.index))))
            return _union(mappings, package)

        for window in windows[folder.windows_done :]:
            tokens: list[NDArray[np.void]] = []

            def keep(
                first: int, scored: Scored, tokens: list[NDArray[np.void]] = tokens, before: int = done_tokens
            ) -> None:
                if (scored.position, scored.rows) != (len(tokens), 1):
                    raise UserError(f"the run scored {scored.rows} tokens from {scored.position} on, not one by one")
                tokens.append(token_record(flags(), package.manifest.model, mode))
                progress(before + len(tokens), total)

            score(client, window, window_tokens=len(window), path="decode", keep=keep)
            folder.add(tokens)
            done_tokens += len(window)


@contextlib.contextmanager
def _mapped(file: Path) -> Iterator[mmap.mmap]:
    with file.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
        yield mapping


def _union(mappings: list[mmap.mmap], package: Package) -> NDArray[np.uint8]:
    """Return the flags of the neurons of all workers' blocks, [feed-forwards, neurons with padding]."""
    import numpy as np

    flags = np.frombuffer(mappings[0], np.uint8).copy()
    for mapping in mappings[1:]:
        flags |= np.frombuffer(mapping, np.uint8)
    return flags.reshape(package.manifest.model.ffns, -1)
