"""Packages of version 2 are read as they always were, under the id they have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from neuronpipe.launch.planning import DEMO
from neuronpipe.plans.package.manifest import identity
from neuronpipe.plans.package.parse import parse_manifest
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.errors import UserError

VERSION_2 = (Path(__file__).parents[1] / "conformance" / "golden" / "manifest_version_2.json").read_bytes()


def test_the_demo_of_version_2_is_the_demo_of_version_3() -> None:
    old, new = parse_manifest(VERSION_2, "manifest.json"), Package.open(DEMO).manifest
    assert old.id == json.loads(VERSION_2)["id"] != new.id
    assert old.sealed() == new


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("architecture", "gpt9", r"model\.family: 'gpt9' is not one of"),
        ("shape", 5, r"model\.width: missing"),
        ("shape.layers", 0, r"model\.layer_kinds\[0\]\.layers: 0 is outside"),
        ("shape.extra", 1, r"model\.extra: unknown field"),
        ("layout", [], "layout: expected an object"),
        ("layout.gate", None, r"layout\.matrices\.gate: missing"),
        ("layout.up.part", [1], r"layout\.matrices\.up\.part: expected a string"),
        ("layout.matrices", {}, r"layout\.matrices\.gate: missing"),
        ("activity", [], "activity: expected an object"),
        ("model", {}, "model: unknown field"),
    ],
)
def test_a_damaged_manifest_of_version_2_is_refused_by_its_field(path: str, value: Any, named: str) -> None:
    values = json.loads(VERSION_2)
    *parents, name = path.split(".")
    holder = values
    for parent in parents:
        holder = holder[parent]
    holder[name] = value
    del values["id"]
    data = json.dumps({**values, "id": identity(values)}).encode()
    with pytest.raises(UserError, match=named):
        parse_manifest(data, "manifest.json")
