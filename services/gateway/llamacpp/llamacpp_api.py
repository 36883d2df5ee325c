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
from neuronpipe.services.gateway.openai.request_schema import HTTP_NAMES, TokenId
from neuronpipe.services.gateway.runs.served_models import ServedModels
from pydantic import ConfigDict, Field
from starlette.requests import Request

TOKEN_BYTES = 100  # of one token with its piece, as a message
PIECE_BYTES = 260  # and of what is made of both for the answer


class TokenizeRequest(RequestModel):
    """Encode a text as token ids."""

    model: str | None = Field(None, description="a name that /v1/models shows; the first where there is none")
    content: str = Field(description="the text")
    add_special: bool = Field(False, description="with the tokens that the tokenizer puts round a text")
    parse_special: Literal[True] = Field(True, description="names of special tokens in a text are these tokens")
    with_pieces: bool = Field(False, description="with the text of each token; bytes where that is no text")


class DetokenizeRequest(RequestModel):
    """Decode token ids to text."""

    model: str | None = Field(None, description="a name that /v1/models shows; the first where there is none")
    tokens: list[TokenId] = Field(description="token ids")
    skip_special_tokens: bool = Field(False, description="leave the names of special tokens out of the text")


class EmbeddingsRequest(RequestModel):
    """A request for embeddings. It is refused, whatever its fields are."""

    model_config = ConfigDict(extra="allow")


class LlamaCppApi:
    """The endpoints' implementations."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models

    async def tokenize(self, request: Request, client: str) -> dict[str, Any]:
        """Return the body of `POST /tokenize`."""
        body = await read_body(request, TokenizeRequest)
        ask = Tokenize(request=new_request_id(), text=body.content, frame=body.add_special)
        answer = await self._tokenize(ask, body.model, client)
        charge_of(request.scope).grow((TOKEN_BYTES + PIECE_BYTES * body.with_pieces) * len(answer.tokens))
        if not body.with_pieces:
            return {"tokens": answer.tokens}
        pieces = zip(answer.tokens, answer.pieces, strict=True)
        return {"tokens": [{"id": token, "piece": _piece_as_json(piece)} for token, piece in pieces]}

    async def detokenize(self, request: Request, client: str) -> dict[str, Any]:
        """Return the body of `POST /detokenize`."""
        body = await read_body(request, DetokenizeRequest)
        ask = Tokenize(request=new_request_id(), tokens=tuple(body.tokens), special=not body.skip_special_tokens)
        return {"content": (await self._tokenize(ask, body.model, client)).text}

    async def props(self, name: str | None) -> dict[str, Any]:
        """Return the body of `GET /props`: properties of a model and the defaults of its sampling options."""
        model = self._models.find(name)
        manifest, defaults = model.package.manifest, Generate(request="", prompt="")
        params = {HTTP_NAMES.get(one.name, one.name): getattr(defaults, one.name) for one in SAMPLING_OPTIONS}
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
        """Refuse embeddings. Raises ApiError."""
        await read_body(request, EmbeddingsRequest)
        raise ApiError(400, "unsupported_endpoint", "embeddings: the model that is served continues texts and has none")

    async def _tokenize(self, ask: Tokenize, model: str | None, client: str) -> Tokenized:
        async with self._models.run_acquirer(self._models.find(model))() as coordinator:
            (answer,) = await tokenize_all(coordinator, [ask], client)
            return answer


def _piece_as_json(piece: bytes) -> str | list[int]:
    """Return a token's text; a list of its bytes if it is not valid UTF-8."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)
