"""A manifest says what it means or is refused by the name of the field."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
from neuronpipe.plans.convert import convert
from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.package.manifest import identity
from neuronpipe.plans.package.parsing.parse import parse_manifest
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.marks import Required, marks_of

from tests.conformance.checkpoints import TINY, write_checkpoint


@pytest.fixture(scope="module")
def manifest_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """manifest.json of a small package."""
    directory = tmp_path_factory.mktemp("manifest")
    package = convert(write_checkpoint(directory / "source", TINY), directory / "package", quantization="q4")
    return (package.path / "manifest.json").read_bytes()


def changed(data: bytes, change: Callable[[Any], object]) -> bytes:
    """The manifest with a change and the id that belongs to it: only the field itself can be wrong."""
    values = json.loads(data)
    change(values)
    del values["id"]
    return json.dumps({**values, "id": identity(values)}).encode()


def test_a_manifest_survives_being_read_and_written(manifest_bytes: bytes) -> None:
    assert parse_manifest(manifest_bytes, "manifest.json").to_bytes() == manifest_bytes


def test_what_came_later_stands_in_a_manifest_only_where_it_says_something(manifest_bytes: bytes) -> None:
    """Packages older than such a field keep their id, and plans made for them stay valid."""
    written = {"experts", "norm", "positions", "head_norm", "gated", "qkv_bias", "output_bias", "ffn_bias"}
    assert marks_of(ModelSpec, Required).keys() == written | {"tied_embeddings"}
    later = {field.name for field in fields(ModelSpec) if field.default is not MISSING} - written - {"tied_embeddings"}
    assert not later & json.loads(manifest_bytes)["model"].keys()
    parallel = changed(manifest_bytes, lambda m: m["model"].update(parallel=True))
    manifest = parse_manifest(parallel, "manifest.json")
    assert manifest.model.parallel
    assert json.loads(manifest.to_bytes())["model"]["parallel"] is True
    assert parse_manifest(manifest.to_bytes(), "manifest.json") == manifest


def test_any_changed_number_is_noticed_by_the_id(manifest_bytes: bytes) -> None:
    values = json.loads(manifest_bytes)
    values["model"]["context_tokens"] += 1
    with pytest.raises(UserError, match=r"manifest.json: id: the content was changed"):
        parse_manifest(json.dumps(values).encode(), "manifest.json")


def one_block_of(neurons: int) -> dict[str, int]:
    """A layout's fields, were every neuron a cluster and all of them one block."""
    return {"cluster_neurons": 1, "clusters": neurons, "block_neurons": neurons, "blocks": 1}


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "another format": (lambda m: m.update(format="zip"), "format: is not"),
    "an earlier version": (lambda m: m.update(version=2), "version: 2, this release reads 3; convert the model again"),
    "a later version": (lambda m: m.update(version=4), "version: 4, this release reads 3; convert the model again"),
    "the first version": (lambda m: m.update(version=1), r"version: 1, .*`neuronpipe convert SOURCE -o PACKAGE"),
    "an unknown activation": (
        lambda m: m["model"].update(activation="elu"),
        r"model\.activation: 'elu' is not one of",
    ),
    "an unknown quantization": (lambda m: m.update(quantization="q5"), "quantization: 'q5'"),
    "an unknown field": (lambda m: m.update(extra=1), "extra: unknown field"),
    "an unknown field of the shape": (lambda m: m["model"].update(heads=1), r"model\.heads: unknown field"),
    "parallel as a number": (lambda m: m["model"].update(parallel=1), r"model\.parallel: expected true or false"),
    "no scale": (lambda m: m["model"].update(residual_scale=0), r"model\.residual_scale: 0 is outside"),
    "a missing field": (lambda m: m["model"].pop("width"), r"model\.width: missing"),
    "a number as text": (lambda m: m["model"].update(width="64"), r"model\.width: expected a whole number"),
    "true as a number": (lambda m: m["model"].update(width=True), r"model\.width: expected a whole number"),
    "an unknown family": (lambda m: m["model"].update(family="gpt9"), r"model\.family: 'gpt9' is not one of llama, "),
    "a run of no layers": (
        lambda m: m["model"]["layer_kinds"].append({"layers": 0, "window_tokens": 0}),
        r"model\.layer_kinds\[1\]\.layers: 0 is outside",
    ),
    "silu without a gate": (
        lambda m: m["model"].update(gated=False, activation="silu"),
        r"model\.activation: silu needs a feed-forward with a gate",
    ),
    "two experts": (
        lambda m: m["model"].update(experts=2),
        r"files\.bundles\.bin\.bytes: \d+, but shape and layout need",
    ),
    "too many experts": (lambda m: m["model"].update(experts=1 << 20), r"model\.experts: 1048576 is outside 1\.\.4096"),
    "more experts for a token than there are": (
        lambda m: m["model"].update(experts_per_token=2),
        r"model\.experts_per_token: 2 of 1 experts",
    ),
    "an unknown router": (lambda m: m["model"].update(router="hash"), r"model\.router: "),
    "an odd head": (lambda m: m["model"].update(head_width=33), r"model\.head_width: 33 is odd"),
    "heads that do not share": (
        lambda m: m["model"].update(query_heads=3, key_heads=2),
        r"model\.query_heads: 3 is no multiple of key_heads, 2",
    ),
    "more neurons than clusters": (lambda m: m["model"].update(neurons=5000), r"layout\.clusters: "),
    "half a page": (
        lambda m: m["layout"].update(trigger_part_bytes=4097),
        r"layout\.trigger_part_bytes: parts are whole",
    ),
    "another stride": (lambda m: m["layout"].update(cluster_stride_bytes=4096), r"layout\.cluster_stride_bytes"),
    "too few blocks": (lambda m: m["layout"].update(blocks=1), r"layout\.blocks"),
    "a block of more clusters than a worker lists": (
        lambda m: (m["model"].update(neurons=70_000), m["layout"].update(one_block_of(70_000))),
        r"layout\.block_neurons: 70000 clusters in a block; at most 65536",
    ),
    "pieces that overlap": (
        lambda m: m["layout"]["matrices"]["down"].update(quants=2),
        r"layout\.matrices\.down\.quants: bytes 2",
    ),
    "a piece outside its part": (
        lambda m: m["layout"]["matrices"]["gate"].update(scales=4094),
        r"layout\.matrices\.gate\.scales",
    ),
    "an odd offset": (
        lambda m: m["layout"]["matrices"]["gate"].update(scales=4001),
        r"layout\.matrices\.gate\.scales: offset 4001 is odd",
    ),
    "up and down in different parts": (
        lambda m: m["layout"]["matrices"]["down"].update(scales_part="value"),
        r"layout\.matrices\.down\.scales_part",
    ),
    "an end token without embedding": (lambda m: m["special_tokens"].update(end=[300]), r"special_tokens\.end: 300"),
    "a short hash": (lambda m: m["files"]["tokenizer.json"].update(sha256="ab"), r"files\.tokenizer\.json\.sha256"),
    "another size of bundles.bin": (lambda m: m["files"]["bundles.bin"].update(bytes=5), r"files\.bundles\.bin\.bytes"),
    "a kind of error that is none": (lambda m: m["quantization_error"].update(norm=0.1), r"quantization_error\.norm"),
    "activity of too few layers": (
        lambda m: m.update(activity={"mean_by_layer": [0.1]}),
        r"activity\.mean_by_layer: expected 2 shares",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_contradiction_is_refused_by_name(what: str, manifest_bytes: bytes) -> None:
    change, message = CHANGES[what]
    with pytest.raises(UserError, match=message):
        parse_manifest(changed(manifest_bytes, change), "manifest.json")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not valid JSON"),
        (b"[]", "expected a JSON object"),
        (b'{"a": 1, "a": 2}', "the field 'a' appears twice"),
        (b'{"a": NaN}', "NaN is not a number"),
        (b'{"a": ' + b"[" * 100_000, "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
    ],
)
def test_what_is_no_json_object_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_manifest(data, "manifest.json")


def test_a_manifest_larger_than_any_is_not_read_into_memory(tmp_path: Path) -> None:
    from neuronpipe.plans.package.parsing.parse import read_manifest

    path = tmp_path / "manifest.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UserError, match="larger than"):
        read_manifest(path)
