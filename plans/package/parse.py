"""Reading manifest.json strictly: a package that contradicts itself is refused by the name of the field."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import cast

from neuronpipe.plans.package.fields import Record, parse_json, read_file
from neuronpipe.plans.package.layout import MOST_BLOCK_CLUSTERS, PAGE_BYTES, Layout, NeuronOrder, Part, Quantization
from neuronpipe.plans.package.manifest import (
    ACTIVATIONS,
    BUNDLES,
    CHAT_TEMPLATE,
    CHECKSUMS,
    ERROR_KINDS,
    FIXED,
    FORMAT,
    MANIFEST,
    MOST_TOKENIZER_BYTES,
    PREDICTOR,
    QUANTIZATIONS,
    SOURCE_KINDS,
    TOKENIZER,
    VERSION,
    Activation,
    Chat,
    FileEntry,
    Manifest,
    Shape,
    Source,
    Workload,
    identity,
)
from neuronpipe.plans.package.parse_predictor import parse_predictor
from neuronpipe.protocol.errors import UserError, quoted

MOST_MANIFEST_BYTES = 4 << 20


def read_manifest(path: Path) -> Manifest:
    """Parse and check a manifest.json. Raises UserError naming the file and the field."""
    return parse_manifest(read_file(path, MOST_MANIFEST_BYTES), str(path))


def parse_manifest(data: bytes, where: str) -> Manifest:
    """The manifest in `data`, checked: types, ranges, that the layout fits the shape, and the id."""
    record = parse_json(data, where)
    if record.value("format") != FORMAT:
        record.fail("format", f"is not {FORMAT!r}: this is no package")
    if record.value("version") != VERSION:
        record.fail(
            "version",
            f"is not {VERSION}, which this release reads; convert the model again: "
            "`neuronpipe convert SOURCE PACKAGE --overwrite`",
        )
    record.choice("architecture", "llama")
    shape = _parse_shape(record.record("shape"))
    quantization = cast(Quantization, record.choice("quantization", *QUANTIZATIONS))
    activation = cast(Activation, record.choice("activation", *ACTIVATIONS))
    activity = _parse_activity(record.record("activity"), shape.layers) if record.has("activity") else (None, None)
    predictor = parse_predictor(record.record("predictor"), shape, activation) if record.has("predictor") else None
    chat = _parse_chat(record.record("chat")) if record.has("chat") else None
    manifest = Manifest(
        name=record.line("name"),
        source=_parse_source(record.record("source")),
        activation=activation,
        quantization=quantization,
        shape=shape,
        attention_bias=record.boolean("attention_bias"),
        tied_embeddings=record.boolean("tied_embeddings"),
        end_tokens=_parse_end_tokens(record.record("special_tokens"), shape.vocabulary),
        layout=_parse_layout(record.record("layout"), shape, quantization),
        files=_parse_files(record.record("files"), predicted=predictor is not None, chats=chat is not None),
        quantization_error=_parse_errors(record.record("quantization_error")),
        activity_by_layer=activity[0],
        gate_fired_by_layer=activity[1],
        predictor=predictor,
        workload=_parse_workload(record.record("workload"), shape.vocabulary) if record.has("workload") else None,
        chat=chat,
        id=record.text("id"),
    )
    record.finish()
    if (expected := identity(record.without("id"))) != manifest.id:
        record.fail("id", f"the content was changed (its hash is {expected[:12]}...); convert the model again")
    for name, size_bytes in (
        (BUNDLES, manifest.words * manifest.layout.cluster_stride_bytes),
        (CHECKSUMS, manifest.words * 8),
    ):
        if manifest.files[name].bytes != size_bytes:
            record.fail(f"files.{name}.bytes", f"{manifest.files[name].bytes}, but shape and layout need {size_bytes}")
    return manifest


def _parse_source(record: Record) -> Source:
    source = Source(record.choice("kind", *SOURCE_KINDS), record.line("name"), record.line("architecture"))
    record.finish()
    return source


def _parse_shape(record: Record) -> Shape:
    shape = Shape(
        width=record.integer("width", 1, 1 << 20),
        neurons=record.integer("neurons", 1, 1 << 22),
        layers=record.integer("layers", 1, 4096),
        experts=record.integer("experts", 1, 1),
        query_heads=record.integer("query_heads", 1, 4096),
        key_heads=record.integer("key_heads", 1, 4096),
        head_width=record.integer("head_width", 2, 4096),
        vocabulary=record.integer("vocabulary", 1, 1 << 24),
        context_tokens=record.integer("context_tokens", 1, 1 << 24),
        norm_epsilon=record.number("norm_epsilon", 0.0, 1.0),
        window_tokens=record.integer("window_tokens", 0, 1 << 24),
    )
    record.finish()
    check_shape(shape, record)
    return shape


def check_shape(shape: Shape, record: Record) -> None:
    """Refuse a shape whose fields contradict each other; `record` names the file and the fields."""
    if shape.head_width % 2:
        record.fail("head_width", f"{shape.head_width} is odd; rotary positions need pairs")
    if shape.query_heads % shape.key_heads:
        record.fail("query_heads", f"{shape.query_heads} is no multiple of key_heads, {shape.key_heads}")


def _parse_end_tokens(record: Record, vocabulary: int) -> tuple[int, ...]:
    tokens = record.items("end")
    for token in tokens:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocabulary:
            record.fail("end", f"{quoted(token)} is no token id below {vocabulary}")
    record.finish()
    return tuple(tokens)


def _parse_layout(record: Record, shape: Shape, quantization: Quantization) -> Layout:
    if quantization != "f16" and (shape.width % 32 or shape.query_width % 32):
        record.fail("cluster_neurons", f"{quantization} needs row lengths that are multiples of 32")
    part_most = 1 << 30
    gate, up, down = record.record("gate"), record.record("up"), record.record("down")
    for matrix in (up, down):
        matrix.choice("part", "rest")
    scales_part = cast(Part, up.choice("scales_part", "gate", "rest"))
    down.choice("scales_part", scales_part)
    layout = Layout(
        cluster_neurons=record.integer("cluster_neurons", 1, 1 << 16),
        clusters=record.integer("clusters", 1, 1 << 22),
        gate_part_bytes=record.integer("gate_part_bytes", PAGE_BYTES, part_most),
        rest_part_bytes=record.integer("rest_part_bytes", PAGE_BYTES, part_most),
        block_neurons=record.integer("block_neurons", 1, 1 << 23),
        blocks=record.integer("blocks", 1, 1 << 22),
        neuron_order=cast(NeuronOrder, record.choice("neuron_order", "source", "frequency")),
        gate_quants=gate.integer("quants", 0, part_most),
        gate_scales=gate.integer("scales", 0, part_most),
        up_quants=up.integer("quants", 0, part_most),
        up_scales=up.integer("scales", 0, part_most),
        down_quants=down.integer("quants", 0, part_most),
        down_scales=down.integer("scales", 0, part_most),
        scales_part=scales_part,
    )
    stride = record.integer("cluster_stride_bytes", PAGE_BYTES, 2 * part_most)
    for part in (record, gate, up, down):
        part.finish()
    _check_layout(layout, stride, shape, quantization, record)
    return layout


def _check_layout(layout: Layout, stride: int, shape: Shape, quantization: Quantization, record: Record) -> None:
    count = layout.cluster_neurons
    if layout.gate_part_bytes % PAGE_BYTES or layout.rest_part_bytes % PAGE_BYTES:
        record.fail("gate_part_bytes", f"parts are whole pages of {PAGE_BYTES} bytes")
    if stride != layout.cluster_stride_bytes:
        record.fail("cluster_stride_bytes", f"{stride} is not the sum of both parts, {layout.cluster_stride_bytes}")
    if layout.clusters != -(-shape.neurons // count):
        record.fail("clusters", f"{layout.clusters} clusters of {count} do not hold {shape.neurons} neurons exactly")
    if shape.layers * shape.experts * layout.clusters >= 1 << 32:
        record.fail("clusters", "more clusters than 32-bit word indices")
    if layout.block_neurons % count or layout.blocks != -(-layout.clusters * count // layout.block_neurons):
        record.fail(
            "blocks",
            f"{layout.blocks} blocks of {layout.block_neurons} do not fit {layout.clusters} clusters of {count}",
        )
    if layout.block_clusters > MOST_BLOCK_CLUSTERS:
        record.fail("block_neurons", f"{layout.block_clusters} clusters in a block; at most {MOST_BLOCK_CLUSTERS}")
    used: dict[str, list[tuple[int, int, str]]] = {"gate": [], "rest": []}
    for part, name, offset, size_bytes in layout.pieces(quantization, shape.width):
        if offset % 2:
            record.fail(name, f"offset {offset} is odd")
        used[part].append((offset, offset + size_bytes, name))
    for part, part_bytes in (("gate", layout.gate_part_bytes), ("rest", layout.rest_part_bytes)):
        end = 0
        for start, stop, name in sorted(used[part]):
            if start < end or stop > part_bytes:
                record.fail(
                    name, f"bytes {start}..{stop} overlap another piece or leave the {part} part of {part_bytes} bytes"
                )
            end = stop


def _parse_chat(record: Record) -> Chat:
    chat = Chat(begin=record.text("begin"), end=record.text("end"))
    record.finish()
    return chat


def _parse_files(record: Record, *, predicted: bool, chats: bool) -> dict[str, FileEntry]:
    optional = ((PREDICTOR, predicted), (CHAT_TEMPLATE, chats))
    files = {}
    for name in (TOKENIZER, FIXED, BUNDLES, CHECKSUMS, *(name for name, there in optional if there)):
        entry = record.record(name)
        sha256 = None if name == BUNDLES else entry.text("sha256")
        if sha256 is not None and (len(sha256) != 64 or set(sha256) - set("0123456789abcdef")):
            entry.fail("sha256", "expected 64 hexadecimal digits")
        most_bytes = MOST_TOKENIZER_BYTES if name == TOKENIZER else 1 << 50  # it is read as a whole
        files[name] = FileEntry(entry.integer("bytes", 0, most_bytes), sha256)
        entry.finish()
    record.finish()
    return files


def _parse_errors(record: Record) -> dict[str, float]:
    errors = {kind: record.number(kind, 0.0, 1e9) for kind in ERROR_KINDS if record.has(kind)}
    record.finish()
    return errors


def _parse_activity(record: Record, layers: int) -> tuple[tuple[float, ...], tuple[float, ...] | None]:
    active = _parse_shares(record, "mean_by_layer", layers)
    fired = _parse_shares(record, "gate_fired_by_layer", layers) if record.has("gate_fired_by_layer") else None
    record.finish()
    return active, fired


def _parse_shares(record: Record, name: str, layers: int) -> tuple[float, ...]:
    values = record.items(name)
    if len(values) != layers or not all(
        isinstance(v, int | float) and not isinstance(v, bool) and 0 <= v <= 1 for v in values
    ):
        record.fail(name, f"expected {layers} shares between 0 and 1")
    return tuple(float(v) for v in values)


def _parse_workload(record: Record, vocabulary: int) -> Workload:
    presets, ranges = {}, record.record("presets")
    for name in ranges.names():
        if not name.isprintable():  # it is shown, and a terminal obeys what is not
            ranges.fail(name, "expected a printable name")
        place = ranges.record(name)
        first = place.integer("first_token", 0, vocabulary - 1)
        presets[name] = (first, place.integer("tokens", 1, vocabulary - first))
        place.finish()
    ranges.finish()
    workload = Workload(seed=record.integer("seed", 0, 1 << 62), presets=presets)
    record.finish()
    return workload


def require_package(path: Path) -> None:
    """Refuse a path that is no complete package directory, saying what it is and what to do."""
    try:
        directory, complete = path.is_dir(), (path / MANIFEST).is_file()
    except OSError as error:
        raise UserError(f"{path}: cannot be opened: {error.strerror}") from None
    if complete:
        return
    what, source = _other_kind(path)
    if what is not None:
        raise UserError(
            f"{path}: {what}, not a package; make one of it with "
            f"`neuronpipe convert {shlex.quote(str(source))} PACKAGE`"
        )
    if not directory:
        raise UserError(f"{path}: no such package directory; make one with `neuronpipe convert`")
    raise UserError(f"{path / MANIFEST}: missing, so this is no complete package; make one with `neuronpipe convert`")


def _other_kind(path: Path) -> tuple[str | None, Path]:
    """What a path is that can be made a package of, and what to convert then."""
    if (path / "config.json").is_file():
        return "a Hugging Face checkpoint", path
    if path.suffix == ".gguf" and path.is_file():
        return "a GGUF file", path
    if path.suffix == ".safetensors" and path.is_file():
        return "a file of a Hugging Face checkpoint", path.parent
    return None, path
