"""A chunk of the prompt cache: CHUNK_TOKENS tokens of a prefix, their keys and values, and the file that stores them.

The key of a chunk is a hash of everything on which its bytes depend: the package, the numerics and the engine, and all
tokens from position 0 to the chunk's end. So prefixes share the files of their common beginning, a longer prefix adds
files only, and a file is never changed.

    offset  bytes  content
         0      8  magic
         8     12  version, bytes of the description, its CRC-32C; little-endian uint32
        20         description: JSON with the fields of `Description`
      4096         pieces of the KV slot in the order of slot_regions.py; the offset is rounded up to whole pages
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from neuronpipe.native import ffi, lib
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.schema import from_json, json_object

CHUNK_TOKENS = 64
MAGIC, VERSION = b"NPPREFIX", 1
PAGE_BYTES = 4096
MAX_DESCRIPTION_BYTES = 1 << 16
MAX_PIECES = 512  # of one system call; systems allow 1,024
_HEAD = struct.Struct("<8sIII")

Pieces = Sequence[memoryview]


class BadChunk(Exception):
    """A file that is no chunk, or not the one that its name promises; the text is the reason."""


@frozen(kw_only=True)
class Origin:
    """Everything besides the tokens on which the bits of keys and values depend.

    package: id of the package
    numerics: as in `Hello`, with whatever else of the plan they depend on
    engine: hash of the compiled engine, since another version may round differently
    regions: signature of the KV slot's regions
    """

    package: str
    numerics: str
    engine: str
    regions: str

    def keys(self, tokens: Sequence[int]) -> Iterator[str]:
        """Yield the key of each whole chunk of these tokens, the first token being at position 0."""
        values = json.dumps({"version": VERSION, "tokens": CHUNK_TOKENS, **dataclasses.asdict(self)}, sort_keys=True)
        chain = hashlib.sha256(values.encode()).digest()
        for first in range(0, len(tokens) - CHUNK_TOKENS + 1, CHUNK_TOKENS):
            chunk = struct.pack(f"<{CHUNK_TOKENS}I", *tokens[first : first + CHUNK_TOKENS])
            chain = hashlib.sha256(chain + chunk).digest()
            yield chain.hex()[:40]


def state_key(chunk_key: str) -> str:
    """Return the key of the recurrent state after a chunk. Its file is like that of a chunk without tokens."""
    return hashlib.sha256(f"{chunk_key} state".encode()).hexdigest()[:40]


@frozen(kw_only=True)
class Description:
    """The description in a chunk's file.

    first: position of the chunk's first token, or of the first token after a state
    content_bytes: bytes of all pieces
    crc32c: checksum of all pieces
    """

    key: str
    package: str
    numerics: str
    engine: str
    regions: str
    first: int
    tokens: tuple[int, ...]
    content_bytes: int
    crc32c: int

    def to_bytes(self) -> bytes:
        """Return the beginning of the file, up to the pieces."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True).encode()
        head = _HEAD.pack(MAGIC, VERSION, len(text), lib.np_crc32c(0, text, len(text))) + text
        return head + bytes(-len(head) % PAGE_BYTES)


def checksum(pieces: Pieces) -> int:
    """Return the CRC-32C of the pieces, one after the other."""
    crc = 0
    for piece in pieces:
        crc = lib.np_crc32c(crc, ffi.from_buffer(piece), len(piece))
    return int(crc)


def write_chunk(fd: int, description: Description, pieces: Pieces) -> None:
    """Write a whole file. Raises OSError."""
    start = description.to_bytes()
    _transfer(lambda buffers, offset: os.pwritev(fd, buffers, offset), [memoryview(start), *pieces], 0)


def read_chunk(fd: int, key: str, tokens: Sequence[int], pieces: Pieces, kept_bytes: Sequence[int] = ()) -> None:
    """Read the content of a file into the pieces, and verify everything. The pieces may be changed even if it fails.

    kept_bytes: how many bytes at the start of each piece are there already. They are in use and stay as they are; the
        checksum shows whether they are those of the file

    Raises BadChunk if the file is not the whole chunk with this key and these tokens; OSError.
    """
    head = os.pread(fd, _HEAD.size + MAX_DESCRIPTION_BYTES, 0)
    description, start_bytes = _parse(head)
    content_bytes = sum(map(len, pieces))
    if description.key != key or description.tokens != tuple(tokens):
        raise BadChunk("it is a chunk of another prefix")
    if description.content_bytes != content_bytes or os.fstat(fd).st_size != start_bytes + content_bytes:
        raise BadChunk("it is truncated, or too long")
    buffers = _around(pieces, kept_bytes) if any(kept_bytes) else pieces
    if _transfer(lambda parts, offset: os.preadv(fd, parts, offset), buffers, start_bytes) != content_bytes:
        raise BadChunk("it is truncated")
    if checksum(pieces) != description.crc32c:
        raise BadChunk("its checksum is wrong")


def _around(pieces: Pieces, kept_bytes: Sequence[int]) -> Pieces:
    """Return buffers of the same sizes, in which unused memory stands for the first bytes of each piece."""
    unused = memoryview(bytearray(max(kept_bytes)))
    parts = ((unused[:kept], piece[kept:]) for piece, kept in zip(pieces, kept_bytes, strict=True))
    return [buffer for pair in parts for buffer in pair]


def _parse(head: bytes) -> tuple[Description, int]:
    """Return the description and the offset of the pieces. Raises BadChunk."""
    if len(head) < _HEAD.size or head[: len(MAGIC)] != MAGIC:
        raise BadChunk("it is no chunk of a prefix")
    _, version, text_bytes, crc = _HEAD.unpack_from(head)
    if version != VERSION:
        raise BadChunk(f"its version is {version}, this program reads {VERSION}")
    text = head[_HEAD.size : _HEAD.size + text_bytes]
    if len(text) != text_bytes or lib.np_crc32c(0, text, len(text)) != crc:
        raise BadChunk("its description is damaged")
    try:
        description: Description = from_json(Description, json_object(text, "description"), "description")
    except UserError as error:
        raise BadChunk(str(error)) from None
    end = _HEAD.size + text_bytes
    return description, end + -end % PAGE_BYTES


def _transfer(call: Callable[[Any, int], int], buffers: Pieces, offset: int) -> int:
    """Read or write all buffers from an offset on; return the number of bytes, which are fewer at the file's end."""
    waiting, total_bytes = [buffer for buffer in buffers if len(buffer)], 0
    at = 0
    while at < len(waiting):
        count = call(waiting[at : at + MAX_PIECES], offset + total_bytes)
        if count == 0:
            break
        total_bytes += count
        while at < len(waiting) and count >= len(waiting[at]):
            count -= len(waiting[at])
            at += 1
        if count:
            waiting[at] = waiting[at][count:]
    return total_bytes
