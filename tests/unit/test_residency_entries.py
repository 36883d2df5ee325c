"""Residency entries and entries of request rings mean the same in Python, in C and in the specification."""

import re
from pathlib import Path

from neuronpipe.protocol.memory import residency

HEADER = (Path(__file__).parents[2] / "native" / "neuronpipe.h").read_text(encoding="utf-8")

PARTS = {"TRIGGER": residency.TRIGGER, "VALUE": residency.VALUE}


def test_python_and_c_agree() -> None:
    entries = dict(re.findall(r"NP_ENTRY_(\w+) = (0x\w+)", HEADER))
    requests = dict(re.findall(r"NP_(REQUEST_\w+) = (0x\w+)", HEADER))
    in_python = {name: value for name, value in vars(residency).items() if isinstance(value, int)}
    assert {name: int(value, 16) for name, value in {**entries, **requests}.items()} | PARTS == in_python


def test_parts_have_the_same_numbers() -> None:
    assert {name: int(value) for name, value in re.findall(r"NP_(TRIGGER|VALUE) = (\d)", HEADER)} == PARTS


def test_slot_state_and_flags_do_not_overlap() -> None:
    flags = (residency.REFERENCED, residency.PINNED, 7 * residency.USE, residency.SCANNED)
    assert sum((residency.SLOT_MASK, residency.STATE_MASK, *flags)) == 0xFFFFFFFF
    states = (residency.ABSENT, residency.LOADING, residency.PRESENT, residency.FAILED)
    assert [state >> 24 for state in states] == [0, 1, 2, 3]
