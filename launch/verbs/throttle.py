"""`neuronpipe throttle [--run DIR] [--once] [--json]`: slow a run down while the device is too hot.

A client like any other: what it asks of the run ends by itself when this command does. How much the run pauses:

    sensors    pauses
    hot        more by STEP_UP at every look, up to MAX_SHARE
    warm       as it is
    cool       less by STEP_DOWN at every look, down to none

Pauses grow fast, shrink slowly, and stay between: a device heats up in seconds and cools in minutes. Clocks that the
system has lowered are reported and not answered with pauses: the system keeps its temperature then, and with less than
full clocks every step is slower already.
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
BATTERY_EVERY_S = 60.0  # asking it starts a process of Android's, and batteries heat up slowly
SHARES_HOLD = 3  # looks: one that comes late does not end the pauses
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
    """Look until the run ends."""
    if arguments.once:
        _say(read_thermal_state(arguments.sensors, battery_status()), 0.0, arguments.json)
        return 0
    with attach(arguments.run) as client:
        client.status()
        try:
            _watch(client, arguments)
        except UserError as ended:
            if not arguments.json:
                print(ended)
        except KeyboardInterrupt:
            client.send(Throttle(share=0.0))
            raise
    return 0


def _watch(client: Client, arguments: argparse.Namespace) -> None:
    """Raises UserError when the run is over."""
    throttling = Throttling()
    told: tuple[object, ...] = ()
    battery, battery_due = "", 0.0
    while True:
        if time.monotonic() >= battery_due:
            battery, battery_due = battery_status(), time.monotonic() + BATTERY_EVERY_S
        heat = read_thermal_state(arguments.sensors, battery)
        before, share = throttling.share, throttling.look(heat)
        if share or before:
            client.send(Throttle(share=share, for_s=SHARES_HOLD * arguments.every))
        now = (heat.state, heat.throttled, share)
        if arguments.json or now != told:
            _say(heat, share, arguments.json)
            told = now
        time.sleep(arguments.every)
        client.status()


def _say(heat: ThermalState, share: float, as_json: bool) -> None:
    if not as_json:
        print(f"{time.strftime('%H:%M:%S')}  {render(heat, share)}", flush=True)
        return
    whole = {**dataclasses.asdict(heat), "state": heat.state, "throttled": heat.throttled, "throttle_share": share}
    print(json.dumps(whole), flush=True)


class Throttling:
    """How much to pause, from one look at the sensors after the other."""

    def __init__(self) -> None:
        self.share = 0.0

    def look(self, heat: ThermalState) -> float:
        """The share of the time to pause from now on, 0..MAX_SHARE."""
        if heat.state == "hot":
            self.share = min(MAX_SHARE, self.share + STEP_UP)
        elif heat.state != "warm":
            self.share = max(0.0, self.share - STEP_DOWN)
        self.share = round(self.share, 4)
        return self.share


def battery_status() -> str:
    """What Termux:API says of the battery; empty without it."""
    program = shutil.which("termux-battery-status")
    if program is None:
        return ""
    try:
        asked = subprocess.run([program], capture_output=True, text=True, timeout=BATTERY_PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""  # the command is there, the app that answers it is not
    return asked.stdout


def render(heat: ThermalState, share: float) -> str:
    """One line for a person."""
    shown = [f"{s.name} {s.celsius:.0f} of {s.limit_celsius:.0f} C" for s in heat.sensors[:SENSORS_SHOWN]]
    parts = [f"{heat.state}: {', '.join(shown)}"] if shown else ["no temperature can be read here"]
    if heat.throttled:
        parts.append(f"the system has lowered the clocks to {heat.clock_share:.0%}")
    if share:
        parts.append(f"throttled: pauses for {share:.0%} of the time")
    elif heat.state == "hot":
        parts.append("let it cool: no case, no charging, no sun")
    if not shown:
        parts.append("on a phone, install the app Termux:API and `pkg install termux-api`")
    return "; ".join(parts)
