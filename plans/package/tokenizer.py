"""Loads a tokenizer.json with the `tokenizers` library, which is imported only when needed, because it is large."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from neuronpipe.protocol.errors import UserError, safe_name


class Panic(Exception):
    """A panic of the library's Rust code, which the library raises as a BaseException."""


@contextmanager
def panics_are_errors() -> Iterator[None]:
    """Turn the library's panics into Panic, an `Exception`."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ == "PanicException":
            raise Panic(" ".join(str(error).split())) from None
        raise


def open_tokenizer(content: bytes, where: str) -> Any:
    """Return the library's tokenizer for the content of a tokenizer.json. Raises UserError, which starts with `where`,
    if the library refuses it or it is no UTF-8 text."""
    from tokenizers import Tokenizer

    try:
        with panics_are_errors():
            tokenizer = Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{where}: not a tokenizer.json: {safe_name(' '.join(str(error).split()))}") from None
    # Files may have settings from training, with which prompts would be cut or padded.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
