"""A file that appears whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from neuronpipe.plans.package.atomic_output import whole_file
from neuronpipe.protocol.errors import UserError


def test_what_was_there_stays_until_all_is_written(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text("old")
    with whole_file(file) as place:
        place.write_text("new")
        assert file.read_text() == "old"
    assert file.read_text() == "new"
    assert list(tmp_path.iterdir()) == [file]


def test_an_error_leaves_what_was_there_and_nothing_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text("old")

    def write_half() -> None:
        with whole_file(file) as place:
            place.write_text("ne")
            raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        write_half()
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_a_place_that_cannot_be_is_named(tmp_path: Path) -> None:
    for place in (tmp_path / ("x" * 300), tmp_path / "nowhere" / "plan.json"):
        with pytest.raises(UserError, match=r"cannot be written: \w+"), whole_file(place) as beside:
            beside.write_text("new")
