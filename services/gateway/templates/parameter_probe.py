"""The text around arguments that a chat template writes one by one, such as <parameter=KEY>VALUE</parameter>."""

from __future__ import annotations

from typing import NamedTuple, Self

ARGUMENTS = {"qzxone": 7131, "qzxtwo": 7132}


class ParameterText(NamedTuple):
    """The text around the two arguments of a call.

    between: before the first of them, after the name of the function
    parameter_before, parameter_between, parameter_after: as in `CallFormat`
    after: after the last of them
    """

    between: str
    parameter_before: str
    parameter_between: str
    parameter_after: str
    after: str

    @classmethod
    def of(cls, text: str) -> Self | None:
        """Find the arguments in what follows the name of a function; return None if they are not written one by one."""
        gaps, end = list[str](), 0
        for word in (str(part) for pair in ARGUMENTS.items() for part in pair):
            at = text.find(word, end)
            if at < 0:
                return None
            gaps.append(text[end:at])
            end = at + len(word)
        first, between, middle, same_between, last = *gaps, text[end:]
        before = first[first.rfind("<") :]
        if not before.startswith("<") or between != same_between or not between or not middle.endswith(before):
            return None
        after = middle.removesuffix(before)
        after = after if last.startswith(after) else after.rstrip()
        if not after.strip() or not last.startswith(after):
            return None
        return cls(first.removesuffix(before), before, between, after, last.removeprefix(after))

    def written(self) -> str:
        """Return the arguments as text."""
        return "".join(
            f"{self.parameter_before}{name}{self.parameter_between}{value}{self.parameter_after}"
            for name, value in ARGUMENTS.items()
        )
