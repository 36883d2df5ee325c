"""Text that must follow a grammar: which tokens may come next, by the llguidance library.

The library is loaded when the first request needs it, and stays. While it reads the vocabulary all requests wait: one
process serves them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from typing import Any, Protocol

from neuronpipe.services.coordinator.detokenizer import Tokenizer

MAX_SCHEMA_BYTES = 64 << 10
KEPT_COMPILED = 8
# Between the parts of JSON, a space or an indented line: a model that has lost its way would write spaces for ever.
BETWEEN = r" |\r?\n[ \t]{0,16}"


class GrammarError(Exception):
    """A grammar that cannot be compiled, or has become too large; says why in one line."""


class Grammar(Protocol):
    """How far one text has come in its grammar.

    allowed: one bit for each token id that may come next, the lowest bit of a byte first
    """

    allowed: bytes

    def take(self, token: int) -> bool:
        """The text goes on with this token, an allowed one. Returns whether nothing can follow. Raises GrammarError."""
        ...


class Grammars:
    """The grammars that a package's tokens can follow.

    tokenizer: what the tokens stand for
    vocabulary: how many ids there are, those included that no token has
    end_tokens: allowed where the text may end, and nowhere else
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, end_tokens: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._end_tokens = sorted(end_tokens)
        self._compiled = functools.lru_cache(KEPT_COMPILED)(self._compile)

    def start(self, grammar: str) -> Grammar:
        """The beginning of a text. grammar: as in `Generate`. Raises GrammarError."""
        return _Following(self._compiled(grammar).deep_copy())

    def _compile(self, grammar: str) -> Any:
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError:
            raise GrammarError("the llguidance package is not installed here: pip install llguidance") from None
        text = '{"type": "object"}' if grammar == "json" else grammar
        _check_schema(text)
        options: Any = {"whitespace_pattern": BETWEEN}
        limits = LLParserLimits(max_lexer_states=20_000, verbose_errors=False)  # 1-2 kB each
        source = LLMatcher.grammar_from_json_schema(text, overrides=options)
        matcher = LLMatcher(self._tokens, source, log_level=0, limits=limits)
        if matcher.is_error():
            raise GrammarError(_one_line(matcher.get_error()))
        return matcher

    @functools.cached_property
    def _tokens(self) -> Any:
        from llguidance import LLTokenizer, TokenizerWrapper

        try:
            vocabulary = _Vocabulary(self._tokenizer, self._vocabulary, self._end_tokens)
            # Without slices: they make strings cheaper, and cost 35 MB with a vocabulary of 128,000.
            return LLTokenizer(TokenizerWrapper(vocabulary), eos_token=self._end_tokens or None, slices=[])
        except Exception as error:  # the library's own kinds
            raise GrammarError(
                f"no grammar can be followed with this package's tokenizer: {_one_line(error)}"
            ) from None


class _Vocabulary:
    """A tokenizer as the library expects one. Given tokenizer.json, it would keep all of it a second time."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, end_tokens: list[int]) -> None:
        self._tokenizer = tokenizer
        self.tokens = tokenizer.pieces(vocabulary)
        self.special_token_ids = tokenizer.special_tokens
        self.eos_token_id = end_tokens[0] if end_tokens else None

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode(), frame=False)


class _Following:
    """One text's matcher. It computes at once what may come next, so that errors occur where they are expected."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self.allowed = self._next()

    def take(self, token: int) -> bool:
        """As in `Grammar`."""
        self._matcher.consume_token(token)
        self.allowed = self._next()
        return bool(self._matcher.is_stopped())

    def _next(self) -> bytes:
        mask: bytes = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise GrammarError(_one_line(self._matcher.get_error()))
        return mask


def _check_schema(text: str) -> None:
    """What the library would take for something else, or take too long over."""
    if len(text.encode(errors="replace")) > MAX_SCHEMA_BYTES:
        raise GrammarError(f"the schema is longer than {MAX_SCHEMA_BYTES} bytes")
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the schema is no JSON: {_one_line(error)}") from None
    if not isinstance(schema, dict):
        raise GrammarError("the schema is no JSON object")


def _one_line(reason: object) -> str:
    return " ".join(str(reason).split())[:300]
