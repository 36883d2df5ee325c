"""`neuronpipe throttle [--run DIR] [--once] [--json]`: slow a run down while the device is too hot.

A client like any other: what it asks of the run ends by itself when this command does.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path

from neuronpipe.launch.attached import attach
from neuronpipe.launch.client import Client
from neuronpipe.launch.throttling import Throttling, battery_status, render
from neuronpipe.plans.device.heat import Heat, read_heat
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.messages.request import Throttle

EVERY_S = 5.0
BATTERY_EVERY_S = 60.0  # asking it starts a process of Android's, and batteries heat up slowly
SHARES_HOLD = 3  # looks: one that comes late does not end the pauses


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `throttle`."""
    parser.add_argument("--run", type=Path, metavar="DIR", help="run directory (default: the only live run)")
    parser.add_argument("--once", action="store_true", help="look once and say how hot it is; needs no run")
    parser.add_argument("--every", type=_seconds, default=EVERY_S, metavar="S", help="seconds between two looks (5)")
    parser.add_argument("--sensors", type=Path, default=Path("/"), metavar="DIR", help="read DIR/sys instead of /sys")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each look")


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
        _say(read_heat(arguments.sensors, battery_status()), 0.0, arguments.json)
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
        heat = read_heat(arguments.sensors, battery)
        before, share = throttling.share, throttling.look(heat)
        if share or before:
            client.send(Throttle(share=share, for_s=SHARES_HOLD * arguments.every))
        now = (heat.state, heat.throttled, share)
        if arguments.json or now != told:
            _say(heat, share, arguments.json)
            told = now
        time.sleep(arguments.every)
        client.status()


def _say(heat: Heat, share: float, as_json: bool) -> None:
    if not as_json:
        print(f"{time.strftime('%H:%M:%S')}  {render(heat, share)}", flush=True)
        return
    whole = {**dataclasses.asdict(heat), "state": heat.state, "throttled": heat.throttled, "throttle_share": share}
    print(json.dumps(whole), flush=True)
