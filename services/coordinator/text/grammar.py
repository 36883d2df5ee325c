"""Grammars by the llguidance library: which tokens may come next.

The author of a grammar determines its cost, so all of this runs in a helper process (grammar_process.py).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from neuronpipe.protocol.messages.request import Calls, GrammarSyntax
from neuronpipe.services.coordinator.text.function_calls import CallsError, as_lark, marks, schema_of
from neuronpipe.services.coordinator.text.json_schemas import as_followed
from neuronpipe.services.coordinator.text.tokenizer import Tokenizer

MAX_GRAMMAR_BYTES = 64 << 10
KEPT_COMPILED = 8
LINE = "\n"  # tokenizers join it with nothing that follows
# White space between parts of JSON: a space or an indented line. Without a limit, a model may write spaces for ever.
BETWEEN = r" |\r?\n[ \t]{0,16}"


class GrammarError(Exception):
    """A grammar that cannot be compiled or has become too large, with the reason in one line."""


class LibraryFault(Exception):
    """A failure of the grammar library. Its message is for the log, not for the author of the grammar."""


class Grammar(Protocol):
    """The state of a sequence in its grammar.

    allowed: one bit for each token id, 1 if it may come next, the lowest bit of a byte first
    """

    allowed: bytes

    def take(self, token: int) -> bool:
        """Continue with an allowed token. Returns True if nothing can follow. Raises GrammarError."""
        ...


class Grammars:
    """The grammars for the tokens of a package.

    tokenizer: returns the bytes of tokens. The library must not read `tokenizer.json` itself, since it would store a
    second copy
    vocabulary: number of ids, including those without a token
    end_tokens: allowed where the text may end, and nowhere else
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, end_tokens: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._end_tokens = sorted(end_tokens)
        self._compiled = functools.lru_cache(KEPT_COMPILED)(self._compile)
        self._compiled_calls = functools.lru_cache(KEPT_COMPILED)(self._compile_calls)

    def start(self, grammar: str, syntax: GrammarSyntax = "json") -> Grammar:
        """Return the state before the first token. Arguments are fields of `Generate`. Raises GrammarError."""
        return _Matcher(self._compiled(grammar, syntax).deep_copy())

    def start_calls(self, calls: Calls, grammar: str | None, syntax: GrammarSyntax = "json") -> Grammar:
        """Return the state before the first token of an answer that may call functions. Raises GrammarError."""
        if grammar is not None and syntax != "json":
            raise GrammarError("an answer that may call functions follows a JSON schema, or nothing")
        return _Matcher(self._compiled_calls(calls, grammar).deep_copy())

    def marks(self, calls: Calls | None, shown_tokens: Sequence[str] = ()) -> dict[int, str]:
        """Return the text of each special token that counts as text. Arguments are fields of `Generate`."""
        named = {self._special[name]: name for name in shown_tokens if name in self._special}
        return named if calls is None else named | marks(calls, self._special)

    def spelled(self, text: bytes) -> list[int]:
        """Return the tokens of a text that is the only one a grammar allows. Raises GrammarError."""
        assert self._tokens is not None
        return self._names(text)

    def forget(self) -> None:
        self._compiled.cache_clear()
        self._compiled_calls.cache_clear()

    def read_vocabulary(self) -> None:
        """Import the library and read the vocabulary, which otherwise delays the first grammar. Raises GrammarError."""
        _library()
        assert self._tokens is not None

    def _compile(self, grammar: str, syntax: GrammarSyntax) -> Any:
        _library()
        try:
            return self._matcher(_source(grammar, syntax))
        except (ValueError, RecursionError) as error:  # the library is stricter about numbers, nesting and strings
            raise GrammarError(_one_line(error)) from None

    def _compile_calls(self, calls: Calls, grammar: str | None) -> Any:
        library = _library()
        if not marks(calls, self._special).keys().isdisjoint(self._end_tokens):
            raise GrammarError("an end token is part of the calls")
        try:
            lark = as_lark(calls, None if grammar is None else _as_part(grammar), self._special)
            try:
                return self._matcher(library.LLMatcher.grammar_from_lark(lark))
            except (GrammarError, ValueError):
                for function in calls.functions:  # the error concerns our grammar: find the schema that causes it
                    try:
                        self._matcher(library.LLMatcher.grammar_from_json_schema(json.dumps(schema_of(function))))
                    except (GrammarError, ValueError) as error:
                        raise CallsError(f"the arguments of {function.name!r}: {error}") from None
                raise
        except (CallsError, ValueError, RecursionError) as error:
            raise GrammarError(_one_line(error)) from None

    def _matcher(self, source: str) -> Any:
        library = _library()
        limits = library.LLParserLimits(max_lexer_states=20_000, verbose_errors=False)  # 1-2 kB each
        matcher = library.LLMatcher(self._tokens, source, log_level=0, limits=limits)
        _raise_error(matcher)
        return matcher

    @functools.cached_property
    def _special(self) -> dict[str, int]:
        """Ids of special tokens by their names."""
        names = (
            (self._tokenizer.piece(token).decode(errors="replace"), token) for token in self._tokenizer.special_tokens
        )
        return {name: token for name, token in names if name}

    @functools.cached_property
    def _names(self) -> _Vocabulary:
        return _Vocabulary(self._tokenizer, self._vocabulary, self._end_tokens)

    @functools.cached_property
    def _tokens(self) -> Any:
        from llguidance import LLTokenizer, TokenizerWrapper

        try:
            vocabulary = self._names
            # Slices would make strings cheaper, but cost 35 MB with a vocabulary of 128,000.
            tokens = LLTokenizer(TokenizerWrapper(vocabulary), eos_token=self._end_tokens or None, slices=[])
        except Exception as error:  # the library raises its own classes
            raise GrammarError(
                f"no grammar can be followed with this package's tokenizer: {_one_line(error)}"
            ) from None
        vocabulary.encode_greedily = tokens.greedy_tokenize
        return tokens


class _Vocabulary:
    """A tokenizer as the library expects it."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, end_tokens: list[int]) -> None:
        self._tokenizer = tokenizer
        self.tokens = tokenizer.pieces(vocabulary)
        self.special_token_ids = tokenizer.special_tokens
        self.eos_token_id = end_tokens[0] if end_tokens else None
        self._special = frozenset(self.special_token_ids)
        self.encode_greedily: Callable[[str], list[int]] | None = None

    def __call__(self, text: bytes) -> list[int]:
        """Return tokens that spell exactly these bytes as the continuation of an answer.

        The tokenizer's encoding of a text may begin with a mark (Llama's "\u2581"), be normalized (NFC), or contain a
        special token of the same name. If it does not spell the bytes, the text is encoded after a line break, and then
        with the longest token first.
        """
        for before in ("", LINE):
            tokens = self._tokenizer.encode(before + text.decode(), frame=False)
            if (spelled := self._without(before, tokens)) is not None and self._spells(spelled, text):
                return spelled
        return [] if self.encode_greedily is None else self.encode_greedily(text.decode())

    def _without(self, before: str, tokens: list[int]) -> list[int] | None:
        """Return the tokens after those of this prefix; None if a token spans the boundary."""
        if not before:
            return tokens
        beginning = self._tokenizer.encode(before, frame=False)
        return tokens[len(beginning) :] if tokens[: len(beginning)] == beginning else None

    def _spells(self, tokens: list[int], text: bytes) -> bool:
        return self._special.isdisjoint(tokens) and b"".join(map(self._piece, tokens)) == text

    def _piece(self, token: int) -> bytes:
        return self.tokens[token] if token < len(self.tokens) else b""


class _Matcher:
    """A `Grammar` by the library's matcher. It computes each mask at once, so that `take` raises the errors of it."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self.allowed = self._next()

    def take(self, token: int) -> bool:
        self._matcher.consume_token(token)
        self.allowed = self._next()
        return bool(self._matcher.is_stopped())

    def _next(self) -> bytes:
        mask: bytes = self._matcher.compute_bitmask()
        _raise_error(self._matcher)
        return mask


def _raise_error(matcher: Any) -> None:
    """Raise GrammarError or LibraryFault if the matcher has failed."""
    if not matcher.is_error():
        return
    reason = _one_line(str(matcher.get_error()).replace("<non-verbose/>", ""))
    if reason.startswith("panic"):
        raise LibraryFault(reason)
    if reason.startswith("NoExtension"):
        reason = "no text follows it"
    raise GrammarError(reason)


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise GrammarError("the llguidance package is not installed here: pip install llguidance") from None
    return llguidance


def _as_part(grammar: str) -> str:
    """Return the JSON schema of a grammar with its options, to be part of another grammar."""
    return json.dumps(_schema(grammar) | {"x-guidance": {"whitespace_pattern": BETWEEN}})


def require_short(grammar: str) -> None:
    if len(grammar.encode(errors="replace")) > MAX_GRAMMAR_BYTES:
        raise GrammarError(f"it is longer than {MAX_GRAMMAR_BYTES} bytes")


def _source(grammar: str, syntax: GrammarSyntax) -> str:
    """Return the grammar in the library's own description."""
    require_short(grammar)
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if syntax == "regex":
        return LLMatcher.grammar_from_regex(grammar)
    if syntax == "json":
        options: Any = {"whitespace_pattern": BETWEEN}
        return LLMatcher.grammar_from_json_schema(json.dumps(_schema(grammar)), overrides=options)
    try:
        return LLMatcher.grammar_from_lark(gbnf_to_lark(grammar) if syntax == "gbnf" else grammar)
    except Exception as error:  # GbnfToLarkError and others
        raise GrammarError(f"the grammar is no GBNF: {_one_line(error)}") from None


def _schema(text: str) -> dict[str, Any]:
    """Return the schema that answers follow. Raises GrammarError."""
    if text == "json":
        return {"type": "object"}
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the schema is no JSON: {_one_line(error)}") from None
    if not isinstance(schema, dict):
        raise GrammarError("the schema is no JSON object")
    try:
        return as_followed(schema)
    except RecursionError:
        raise GrammarError("the schema is nested too deeply") from None


def _one_line(reason: object) -> str:
    return " ".join(str(reason).split())[:300]
