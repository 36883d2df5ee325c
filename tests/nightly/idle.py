"""Measure the cost of an idle run: wake-ups per second and the share of a core, for all its processes together.

    python tests/nightly/idle.py [--seconds N]

Fails above 2 wake-ups per second or 0.1 % of a core. Other load on the machine changes neither figure.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.http_client import served
from tests.idle_cost import cost_over
from tests.pipeline import scratch_shell

MAX_WAKEUPS_PER_S, MAX_CORE_SHARE = 2.0, 0.001
SETTLES_S = 15.0


def main() -> int:
    """Print the figures. The exit status is 1 if one exceeds its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0, help="measured duration (default: %(default)s)")
    seconds = parser.parse_args().seconds
    with scratch_shell() as shell, served(shell, notices=True) as server:
        assert server.post("/v1/completions", prompt="def f(", max_tokens=20).status == 200
        time.sleep(SETTLES_S)
        cost = cost_over(shell.processes(), seconds)
    wakeups_per_s, core_share = cost.wakeups.total() / seconds, cost.cpu_s / seconds
    print(f"idle for {seconds:.0f} s: {wakeups_per_s:.2f} wake-ups a second, {core_share:.3%} of a core")
    for name, count in cost.wakeups.most_common(5):
        print(f"  {name}: {count / seconds:.2f} a second")
    return int(wakeups_per_s > MAX_WAKEUPS_PER_S or core_share > MAX_CORE_SHARE)


if __name__ == "__main__":
    sys.exit(main())
