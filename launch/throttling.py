"""Throttling: from what the sensors say to how much a run pauses. The decision is pure; asking the battery is not.

    sensors    pauses
    hot        more by STEP_UP at every look, up to MAX_SHARE
    warm       as it is
    cool       less by STEP_DOWN at every look, down to none

Pauses grow fast, shrink slowly, and stay between: a device heats up in seconds and cools in minutes. Clocks that the
system has lowered are reported and not answered with pauses: the system keeps its temperature then, and with less than
full clocks every step is slower already.
"""

from __future__ import annotations

import shutil
import subprocess

from neuronpipe.plans.device.heat import Heat

STEP_UP, STEP_DOWN, MAX_SHARE = 0.15, 0.05, 0.75
SENSORS_SHOWN = 3
BATTERY_PATIENCE_S = 10.0


class Throttling:
    """How much to pause, from one look at the sensors after the other."""

    def __init__(self) -> None:
        self.share = 0.0

    def look(self, heat: Heat) -> float:
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


def render(heat: Heat, share: float) -> str:
    """One line for a person."""
    shown = [f"{s.name} {s.celsius:.0f} of {s.bears_celsius:.0f} C" for s in heat.sensors[:SENSORS_SHOWN]]
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
