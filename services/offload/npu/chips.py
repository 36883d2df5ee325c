"""Chips with a Hexagon: what the runtime calls them, and how to know one's own.

Names, models and architectures are those that QNN 2.51 writes into the contexts it prepares for a model; the kernel's
numbers are those of Linux. A chip that is not here is refused: the runtime prepares for one that it does not know as if
it were its oldest, and says nothing.
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
"""From this Hexagon on all compute the same bits in emulation; the two before it compute others, alike."""


@frozen
class Chip:
    """soc: QNN's `soc_model`. arch: of its Hexagon, 75 for v75. soc_ids: the kernel's numbers for it."""

    soc: int
    name: str
    arch: int
    soc_ids: tuple[int, ...] = ()

    @property
    def emulated_numerics(self) -> str:
        """The arithmetic of its products in emulation."""
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
    """By its number or name. Raises UserError."""
    for chip in CHIPS:
        if text == str(chip.soc) or text.upper() == chip.name:
            return chip
    known = ", ".join(f"{chip.soc} {chip.name}" for chip in CHIPS)
    raise UserError(f"chip {quoted(text)}: nobody here knows it; the chips are {known}")


@frozen
class Found:
    """What a machine says of its chip: how it calls it, and which of CHIPS that is, if any."""

    said: str
    chip: Chip | None


def android_property(name: str) -> str:
    """What Android says of itself; nothing elsewhere."""
    command = shutil.which("getprop")
    if command is None:
        return ""
    try:
        said = subprocess.run([command, name], capture_output=True, text=True, check=False, timeout=PROPERTY_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return said.stdout.strip()


def find_chip(root: Path = Path("/"), android: Callable[[str], str] = android_property) -> Found | None:
    """This machine's chip; None where nothing says that it has one of Qualcomm's. root: of its file system. An app of
    Android may not read what Linux says: then its properties do."""
    number, name = _line(root / SYSFS / "soc_id"), android("ro.soc.model") or _line(root / SYSFS / "machine")
    maker = f"{_line(root / SYSFS / 'family')} {android('ro.soc.manufacturer')}".lower()
    if not any(word in maker for word in MAKERS):
        return None
    model = name.upper().partition("-")[0]  # of SM8650-AC, which is a faster one
    known = (chip for chip in CHIPS if model == chip.name or number in map(str, chip.soc_ids))
    return Found(
        ", ".join(filter(None, (name, number and f"soc_id {number}"))) or "one without a name", next(known, None)
    )


def _line(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
