"""`options` of a request of Ollama's API, and their translation to fields of a chat or plain completion.

Options that describe how Ollama loads a model are accepted without effect: the plan of the run decides that here.
Options of samplers that this engine does not have are refused unless their value turns the sampler off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from neuronpipe.protocol.messages.request import MAX_TOKENS, SAMPLING_OPTIONS
from neuronpipe.services.gateway.http.schema_base import IGNORED, RequestModel, refuse_with, unsupported
from neuronpipe.services.gateway.openai.request_schema import HTTP_NAMES, MAX_STOPS, Stops, option_field
from pydantic import AfterValidator, Field, create_model

NAMES = {"repetition_penalty": "repeat_penalty"}  # sampling options that Ollama calls by another name
DEFAULTS: Mapping[str, float] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}  # Ollama's
NOT_OF_OLLAMA = {"ignore_end", "penalty_tokens"}  # the latter has other values, see `repeat_last_n`
RANDOM_SEED, UNLIMITED, WHOLE_TEXT = -1, -1, -1
MIN_LIMIT = -2  # Ollama has two values for "as many as fit"
OPTIONS_OF_OLLAMA = {
    NAMES.get(option.name, option.name): option for option in SAMPLING_OPTIONS if option.name not in NOT_OF_OLLAMA
}
NO_MIROSTAT = "there is no mirostat here; use temperature, top_k, top_p and min_p"


def _only_one(value: float) -> float:
    """Refuse every value of a sampler's option except 1, which turns the sampler off."""
    if value != 1:
        raise unsupported("there is no such sampler here; only 1, which turns it off, is accepted")
    return value


Off = Annotated[float, AfterValidator(_only_one)]

if TYPE_CHECKING:  # the fields are created at run time from the declarations of `Generate`
    OllamaSampling = RequestModel
else:
    OllamaSampling = create_model(
        "OllamaSampling",
        __base__=RequestModel,
        **{
            name: option_field(option, None, DEFAULTS.get(option.name, option.default))
            for name, option in OPTIONS_OF_OLLAMA.items()
        },
    )


class OllamaOptions(OllamaSampling):
    """The sampling options and the end of a completion, by their names in Ollama's API."""

    num_predict: int = Field(
        UNLIMITED,
        ge=MIN_LIMIT,
        le=MAX_TOKENS,
        description="The maximum number of tokens to generate; 0 or less means as many as fit the context.",
    )
    seed: int | None = Field(
        None,
        description="The seed of the random numbers: any integer, modulo 2^63. By default, and with -1, every request "
        "has a random seed.",
    )
    stop: Stops = Field(
        default=[], description=f"Strings that end the completion and are not part of it, up to {MAX_STOPS}."
    )
    repeat_last_n: int = Field(
        64,
        ge=WHOLE_TEXT,
        le=MAX_TOKENS,
        description="How many of the last tokens the penalties consider: -1, all, or 0, none.",
    )
    mirostat: Annotated[int, refuse_with(NO_MIROSTAT)] = Field(
        0, description="Only 0 is accepted: the sampler is not supported."
    )
    tfs_z: Off = Field(1.0, description="Only 1 is accepted: the sampler is not supported.")
    typical_p: Off = Field(1.0, description="Only 1 is accepted: the sampler is not supported.")
    draft_num_predict: int | None = Field(None, description=IGNORED)
    embedding_only: bool | None = Field(None, description=IGNORED)
    f16_kv: bool | None = Field(None, description=IGNORED)
    logits_all: bool | None = Field(None, description=IGNORED)
    low_vram: bool | None = Field(None, description=IGNORED)
    main_gpu: int | None = Field(None, description=IGNORED)
    mirostat_eta: float | None = Field(None, description=IGNORED)
    mirostat_tau: float | None = Field(None, description=IGNORED)
    num_batch: int | None = Field(None, description=IGNORED)
    num_ctx: int | None = Field(None, description=IGNORED)
    num_gpu: int | None = Field(None, description=IGNORED)
    num_keep: int | None = Field(None, description=IGNORED)
    num_thread: int | None = Field(None, description=IGNORED)
    numa: bool | None = Field(None, description=IGNORED)
    penalize_newline: bool | None = Field(None, description=IGNORED)
    use_mlock: bool | None = Field(None, description=IGNORED)
    use_mmap: bool | None = Field(None, description=IGNORED)
    vocab_only: bool | None = Field(None, description=IGNORED)

    @property
    def _penalties(self) -> set[str]:
        """Return the names of the penalties that are not off."""
        penalties = {name: option for name, option in OPTIONS_OF_OLLAMA.items() if option.reads_text}
        return {name for name, option in penalties.items() if getattr(self, name) != option.default}

    @property
    def max_tokens(self) -> int:
        return self.num_predict if self.num_predict > 0 else MAX_TOKENS

    def as_fields(self) -> dict[str, Any]:
        """Return the fields of a chat or plain completion, without the limit of tokens."""
        off = self._penalties if self.repeat_last_n == 0 else ()
        sampling = {
            HTTP_NAMES.get(option.name, option.name): option.default if name in off else getattr(self, name)
            for name, option in OPTIONS_OF_OLLAMA.items()
        }
        sampling["penalty_tokens"] = max(0, self.repeat_last_n)
        return sampling | {"seed": None if self.seed == RANDOM_SEED else self.seed, "stop": self.stop}
