"""Where the demo model's package lies: in the checkout and in an installed package alike."""

from pathlib import Path

DEMO = Path(__file__).resolve().parent.parent / "plans" / "demo" / "package"
