"""Text that must follow a grammar: which tokens may come next, by the llguidance library.

The library is loaded when the first request needs it, and stays. While it reads the vocabulary all requests wait: one
process serves them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from neuronpipe.protocol.messages.request import GrammarSyntax
from neuronpipe.services.coordinator.detokenizer import Tokenizer

MAX_GRAMMAR_BYTES = 64 << 10
KEPT_COMPILED = 8
# Between the parts of JSON, a space or an indented line: a model that has lost its way would write spaces for ever.
BETWEEN = r" |\r?\n[ \t]{0,16}"
# Where schemas stand in a schema: as a value, in a list, by names; and what says more of an object's properties.
ONE = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames", "unevaluatedItems")
MANY = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
SAYS_MORE = ("additionalProperties", "unevaluatedProperties", "allOf", "$ref", "if", "dependentSchemas")


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

    def start(self, grammar: str, syntax: GrammarSyntax = "json") -> Grammar:
        """The beginning of a text. grammar, syntax: as in `Generate`. Raises GrammarError."""
        return _Following(self._compiled(grammar, syntax).deep_copy())

    def _compile(self, grammar: str, syntax: GrammarSyntax) -> Any:
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError:
            raise GrammarError("the llguidance package is not installed here: pip install llguidance") from None
        if len(grammar.encode(errors="replace")) > MAX_GRAMMAR_BYTES:
            raise GrammarError(f"it is longer than {MAX_GRAMMAR_BYTES} bytes")
        limits = LLParserLimits(max_lexer_states=20_000, verbose_errors=False)  # 1-2 kB each
        matcher = LLMatcher(self._tokens, _source(grammar, syntax), log_level=0, limits=limits)
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


def _source(grammar: str, syntax: GrammarSyntax) -> str:
    """The grammar as the library takes it."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

    if syntax == "regex":
        return LLMatcher.grammar_from_regex(grammar)
    if syntax == "json":
        options: Any = {"whitespace_pattern": BETWEEN}
        try:
            return LLMatcher.grammar_from_json_schema(json.dumps(_schema(grammar)), overrides=options)
        except RecursionError:
            raise GrammarError("the schema is nested too deeply") from None
    try:
        return LLMatcher.grammar_from_lark(gbnf_to_lark(grammar) if syntax == "gbnf" else grammar)
    except (GbnfToLarkError, ValueError, IndexError, KeyError, RecursionError) as error:
        raise GrammarError(f"the grammar is no GBNF: {_one_line(error)}") from None


def _schema(text: str) -> dict[str, Any]:
    """The schema that answers follow."""
    if text == "json":
        return {"type": "object"}
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the schema is no JSON: {_one_line(error)}") from None
    if not isinstance(schema, dict):
        raise GrammarError("the schema is no JSON object")
    return as_followed(schema)


# ---- JSON schemas --------------------------------------------------------------------------------------------
def as_followed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema that answers follow: stricter in one point than it is written, and looser in one. The given one stays
    as it is.

    An object that names its properties and says nothing of others has no others. By the letter it could have any, and a
    model that has lost its way would write them for ever. `uniqueItems` is passed over: no grammar can say whether an
    item is new, and a schema with it is common.
    """
    joined = {id(part) for one in _schemas(schema) for part in _joined(one, schema)}
    made = _followed(schema, joined)
    assert isinstance(made, dict)
    return made


def _followed(value: Any, joined: set[int]) -> Any:
    if not isinstance(value, dict):
        return value
    made = {name: item for name, item in value.items() if name != "uniqueItems"}
    for name, item in value.items():
        if name in BY_NAME and isinstance(item, dict):
            made[name] = {key: _followed(one, joined) for key, one in item.items()}
        elif name in MANY and isinstance(item, list):
            made[name] = [_followed(one, joined) for one in item]
        elif name in ONE:
            made[name] = _followed(item, joined)
    if isinstance(value.get("properties"), dict) and id(value) not in joined and not any(n in value for n in SAYS_MORE):
        made["additionalProperties"] = False
    return made


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """It and all schemas in it."""
    if not isinstance(schema, dict):
        return
    yield schema
    for name, item in schema.items():
        if name in BY_NAME and isinstance(item, dict):
            inner = list(item.values())
        elif name in MANY and isinstance(item, list):
            inner = item
        else:
            inner = [item] if name in ONE else []
        for one in inner:
            yield from _schemas(one)


def _joined(schema: dict[str, Any], document: dict[str, Any]) -> Iterator[Any]:
    """The schemas that describe one object together with others: closed one by one, no object would satisfy all."""
    parts = schema.get("allOf")
    together = list(parts) if isinstance(parts, list) else []
    if "$ref" in schema and "properties" in schema:
        together.append(schema)
    for part in together:
        if len(together) == 1 and part is not schema and "properties" not in schema:
            continue
        yield from _reached(part, document, set())


def _reached(part: Any, document: dict[str, Any], seen: set[int]) -> Iterator[Any]:
    """A schema, what it refers to in this document, and its alternatives."""
    if not isinstance(part, dict) or id(part) in seen:
        return
    seen.add(id(part))
    yield part
    for name in ("anyOf", "oneOf", "allOf"):
        alternatives = part.get(name)
        for one in alternatives if isinstance(alternatives, list) else []:
            yield from _reached(one, document, seen)
    if isinstance(part.get("$ref"), str) and part["$ref"].startswith("#/"):
        target: Any = document
        for key in part["$ref"].removeprefix("#/").split("/"):
            target = target.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
        yield from _reached(target, document, seen)


def _one_line(reason: object) -> str:
    return " ".join(str(reason).split())[:300]
