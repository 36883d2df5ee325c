"""Manifests of version 2, as packages of earlier releases have them, turned into those of version 3.

    version 2                          version 3
    architecture, shape, activation,   model: one description (plans/models/spec.py)
    attention_bias, tied_embeddings
    layout.gate_part_bytes             layout.trigger_part_bytes
    layout.rest_part_bytes             layout.value_part_bytes
    layout.gate, .up, .down            layout.matrices.gate, .up, .down; `part` says where both pieces lie
    activity.gate_fired_by_layer       activity.trigger_fired_by_layer

The id stays that of the file as it is: plans made for the package go on being obeyed.
"""

from __future__ import annotations

from typing import Any

from neuronpipe.plans.strict_json import Record

PARTS = {"gate": "trigger", "rest": "value"}


def as_version_3(record: Record) -> Record:
    """A manifest of version 2 with the fields of version 3. Unknown fields stay, for the reader to refuse."""
    values = record.without("")
    if "model" in values:
        record.fail("model", "unknown field; a newer version may understand it")
    shape = dict(_object(values.pop("shape", None)))
    layers = {name: shape.pop(name, None) for name in ("layers", "window_tokens")}
    values["version"] = 3
    values["model"] = {
        **shape,
        "family": values.pop("architecture", None),
        "layer_kinds": [layers],
        "norm": "rms",
        "positions": "rotary",
        "head_norm": False,
        "activation": values.pop("activation", None),
        "gated": True,
        "qkv_bias": values.pop("attention_bias", None),
        "output_bias": False,
        "ffn_bias": False,
        "tied_embeddings": values.pop("tied_embeddings", None),
    }
    values["layout"] = _layout(values.get("layout"))
    if isinstance(activity := values.get("activity"), dict):
        values["activity"] = _renamed(activity, {"gate_fired_by_layer": "trigger_fired_by_layer"})
    return Record(values, record.where)


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _renamed(values: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in values.items()}


def _layout(layout: Any) -> Any:
    if not isinstance(layout, dict):
        return layout
    layout = _renamed(layout, {"gate_part_bytes": "trigger_part_bytes", "rest_part_bytes": "value_part_bytes"})
    if "matrices" in layout:
        return layout  # with gate, up and down, which are refused beside it
    layout["matrices"] = {}
    for name in ("gate", "up", "down"):
        if isinstance(place := layout.pop(name, None), dict):
            place = {"part": "gate", "scales_part": "gate"} | place
            named = {field: PARTS.get(str(place[field]), place[field]) for field in ("part", "scales_part")}
            layout["matrices"][name] = place | named
    return layout
