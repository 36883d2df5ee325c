"""Shared by all clients' files: the functions that a model is offered, and the report of what worked.

These files run with the Python of the clients, not with ours, and so import nothing else of this project.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

URL, MODEL = sys.argv[1], sys.argv[2]  # the server's address with /v1, and the model's name
CODE = 'if __name__ == "__main__":'  # the demo ends its answer to this by itself
MAX_TOKENS = 80
WORDS = ("loop", "call")
PARAMETERS = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 9}, "how": {"type": "string", "enum": [*WORDS]}},
    "required": ["n", "how"],
}


def valid(n: object, how: object) -> None:
    """Arguments, or an object, as PARAMETERS wants them."""
    assert isinstance(n, int), n
    assert 1 <= n <= 9, n
    assert how in WORDS, how


def line_of(error: BaseException) -> str:
    """An error in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


def report(**tries: Callable[[], Any]) -> None:
    """Try each of them, and print a line of JSON: what was tried, and the error, or null."""
    for what, attempt in tries.items():
        try:
            attempt()
            error = None
        except BaseException as failure:
            error = line_of(failure)
        print(json.dumps({"what": what, "error": error}), flush=True)
