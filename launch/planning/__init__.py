"""From the options of a command line to an open package, a plan for it, and the implementations of its roles."""

from pathlib import Path

DEMO = Path(__file__).resolve().parents[2] / "plans" / "demo" / "package"
"""The demo model's package, at the same place in a checkout and in an installed package."""

AUTO = -1
"""The number of bytes that `--memory auto` stands for: the run follows what is available, as it changes."""
