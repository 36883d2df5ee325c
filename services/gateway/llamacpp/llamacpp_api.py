"""Endpoints of llama.cpp's server for tokens and properties, and the refusal of embeddings."""

from __future__ import annotations

from typing import Any, Literal, NoReturn

from neuronpipe.protocol.messages.client import Tokenized
from neuronpipe.protocol.messages.request import SAMPLING_OPTIONS, Generate, Tokenize
from neuronpipe.services.gateway.client.run_client import new_request_id, tokenize_all
from neuronpipe.services.gateway.http.api_errors import ApiError
from neuronpipe.services.gateway.http.memory_account import charge_of
from neuronpipe.services.gateway.http.request_body import read_body
from neuronpipe.services.gateway.http.schema_base import RequestModel
from neuronpipe.services.gateway.openai.request_schema import HTTP_NAMES, MODEL, TokenId
from neuronpipe.services.gateway.runs.served_models import ServedModels
from pydantic import ConfigDict, Field
from starlette.requests import Request

TOKEN_BYTES = 100  # memory of one token with its piece in the message
PIECE_BYTES = 260  # memory of both in the response


class TokenizeRequest(RequestModel):
    """Encode a text as token ids."""

    model: str | None = Field(None, description=MODEL)
    content: str = Field(description="The text to encode.")
    add_special: bool = Field(False, description="Add the begin and end tokens of the tokenizer.")
    parse_special: Literal[True] = Field(
        True, description="Names of special tokens in the text always become these tokens; only true is accepted."
    )
    with_pieces: bool = Field(
        False,
        description="Return objects with `id` and `piece`, the text of the token, or a list of its bytes if it is not "
        "valid UTF-8.",
    )


class DetokenizeRequest(RequestModel):
    """Decode token ids to text."""

    model: str | None = Field(None, description=MODEL)
    tokens: list[TokenId] = Field(description="The token ids to decode.")
    skip_special_tokens: bool = Field(False, description="Omit the names of special tokens.")


class EmbeddingsRequest(RequestModel):
    """A request for embeddings. It is refused, whatever its fields are."""

    model_config = ConfigDict(extra="allow")


class LlamaCppApi:
    """The implementation of these endpoints."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models

    async def tokenize(self, request: Request, client: str) -> dict[str, Any]:
        body = await read_body(request, TokenizeRequest)
        ask = Tokenize(request=new_request_id(), text=body.content, frame=body.add_special)
        answer = await self.tokenized(ask, body.model, client)
        charge_of(request.scope).grow((TOKEN_BYTES + PIECE_BYTES * body.with_pieces) * len(answer.tokens))
        if not body.with_pieces:
            return {"tokens": answer.tokens}
        pieces = zip(answer.tokens, answer.pieces, strict=True)
        return {"tokens": [{"id": token, "piece": _piece_as_json(piece)} for token, piece in pieces]}

    async def detokenize(self, request: Request, client: str) -> dict[str, Any]:
        body = await read_body(request, DetokenizeRequest)
        ask = Tokenize(request=new_request_id(), tokens=tuple(body.tokens), special=not body.skip_special_tokens)
        return {"content": (await self.tokenized(ask, body.model, client)).text}

    async def props(self, name: str | None) -> dict[str, Any]:
        """Return the body of `GET /props`: properties of a model and the defaults of its sampling options."""
        model = self._models.find(name)
        manifest, defaults = model.package.manifest, Generate(request="", prompt="")
        params = {
            HTTP_NAMES.get(option.name, option.name): getattr(defaults, option.name) for option in SAMPLING_OPTIONS
        }
        chat, report = manifest.chat, await model.chat.report()
        return {
            "default_generation_settings": {
                "n_ctx": model.context_tokens,
                "params": params | {"temperature": 1.0, "n_predict": -1, "stream": False},
            },
            "total_slots": model.sequences,
            "model_alias": manifest.name,
            "model_path": manifest.name,
            "modalities": {"vision": False, "audio": False},
            "chat_template": "" if chat is None else model.package.chat_template(),
            "chat_template_error": None if report is None else report.error,
            "chat_template_tools": None
            if report is None
            else {"format": "template" if report.writes_calls else "stated", "reason": report.why_not},
            "bos_token": "" if chat is None else chat.begin,
            "eos_token": "" if chat is None else chat.end,
        }

    async def embeddings(self, request: Request) -> NoReturn:
        await read_body(request, EmbeddingsRequest)
        message = "embeddings are not supported: the models of this server generate text"
        raise ApiError(400, "unsupported_endpoint", message)

    async def tokenized(self, ask: Tokenize, model: str | None, client: str) -> Tokenized:
        """Return the reply to a call of a model's tokenizer."""
        async with self._models.run_acquirer(self._models.find(model))() as coordinator:
            (answer,) = await tokenize_all(coordinator, [ask], client)
            return answer


def _piece_as_json(piece: bytes) -> str | list[int]:
    """Return a token's text; a list of its bytes if it is not valid UTF-8."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)
