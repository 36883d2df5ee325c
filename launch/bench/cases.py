"""What is measured: `pp512` a prompt of 512 tokens, `tg128` 128 generated tokens, `pp512+tg128` both in one request."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass

LEAD_TOKENS = 4  # before the tokens that `tg` counts: a text must begin with something
DEFAULT_PROMPT_TOKENS, DEFAULT_DECODE_TOKENS = 512, 128


@dataclass(frozen=True)
class Case:
    """One test. Zero tokens: that part is not measured."""

    name: str
    prefill_tokens: int
    decode_tokens: int

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt that the request carries."""
        return self.prefill_tokens or LEAD_TOKENS

    @property
    def max_tokens(self) -> int:
        """Tokens to ask for: the first one comes with the prefill, the gaps after it are decode steps."""
        return self.decode_tokens + 1

    @property
    def context_tokens(self) -> int:
        """Tokens of the request's whole text. Where nothing is decoded, the one that comes with the prefill needs no
        room."""
        return self.prompt_tokens + (self.max_tokens if self.decode_tokens else 0)


def parse_cases(text: str) -> tuple[Case, ...]:
    """`pp512,tg128,pp64+tg16`. For argparse: raises ArgumentTypeError."""
    cases = []
    for word in text.split(","):
        found = re.fullmatch(r"(?:pp([1-9]\d{0,6}))?(\+)?(?:tg([1-9]\d{0,6}))?", word.strip())
        if not found or not word.strip() or bool(found[2]) != bool(found[1] and found[3]):
            raise argparse.ArgumentTypeError(f"{word!r} is no test; write pp512, tg128 or pp512+tg128")
        cases.append(Case(word.strip(), int(found[1] or 0), int(found[3] or 0)))
    return tuple(cases)


def default_cases(context_tokens: int) -> tuple[Case, ...]:
    """pp512 and tg128, or what a shorter context holds."""
    prompt = min(DEFAULT_PROMPT_TOKENS, context_tokens)
    decode = min(DEFAULT_DECODE_TOKENS, max(1, context_tokens - LEAD_TOKENS - 1))
    return Case(f"pp{prompt}", prompt, 0), Case(f"tg{decode}", 0, decode)
