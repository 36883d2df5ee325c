"""Builds a tokenizer.json from sentencepiece's file tokenizer.model, for checkpoints without tokenizer.json.

tokenizer_config.json and added_tokens.json beside it have begin and end tokens, and pieces that were added later. The
result encodes like LlamaTokenizer of transformers, the class of all known models with such a file. Settings that would
make the encoding differ are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from neuronpipe.plans.convert.character_map import as_normalizers
from neuronpipe.plans.convert.chat_template import CONFIG
from neuronpipe.plans.convert.gguf.scored_bpe import (
    CONTROL,
    SPACE,
    USER_DEFINED,
    complaint_about,
    framed,
    scored_bpe,
    whole_pieces,
)
from neuronpipe.plans.package.manifest import MAX_TOKENIZER_BYTES
from neuronpipe.plans.package.tokenizer import panics_are_errors
from neuronpipe.plans.strict_json import Record, read_file, read_json
from neuronpipe.protocol.errors import UserError, quoted, safe_name
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

ADDED = "added_tokens.json"
CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast")
SAVE_IT = "save the model's tokenizer.json beside it, or pass --tokenizer FILE"
BPE = 2  # TrainerSpec.ModelType


class _Added(NamedTuple):
    """A piece that the files beside tokenizer.model add, or mark as special."""

    text: str
    special: bool


def build_from_sentencepiece(path: Path) -> bytes:
    """Return the content of a tokenizer.json that is equivalent to a tokenizer.model and the files beside it. Raises
    UserError if there is none."""
    model = _parsed(path)
    config = read_json(path.with_name(CONFIG)) if path.with_name(CONFIG).exists() else Record({}, str(path))
    _refuse_what_differs(path, model, config)
    pieces = [piece.piece for piece in model.pieces]
    kinds = [int(piece.type) for piece in model.pieces]
    scores = [piece.score for piece in model.pieces]
    for number, added in sorted(_added(path, config).items()):
        if number > len(pieces) or (number < len(pieces) and pieces[number] != added.text):
            raise UserError(
                f"{path}: the token {quoted(added.text)} is added as number {number}, which contradicts the "
                f"{len(pieces)} pieces before it"
            )
        if number == len(pieces):
            pieces, kinds, scores = [*pieces, added.text], [*kinds, USER_DEFINED], [*scores, 0.0]
        kinds[number] = CONTROL if added.special else kinds[number]
    if complaint := complaint_about(pieces):
        raise UserError(f"{path}: {complaint}")
    try:
        with panics_are_errors():
            tokenizer = scored_bpe(pieces, scores, kinds, space_prefix=model.normalizer_spec.add_dummy_prefix)
            _normalize(tokenizer, path, model.normalizer_spec, config)
            whole_pieces(tokenizer, pieces, kinds)
            begin, end = (_frame_token(config, name, pieces, model) for name in ("bos", "eos"))
            return framed(tokenizer, pieces, begin, end)
    except UserError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{path}: makes no tokenizer: {safe_name(' '.join(str(error).split()))}") from None


def _parsed(path: Path) -> Any:
    data = read_file(path, MAX_TOKENIZER_BYTES)
    try:
        from google.protobuf.message import DecodeError
        from sentencepiece.sentencepiece_model_pb2 import ModelProto
    except ImportError:
        raise UserError(
            f"{path}: reading it takes two packages that are not installed: `pip install sentencepiece protobuf`; or "
            f"{SAVE_IT}"
        ) from None
    model = ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError:
        model = None
    if model is None or not model.pieces:
        raise UserError(f"{path}: not a sentencepiece model: truncated or damaged")
    return model


def _refuse_what_differs(path: Path, model: Any, config: Record) -> None:
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    for holds, what in (
        (trainer.model_type == BPE, "only models of type BPE are read"),
        (normalizer.escape_whitespaces, "spaces that are not escaped are not supported"),
        (not trainer.treat_whitespace_as_suffix, "spaces after words are not supported"),
        (not model.denormalizer_spec.precompiled_charsmap, "a rule for decoded texts is not supported"),
    ):
        if not holds:
            raise UserError(f"{path}: {what}; {SAVE_IT}")
    for piece in (piece for piece in model.pieces if piece.type == USER_DEFINED):
        # The library adds a space after a special token and not after such a piece; a tokenizer.json treats both alike.
        if SPACE in piece.piece or (normalizer.add_dummy_prefix and _is_legacy(config)):
            raise UserError(f"{path}: {quoted(piece.piece)}: a user-defined piece beside spaces; {SAVE_IT}")
    if config.has("tokenizer_class") and (name := config.text("tokenizer_class")) not in CLASSES:
        config.fail("tokenizer_class", f"{quoted(name)} is not supported; {' and '.join(CLASSES)} are; {SAVE_IT}")


def _normalize(tokenizer: Tokenizer, path: Path, spec: Any, config: Record) -> None:
    """Set the normalization before merging: the model's character map, then spaces."""
    steps: list[Any] = []
    if spec.precompiled_charsmap:
        try:
            steps += as_normalizers(spec.precompiled_charsmap)
        except ValueError as error:
            raise UserError(f"{path}: its character map is not supported: {error}; {SAVE_IT}") from None
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if spec.add_dummy_prefix and _is_legacy(config):
        # If the map leaves nothing of a text, the space remains, unless extra spaces are removed.
        at = len(steps) if spec.remove_extra_whitespaces else 0
        steps.insert(at, normalizers.Prepend(SPACE))
    elif spec.add_dummy_prefix:  # only before the text, not after each special token in it
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])


def _is_legacy(config: Record) -> bool:
    """Return True if a space is added after each special token, too, and not only before the text."""
    return config.boolean("legacy") if config.has("legacy") else True


def _added(path: Path, config: Record) -> dict[int, _Added]:
    """Return the added tokens by number. tokenizer_config.json takes precedence over added_tokens.json."""
    added: dict[int, _Added] = {}
    if path.with_name(ADDED).exists():
        record = read_json(path.with_name(ADDED))
        added = {record.integer(text, 0, 1 << 24): _Added(text, False) for text in record.names()}
    if config.has("added_tokens_decoder"):
        decoder = config.record("added_tokens_decoder")
        for number in decoder.names():
            entry = decoder.record(number)
            if not number.isdecimal():
                decoder.fail(number, "is no number of a token")
            special = entry.has("special") and entry.boolean("special")
            added[int(number)] = _Added(entry.text("content"), special)
    return added


def _frame_token(config: Record, name: str, pieces: list[str], model: Any) -> int | None:
    """Return the number of the token that is put before or after a text, None if there is none. By default there is
    only a begin token.

    name: bos or eos
    """
    option = f"add_{name}_token"
    if not (config.boolean(option) if config.has(option) else name == "bos"):
        return None
    field = f"{name}_token"
    if not config.has(field):
        text = model.trainer_spec.bos_piece if name == "bos" else model.trainer_spec.eos_piece
    elif isinstance(config.value(field), dict):
        text = config.record(field).text("content")
    else:
        text = config.text(field)
    if text not in pieces:
        config.fail(field, f"{quoted(text)} is no token")
    return pieces.index(text)
