"""The process that measures the device profile while a run is idle: `python -m ...idle_measurement PACKAGE`.

The supervisor of the run starts it, and kills it when a request comes (launch/supervisor/idle_profile.py). It runs only
where no other process wants the processor. It measures nothing if a valid profile exists, and stores nothing that is
doubtful. Its exit status is DONE, LATER if the machine is busy or has too little memory now, or FAILED with the reason
on stderr.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from neuronpipe.launch.formats import show_bytes
from neuronpipe.launch.profile.accelerator import accelerator_options
from neuronpipe.launch.profile.device_profile import measure_device_profile
from neuronpipe.native import lib
from neuronpipe.plans.device.device import Device
from neuronpipe.plans.device.profile import DeviceProfile
from neuronpipe.plans.measure.cached_profile import cache_profile, doubt, is_quiet
from neuronpipe.plans.measure.probe import has_device_profile, profile_path, this_device
from neuronpipe.protocol.errors import UserError

DONE, FAILED, LATER = 0, 1, 75  # 75: EX_TEMPFAIL of sysexits.h
MIN_AVAILABLE_BYTES = 2 << 30  # a measurement takes half a GiB, and must not take memory from the run
LOCK = "profile.lock"

Measure = Callable[[Path, Device, str | None], DeviceProfile]


def main() -> int:
    """Measure for the package that the command line names, and return the exit status."""
    lib.np_process_die_with(os.getppid())
    lib.np_process_name(b"np-profile")
    lower_priority()
    try:
        return measure_if_due(Path(sys.argv[1]))
    except (UserError, OSError) as error:
        print(f"the device profile was not measured: {error}", file=sys.stderr)
        return FAILED


def measure_if_due(directory: Path, measure: Measure = measure_device_profile) -> int:
    """Measure and store the device profile unless it is there, and return the exit status. Raises UserError."""
    device = this_device()
    path = profile_path(device, directory)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _lock(path.parent / LOCK) as is_locked:
        if has_device_profile(directory):
            return DONE
        if not is_locked:
            return _later("another run measures it")
        if device.memory_available_bytes < MIN_AVAILABLE_BYTES:
            return _later(f"less than {show_bytes(MIN_AVAILABLE_BYTES)} of memory is available")
        if not is_quiet():
            return _later("other programs use the machine")
        profile = measure(directory, device, accelerator_options(None))
        if (reason := doubt(profile)) is not None:
            return _later(reason)
        if (reason := cache_profile(path, profile)) is not None:
            raise UserError(reason)
    return DONE


def _later(reason: str) -> int:
    print(f"the device profile is measured later: {reason}", file=sys.stderr)
    return LATER


def lower_priority() -> None:
    """Let this process and its children run only when nothing else wants their core."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, 19)
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Hold a lock file within the context. Yield False if another run measures at the moment."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


if __name__ == "__main__":
    sys.exit(main())
