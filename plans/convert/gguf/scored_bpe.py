"""Sentencepiece's BPE as a tokenizer.json: the piece with the highest score is merged first.

GGUF files and tokenizer.model contain the same three lists: pieces, scores, and the kind of each piece.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "▁"
MAX_PIECE_CHARACTERS = 4096  # work grows with the square of the length; real pieces have a few hundred at most


def complaint_about(pieces: Sequence[str]) -> str | None:
    """Return what is wrong with a vocabulary; None if nothing is."""
    if len(set(pieces)) != len(pieces):
        return "a token appears twice"
    longest = max(map(len, pieces), default=0)
    return f"a token of {longest} characters: damaged" if longest > MAX_PIECE_CHARACTERS else None


def scored_bpe(
    pieces: Sequence[str], scores: Sequence[float], kinds: Sequence[int], *, space_prefix: bool
) -> Tokenizer:
    """Return the tokenizer, in which control pieces are not special yet; see `whole_pieces`.

    kinds: NORMAL, CONTROL and so on
    space_prefix: prepend a space to each text
    """
    normal = {piece: n for n, piece in enumerate(pieces) if kinds[n] == NORMAL}
    return spaced_bpe(pieces, list(_merges(normal, scores)), kinds, space_prefix=space_prefix)


def spaced_bpe(
    pieces: Sequence[str], merges: list[tuple[str, str]], kinds: Sequence[int], *, space_prefix: bool
) -> Tokenizer:
    """Return the tokenizer of BPE in which SPACE takes the place of spaces, and unknown characters are bytes.

    merges: pairs of pieces, the first to be merged first
    kinds, space_prefix: as in `scored_bpe`
    """
    unknown = next((piece for piece, kind in zip(pieces, kinds, strict=True) if kind == UNKNOWN), None)
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: n for n, piece in enumerate(pieces)},
            merges=merges,
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=BYTE in kinds,
        )
    )
    prefix = [normalizers.Prepend(SPACE)] if space_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if space_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges(normal: dict[str, int], scores: Sequence[float]) -> Iterator[tuple[str, str]]:
    """Yield all pairs of pieces that form another piece, by its descending score. normal: piece -> id."""
    for piece in sorted(normal, key=lambda piece: -scores[normal[piece]]):
        halves = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        pairs = [(left, right) for left, right in halves if left in normal and right in normal]
        yield from sorted(pairs, key=lambda pair: (normal[pair[0]], normal[pair[1]]))


def whole_pieces(tokenizer: Tokenizer, pieces: Sequence[str], kinds: Sequence[int]) -> None:
    """Add control and user-defined pieces to a tokenizer as tokens that are found in a text before it is split."""
    for piece, kind in zip(pieces, kinds, strict=True):
        if kind in (CONTROL, USER_DEFINED):
            tokenizer.add_tokens([AddedToken(piece, special=kind == CONTROL, normalized=False)])


def framed(tokenizer: Tokenizer, pieces: Sequence[str], begin: int | None, end: int | None) -> bytes:
    """Return the content of tokenizer.json, with a post-processor that puts the begin and end tokens (ids, None: no
    such token) around a text."""
    values = json.loads(tokenizer.to_str())
    values["post_processor"] = _frame(pieces, begin, end)
    return json.dumps(values, ensure_ascii=False).encode()


def _frame(pieces: Sequence[str], begin: int | None, end: int | None) -> dict[str, Any] | None:
    numbers = [number for number in (begin, end) if number is not None]
    if not numbers:
        return None
    special = {pieces[n]: {"id": pieces[n], "ids": [n], "tokens": [pieces[n]]} for n in numbers}

    def around(*names: str) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = []
        for name in names:
            parts += [] if begin is None else [{"SpecialToken": {"id": pieces[begin], "type_id": 0}}]
            parts += [{"Sequence": {"id": name, "type_id": 0}}]
            parts += [] if end is None else [{"SpecialToken": {"id": pieces[end], "type_id": 0}}]
        return parts

    single, pair = around("A"), around("A", "B")
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}
