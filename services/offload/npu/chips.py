"""Chips with a Hexagon: the runtime's names for them, and how to detect this machine's.

Names, models and architectures are those that QNN 2.51 writes into the contexts it prepares; the kernel's numbers are
those of Linux. Any other chip is refused: the runtime silently prepares for its oldest architecture if it does not know
a chip.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from neuronpipe.protocol.errors import UserError, quoted
from neuronpipe.protocol.frozen import frozen

SYSFS = Path("sys/devices/soc0")
MAKERS = ("snapdragon", "qualcomm", "qti")
PROPERTY_TIMEOUT_S = 5
UNLIKE_V68 = 73
"""From this architecture on all emulated Hexagons compute the same bits. The two older ones agree with each other."""


@frozen
class Chip:
    """A chip.

    soc: QNN's `soc_model`
    arch: the version of its Hexagon
    soc_ids: the kernel's numbers for it
    """

    soc: int
    name: str
    arch: int
    soc_ids: tuple[int, ...] = ()

    @property
    def emulated_numerics(self) -> str:
        return "htp-v73" if self.arch >= UNLIKE_V68 else "htp-v68"

    def __str__(self) -> str:
        return f"{self.name} (soc {self.soc}, Hexagon v{self.arch})"


CHIPS = (
    Chip(30, "SM8350", 68, (439,)),
    Chip(36, "SM8450", 69, (457, 480, 482)),
    Chip(43, "SM8550", 73, (519,)),
    Chip(52, "SA8255", 73),
    Chip(57, "SM8650", 75, (557, 577)),
    Chip(60, "SC8380XP", 73, (555,)),
    Chip(64, "SM7550", 73),
    Chip(66, "QCS8550", 73, (603, 604)),
    Chip(68, "SM8635", 73, (614,)),
    Chip(69, "SM8750", 79, (618,)),
    Chip(70, "SM7675", 73),
    Chip(73, "SM7635", 73, (636,)),
    Chip(74, "SM6650", 73, (640, 641)),
    Chip(77, "QCS9100", 73, (667,)),
    Chip(78, "QCM6690", 73, (657, 658)),
    Chip(82, "QCS8300", 75, (674,)),
    Chip(85, "SM8735", 73),
    Chip(86, "SM7750", 73, (659,)),
    Chip(87, "SM8850", 81, (660,)),
    Chip(88, "SC8480XP", 81),
    Chip(97, "SM8845", 81),
)


def chip_of(text: str) -> Chip:
    """Return the chip with this number or name. Raises UserError for any other text."""
    for chip in CHIPS:
        if text == str(chip.soc) or text.upper() == chip.name:
            return chip
    names = ", ".join(f"{chip.soc} {chip.name}" for chip in CHIPS)
    raise UserError(f"chip {quoted(text)}: it is not known here; the chips are {names}")


@frozen
class DetectedChip:
    """A machine's chip: the machine's own description of it, and the entry of CHIPS, if there is one."""

    description: str
    chip: Chip | None


def android_property(name: str) -> str:
    """Return a property of Android, or an empty string elsewhere."""
    command = shutil.which("getprop")
    if command is None:
        return ""
    try:
        completed = subprocess.run(
            [command, name], capture_output=True, text=True, check=False, timeout=PROPERTY_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return completed.stdout.strip()


def find_chip(root: Path = Path("/"), android: Callable[[str], str] = android_property) -> DetectedChip | None:
    """Detect this machine's chip. Return None if nothing indicates one of Qualcomm's.

    root: root of the file system. Android apps may not read sysfs, so Android's properties are read as well.
    """
    number, name = _line(root / SYSFS / "soc_id"), android("ro.soc.model") or _line(root / SYSFS / "machine")
    maker = f"{_line(root / SYSFS / 'family')} {android('ro.soc.manufacturer')}".lower()
    if not any(word in maker for word in MAKERS):
        return None
    model = name.upper().partition("-")[0]  # SM8650-AC is a faster SM8650
    matching = (chip for chip in CHIPS if model == chip.name or number in map(str, chip.soc_ids))
    description = ", ".join(filter(None, (name, number and f"soc_id {number}"))) or "without a name"
    return DetectedChip(description, next(matching, None))


def _line(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
