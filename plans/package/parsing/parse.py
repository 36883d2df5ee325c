"""Strict reading of manifest.json. Contradictions and unknown fields raise a UserError, which names file and field."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from neuronpipe.plans.models.registry import FAMILIES
from neuronpipe.plans.models.spec import MAX, ModelSpec
from neuronpipe.plans.package.activity_profile import activity_bytes, parse_profiles
from neuronpipe.plans.package.layout import (
    MAX_BLOCK_CLUSTERS,
    PAGE_BYTES,
    Layout,
    MatrixPlace,
    NeuronOrder,
    Part,
    Quantization,
    is_quantized_with,
    reads_inputs_of,
)
from neuronpipe.plans.package.manifest import (
    ACTIVITY,
    BUNDLES,
    CHAT_TEMPLATE,
    CHECKSUMS,
    EMBEDDINGS,
    ERROR_KINDS,
    FIXED,
    FORMAT,
    GATE_QUANTIZATIONS,
    MANIFEST,
    MAX_TOKENIZER_BYTES,
    PREDICTOR,
    QUANTIZATIONS,
    SOURCE_KINDS,
    TOKENIZER,
    VERSION,
    Chat,
    FileEntry,
    Manifest,
    Source,
    Workload,
    identity,
)
from neuronpipe.plans.package.npu_section import parse_npu
from neuronpipe.plans.package.parsing.parse_experts import parse_experts, require_whole_experts
from neuronpipe.plans.package.parsing.parse_predictor import parse_predictor
from neuronpipe.plans.package.parsing.parse_thresholds import parse_silent
from neuronpipe.plans.package.source_experts import SHARED
from neuronpipe.plans.package.tensors import fixed_matrices, row_lengths
from neuronpipe.plans.strict_json import Record, parse_json, read_file
from neuronpipe.protocol.errors import UserError, quoted, safe_name

MAX_MANIFEST_BYTES = 4 << 20
MAX_PART_BYTES = 1 << 30
MAX_SHOWN = 8
MAX_CLUSTERS = 1 << 24  # a request has 24 bits for the index of a cluster


def read_manifest(path: Path) -> Manifest:
    """Return the manifest in a file. Raises UserError as `parse_manifest`, or if the file cannot be read."""
    return parse_manifest(read_file(path, MAX_MANIFEST_BYTES), str(path))


def parse_manifest(data: bytes, where: str) -> Manifest:
    """Return the manifest in `data`. Raises UserError, which starts with `where`, for another version, a wrong id, and
    values that are out of range or contradict each other."""
    record = parse_json(data, where)
    expected_id = identity(record.without("id"))
    if record.value("format") != FORMAT:
        record.fail("format", f"is not {FORMAT!r}: this is no package")
    if record.value("version") != VERSION:
        record.fail(
            "version",
            f"{quoted(record.value('version'))}, this release reads {VERSION}; convert the model again: "
            "`neuronpipe convert SOURCE -o PACKAGE --overwrite`",
        )
    model = _parse_model(record.record("model"))
    quantization = cast(Quantization, record.choice("quantization", *QUANTIZATIONS))
    quantizations = (
        _parse_quantizations(record.record("quantizations"), model, quantization) if record.has("quantizations") else {}
    )
    activity = _parse_activity(record.record("activity"), model.layers) if record.has("activity") else (None, None)
    predictor = parse_predictor(record.record("predictor"), model) if record.has("predictor") else None
    chat = _parse_chat(record.record("chat")) if record.has("chat") else None
    profiles = parse_profiles(record.records("profiles"), model) if record.has("profiles") else ()
    optional = {PREDICTOR: predictor is not None, CHAT_TEMPLATE: chat is not None, ACTIVITY: bool(profiles)}
    silent = parse_silent(record.record("silent"), model) if record.has("silent") else None
    layout = _parse_layout(record.record("layout"), model, quantization, in_place=record.has("source_experts"))
    if silent is not None and layout.down_by_output:
        record.fail("silent", "thresholds need neurons in clusters, and this package has Down by output")
    experts = None
    if record.has("source_experts"):
        experts = parse_experts(
            record.record("source_experts"), model, layout, quantization, _shared_bytes(record.record("files"))
        )
    manifest = Manifest(
        name=record.line("name"),
        source=_parse_source(record.record("source")),
        model=model,
        quantization=quantization,
        end_tokens=_parse_end_tokens(record.record("special_tokens"), model.vocabulary),
        layout=layout,
        files=_parse_files(record.record("files"), optional, in_place=experts is not None),
        quantization_error=_parse_errors(record.record("quantization_error")),
        fired_by_layer=activity[0],
        trigger_fired_by_layer=activity[1],
        predictor=predictor,
        silent=silent,
        npu=parse_npu(record.record("npu"), model) if record.has("npu") else None,
        profiles=profiles,
        workload=_parse_workload(record.record("workload"), model.vocabulary) if record.has("workload") else None,
        chat=chat,
        quantizations=quantizations,
        source_experts=experts,
        compact_tokenizer=record.has("compact_tokenizer") and record.boolean("compact_tokenizer"),
        id=record.text("id"),
    )
    record.finish()
    if expected_id != manifest.id:
        record.fail("id", f"the content was changed (its hash is {expected_id[:12]}...); convert the model again")
    for name, size_bytes in (
        *([] if experts else [(BUNDLES, manifest.clusters * manifest.layout.cluster_stride_bytes)]),
        (CHECKSUMS, manifest.clusters * 8),
        *([(ACTIVITY, activity_bytes(model, len(profiles)))] if profiles else ()),
    ):
        if manifest.files[name].bytes != size_bytes:
            record.fail(f"files.{name}.bytes", f"{manifest.files[name].bytes}, but shape and layout need {size_bytes}")
    return manifest


def _parse_source(record: Record) -> Source:
    kind = record.choice("kind", *SOURCE_KINDS)
    weights = record.record("weights") if record.has("weights") else None
    names = () if weights is None else weights.names()
    if weights is not None and not (
        0 < len(names) <= MAX_SHOWN * 4 and all(name.isprintable() and len(name) < 16 for name in names)
    ):
        record.fail("weights", "expected how many weights each encoding of the source has")
    source = Source(
        kind,
        record.line("name"),
        record.line("architecture"),
        {} if weights is None else {name: weights.integer(name, 1, 1 << 53) for name in names},
        record.line("importance") if record.has("importance") else "",
    )
    record.finish()
    return source


def _parse_model(record: Record) -> ModelSpec:
    record.choice("family", *FAMILIES)
    return record.read(ModelSpec)


def _parse_quantizations(record: Record, model: ModelSpec, quantization: Quantization) -> dict[str, Quantization]:
    names = {name for name, _, _ in fixed_matrices(model)}
    quantizations = {}
    for name in record.names():
        if name not in names:
            record.fail(safe_name(name), "is no fixed matrix of this model")
        encoding = cast(Quantization, record.choice(name, *(other for other in QUANTIZATIONS if other != quantization)))
        has_own_inputs = name in EMBEDDINGS or model.all_neurons_fire
        if not (is_quantized_with if has_own_inputs else reads_inputs_of)(encoding, quantization):
            record.fail(name, f"{encoding} does not go with {quantization}")
        quantizations[name] = encoding
    record.finish()
    return quantizations


def _parse_end_tokens(record: Record, vocabulary: int) -> tuple[int, ...]:
    tokens = record.items("end")
    for token in tokens:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocabulary:
            record.fail("end", f"{quoted(token)} is no token id below {vocabulary}")
    record.finish()
    return tuple(tokens)


def _parse_layout(record: Record, model: ModelSpec, quantization: Quantization, *, in_place: bool) -> Layout:
    if quantization != "f16" and (any(length % 32 for length in row_lengths(model).values())):
        record.fail("cluster_neurons", f"{quantization} needs row lengths that are multiples of 32")
    matrices = record.record("matrices")
    layout = Layout(
        cluster_neurons=record.integer("cluster_neurons", 1, 1 << 16),
        clusters=record.integer("clusters", 1, MAX.neurons),
        trigger_part_bytes=record.integer("trigger_part_bytes", PAGE_BYTES, MAX_PART_BYTES),
        value_part_bytes=record.integer("value_part_bytes", PAGE_BYTES, MAX_PART_BYTES),
        block_neurons=record.integer("block_neurons", 1, 2 * MAX.neurons),
        blocks=record.integer("blocks", 1, MAX.neurons),
        neuron_order=cast(NeuronOrder, record.choice("neuron_order", "source", "frequency")),
        matrices=tuple(
            _parse_matrix(matrices.record(name), name, model.trigger, quantization) for name in model.ffn_matrices
        ),
        down_by_output=record.has("down_by_output") and record.boolean("down_by_output"),
    )
    matrices.finish()
    stride = record.integer("cluster_stride_bytes", PAGE_BYTES, 2 * MAX_PART_BYTES)
    record.finish()
    _check_layout(layout, stride, model, quantization, record, in_place=in_place)
    return layout


def _parse_matrix(record: Record, name: str, trigger: str, quantization: Quantization) -> MatrixPlace:
    part = "trigger" if name == trigger else "value"
    of_rows = None
    if record.has("quantization"):
        of_rows = cast(Quantization, record.choice("quantization", *GATE_QUANTIZATIONS, *QUANTIZATIONS))
        if not (is_quantized_with(of_rows, quantization) if name == "down" else reads_inputs_of(of_rows, quantization)):
            record.fail("quantization", f"{of_rows} does not go with {quantization}")
        if of_rows == quantization:
            record.fail("quantization", f"{of_rows} is the package's; leave it out")
        if of_rows in GATE_QUANTIZATIONS and name != "gate":
            record.fail("quantization", f"{of_rows} is for gates of packages in q4")
    matrix = MatrixPlace(
        name,
        cast(Part, record.choice("part", part)),
        record.integer("quants", 0, MAX_PART_BYTES),
        cast(Part, record.choice("scales_part", *dict.fromkeys((part, "trigger")))),
        record.integer("scales", 0, MAX_PART_BYTES),
        of_rows,
    )
    record.finish()
    return matrix


def _check_layout(
    layout: Layout, stride: int, model: ModelSpec, quantization: Quantization, record: Record, *, in_place: bool
) -> None:
    """Raise UserError if a layout contradicts itself or the model. in_place: matrices have the offsets of slots"""
    if len({matrix.scales_part for matrix in layout.matrices[1:]}) > 1:
        record.fail("matrices.down.scales_part", "the scales of the value part's matrices lie in one part")
    count = layout.cluster_neurons
    if layout.trigger_part_bytes % PAGE_BYTES or layout.value_part_bytes % PAGE_BYTES:
        record.fail("trigger_part_bytes", f"parts are whole pages of {PAGE_BYTES} bytes")
    if stride != layout.cluster_stride_bytes:
        record.fail("cluster_stride_bytes", f"{stride} is not the sum of both parts, {layout.cluster_stride_bytes}")
    if layout.clusters != -(-model.neurons // count):
        record.fail("clusters", f"{layout.clusters} clusters of {count} do not hold {model.neurons} neurons exactly")
    if (all_clusters := model.ffns * layout.clusters) > MAX_CLUSTERS:
        record.fail("clusters", f"{all_clusters} clusters in all; at most {MAX_CLUSTERS}")
    if layout.block_neurons % count or layout.blocks != -(-layout.clusters * count // layout.block_neurons):
        record.fail(
            "blocks",
            f"{layout.blocks} blocks of {layout.block_neurons} do not fit {layout.clusters} clusters of {count}",
        )
    if layout.block_clusters > MAX_BLOCK_CLUSTERS:
        record.fail("block_neurons", f"{layout.block_clusters} clusters in a block; at most {MAX_BLOCK_CLUSTERS}")
    if layout.down_by_output:
        require_whole_experts(layout, model, quantization, record)
    used: dict[str, list[tuple[int, int, str]]] = {"trigger": [], "value": []}
    for part, name, offset, size_bytes in layout.pieces(quantization, model.width):
        if offset % 2:
            record.fail(f"matrices.{name}", f"offset {offset} is odd")
        used[part].append((offset, offset + size_bytes, name))
    part_sizes = {"trigger": layout.trigger_part_bytes, "value": layout.value_part_bytes}
    for name_of_part, bytes_of_part in part_sizes.items():
        part_bytes, end = MAX_PART_BYTES if in_place else bytes_of_part, 0
        for start, stop, name in sorted(used[name_of_part]):
            if start < end or stop > part_bytes:
                record.fail(
                    f"matrices.{name}",
                    f"bytes {start}..{stop} overlap another piece or leave the {name_of_part} part of {part_bytes}",
                )
            end = stop


def _parse_chat(record: Record) -> Chat:
    chat = Chat(begin=record.text("begin"), end=record.text("end"))
    record.finish()
    return chat


def _parse_files(record: Record, optional: Mapping[str, bool], *, in_place: bool) -> dict[str, FileEntry]:
    """Return the entries of all files.

    optional: names of the optional files; True if another section of the manifest requires the file
    in_place: experts are read in place, so there is no bundles.bin, and the loader writes checksums
    """
    files = {}
    neurons = (CHECKSUMS,) if in_place else (BUNDLES, CHECKSUMS)
    if in_place and record.has(SHARED):
        neurons = (*neurons, SHARED)
    for name in (TOKENIZER, FIXED, *neurons, *(name for name, is_used in optional.items() if is_used)):
        entry = record.record(name)
        sha256 = None if name == neurons[0] else entry.text("sha256")
        if sha256 is not None and (len(sha256) != 64 or set(sha256) - set("0123456789abcdef")):
            entry.fail("sha256", "expected 64 hexadecimal digits")
        max_bytes = MAX_TOKENIZER_BYTES if name == TOKENIZER else 1 << 50  # the tokenizer is read as a whole
        files[name] = FileEntry(entry.integer("bytes", 0, max_bytes), sha256)
        entry.finish()
    record.finish()
    return files


def _shared_bytes(files: Record) -> int | None:
    """Return the length of shared.bin; None if the package has none."""
    return files.record(SHARED).integer("bytes", 1, 1 << 50) if files.has(SHARED) else None


def _parse_errors(record: Record) -> dict[str, float]:
    errors = {kind: record.number(kind, 0.0, 1e9) for kind in ERROR_KINDS if record.has(kind)}
    record.finish()
    return errors


def _parse_activity(record: Record, layers: int) -> tuple[tuple[float, ...], tuple[float, ...] | None]:
    active = record.shares("mean_by_layer", layers)
    fired = record.shares("trigger_fired_by_layer", layers) if record.has("trigger_fired_by_layer") else None
    record.finish()
    return active, fired


def _parse_workload(record: Record, vocabulary: int) -> Workload:
    presets, ranges = {}, record.record("presets")
    for name in ranges.names():
        if not name.isprintable():  # it is printed, and control characters act on a terminal
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
    """Raise UserError if a path is no complete package directory. The error says what the path is and what to do."""
    try:
        directory, complete = path.is_dir(), (path / MANIFEST).is_file()
    except OSError as error:
        raise UserError(f"{path}: cannot be opened: {error.strerror}") from None
    if complete:
        return
    what, source = _other_kind(path)
    if what is not None:
        raise UserError(
            f"{path}: {what}, not a package; make one of it with `neuronpipe convert {shlex.quote(str(source))}`"
        )
    if not directory:
        raise UserError(f"{path}: no such package directory; make one with `neuronpipe convert`")
    raise UserError(
        f"{path / MANIFEST}: missing, so this is no complete package; {what_is_in(path)}; make one with `neuronpipe "
        "convert`, of a Hugging Face model's folder (which has config.json) or a GGUF file"
    )


def what_is_in(directory: Path) -> str:
    """Return the end of an error about a directory: that it is empty or unreadable, or its first names."""
    try:
        names = sorted(os.listdir(directory))
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    if not names:
        return "it is empty"
    more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
    return f"it holds {', '.join(map(safe_name, names[:MAX_SHOWN]))}{more}"


def _other_kind(path: Path) -> tuple[str | None, Path]:
    """Return a description of the model source at a path, and the path to convert; None if there is no source."""
    if (path / "config.json").is_file():
        return "a Hugging Face checkpoint", path
    if path.suffix == ".gguf" and path.is_file():
        return "a GGUF file", path
    if path.suffix == ".safetensors" and path.is_file():
        return "a file of a Hugging Face checkpoint", path.parent
    return None, path
