"""`GenerationOptions` and `SamplingOptions`, the checked values of the options of a request."""

from __future__ import annotations

from collections.abc import Mapping

from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.marks import Range
from neuronpipe.protocol.messages.request import Bias, Generate

SEEDS = Range(0, (1 << 63) - 1)


@frozen(kw_only=True)
class SamplingOptions:
    """Options that control the sampling of tokens, and the end of a request.

    declared: values of the options that `Generate` declares, by name
    grammar: JSON schema of the answer, or "json" for any JSON object
    logprobs: number of most likely tokens to report at each position
    """

    max_tokens: int
    stop: tuple[str, ...]
    declared: Mapping[str, float]
    logit_bias: tuple[Bias, ...]
    grammar: str | None
    logprobs: int | None
    seed: int

    def request(self, prompt: str) -> Generate:
        """Return the request that samples a completion of the prompt with these options."""
        return Generate(
            request="1",
            prompt=prompt,
            max_tokens=self.max_tokens,
            stop=self.stop,
            logit_bias=self.logit_bias,
            grammar=self.grammar,
            logprobs=self.logprobs,
            seed=self.seed,
            **self.declared,  # type: ignore[arg-type]
        )


@frozen(kw_only=True)
class GenerationOptions:
    """The options of one request.

    prompt: None if it comes from standard input
    system: the system message, for a model with a chat template
    raw: whether to use the prompt as it is, without the chat template
    as_json: whether to print one JSON object instead of streaming
    hides_thinking: whether to show only the answer, without the reasoning before it
    """

    prompt: str | None
    system: str | None
    raw: bool
    as_json: bool
    hides_thinking: bool
    sampling: SamplingOptions
