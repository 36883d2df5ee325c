"""Text that must follow a grammar: which tokens may come next, by the llguidance library.

What this costs, whoever wrote the grammar chooses: it runs in a helper process (constrained_answers.py).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from neuronpipe.protocol.messages.request import Calls, GrammarSyntax
from neuronpipe.services.coordinator.text.function_calls import CallsError, as_lark, marks, schema_of
from neuronpipe.services.coordinator.text.json_schemas import as_followed
from neuronpipe.services.coordinator.text.tokenizer import Tokenizer

MAX_GRAMMAR_BYTES = 64 << 10
KEPT_COMPILED = 8
LINE = "\n"  # a character that tokenizers join with nothing that follows
# Between the parts of JSON, a space or an indented line: a model that has lost its way would write spaces for ever.
BETWEEN = r" |\r?\n[ \t]{0,16}"


class GrammarError(Exception):
    """A grammar that cannot be compiled, or has become too large; says why in one line."""


class LibraryFault(Exception):
    """The grammar library itself has failed. What it says of that is for us, not for who wrote the grammar."""


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
        self._compiled_calls = functools.lru_cache(KEPT_COMPILED)(self._compile_calls)

    def start(self, grammar: str, syntax: GrammarSyntax = "json") -> Grammar:
        """The beginning of a text. grammar, syntax: as in `Generate`. Raises GrammarError."""
        return _Following(self._compiled(grammar, syntax).deep_copy())

    def start_calls(self, calls: Calls, grammar: str | None, syntax: GrammarSyntax = "json") -> Grammar:
        """The beginning of a text that may call functions. calls, grammar, syntax: as in `Generate`. Raises
        GrammarError."""
        if grammar is not None and syntax != "json":
            raise GrammarError("an answer that may call functions follows a JSON schema, or nothing")
        return _Following(self._compiled_calls(calls, grammar).deep_copy())

    def marks(self, calls: Calls) -> dict[int, str]:
        """The special tokens that are text in such an answer, and that text."""
        return marks(calls, self._special)

    def spelled(self, text: bytes) -> list[int]:
        """The tokens in which this text is forced. Raises GrammarError."""
        assert self._tokens is not None
        return self._names(text)

    def forget(self) -> None:
        """Forget the grammars that were compiled."""
        self._compiled.cache_clear()
        self._compiled_calls.cache_clear()

    def read_vocabulary(self) -> None:
        """Do what only the first grammar needs. Raises GrammarError."""
        _library()
        assert self._tokens is not None

    def _compile(self, grammar: str, syntax: GrammarSyntax) -> Any:
        _library()
        try:
            return self._matcher(_source(grammar, syntax))
        except (ValueError, RecursionError) as error:  # the library reads numbers, nesting and texts more strictly
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
                for one in calls.functions:  # the error speaks of our grammar: which of the schemas is it about?
                    try:
                        self._matcher(library.LLMatcher.grammar_from_json_schema(json.dumps(schema_of(one))))
                    except (GrammarError, ValueError) as error:
                        raise CallsError(f"the arguments of {one.name!r}: {error}") from None
                raise
        except (CallsError, ValueError, RecursionError) as error:
            raise GrammarError(_one_line(error)) from None

    def _matcher(self, source: str) -> Any:
        """The beginning of what the library's own description of a grammar describes."""
        library = _library()
        limits = library.LLParserLimits(max_lexer_states=20_000, verbose_errors=False)  # 1-2 kB each
        matcher = library.LLMatcher(self._tokens, source, log_level=0, limits=limits)
        _require_sound(matcher)
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
            # Without slices: they make strings cheaper, and cost 35 MB with a vocabulary of 128,000.
            tokens = LLTokenizer(TokenizerWrapper(vocabulary), eos_token=self._end_tokens or None, slices=[])
        except Exception as error:  # the library's own kinds
            raise GrammarError(
                f"no grammar can be followed with this package's tokenizer: {_one_line(error)}"
            ) from None
        vocabulary.encode_greedily = tokens.greedy_tokenize
        return tokens


class _Vocabulary:
    """A tokenizer as the library expects one. Given tokenizer.json, it would keep all of it a second time."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, end_tokens: list[int]) -> None:
        self._tokenizer = tokenizer
        self.tokens = tokenizer.pieces(vocabulary)
        self.special_token_ids = tokenizer.special_tokens
        self.eos_token_id = end_tokens[0] if end_tokens else None
        self._special = frozenset(self.special_token_ids)
        self.encode_greedily: Callable[[str], list[int]] | None = None

    def __call__(self, text: bytes) -> list[int]:
        """Tokens that spell exactly these bytes, as they continue an answer: what a tokenizer makes of a text of its
        own may begin with a mark (Llama's "\u2581"), have another form (NFC), or be a special token of that name."""
        for before in ("", LINE):
            tokens = self._tokenizer.encode(before + text.decode(), frame=False)
            if (spelled := self._without(before, tokens)) is not None and self._spells(spelled, text):
                return spelled
        return [] if self.encode_greedily is None else self.encode_greedily(text.decode())

    def _without(self, before: str, tokens: list[int]) -> list[int] | None:
        """The tokens after those of this beginning; None where one token spells both its end and more."""
        if not before:
            return tokens
        beginning = self._tokenizer.encode(before, frame=False)
        return tokens[len(beginning) :] if tokens[: len(beginning)] == beginning else None

    def _spells(self, tokens: list[int], text: bytes) -> bool:
        return self._special.isdisjoint(tokens) and b"".join(map(self._piece, tokens)) == text

    def _piece(self, token: int) -> bytes:
        return self.tokens[token] if token < len(self.tokens) else b""


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
        _require_sound(self._matcher)
        return mask


def _require_sound(matcher: Any) -> None:
    """Raises GrammarError, LibraryFault."""
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
    """The JSON schema of a grammar as part of another, with its options in it."""
    return json.dumps(_schema(grammar) | {"x-guidance": {"whitespace_pattern": BETWEEN}})


def require_short(grammar: str) -> None:
    """Raises GrammarError."""
    if len(grammar.encode(errors="replace")) > MAX_GRAMMAR_BYTES:
        raise GrammarError(f"it is longer than {MAX_GRAMMAR_BYTES} bytes")


def _source(grammar: str, syntax: GrammarSyntax) -> str:
    """The grammar as the library takes it."""
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
    except Exception as error:  # GbnfToLarkError and plain ones
        raise GrammarError(f"the grammar is no GBNF: {_one_line(error)}") from None


def _schema(text: str) -> dict[str, Any]:
    """The schema that answers follow. Raises GrammarError."""
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
