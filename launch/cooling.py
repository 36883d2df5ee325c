"""Keeping a run cool: from what the sensors say to how much it rests. The decision is pure; asking the battery is not.

    sensors    rest
    hot        more by STEP_UP at every look, up to MOST_REST
    warm       as it is
    cool       less by STEP_DOWN at every look, down to none

Rest grows fast and goes slowly, and stays between: a device heats up in seconds and cools in minutes. Clocks that the
system has lowered are reported and not answered with rest: the system keeps its temperature then, and with less than
full clocks every step is slower already.
"""

from __future__ import annotations

import shutil
import subprocess

from neuronpipe.plans.device.heat import Heat

STEP_UP, STEP_DOWN, MOST_REST = 0.15, 0.05, 0.75
SENSORS_SHOWN = 3
BATTERY_PATIENCE_S = 10.0


class Cooling:
    """How much to rest, from one look at the sensors after the other."""

    def __init__(self) -> None:
        self.rest = 0.0

    def look(self, heat: Heat) -> float:
        """The share of the time to rest from now on, 0..MOST_REST."""
        if heat.state == "hot":
            self.rest = min(MOST_REST, self.rest + STEP_UP)
        elif heat.state != "warm":
            self.rest = max(0.0, self.rest - STEP_DOWN)
        self.rest = round(self.rest, 4)
        return self.rest


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


def render(heat: Heat, rest: float) -> str:
    """One line for a person."""
    shown = [f"{s.name} {s.celsius:.0f} of {s.bears_celsius:.0f} C" for s in heat.sensors[:SENSORS_SHOWN]]
    parts = [f"{heat.state}: {', '.join(shown)}"] if shown else ["no temperature can be read here"]
    if heat.throttled:
        parts.append(f"the system has lowered the clocks to {heat.clock_share:.0%}")
    if rest:
        parts.append(f"resting {rest:.0%} of the time")
    elif heat.state == "hot":
        parts.append("let it cool: no case, no charging, no sun")
    if not shown:
        parts.append("on a phone, install the app Termux:API and `pkg install termux-api`")
    return "; ".join(parts)
