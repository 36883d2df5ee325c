"""The settings file: defaults of options, by verb.

    [run]
    package = "Qwen3-4B"
    memory = "4GiB"
    temperature = 0.5

    [serve]
    port = 9090

A key is a long option without its dashes, or package; a value is what would be typed, and is checked in the same way.
The file is named by $NEURONPIPE_CONFIG (empty: no file), or is neuronpipe/config.toml in the user's configuration
folder. Typed options win. An option from the file gives way where a typed one would be refused: to a live run, and to
--plan.
"""

from __future__ import annotations

import argparse
import codecs
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from neuronpipe.protocol.errors import UserError, quoted, safe_name

VARIABLE = "NEURONPIPE_CONFIG"
MAX_BYTES = 1 << 20
NOT_SETTABLE = ("help", "help_all", "version")
FindNearest = Callable[[str, Collection[str]], str | None]


def settings_file() -> Path | None:
    """Return the path of the settings file, whether or not it exists.

    A relative XDG_CONFIG_HOME is ignored, as its specification requires.
    """
    if (named_file := os.environ.get(VARIABLE)) is not None:
        return Path(named_file).absolute() if named_file else None
    if os.path.isabs(base := os.environ.get("XDG_CONFIG_HOME", "")):
        return Path(base) / "neuronpipe" / "config.toml"
    try:
        return Path.home() / ".config" / "neuronpipe" / "config.toml"
    except RuntimeError:  # the user has no home, and so no settings
        return None


class Settings:
    """The settings of all verbs. Its errors are UserErrors that name the file and the key.

    find_nearest: finds the name that the user probably wanted
    """

    def __init__(self, file: Path | None, verbs: Collection[str], find_nearest: FindNearest) -> None:
        self.file = file
        self._find_nearest = find_nearest
        self._by_verb: dict[str, dict[str, Any]] = _read(file) if file is not None else {}
        for verb, keys in self._by_verb.items():
            if verb not in verbs:
                nearest = find_nearest(verb, verbs)
                advice = f"; did you mean [{nearest}]?" if nearest else ": a section is named after a verb, e.g. [run]"
                raise UserError(f"{file}: [{safe_name(verb)}] is not a verb{advice}")
            if not isinstance(keys, dict):
                raise UserError(f"{file}: {safe_name(verb)}: belongs in the section of a verb, e.g. [run]")

    def of(self, verb: str) -> Mapping[str, Any]:
        return self._by_verb.get(verb, {})

    @property
    def verbs(self) -> list[str]:
        return list(self._by_verb)

    def apply(self, verb: str, parser: argparse.ArgumentParser) -> None:
        """Check a verb's settings, and make them the defaults of its parser. Raises UserError."""
        options = {
            option.removeprefix("--"): action
            for action in parser._actions
            if action.dest not in NOT_SETTABLE
            for option in action.option_strings or [f"--{action.dest}"]
            if option.startswith("--") and (action.option_strings or action.nargs in ("?", "*"))
        }
        for key, value in self.of(verb).items():
            where = f"{self.file}: [{verb}] {safe_name(key)}"
            if key not in options:
                nearest = self._find_nearest(key, options)
                advice = f"; did you mean {nearest}?" if nearest else f"; `neuronpipe {verb} --help` shows them"
                raise UserError(f"{where}: there is no such option{advice}")
            action = options[key]
            parser.set_defaults(**{action.dest: _value(parser, action, value, where)})

    def note(self, verb: str) -> str:
        """Return the lines about the settings at the end of a verb's help; empty if there are none."""
        lines = [f"  --{key} {_show(value)}\n" for key, value in self.of(verb).items()]
        return f"\nfrom {self.file}:\n{''.join(lines)}" if lines else ""


class FromFile:
    """The value of an option from the file. It is replaced if the option is typed."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __str__(self) -> str:
        return str(self.value)


class ListFromFile(list[Any]):
    """The values of a repeatable option from the file. Typed values are appended."""

    def __init__(self, values: Iterable[Any]) -> None:
        super().__init__(values)
        self.count_from_file = len(self)


def settle(arguments: argparse.Namespace) -> argparse.Namespace:
    """Replace the markers of values from the file by plain values.

    The attribute `from_file` holds the names of the options that come from the file alone.
    """
    from_file = {name: marker.value for name, marker in vars(arguments).items() if isinstance(marker, FromFile)}
    for name, value in from_file.items():
        setattr(arguments, name, value)
    lists = {
        name
        for name, values in vars(arguments).items()
        if isinstance(values, ListFromFile) and len(values) == values.count_from_file
    }
    arguments.from_file = {*from_file, *lists}
    return arguments


def _read(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from None
    import tomllib  # imported here: it takes 7 ms of every start, and most users have no such file

    if len(content) > MAX_BYTES:
        raise UserError(f"{file}: more than {MAX_BYTES:,} bytes")
    content = content.removeprefix(codecs.BOM_UTF8)  # some editors begin UTF-8 files with it
    try:
        return tomllib.loads(content.decode())
    except UnicodeDecodeError as error:
        before = content[: error.start]
        line, byte = before.count(b"\n") + 1, error.start - before.rfind(b"\n")
        problem = f"line {line}, byte {byte}: 0x{content[error.start]:02x} is not UTF-8"
        raise UserError(f"{file}: {problem}; save the file as UTF-8 in an editor") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UserError(f"{file}: is not TOML: {error}") from None


def _value(parser: argparse.ArgumentParser, action: argparse.Action, value: Any, where: str) -> Any:
    """Return the value that the option would have if `value` was typed. Raises UserError."""
    if isinstance(action, argparse._AppendAction):
        values = value if isinstance(value, list) else [value]
        return ListFromFile([*(action.default or []), *(_parse(parser, action, item, where) for item in values)])
    if action.nargs == "*":
        values = value if isinstance(value, list) else [value]
        return FromFile([_parse(parser, action, item, where) for item in values])
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise UserError(f"{where}: {quoted(value)}: expected true or false")
        return FromFile(action.const if value else action.default)
    return FromFile(_parse(parser, action, value, where))


def _parse(parser: argparse.ArgumentParser, action: argparse.Action, value: Any, where: str) -> Any:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UserError(f"{where}: {quoted(value)}: expected a text or a number")
    try:
        parsed = parser._get_value(action, str(value))
        parser._check_value(action, parsed)
    except argparse.ArgumentError as error:
        raise UserError(f"{where}: {error.message}") from None
    return parsed


def _show(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
