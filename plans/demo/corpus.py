"""The demo model's training text: the Python standard library's own sources, tests included.

The held-out set is chosen by a hash of each file's path, so that it is the same on every machine with the same Python
version and never overlaps the training set.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

# Tables and generated text: many bytes that teach nothing about writing Python.
SKIPPED_PARTS = ("site-packages", "encodings", "pydoc_data", "lib2to3", "__pycache__")
HELD_OUT_SHARE_PERCENT = 2
DOCUMENT_END = "<|endoftext|>"


def library_root() -> Path:
    """Return the directory of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def is_held_out(relative_path: str) -> bool:
    """Return True if a file belongs to the held-out set. Its path alone decides."""
    digest = hashlib.sha256(relative_path.encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_SHARE_PERCENT


def documents(*, held_out: bool, root: Path | None = None) -> Iterator[str]:
    """Yield the source texts of one side of the split, in path order."""
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
    """Print the held-out set as one text, for `neuronpipe perplexity`: `python -m neuronpipe.plans.demo.corpus >
    FILE`."""
    for text in documents(held_out=True):
        print(text)


if __name__ == "__main__":
    main()
