"""The settings file: options that one would type every time, by verb.

    [run]
    package = "Qwen3-4B"
    memory = "4GiB"
    temperature = 0.5

    [serve]
    port = 9090

A key is a long option without its dashes, or package; a value is what would be typed. The file is named by
$NEURONPIPE_CONFIG (empty: none), or is neuronpipe/config.toml in the user's configuration folder. What is typed wins.
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
NEVER = ("help", "version")
Nearest = Callable[[str, Collection[str]], str | None]


def settings_file() -> Path | None:
    """Where the settings are, whether or not there are any. A relative XDG_CONFIG_HOME counts as none, as its
    specification says."""
    if (named_file := os.environ.get(VARIABLE)) is not None:
        return Path(named_file).absolute() if named_file else None
    if os.path.isabs(base := os.environ.get("XDG_CONFIG_HOME", "")):
        return Path(base) / "neuronpipe" / "config.toml"
    try:
        return Path.home() / ".config" / "neuronpipe" / "config.toml"
    except RuntimeError:  # no HOME, and nobody knows this user: there are no settings
        return None


class Settings:
    """The settings of all verbs. nearest: finds what was probably meant. Raises UserError that names file and key."""

    def __init__(self, file: Path | None, verbs: Collection[str], nearest: Nearest) -> None:
        self.file = file
        self._nearest = nearest
        self._by_verb: dict[str, dict[str, Any]] = _read(file) if file is not None else {}
        for verb, keys in self._by_verb.items():
            if verb not in verbs:
                near = nearest(verb, verbs)
                meant = f"; did you mean [{near}]?" if near else ": a section is named as a verb, e.g. [run]"
                raise UserError(f"{file}: [{safe_name(verb)}] is no verb{meant}")
            if not isinstance(keys, dict):
                raise UserError(f"{file}: {safe_name(verb)}: belongs into the section of a verb, e.g. [run]")

    def of(self, verb: str) -> Mapping[str, Any]:
        """What a verb's section says."""
        return self._by_verb.get(verb, {})

    @property
    def verbs(self) -> list[str]:
        """The verbs that have a section."""
        return list(self._by_verb)

    def apply(self, verb: str, parser: argparse.ArgumentParser) -> None:
        """Make them the defaults of the verb's parser, checked as if they were typed."""
        options = {
            option.removeprefix("--"): action
            for action in parser._actions
            if action.dest not in NEVER
            for option in action.option_strings or [f"--{action.dest}"]
            if option.startswith("--") and (action.option_strings or action.nargs in ("?", "*"))
        }
        for key, value in self.of(verb).items():
            where = f"{self.file}: [{verb}] {safe_name(key)}"
            if key not in options:
                near = self._nearest(key, options)
                meant = f"; did you mean {near}?" if near else f"; `neuronpipe {verb} --help` shows them"
                raise UserError(f"{where}: there is no such option{meant}")
            action = options[key]
            parser.set_defaults(**{action.dest: _value(parser, action, value, where)})

    def note(self, verb: str) -> str:
        """What the verb's help ends with."""
        lines = [f"  --{key} {_shown(value)}\n" for key, value in self.of(verb).items()]
        return f"\nfrom {self.file}:\n{''.join(lines)}" if lines else ""


class FromFile:
    """The value of an option that was not typed."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __str__(self) -> str:
        return str(self.value)


class ListFromFile(list[Any]):
    """The same of an option that may be given several times; what is typed is added."""

    def __init__(self, values: Iterable[Any]) -> None:
        super().__init__(values)
        self.of_file = len(self)


def settled(arguments: argparse.Namespace) -> argparse.Namespace:
    """The arguments with plain values. `from_file`: the names of those that stand in the file and
    were not typed."""
    from_file = {name: one.value for name, one in vars(arguments).items() if isinstance(one, FromFile)}
    for name, value in from_file.items():
        setattr(arguments, name, value)
    lists = {name for name, one in vars(arguments).items() if isinstance(one, ListFromFile) and len(one) == one.of_file}
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
    import tomllib  # 7 ms of each command's start, and most users have no such file

    if len(content) > MAX_BYTES:
        raise UserError(f"{file}: more than {MAX_BYTES:,} bytes")
    content = content.removeprefix(codecs.BOM_UTF8)  # with which some editors save UTF-8
    try:
        return tomllib.loads(content.decode())
    except UnicodeDecodeError as error:
        before = content[: error.start]
        line, byte = before.count(b"\n") + 1, error.start - before.rfind(b"\n")
        said = f"line {line}, byte {byte}: 0x{content[error.start]:02x} is no UTF-8"
        raise UserError(f"{file}: {said}; save the file as UTF-8 in an editor") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UserError(f"{file}: is no TOML: {error}") from None


def _value(parser: argparse.ArgumentParser, action: argparse.Action, value: Any, where: str) -> Any:
    """What the option would be if this was typed. Raises UserError."""
    if isinstance(action, argparse._AppendAction):
        values = value if isinstance(value, list) else [value]
        return ListFromFile([*(action.default or []), *(_typed(parser, action, one, where) for one in values)])
    if action.nargs == "*":
        return FromFile([_typed(parser, action, one, where) for one in (value if isinstance(value, list) else [value])])
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise UserError(f"{where}: {quoted(value)}: expected true or false")
        return FromFile(action.const if value else action.default)
    return FromFile(_typed(parser, action, value, where))


def _typed(parser: argparse.ArgumentParser, action: argparse.Action, value: Any, where: str) -> Any:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UserError(f"{where}: {quoted(value)}: expected a text or a number")
    try:
        made = parser._get_value(action, str(value))
        parser._check_value(action, made)
    except argparse.ArgumentError as error:
        raise UserError(f"{where}: {error.message}") from None
    return made


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
