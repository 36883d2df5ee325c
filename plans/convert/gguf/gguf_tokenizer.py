"""Builds a tokenizer.json from the vocabulary in a GGUF file.

Three kinds are supported: `gpt2`, byte-level BPE with merges, whose split rule is only named (tokenizer.ggml.pre);
`llama`, sentencepiece's BPE, in which the scores of pieces decide the order of merges; and `gemma4`, which is like it
but has merges. Other vocabularies need a tokenizer.json beside the file or named with --tokenizer.
"""

from __future__ import annotations

from pathlib import Path

from neuronpipe.plans.convert.end_tokens import EndToken, end_tokens, ids_at
from neuronpipe.plans.convert.gguf.gguf_splits import SPLITS
from neuronpipe.plans.convert.gguf.scored_bpe import (
    CONTROL,
    NORMAL,
    USER_DEFINED,
    complaint_about,
    framed,
    scored_bpe,
    spaced_bpe,
    whole_pieces,
)
from neuronpipe.plans.convert.tokenizer_file import check_tokenizer, read_tokenizer
from neuronpipe.plans.package.tokenizer import panics_are_errors
from neuronpipe.plans.strict_json import Record
from neuronpipe.protocol.errors import UserError, quoted, safe_name
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

ENDINGS = ("<|eot_id|>", "<|im_end|>", "<|end_of_text|>", "<|endoftext|>", "</s>")


def package_tokenizer(path: Path, metadata: Record, chosen: Path | None, vocabulary: int) -> bytes:
    """Return the content of tokenizer.json: the user's file `chosen`, or built from the metadata, or the tokenizer
    beside the GGUF file. Raises UserError if none fits."""
    if chosen is not None:
        return read_tokenizer(chosen, vocabulary)
    try:
        data = build_tokenizer(metadata)
    except UserError as error:
        neighbour = path.with_name("tokenizer.json")
        if neighbour.exists() or neighbour.with_suffix(".model").exists():
            return read_tokenizer(neighbour, vocabulary)
        raise UserError(f"{error}; put the model's tokenizer.json beside the file or pass --tokenizer FILE") from None
    check_tokenizer(data, vocabulary, f"{path}: tokenizer")
    return data


def build_tokenizer(metadata: Record) -> bytes:
    """Return the content of a tokenizer.json that is equivalent to the metadata. Raises UserError if there is none."""
    pieces = _texts(metadata, "tokenizer.ggml.tokens")
    kinds = _kinds(metadata, len(pieces))
    if complaint := complaint_about(pieces):
        metadata.fail("tokenizer.ggml.tokens", complaint)
    model = metadata.text("tokenizer.ggml.model")
    try:
        with panics_are_errors():
            if model == "gpt2":
                tokenizer, starts = _byte_level(metadata, pieces)
            elif model == "llama":
                tokenizer, starts = _sentencepiece(metadata, pieces, kinds), True
            elif model == "gemma4":
                tokenizer, starts = spaced_bpe(pieces, _merges(metadata), kinds, space_prefix=False), True
            else:
                metadata.fail("tokenizer.ggml.model", f"{quoted(model)} is not supported; gpt2, llama and gemma4 are")
            whole_pieces(tokenizer, pieces, kinds)
            begin, end = (_frame_token(metadata, *name, pieces) for name in (("bos", starts), ("eos", False)))
            return framed(tokenizer, pieces, begin, end)
    except UserError:
        raise
    except Exception as error:  # the library raises bare Exception
        metadata.fail("tokenizer.ggml.tokens", f"make no tokenizer: {safe_name(' '.join(str(error).split()))}")


def gguf_ends(metadata: Record, vocabulary: int, closing: str = "") -> tuple[EndToken, ...]:
    """Return the end tokens: those that the metadata names, control tokens named as in ENDINGS, and the token with
    which the chat template closes turns.

    closing: text that the template writes after an answer
    """
    fields = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    declared = [
        (token, field) for field in fields if metadata.has(field) for token in ids_at(metadata, field, vocabulary)
    ]
    if not metadata.has("tokenizer.ggml.tokens"):
        return end_tokens(declared, [], closing, {})
    pieces = _texts(metadata, "tokenizer.ggml.tokens")
    kinds = _kinds(metadata, len(pieces))
    whole = {
        piece: token
        for token, (piece, kind) in enumerate(zip(pieces[:vocabulary], kinds, strict=False))
        if kind in (CONTROL, USER_DEFINED)
    }
    conventional = [
        (piece, "a control token of this name ends texts")
        for piece, token in whole.items()
        if kinds[token] == CONTROL and piece in ENDINGS
    ]
    return end_tokens(declared, conventional, closing, whole)


def _texts(metadata: Record, field: str) -> list[str]:
    values = metadata.items(field)
    if not all(isinstance(value, str) for value in values):
        metadata.fail(field, "expected a list of strings")
    return values


def _kinds(metadata: Record, count: int) -> list[int]:
    field = "tokenizer.ggml.token_type"
    kinds = metadata.items(field) if metadata.has(field) else [NORMAL] * count
    if len(kinds) != count or not all(type(kind) is int for kind in kinds):
        metadata.fail(field, f"expected {count} whole numbers, one for each token")
    return kinds


def _merges(metadata: Record) -> list[tuple[str, str]]:
    merges = []
    for merge in _texts(metadata, "tokenizer.ggml.merges"):
        left, space, right = merge.partition(" ")
        if not space or " " in right:
            metadata.fail("tokenizer.ggml.merges", "expected two pieces and a space between them")
        merges.append((left, right))
    return merges


def _byte_level(metadata: Record, pieces: list[str]) -> tuple[Tokenizer, bool]:
    """Return the tokenizer, and True if texts start with the begin token unless the file says otherwise."""
    pre = metadata.text("tokenizer.ggml.pre")
    if pre not in SPLITS:
        metadata.fail("tokenizer.ggml.pre", f"{quoted(pre)} is not known; {', '.join(SPLITS)} are")
    merges = _merges(metadata)
    vocabulary = {piece: n for n, piece in enumerate(pieces)}
    split = SPLITS[pre]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split.whole_words))
    if split.composed:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, split.starts


def _sentencepiece(metadata: Record, pieces: list[str], kinds: list[int]) -> Tokenizer:
    scores = metadata.items("tokenizer.ggml.scores")
    if len(scores) != len(pieces) or not all(isinstance(score, float) for score in scores):
        metadata.fail("tokenizer.ggml.scores", f"expected {len(pieces)} numbers, one for each token")
    field = "tokenizer.ggml.add_space_prefix"
    prefix = metadata.boolean(field) if metadata.has(field) else True
    return scored_bpe(pieces, scores, kinds, space_prefix=prefix)


def _frame_token(metadata: Record, name: str, default: bool, pieces: list[str]) -> int | None:
    """Return the id of the token that is put before or after a text; None if there is none.

    name: bos or eos
    default: True if there is one unless the file says otherwise
    """
    option = f"tokenizer.ggml.add_{name}_token"
    if not (metadata.boolean(option) if metadata.has(option) else default):
        return None
    return ids_at(metadata, f"tokenizer.ggml.{name}_token_id", len(pieces))[0]
