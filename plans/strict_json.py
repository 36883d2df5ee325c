"""Strict reading of JSON files, field by field: every error names the file and the field.

The checks of values are those of protocol/schema.py. `Record.read` reads an object of this project's formats as a
dataclass; the other readers are for formats of other programs, which have more fields than are read.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeVar

from neuronpipe.plans.uncached_read import disable_read_ahead, forget
from neuronpipe.protocol.errors import UserError, quoted, safe_name
from neuronpipe.protocol.marks import Range
from neuronpipe.protocol.schema import Mismatch, Reader, json_object, number_within, one_of, reader, true_or_false

T = TypeVar("T")

MAX_JSON_BYTES = 64 << 20
MAX_JSON_VALUES = 1 << 22  # a value of two bytes in a file takes up to a hundred in memory
MAX_LINE_CHARACTERS = 1000
LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def one_line(text: str) -> str:
    """Return a name that `Record.line` accepts: printable and of limited length."""
    return "".join(character if character.isprintable() else "?" for character in text[:MAX_LINE_CHARACTERS])


def parse_json(data: bytes, where: str, *, has_infinities: bool = False) -> Record:
    """Return the JSON object in `data`.

    Raises UserError, beginning with `where`, for anything else, duplicate fields, NaN, infinities, or more than
    MAX_JSON_VALUES values.

    has_infinities: NaN and infinities become what newer configurations write for them, {"__float__": name}
    """
    if sum(map(data.count, (b",", b"[", b"{"))) > MAX_JSON_VALUES:
        raise UserError(f"{where}: has more than the {MAX_JSON_VALUES} values such a file may have")
    constant = (lambda name: {"__float__": name}) if has_infinities else None
    return Record(json_object(data, where, constant), where)


def read_json(path: Path, *, has_infinities: bool = False) -> Record:
    """Return the JSON object in a file of at most MAX_JSON_BYTES. Raises UserError as `read_file` and `parse_json`."""
    return parse_json(read_file(path, MAX_JSON_BYTES), str(path), has_infinities=has_infinities)


def open_file(path: Path) -> BinaryIO:
    """Open a regular file without read-ahead.

    Raises UserError for a missing file, a pipe, a directory, and a Git-LFS pointer, which Git leaves in place of a
    large file that it did not fetch.
    """
    try:
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")  # a pipe must not block
        try:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UserError(f"{path}: cannot be read: not a regular file")
            disable_read_ahead(file.fileno())
            if file.read(len(LFS_POINTER)) == LFS_POINTER:
                raise UserError(
                    f"{path}: a Git-LFS pointer, not the file itself; "
                    f"fetch it with `git -C {shlex.quote(str(path.parent))} lfs pull`"
                )
            file.seek(0)
        except BaseException:
            file.close()
            raise
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    return file


def read_file(path: Path, max_bytes: int) -> bytes:
    """Return the content of a file, without leaving it in the page cache.

    Raises UserError if it cannot be opened or read, or is larger than `max_bytes`.
    """
    with open_file(path) as file:
        try:
            if file.seek(0, 2) > max_bytes:
                raise UserError(f"{path}: larger than the {max_bytes} bytes such a file may have")
            file.seek(0)
            data = file.read()
            forget(file.fileno())
            return data
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from None


class Record:
    """A JSON object that is read field by field. `finish` refuses fields that were not read.

    Readers of a field raise UserError, which names file and field, if it is missing or has another type or range.
    """

    def __init__(self, values: dict[str, Any], where: str, prefix: str = "") -> None:
        self._values, self.where, self._prefix = values, where, prefix
        self._seen: set[str] = set()
        self._defaults: Mapping[str, Any] = {}
        self._owner = ""

    def over(self, defaults: Mapping[str, Any], owner: str) -> Record:
        """Return the same object, in which a missing field has its default, besides those it had. `owner` names the
        owner of the defaults in errors."""
        result = Record(self._values, self.where, self._prefix)
        result._defaults, result._owner = {**self._defaults, **defaults}, owner
        return result

    def replaced(self, values: Mapping[str, Any]) -> Record:
        """Return the same object with other values of some fields."""
        return Record({**self._values, **values}, self.where, self._prefix).over(self._defaults, self._owner)

    def fail(self, name: str, problem: str) -> NoReturn:
        """Raise a UserError about one field."""
        if name not in self._values and name in self._defaults:
            problem += f" (the file does not have it; {quoted(self._defaults[name])} is {self._owner}'s default)"
        raise UserError(f"{self.where}: {safe_name(self._prefix + name)}: {problem}")

    def has(self, name: str) -> bool:
        """Return True if the field is present or has a default, and is not null."""
        self._seen.add(name)
        return self._values.get(name, self._defaults.get(name)) is not None

    def value(self, name: str) -> Any:
        """Return the field's value without checks."""
        self._seen.add(name)
        if name in self._values:
            return self._values[name]
        if name not in self._defaults:
            self.fail(name, "missing")
        return self._defaults[name]

    def integer(self, name: str, minimum: int, maximum: int) -> int:
        """Return a whole number in minimum..maximum."""
        return int(self._checked(name, number_within(int, Range(minimum, maximum))))

    def number(self, name: str, minimum: float, maximum: float) -> float:
        """Return a finite number in minimum..maximum."""
        return float(self._checked(name, number_within(float, Range(minimum, maximum))))

    def text(self, name: str) -> str:
        """Return a string that can be written as UTF-8: JSON can escape lone surrogates, which no file can contain."""
        value = self.value(name)
        if not isinstance(value, str) or any("\ud800" <= character <= "\udfff" for character in value):
            self.fail(name, f"expected a string, found {quoted(value)}")
        return value

    def line(self, name: str) -> str:
        """Return a printable string of limited length, for people: control characters would act on a terminal."""
        value = self.text(name)
        if not value.isprintable() or len(value) > MAX_LINE_CHARACTERS:
            self.fail(name, f"expected at most {MAX_LINE_CHARACTERS} printable characters, found {quoted(value)}")
        return value

    def choice(self, name: str, *allowed: str) -> str:
        """Return one of the strings in `allowed`."""
        return str(self._checked(name, one_of(allowed)))

    def boolean(self, name: str) -> bool:
        return bool(self._checked(name, true_or_false))

    def read(self, cls: type[T]) -> T:
        """Return the whole object as a dataclass of this project, as its annotations say. Raises UserError, which names
        the field, also for fields that the dataclass lacks."""
        self._seen.update(self._values)
        try:
            dataclass: T = reader(cls, strict=True)(self._values)  # type: ignore[arg-type]
        except Mismatch as mismatch:
            self.fail(mismatch.path[1:], mismatch.complaint())
        return dataclass

    def _checked(self, name: str, check: Reader) -> Any:
        value = self.value(name)
        try:
            return check(value)
        except Mismatch as mismatch:
            self.fail(name + mismatch.path, mismatch.complaint())

    def record(self, name: str) -> Record:
        value = self.value(name)
        if not isinstance(value, dict):
            self.fail(name, f"expected an object, found {quoted(value)}")
        return Record(value, self.where, f"{self._prefix}{name}.")

    def records(self, name: str) -> list[Record]:
        values = self.items(name)
        for value in values:
            if not isinstance(value, dict):
                self.fail(name, f"expected a list of objects, found {quoted(value)}")
        return [Record(value, self.where, f"{self._prefix}{name}[{n}].") for n, value in enumerate(values)]

    def items(self, name: str) -> list[Any]:
        """Return a list of unchecked values."""
        value = self.value(name)
        if not isinstance(value, list):
            self.fail(name, f"expected a list, found {quoted(value)}")
        return value

    def shares(self, name: str, count: int) -> tuple[float, ...]:
        """Return a list of `count` numbers between 0 and 1."""
        values = self.items(name)
        if len(values) != count or not all(
            isinstance(v, int | float) and not isinstance(v, bool) and 0 <= v <= 1 for v in values
        ):
            self.fail(name, f"expected {count} shares between 0 and 1")
        return tuple(float(v) for v in values)

    def names(self) -> list[str]:
        """Return the names of all fields, in order."""
        return list(self._values)

    def without(self, name: str) -> dict[str, Any]:
        """Return all fields but one, unchecked."""
        return {key: value for key, value in self._values.items() if key != name}

    def finish(self) -> None:
        """Refuse fields that were not read: they might change the meaning of the others."""
        unknown = sorted(set(self._values) - self._seen)
        if unknown:
            self.fail(unknown[0], "unknown field; a newer version may understand it")
