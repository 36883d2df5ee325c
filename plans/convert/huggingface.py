"""Opens a Hugging Face directory: config.json, one or several safetensors files, tokenizer.json."""

from __future__ import annotations

import math
import re
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
from neuronpipe.plans.convert.chat_template import CONFIG, examined, huggingface_end, huggingface_template
from neuronpipe.plans.convert.checkpoint import Checkpoint, Options, take_tensors
from neuronpipe.plans.convert.end_tokens import EndToken, added_tokens, end_tokens, ids_at
from neuronpipe.plans.convert.fp8_rows import F8, HARMLESS, METHODS, Fp8Reader
from neuronpipe.plans.convert.refusals import refuse_missing_config, refuse_other_directories
from neuronpipe.plans.convert.rope import (
    attention_scale,
    interleaved_order,
    joined_order,
    latent_orders,
    latent_scale,
    layer_positions,
    paired_order,
    rotated_width,
    scaled_frequencies,
    with_score_factor,
)
from neuronpipe.plans.convert.source_file import SourceFile
from neuronpipe.plans.convert.source_predictors import take_predictors
from neuronpipe.plans.convert.stored_tensors import Inventory, OpenFile, RowNumbers
from neuronpipe.plans.convert.tokenizer_file import read_tokenizer
from neuronpipe.plans.models.family import Architecture, Choices
from neuronpipe.plans.models.registry import ARCHITECTURES, MISSING_BY_ARCHITECTURE
from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.package.manifest import Source
from neuronpipe.plans.package.safetensors_header import TensorEntry, parse_header
from neuronpipe.plans.strict_json import Record, one_line, read_json
from neuronpipe.protocol.errors import MAX_QUOTED_CHARACTERS, UserError, quoted, safe_name
from numpy.typing import NDArray

MAX_FILES = 1000
MAX_EXTRA_LAYERS = 16


def open_huggingface(path: Path, options: Options, open_file: OpenFile = SourceFile) -> Checkpoint:
    """Return the checkpoint in a directory. Reads configuration and headers, but no weights. Raises UserError for
    anything that is missing, contradictory or not supported.

    open_file: opens the safetensors files, which may lie elsewhere
    """
    refuse_other_directories(path)
    refuse_missing_config(path)
    document = read_json(path / "config.json", has_infinities=True)
    name = _architecture(document)
    architecture = ARCHITECTURES[name]
    config = architecture.language_part(document)
    ends = document if document.has("eos_token_id") else config
    with ExitStack() as files:
        is_fp8 = _method(document) in METHODS
        readers = {F8: Fp8Reader(document.record("quantization_config"))} if is_fp8 else {}
        inventory = _inventory(Inventory(path, readers), architecture, path, files, open_file)
        model = architecture.read(config, inventory.has, Choices(options.activation, options.context_tokens))
        names = architecture.tensor_names(config, inventory.has)
        position_config, local = config, None
        if architecture.local_theta is not None:
            position_config, local_config = layer_positions(config, architecture.local_theta)
            model, local = _with_local_positions(model, local_config)
        frequencies, orders = _positions(position_config, model, architecture)
        if model.latent_width:
            rotary_scale = math.sqrt(attention_scale(config, model.context_tokens))
            model = replace(model, attention_scale=latent_scale(config), rotary_scale=rotary_scale)
        elif frequencies is not None:
            model = with_score_factor(model, frequencies, attention_scale(position_config, model.context_tokens))
        if architecture.joined_rows is not None:
            apart = np.asarray(architecture.joined_rows(config, model), dtype=np.int64)
            orders["query_key_value"] = apart[joined_order(model, orders)] if orders else apart
        elif names.query_key_value is not None and orders:
            orders["query_key_value"] = joined_order(model, orders)
        matrices, vectors = take_tensors(inventory, model, names, orders, norm_offset=architecture.norm_offset)
        predictors = take_predictors(inventory, model, names, enabled=options.predictor)
        unused = f"{names.output}.weight" if model.tied_embeddings else "(?!)"
        left_out = [re.escape(names.layer.format(model.layers + n)) for n in range(_extra_layers(config, architecture))]
        unused = "|".join([unused, HARMLESS if is_fp8 else "(?!)", *(f"{layer}.*" for layer in left_out)])
        left_out_notes = inventory.refuse_leftovers(re.compile(f"{architecture.harmless}|{unused}"))
        tokenizer = read_tokenizer(options.tokenizer or path / "tokenizer.json", model.vocabulary)
        template = huggingface_template(path, options.chat_template)
        facts = examined(template, options.examine_template, options.chat_template)
        return Checkpoint(
            source=Source("huggingface", one_line(path.resolve().name), name),
            model=model,
            ends=_ends(path, ends, model.vocabulary, facts.closing, tokenizer),
            tokenizer=tokenizer,
            chat_template=template,
            notes=(*facts.notes(template), *left_out_notes),
            inverse_frequency=frequencies,
            local_inverse_frequency=local,
            matrices=matrices,
            vectors=vectors,
            predictors=predictors,
            files=files.pop_all(),
        )
    raise AssertionError  # for the type checker, which assumes that ExitStack.__exit__ may suppress errors


def _with_local_positions(model: ModelSpec, config: Record) -> tuple[ModelSpec, NDArray[np.float32] | None]:
    """Return the model and the table of its layers with local positions, None if it has no such layers.

    config: the configuration of the positions of these layers
    """
    width = model.table_width(is_local=True)
    rotated_width(config, width, partial=False)
    if not any(model.local_layers):
        return model, None
    scale = model.local_attention_scale * attention_scale(config)
    return replace(model, local_attention_scale=scale), scaled_frequencies(config, width)


def _extra_layers(config: Record, architecture: Architecture) -> int:
    """Return the number of layers behind the last one that are left out."""
    key = architecture.extra_layers
    return config.integer(key, 0, MAX_EXTRA_LAYERS) if key is not None and config.has(key) else 0


def _positions(
    config: Record, model: ModelSpec, architecture: Architecture
) -> tuple[NDArray[np.float32] | None, dict[str, RowNumbers]]:
    """Return the table of inverse frequencies, None without rotary positions, and the order of the rows of queries and
    keys, empty unless only a part of each head rotates, or neighbours are pairs."""
    if model.positions != "rotary":
        return None, {}
    if model.latent_width:
        rotated = rotated_width(config, model.rotary_width, partial=False)
        frequencies = scaled_frequencies(config, rotated, context_tokens=model.context_tokens)
        return frequencies, latent_orders(model) if architecture.is_interleaved(config) else {}
    head_width = model.table_width(is_local=False)
    rotated = rotated_width(config, head_width, partial=architecture.partial_rotary)
    frequencies = scaled_frequencies(config, head_width, rotated, model.context_tokens)
    heads = {"query": model.query_heads, "key": model.key_heads}
    if rotated == head_width and not architecture.interleaved:
        return frequencies, {}
    if rotated == model.head_width:
        return frequencies, {part: interleaved_order(count, model.head_width) for part, count in heads.items()}
    return frequencies, {part: paired_order(count, model.head_width, rotated) for part, count in heads.items()}


def _architecture(config: Record) -> str:
    names = config.items("architectures")
    if len(names) == 1 and (missing := MISSING_BY_ARCHITECTURE.get(str(names[0]))) is not None:
        config.fail("architectures", f"{quoted(names)} is not supported: it needs {missing}")
    if len(names) != 1 or names[0] not in tuple(ARCHITECTURES):
        config.fail(
            "architectures",
            f"{quoted(names)} is not supported; {len(ARCHITECTURES)} classes are: see plans/models/README.md",
        )
    methods = ("mxfp4",) if _joins_experts(names[0]) else METHODS
    if config.has("quantization_config") and _method(config) not in methods:
        config.fail("quantization_config", "quantized checkpoints are not supported; convert the original weights")
    return str(names[0])


def _method(config: Record) -> str | None:
    """Return the method by which a checkpoint is quantized, as the file names it; None if it does not."""
    if not config.has("quantization_config"):
        return None
    quantization = config.record("quantization_config")
    return quantization.text("quant_method") if quantization.has("quant_method") else None


def _joins_experts(architecture: str) -> bool:
    names = ARCHITECTURES[architecture].names
    return not callable(names) and names.joined_gate_up is not None


def _inventory(
    inventory: Inventory, architecture: Architecture, path: Path, files: ExitStack, open_file: OpenFile
) -> Inventory:
    index_path = path / "model.safetensors.index.json"
    if (path / "model.safetensors").exists() or not index_path.exists():
        names, promised = ["model.safetensors"], {}
    else:
        weights = read_json(index_path).record("weight_map")
        promised = {name: weights.text(name) for name in weights.names()}
        names = sorted(set(promised.values()))
        if len(names) > MAX_FILES:
            raise UserError(f"{index_path}: weight_map: {len(names)} files are more than the {MAX_FILES} of a model")
        for name in names:
            if not _is_file_name(name):
                raise UserError(f"{index_path}: weight_map: {quoted(name)} is not the name of a file beside it")
    opened = {name: open_file(path / name) for name in names}
    headers = {name: _header(file) for name, file in opened.items()}
    for tensor, name in promised.items():
        if tensor not in headers[name]:
            raise UserError(f"{path / name}: {safe_name(tensor)}: missing, though {index_path.name} promises it")
    for name, entries in headers.items():
        file = opened[name]
        files.callback(file.close)
        for tensor, entry in entries.items():
            inventory.add(architecture.tensor_name(tensor), file, entry.start, entry.shape, entry.dtype)
    return inventory


def _header(file: SourceFile) -> dict[str, TensorEntry]:
    with file.beginning() as beginning:
        return parse_header(beginning, file.path)


def _is_file_name(name: str) -> bool:
    return Path(name).name == name and name.isprintable() and 0 < len(name) <= MAX_QUOTED_CHARACTERS


def _ends(path: Path, config: Record, vocabulary: int, closing: str, tokenizer: bytes) -> tuple[EndToken, ...]:
    """Return the end tokens. generation_config.json takes precedence over config.json."""
    generation = path / "generation_config.json"
    record = read_json(generation) if generation.exists() else config
    record = record if record.has("eos_token_id") else config
    declared: list[tuple[int, str]] = []
    # A class's default may be a token that a smaller model does not have.
    if record.has("eos_token_id") and ("eos_token_id" in record.names() or record.value("eos_token_id") < vocabulary):
        why = f"{Path(record.where).name}: eos_token_id"
        declared = [(token, why) for token in ids_at(record, "eos_token_id", vocabulary)]
    by_text = [(huggingface_end(path), f"{CONFIG}: eos_token")]
    return end_tokens(declared, by_text, closing, added_tokens(tokenizer, vocabulary))
