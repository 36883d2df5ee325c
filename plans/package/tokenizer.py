"""Loads a tokenizer.json with the `tokenizers` library, which is imported only when needed, because it is large.

A file may contain settings to truncate and pad texts, from training. They are turned off: a truncated prompt would be
another prompt, and padding could add any number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from neuronpipe.protocol.errors import UserError, safe_name


class Panic(Exception):
    """A panic of the library: it met a state that it considers impossible."""


@contextmanager
def panics_are_errors() -> Iterator[None]:
    """Turn the library's panics into Panic. They are no `Exception`, so `except Exception` would miss them."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ == "PanicException":
            raise Panic(" ".join(str(error).split())) from None
        raise


def open_tokenizer(text: str, where: str) -> Any:
    """Return the library's tokenizer of a tokenizer.json. Raises UserError that starts with `where`."""
    from tokenizers import Tokenizer

    try:
        with panics_are_errors():
            tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{where}: not a tokenizer.json: {safe_name(' '.join(str(error).split()))}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
