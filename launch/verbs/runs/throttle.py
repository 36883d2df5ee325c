"""`neuronpipe throttle [--run DIR] [--once] [--json]`: slow a run down while the device is too hot.

The command is a client of the run. It requests pauses between steps, which end by themselves if the command ends, so
that other runs pay nothing for it. Pauses do not change the output, and unlike slow cores they do not make one
participant late for all others.

    sensors    pauses
    hot        more by STEP_UP at each reading, up to MAX_SHARE
    warm       unchanged
    cool       less by STEP_DOWN at each reading, down to none

Pauses grow fast and shrink slowly, because a device heats up in seconds and cools down in minutes. Clocks that the
system has lowered are only reported: the system controls the temperature then, and every step is slower already.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import subprocess
import time
from pathlib import Path

from neuronpipe.launch.client import Client, attach
from neuronpipe.plans.device.thermal import ThermalState, read_thermal_state
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.messages.request import Throttle

EVERY_S = 5.0
BATTERY_EVERY_S = 60.0  # reading it starts an Android process, and batteries heat up slowly
PAUSES_LAST = 3  # readings, so that one that comes late does not end the pauses
STEP_UP, STEP_DOWN, MAX_SHARE = 0.15, 0.05, 0.75
SENSORS_SHOWN = 3
BATTERY_PATIENCE_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", type=Path, metavar="DIR", help="run directory (default: the only live run)")
    parser.add_argument("--once", action="store_true", help="report the temperatures once; needs no run")
    parser.add_argument("--every", type=_seconds, default=EVERY_S, metavar="S", help="seconds between readings (5)")
    parser.add_argument("--sensors", type=Path, default=Path("/"), metavar="DIR", help="read DIR/sys instead of /sys")
    parser.add_argument("--json", action="store_true", help="print one JSON object per reading")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 60:
        raise argparse.ArgumentTypeError(f"{text!r}: between 0.1 and 60 seconds")
    return seconds


def main(arguments: argparse.Namespace) -> int:
    if arguments.once:
        _print_reading(read_thermal_state(arguments.sensors, battery_status()), 0.0, arguments.json)
        return 0
    with attach(arguments.run) as client:
        client.status()
        try:
            _control(client, arguments.sensors, arguments.every, as_json=arguments.json)
        except UserError as ended:
            if not arguments.json:
                print(ended)
        except KeyboardInterrupt:
            client.send(Throttle(share=0.0))
            raise
    return 0


def _control(client: Client, sensors: Path, every_s: float, *, as_json: bool) -> None:
    """Read the sensors and adapt the pauses, until the run ends: raises UserError then."""
    throttling = Throttling()
    last_printed: tuple[object, ...] = ()
    battery, battery_due = "", 0.0
    while True:
        if time.monotonic() >= battery_due:
            battery, battery_due = battery_status(), time.monotonic() + BATTERY_EVERY_S
        thermal = read_thermal_state(sensors, battery)
        before, share = throttling.share, throttling.update(thermal)
        if share or before:
            client.send(Throttle(share=share, for_s=PAUSES_LAST * every_s))
        reading = (thermal.state, thermal.throttled, share)
        if as_json or reading != last_printed:
            _print_reading(thermal, share, as_json)
            last_printed = reading
        time.sleep(every_s)
        client.status()


def _print_reading(thermal: ThermalState, share: float, as_json: bool) -> None:
    if not as_json:
        print(f"{time.strftime('%H:%M:%S')}  {render(thermal, share)}", flush=True)
        return
    fields = {**dataclasses.asdict(thermal), "state": thermal.state, "throttled": thermal.throttled}
    print(json.dumps(fields | {"throttle_share": share}), flush=True)


class Throttling:
    """The share of the time to pause, adapted at each reading of the sensors."""

    def __init__(self) -> None:
        self.share = 0.0

    def update(self, thermal: ThermalState) -> float:
        """Return the share of the time to pause from now on, 0..MAX_SHARE."""
        if thermal.state == "hot":
            self.share = min(MAX_SHARE, self.share + STEP_UP)
        elif thermal.state != "warm":
            self.share = max(0.0, self.share - STEP_DOWN)
        self.share = round(self.share, 4)
        return self.share


def battery_status() -> str:
    """Return the battery status of Termux:API; empty without it."""
    program = shutil.which("termux-battery-status")
    if program is None:
        return ""
    try:
        result = subprocess.run([program], capture_output=True, text=True, timeout=BATTERY_PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""  # the command exists, but not the app that answers it
    return result.stdout


def render(thermal: ThermalState, share: float) -> str:
    temperatures = [f"{s.name} {s.celsius:.0f} of {s.limit_celsius:.0f} C" for s in thermal.sensors[:SENSORS_SHOWN]]
    parts = [f"{thermal.state}: {', '.join(temperatures)}"] if temperatures else ["no temperature can be read here"]
    if thermal.throttled:
        parts.append(f"the system has lowered the clocks to {thermal.clock_share:.0%}")
    if share:
        parts.append(f"throttled: pauses for {share:.0%} of the time")
    elif thermal.state == "hot":
        parts.append("let it cool: no case, no charging, no sun")
    if not temperatures:
        parts.append("on a phone, install the app Termux:API and `pkg install termux-api`")
    return "; ".join(parts)
