"""What the coordinator receives from clients. A client names each request; the name is unique within the client."""

from __future__ import annotations

from typing import Annotated, Literal

from neuronpipe.protocol.codec import Message, message
from neuronpipe.protocol.options import PENALTY, SAMPLING, Range, ranges_of, sampling_options_of

GrammarSyntax = Literal["json", "regex", "lark", "gbnf"]
MAX_TOKENS = 1 << 24
MAX_BIAS = 100
MAX_CALLS = 64
MAX_STOP_TOKENS = 64


@message
class Bias(Message):
    """What is added to the logit of one token, in `Generate`.

    token: its id
    bias: -100 bans it
    """

    token: int
    bias: Annotated[float, Range(-MAX_BIAS, MAX_BIAS)]


@message
class Function(Message):
    """A function that an answer may call, in `Calls`.

    name: its name
    arguments: JSON schema of its arguments, an object
    strict: whether a schema is refused that says what a grammar cannot; if not, such parts of it are passed over
    """

    name: str
    arguments: str
    strict: bool = False


@message
class Calls(Message):
    """How an answer calls functions, in `Generate`: `before`, a name, `between`, the arguments; for each further call
    `next`, a name, `between`, the arguments; at last `after`, and nothing more. In these texts a NUL stands for any
    letter or digit of ASCII, and the name of a special token for that token, which is text of the answer then.

    functions: those that may be called
    before: what stands before the name of the first function
    between: what stands between a name and the arguments, which are a JSON object with a space after each comma and
        colon
    next: what stands between the arguments and the next name
    after: what stands after the last arguments
    marker: how `before` begins: the first time that this occurs, text ends and calls begin. Empty: calls are the whole
        answer, and text begins in another way than they
    text: whether there may be text in place of calls, and before them where there is a marker
    most: most calls
    """

    functions: tuple[Function, ...]
    before: str
    between: str
    next: str
    after: str
    marker: str = ""
    text: bool = True
    most: int = 1

    def __post_init__(self) -> None:
        if not self.functions or not self.before or not self.between:
            raise ValueError("functions, before, between: expected at least one function, and texts")
        if not self.before.startswith(self.marker):
            raise ValueError("marker: expected the beginning of before")
        if not 1 <= self.most <= MAX_CALLS or (self.most > 1 and not self.next):
            raise ValueError(f"most: expected 1 to {MAX_CALLS}, and 1 without next")


@message
class Generate(Message):
    """Continue a text. Answered by `Accepted`, then a `Token` for each token, then `Finished`; or by `Refused`.

    request: the client's name for it
    prompt: the text; exactly one of prompt and tokens is given
    tokens: the text as token ids, used as they are: no begin token is added
    frame: whether the tokenizer adds its begin and end tokens to the prompt; chat templates write them themselves
    max_tokens: most tokens to generate
    temperature: divides the logits; 0: always the most likely token
    top_k: sample from this many most likely tokens; 0: from all
    top_p: sample from the smallest set of tokens whose probability reaches this; 1: from all
    min_p: sample from tokens at least this fraction as likely as the most likely one, at this temperature; 0: from all
    repetition_penalty: for tokens of the prompt or the answer, positive logits are divided by it, others multiplied;
        1: off
    frequency_penalty: subtracted from a token's logit for each time that it occurs in the answer
    presence_penalty: subtracted from a token's logit if it occurs in the answer
    logit_bias: added to the logits of these tokens, after the penalties
    ignore_end: never sample an end token
    grammar: the form of the answer: "json" for any JSON object, or a JSON schema. Only tokens that can continue it are
        sampled, end tokens only where it may end; where nothing can follow, the answer ends with reason "end"
    grammar_syntax: how the grammar is written: "json": as above; "regex": a regular expression; "lark": a Lark grammar;
        "gbnf": one as llama.cpp has it
    logprobs: how many of the most likely tokens to report with each token, with logarithms of probabilities;
        0: the token itself only; nil: none
    seed: of the random numbers; the same request with the same seed yields the same text
    stop: texts that end the generation; they are not part of the answer
    share_prefix: whether keys and values may be copied from other texts with the same prefix; the tokens are the same
        either way
    owner: for whom the client asks. Where requests wait, clients and their owners have equal shares of the KV slots
    calls: functions that the answer may call; what it says instead of that follows the grammar, if there is one
    stop_tokens: tokens that end it as an end token does, 64 at most; `ignore_end` does not ban them
    """

    request: str
    prompt: str | None = None
    tokens: tuple[int, ...] | None = None
    frame: bool = True
    max_tokens: Annotated[int, Range(1, MAX_TOKENS)] = 128
    temperature: Annotated[float, SAMPLING, Range(0, 100)] = 0.0
    top_k: Annotated[int, SAMPLING, Range(0, (1 << 31) - 1)] = 0
    top_p: Annotated[float, SAMPLING, Range(0, 1, above=True)] = 1.0
    min_p: Annotated[float, SAMPLING, Range(0, 1)] = 0.0
    repetition_penalty: Annotated[float, PENALTY, Range(0.01, 100)] = 1.0
    frequency_penalty: Annotated[float, PENALTY, Range(-100, 100)] = 0.0
    presence_penalty: Annotated[float, PENALTY, Range(-100, 100)] = 0.0
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

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.tokens is None):
            raise ValueError("prompt, tokens: expected exactly one of the two")
        if len(self.stop_tokens) > MAX_STOP_TOKENS:
            raise ValueError(f"stop_tokens: expected at most {MAX_STOP_TOKENS}")


RANGES = ranges_of(Generate)
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
    """Score a given text: how unlikely the model finds each token after those before it. Answered by `Scored` for one
    piece after the other, each after `Next`, then `ScoreFinished`; or by `Refused`.

    request: the client's name for it
    tokens: the text as token ids; exactly one of tokens and text is given
    text: the text
    path: the decode workers compute it, token by token, or a prefill worker, a chunk at a time
    logits: whether the client reads the logits of each piece from the exchange segment
    frame: whether the tokenizer adds its begin and end tokens to the text
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
    """The client has read the logits of the last `Scored`; the rows may be overwritten. Needed only when `logits` was
    set.

    request: as in `Score`
    """

    request: str


@message
class Tokenize(Message):
    """Turn a text into tokens, or tokens into a text. Answered by `Tokenized`; or by `Refused`.

    request: the client's name for it
    text: the text; exactly one of text and tokens is given
    tokens: the ids
    frame: whether the tokenizer adds its begin and end tokens to the text
    special: whether the text of tokens has the names of special tokens; without, they are left out
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
    """Answered by `Status`."""


@message
class Throttle(Message):
    """Pause between steps: the device is too hot, or busy with something else. Not answered; the last one counts.

    share: of the time to pause, from 0 to 0.95; the pause after a step is the step's time * share / (1 - share)
    for_s: how long this holds, at most 600; send it again to prolong it
    """

    share: float
    for_s: float = 30.0

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 0.95:
            raise ValueError("share: expected 0 to 0.95")
        if not 0 < self.for_s <= 600:
            raise ValueError("for_s: expected more than 0, at most 600")
