"""A tokenizer.json through the `tokenizers` library, which is loaded when the first one is opened: it is large.

A file may say how its owner's training cut and filled texts up. Here a text is taken whole: cut in silence it would be
another prompt, and filled up as far as the file likes it would be any number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from neuronpipe.protocol.errors import UserError, named


class Panic(Exception):
    """The library panicked: it met a state that it takes for impossible."""


@contextmanager
def panics_are_errors() -> Iterator[None]:
    """The library's panics are no `Exception`, so that `except Exception` would miss them. Raises Panic instead."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ == "PanicException":
            raise Panic(" ".join(str(error).split())) from None
        raise


def open_tokenizer(text: str, where: str) -> Any:
    """The library's tokenizer of a tokenizer.json. Raises UserError that starts with `where`."""
    from tokenizers import Tokenizer

    try:
        with panics_are_errors():
            tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{where}: not a tokenizer.json: {named(' '.join(str(error).split()))}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
