"""Residency entries and entries of request rings mean the same in Python, in C and in the specification."""

import re
from pathlib import Path
from types import ModuleType

import pytest
from neuronpipe.protocol import requests, residency

HEADER = (Path(__file__).parents[2] / "native" / "neuronpipe.h").read_text(encoding="utf-8")

PARTS = {"TRIGGER": residency.TRIGGER, "VALUE": residency.VALUE}


@pytest.mark.parametrize(("prefix", "module"), [("NP_ENTRY_", residency), ("NP_REQUEST_", requests)])
def test_python_and_c_agree(prefix: str, module: ModuleType) -> None:
    in_c = {name: int(value, 16) for name, value in re.findall(rf"{prefix}(\w+) = (0x\w+)", HEADER)}
    in_python = {name: value for name, value in vars(module).items() if isinstance(value, int)}
    in_python = {name: value for name, value in in_python.items() if name not in PARTS or module is requests}
    assert in_c == in_python


def test_parts_have_the_same_numbers() -> None:
    assert {name: int(value) for name, value in re.findall(r"NP_(TRIGGER|VALUE) = (\d)", HEADER)} == PARTS


def test_slot_state_and_flags_do_not_overlap() -> None:
    parts = (residency.SLOT_MASK, residency.STATE_MASK, residency.REFERENCED, residency.PINNED)
    assert sum(parts) == residency.SLOT_MASK | residency.STATE_MASK | residency.REFERENCED | residency.PINNED
    states = (residency.ABSENT, residency.LOADING, residency.PRESENT, residency.FAILED)
    assert [state >> 24 for state in states] == [0, 1, 2, 3]
