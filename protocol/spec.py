"""Generates the tables of SPEC.md from the code: `python -m neuronpipe.protocol.spec --write`.

The prose of SPEC.md is written by hand; the text between a pair of markers is generated, so that it cannot differ from
the code. Without --write nothing is changed, and the exit status says whether the file is up to date.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from types import ModuleType
from typing import Any, get_args, get_type_hints

from neuronpipe.protocol import codec, layouts, links, run_directory
from neuronpipe.protocol.codec import MAGIC, VERSION, Message, Vocabulary
from neuronpipe.protocol.layouts.run import BOARD_FLASH, BOARD_MEMORY, BOARD_MISSES, BOARD_WORDS, LEDGER_ENTRY
from neuronpipe.protocol.marks import Range, marks_of
from neuronpipe.protocol.memory import residency, segments, spans
from neuronpipe.protocol.messages import cache, client, event, lifecycle, loader, outcome, request, snapshot, worker
from neuronpipe.protocol.schema import describe, documented, one_line

PATH = Path(__file__).parent / "SPEC.md"
FILES: tuple[ModuleType, ...] = (lifecycle, worker, outcome, loader, cache, request, client, event, snapshot)

_BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def messages_in(module: ModuleType) -> list[type[Message]]:
    values: Iterable[Any] = vars(module).values()
    classes = [cls for cls in values if isinstance(cls, type) and issubclass(cls, Message)]
    return [cls for cls in classes if cls.__module__ == module.__name__]


def all_messages() -> list[type[Message]]:
    return [cls for module in FILES for cls in messages_in(module)]


def render(text: str) -> str:
    """Return SPEC.md with every generated block replaced. Raises KeyError for a block that nothing generates."""
    return _BLOCK.sub(lambda block: f"{block[1]}\n{_BLOCKS[block[2]]().strip()}\n\n{block[3]}", text)


def main(arguments: Sequence[str]) -> int:
    """Write the file, or report whether it is up to date."""
    text = PATH.read_text(encoding="utf-8")
    fresh = render(text)
    if "--write" in arguments:
        PATH.write_text(fresh, encoding="utf-8")
    elif fresh != text:
        print(f"{PATH}: not up to date; run `python -m neuronpipe.protocol.spec --write`", file=sys.stderr)
        return 1
    return 0


def _version() -> str:
    return _table(
        ("constant", "value"),
        (
            ("version of the protocol", VERSION),
            ("magic, first frame of every message", f"`{MAGIC.decode()}`"),
            ("largest frame, in bytes", codec.MAX_FRAME_BYTES),
            ("most items of an array", codec.MAX_ARRAY_ITEMS),
            ("most entries of a map", codec.MAX_MAP_ITEMS),
            ("longest wait for room in a queue, in ms", links.WAIT_MS),
            ("longest path of a socket, in bytes", run_directory.MAX_SOCKET_PATH_BYTES),
        ),
    )


def _links() -> str:
    rows = []
    for link in (*links.LINKS, links.WATCH):
        for arrow, direction in (
            (f"{', '.join(link.connected_by)} → {link.bound_by}", link.inward),
            (f"{link.bound_by} → {', '.join(link.connected_by)}", link.outward),
        ):
            if direction.carries.classes:
                names = _names(direction.carries)
                row = (f"`{link.name}`", link.bound_by, arrow, names, direction.limit_messages, direction.when_full)
                rows.append(row)
    return _table(("link", "bound by", "from → to", "messages", "limit", "when full"), rows)


def _messages() -> str:
    parts = []
    for module in FILES:
        parts.append(f"### {one_line((module.__doc__ or '').partition('.')[0])}\n")
        parts += [_message(cls) for cls in messages_in(module)]
    return "\n".join(parts)


def _message(cls: type[Message]) -> str:
    description, meanings = documented(cls)
    hints, ranges = get_type_hints(cls), marks_of(cls, Range)
    rows = []
    for field in fields(cls):  # type: ignore[arg-type]
        default = "" if field.default is MISSING else f"`{_literal(field.default)}`"
        kind = describe(hints[field.name]) + (f", {ranges[field.name]}" if field.name in ranges else "")
        rows.append((f"`{field.name}`", kind, default, meanings.get(field.name, "")))
    table = "\n" + _table(("field", "type", "default", "meaning"), rows) if rows else ""
    return f"#### {cls.__name__}\n\n{description}\n{table}"


def _run_file() -> str:
    parts = (run_directory.RunFile, run_directory.SegmentHandle, run_directory.RunSummary)
    return "\n".join(_message(part) for part in parts)


def _header() -> str:
    text = inspect.getdoc(segments) or ""
    lines = text[text.index("    offset") :].splitlines()
    return "```\n" + "\n".join(line[4:] for line in lines) + "\n```\n"


def _segments() -> str:
    parts = []
    for layout in layouts.examples():
        make: Callable[..., object] = getattr(layouts, layout.name)
        rows = [
            (
                f"`{field.name}`",
                field.type,
                "".join(f"[{dimension}]" for dimension in field.dimensions),
                field.written_by,
                field.read_by,
                field.ordering,
            )
            for field in layout.fields
        ]
        parts.append(f"#### {layout.name}, kind {layout.kind}\n\n{one_line(inspect.getdoc(make) or '')}\n")
        parts.append(_table(("field", "type", "shape", "written by", "read by", "ordering"), rows))
    return "\n".join(parts)


def _board() -> str:
    rows = [
        ("`processes`", "32 bits", ", ".join(BOARD_WORDS)),
        ("`memory`", "64 bits", ", ".join(BOARD_MEMORY)),
        ("`flash`", "64 bits", ", ".join(BOARD_FLASH)),
        ("`ledger`", "64 bits", ", ".join(LEDGER_ENTRY)),
        ("`misses`", "64 bits", ", ".join(BOARD_MISSES)),
    ]
    return _table(("line of the board", "words of", "in this order"), rows)


def _spans() -> str:
    fields = _table(("offset", "field", "what"), spans.FIELDS)
    return fields + "\n" + _table(("number", "kind", "written by", "what", "value"), spans.KINDS)


def _residency() -> str:
    bits = _table(("bits", "name", "meaning"), residency.BITS)
    return bits + "\n" + _table(("from", "to", "by", "how"), residency.CHANGES)


def _requests() -> str:
    return _table(("bits", "name", "meaning"), residency.REQUEST_BITS)


def _states() -> str:
    return "`" + "`, `".join(get_args(lifecycle.State)) + "`\n"


_BLOCKS: dict[str, Callable[[], str]] = {
    "version": _version,
    "links": _links,
    "messages": _messages,
    "run_file": _run_file,
    "header": _header,
    "segments": _segments,
    "board": _board,
    "spans": _spans,
    "residency": _residency,
    "requests": _requests,
    "states": _states,
}


def _names(vocabulary: Vocabulary) -> str:
    return ", ".join(f"[{cls.__name__}](#{cls.__name__.lower()})" for cls in vocabulary.classes)


def _literal(default: object) -> str:
    plain = {None: "nil", True: "true", False: "false", (): "[]"}
    if isinstance(default, str):
        return f'"{default}"'
    return plain[default] if type(default) in (bool, tuple, type(None)) else str(default)  # type: ignore[index]


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [heads, ["---" for _ in heads], *rows]
    return "".join("| " + " | ".join(str(cell) for cell in line) + " |\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
