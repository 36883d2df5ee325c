"""Messages that the coordinator receives from clients. A client names each request; the name is unique within the
client."""

from __future__ import annotations

from typing import Annotated, Literal

from neuronpipe.protocol.argument_syntax import ArgumentSyntax
from neuronpipe.protocol.codec import Message, message
from neuronpipe.protocol.marks import Range, marks_of
from neuronpipe.protocol.options import PENALTY, SAMPLING, sampling_options_of

GrammarSyntax = Literal["json", "regex", "lark", "gbnf"]
MAX_TOKENS = 1 << 24
MAX_BIAS = 100
MAX_CALLS = 64
MAX_STOP_TOKENS = 64
MAX_THOUGHTS = 8
MAX_SHOWN_TOKENS = 64


@message
class Bias(Message):
    """A number to add to the logit of one token, in `Generate`.

    token: its id
    bias: the number; -100 bans the token
    """

    token: int
    bias: Annotated[float, Range(-MAX_BIAS, MAX_BIAS)]


@message
class Function(Message):
    """A function that a completion may call, in `Calls`.

    name: its name
    arguments: JSON schema of its arguments, which are an object
    strict: true: refuse a schema with parts that a grammar cannot express; false: ignore such parts
    """

    name: str
    arguments: str
    strict: bool = False


@message
class Thought(Message):
    """Text that may come before everything else in a completion, such as reasoning, in `Calls`.

    before: the string before it
    after: the string after it
    """

    before: str
    after: str

    def __post_init__(self) -> None:
        if not self.before or not self.after:
            raise ValueError("before, after: expected texts")


@message
class Calls(Message):
    """The format of function calls in a completion, in `Generate`. Calls consist of `before`, a name, `between` and the
    arguments; for each further call `next`, a name, `between` and the arguments; then `after`, and nothing follows. In
    these strings a NUL stands for any ASCII letter or digit, and the name of a special token stands for that token,
    which is then text of the completion.

    functions: those that may be called
    before: the string before the name of the first function
    between: the string between a name and the arguments; it may be empty with `parameter_before`. The arguments are a
        JSON object with a space after each comma and colon
    next: the string between the arguments and the next name
    after: the string after the last arguments
    marker: the beginning of `before`: where it first occurs, text ends and calls begin. Empty: the calls are the whole
        completion, and text cannot begin like them
    text: true if there may be text instead of calls, and before them if there is a marker
    most: maximal number of calls
    thoughts: texts that may come before all that, any number of them in any order
    in_thought: true if the prompt ends inside of the first of these thoughts
    opening: the string before text that is no thought
    parameter_before: empty if arguments are a JSON object. Otherwise they are written one by one, in the order of the
        schema's properties: this string, a name, `parameter_between`, a value, `parameter_after`. Strings are written
        as they are and end at the first `parameter_after`, other values are JSON
    parameter_between: the string between the name and the value of an argument
    parameter_after: the string after the value of an argument
    argument_syntax: empty, or how arguments are written as keywords up to `next` or `after`: "keywords": name=value,
        separated by a comma and a space, values as JSON; "python": the same with False, True and None; "gemma":
        name:value in the order of the names, separated by commas, with strings between `<|"|>` and None for nil
    """

    functions: tuple[Function, ...]
    before: str
    between: str
    next: str
    after: str
    marker: str = ""
    text: bool = True
    most: int = 1
    thoughts: tuple[Thought, ...] = ()
    in_thought: bool = False
    opening: str = ""
    parameter_before: str = ""
    parameter_between: str = ""
    parameter_after: str = ""
    argument_syntax: ArgumentSyntax = ""

    def __post_init__(self) -> None:
        if not self.functions or not self.before or not (self.between or self.parameter_before):
            raise ValueError("functions, before, between: expected at least one function, and texts")
        if not self.before.startswith(self.marker):
            raise ValueError("marker: expected the beginning of before")
        if not 1 <= self.most <= MAX_CALLS or (self.most > 1 and not self.next):
            raise ValueError(f"most: expected 1 to {MAX_CALLS}, and 1 without next")
        if len(self.thoughts) > MAX_THOUGHTS or (self.in_thought and not self.thoughts):
            raise ValueError(f"thoughts: expected at most {MAX_THOUGHTS}, and at least one with in_thought")
        if len({bool(self.parameter_before), bool(self.parameter_between), bool(self.parameter_after)}) > 1:
            raise ValueError("parameter_before, parameter_between, parameter_after: expected all of them or none")
        if self.argument_syntax and (self.parameter_before or not self.between):
            raise ValueError("argument_syntax: expected between, and no parameter_before")


@message
class Generate(Message):
    """Continue a prompt. The answer is `Accepted`, then a `Token` for each token, then `Finished`; or `Refused`.

    request: the client's name for the request
    prompt: the prompt as text; a `Generate` has exactly one of `prompt` and `tokens`
    tokens: the prompt as token ids, used as they are: no begin token is added
    frame: true if the tokenizer adds its begin and end tokens to the prompt; chat templates write them themselves
    max_tokens: maximal number of tokens to generate
    temperature: divides the logits; 0: always the most likely token
    top_k: sample from this many most likely tokens; 0: from all
    top_p: sample from the smallest set of tokens whose probability reaches this; 1: from all; 0: the most likely token
    min_p: sample from tokens at least this fraction as likely as the most likely one, at this temperature; 0: from all
    repetition_penalty: for tokens of the prompt or the completion, positive logits are divided by it, others
        multiplied; 1: off
    frequency_penalty: subtracted from a token's logit for each time that it occurs in the completion
    presence_penalty: subtracted from a token's logit if it occurs in the completion
    penalty_tokens: the penalties consider this many of the last tokens; 0: all
    logit_bias: added to the logits of these tokens, after the penalties
    ignore_end: never sample an end token
    grammar: the grammar of the completion: "json" for any JSON object, or a JSON schema. Only tokens that can continue
        it are sampled, and end tokens only where it may end. Where nothing can follow, the completion ends with reason
        "end"
    grammar_syntax: the syntax of `grammar`: "json": as above; "regex": a regular expression; "lark": a Lark grammar;
        "gbnf": GBNF as in llama.cpp
    logprobs: how many of the most likely tokens to report with each token, with logarithms of probabilities; 0: the
        token itself only; nil: none
    seed: seed of the random numbers; the same request with the same seed yields the same text
    stop: strings that end the generation; they are not part of the completion
    share_prefix: true if keys and values may be copied from other sequences with the same prefix, or from the prompt
        cache; the tokens are the same either way
    owner: the user for whom the client asks. When requests wait, clients and their owners have equal shares of the KV
        slots
    calls: functions that the completion may call; text outside calls follows the grammar, if there is one
    stop_tokens: tokens that end the completion like an end token, at most 64; `ignore_end` does not ban them
    shown_tokens: names of special tokens that are text of the completion, at most 64; names of other tokens are ignored
    draft: true if a step may compute tokens that the text probably continues with; the tokens are the same either way
    """

    request: str
    prompt: str | None = None
    tokens: tuple[int, ...] | None = None
    frame: bool = True
    max_tokens: Annotated[int, Range(1, MAX_TOKENS)] = 128
    temperature: Annotated[float, SAMPLING, Range(0, 100)] = 0.0
    top_k: Annotated[int, SAMPLING, Range(0, (1 << 31) - 1)] = 0
    top_p: Annotated[float, SAMPLING, Range(0, 1)] = 1.0
    min_p: Annotated[float, SAMPLING, Range(0, 1)] = 0.0
    repetition_penalty: Annotated[float, PENALTY, Range(0.01, 100)] = 1.0
    frequency_penalty: Annotated[float, PENALTY, Range(-100, 100)] = 0.0
    presence_penalty: Annotated[float, PENALTY, Range(-100, 100)] = 0.0
    penalty_tokens: Annotated[int, SAMPLING, Range(0, (1 << 31) - 1)] = 0
    logit_bias: tuple[Bias, ...] = ()
    ignore_end: Annotated[bool, SAMPLING] = False
    grammar: str | None = None
    grammar_syntax: GrammarSyntax = "json"
    logprobs: Annotated[int | None, Range(0, 20)] = None
    seed: int = 0
    stop: tuple[str, ...] = ()
    share_prefix: bool = True
    owner: str = ""
    calls: Calls | None = None
    stop_tokens: tuple[int, ...] = ()
    shown_tokens: tuple[str, ...] = ()
    draft: bool = True

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.tokens is None):
            raise ValueError("prompt, tokens: expected exactly one of the two")
        if len(self.stop_tokens) > MAX_STOP_TOKENS:
            raise ValueError(f"stop_tokens: expected at most {MAX_STOP_TOKENS}")
        if len(self.shown_tokens) > MAX_SHOWN_TOKENS:
            raise ValueError(f"shown_tokens: expected at most {MAX_SHOWN_TOKENS}")


RANGES = marks_of(Generate, Range)
SAMPLING_OPTIONS = sampling_options_of(Generate)


@message
class Cancel(Message):
    """End a request. A `Generate` is answered by `Finished` with reason "cancelled", a `Score` by `Refused` with code
    "cancelled". An unknown name is ignored, since the request may just have ended.

    request: as in `Generate` or `Score`
    """

    request: str


@message
class Score(Message):
    """Score a given text: how unlikely the model finds each token after the tokens before it. The answer is one
    `Scored` for each piece, each after `Next`, then `ScoreFinished`; or `Refused`.

    request: the client's name for the request
    tokens: the text as token ids; a `Score` has exactly one of `tokens` and `text`
    text: the text
    path: "decode": the decode workers compute it, token by token; "prefill": a prefill worker computes it, a chunk at a
        time
    logits: true if the client reads the logits of each piece from the exchange segment
    frame: true if the tokenizer adds its begin and end tokens to the text
    logprobs: how many of the most likely tokens to report for each token of the text, in `Scored.rated`; nil: not even
        the token itself
    owner: as in `Generate`
    """

    request: str
    tokens: tuple[int, ...] | None = None
    text: str | None = None
    path: Literal["decode", "prefill"] = "prefill"
    logits: bool = False
    frame: bool = True
    logprobs: Annotated[int | None, Range(0, 20)] = None
    owner: str = ""

    def __post_init__(self) -> None:
        if (self.text is None) == (self.tokens is None):
            raise ValueError("tokens, text: expected exactly one of the two")


@message
class Next(Message):
    """The client has read the logits of the last `Scored`, and the rows may be overwritten. Needed only if
    `Score.logits` is set.

    request: as in `Score`
    """

    request: str


@message
class Tokenize(Message):
    """Turn a text into tokens, or tokens into a text. The answer is `Tokenized` or `Refused`.

    request: the client's name for the request
    text: the text; a `Tokenize` has exactly one of `text` and `tokens`
    tokens: the token ids
    frame: true if the tokenizer adds its begin and end tokens to the text
    special: true: the text made from tokens has the names of special tokens; false: they are left out
    """

    request: str
    text: str | None = None
    tokens: tuple[int, ...] | None = None
    frame: bool = True
    special: bool = False

    def __post_init__(self) -> None:
        if (self.text is None) == (self.tokens is None):
            raise ValueError("text, tokens: expected exactly one of the two")


@message
class AskStatus(Message):
    """Ask the coordinator for a `Status`."""


@message
class Throttle(Message):
    """Pause between steps, because the device is too hot or busy with something else. There is no answer; the last
    `Throttle` counts.

    share: share of the time to pause, from 0 to 0.95; the pause after a step is the step's time * share / (1 - share)
    for_s: how long this is valid, at most 600; send it again to prolong it
    """

    share: float
    for_s: float = 30.0

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 0.95:
            raise ValueError("share: expected 0 to 0.95")
        if not 0 < self.for_s <= 600:
            raise ValueError("for_s: expected more than 0, at most 600")
