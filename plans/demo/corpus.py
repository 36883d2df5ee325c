"""The demo model's training text: the sources of Python's standard library, tests included.

A hash of its path decides whether a file is held out, so that the sets are the same on every machine with the same
version of Python.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

# Tables and generated text, from which a model learns nothing about Python.
SKIPPED_PARTS = ("site-packages", "encodings", "pydoc_data", "lib2to3", "__pycache__")
HELD_OUT_SHARE_PERCENT = 2
DOCUMENT_END = "<|endoftext|>"


def library_root() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def is_held_out(relative_path: str) -> bool:
    """Return True if a file belongs to the held-out set. relative_path: below the library's root."""
    digest = hashlib.sha256(relative_path.encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_SHARE_PERCENT


def documents(*, held_out: bool, root: Path | None = None) -> Iterator[str]:
    """Yield the texts of the held-out or of the training set, by path.

    root: None: the running interpreter's standard library
    """
    root = root or library_root()
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root).as_posix()
        if any(part in relative for part in SKIPPED_PARTS) or is_held_out(relative) != held_out:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a few test files are deliberately badly encoded
        if text.strip():
            yield text


def main() -> None:
    """Print the held-out set, for `neuronpipe perplexity`: `python -m neuronpipe.plans.demo.corpus > FILE`."""
    for text in documents(held_out=True):
        print(text)


if __name__ == "__main__":
    main()
