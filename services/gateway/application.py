"""The ASGI application: the routes, and the handlers of the endpoints. `/` serves the files of page/."""

from __future__ import annotations

import functools
import json
import secrets
import sys
from collections.abc import Awaitable, Callable, Sequence
from importlib.metadata import version
from mimetypes import guess_type
from pathlib import Path
from typing import Any

from neuronpipe.protocol.errors import safe_name
from neuronpipe.protocol.messages.request import MAX_TOKENS, Bias, Calls, Generate, Tokenize
from neuronpipe.services.gateway.anthropic.messages_api import CountTokensRequest, MessagesRequest
from neuronpipe.services.gateway.anthropic.messages_encoding import MessagesEncoder
from neuronpipe.services.gateway.client.run_client import MAX_SENT, new_request_id
from neuronpipe.services.gateway.http.access_control import AccessControl, client_of, respond
from neuronpipe.services.gateway.http.api_errors import MESSAGES_PATH, OLLAMA_PATH, ApiError, prompt_too_long
from neuronpipe.services.gateway.http.memory_account import MemoryAccount, charge_of
from neuronpipe.services.gateway.http.metrics import Metrics
from neuronpipe.services.gateway.http.request_body import read_body
from neuronpipe.services.gateway.llamacpp.llamacpp_api import LlamaCppApi
from neuronpipe.services.gateway.ollama.model_endpoints import OllamaModels
from neuronpipe.services.gateway.ollama.ollama_api import OllamaChatRequest, OllamaGenerateRequest
from neuronpipe.services.gateway.ollama.ollama_encoding import (
    OllamaChatEncoder,
    OllamaEncoder,
    OllamaGenerateEncoder,
    RequestTimer,
)
from neuronpipe.services.gateway.openai.chat_encoding import ChatEncoder, FunctionCallEncoder
from neuronpipe.services.gateway.openai.echo import EchoEncoder, EchoResponse
from neuronpipe.services.gateway.openai.infill import InfillResponse
from neuronpipe.services.gateway.openai.request_schema import (
    MAX_SEQUENCES,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
)
from neuronpipe.services.gateway.openai.response_encoding import CompletionEncoder, ResponseEncoder
from neuronpipe.services.gateway.openai.response_sending import GenerationResponse
from neuronpipe.services.gateway.openai.responses_api import ResponsesRequest
from neuronpipe.services.gateway.openai.responses_encoding import ResponsesEncoder
from neuronpipe.services.gateway.openapi_description import openapi_document
from neuronpipe.services.gateway.runs.live_view import LiveResponse
from neuronpipe.services.gateway.runs.served_models import HEALTH_S, ServedModel, ServedModels
from neuronpipe.services.runtime.listener import Listener
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

ENDING = "the server is ending"
SEQUENCE_BYTES = 1 << 10  # memory of one requested sequence, beside its prompt
TUPLE_TOKEN_BYTES = 40  # memory of a token id in a tuple
MESSAGE_TOKEN_BYTES = (5, 1)  # size of a token id, and of a character, in a message
PAGE_FOLDER = Path(__file__).parent / "page"
PAGE_INDEX = "index.html"
PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; manifest-src 'self'; worker-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "cache-control": "no-cache",
    "service-worker-allowed": "/",  # /page/offline.js is for the whole page
}


class Gateway:
    """The handlers of all endpoints, and the state that they share."""

    def __init__(self, models: ServedModels, listener: Listener, account: MemoryAccount) -> None:
        self._models, self._listener, self._account = models, listener, account
        self._llamacpp = LlamaCppApi(models)
        self._ollama = OllamaModels(models)
        self._metrics = Metrics()

    def application(self) -> ASGIApp:
        routes = [
            *_with_and_without_version("/chat/completions", self.chat, "POST"),
            *_with_and_without_version("/completions", self.completions, "POST"),
            *_with_and_without_version("/responses", self.responses, "POST"),
            *_with_and_without_version("/embeddings", self._llamacpp.embeddings, "POST"),
            *_with_and_without_version("/models", self.models, "GET"),
            *_with_and_without_version("/models/{name:path}", self.model, "GET"),
            Route(MESSAGES_PATH, self.messages, methods=["POST"]),
            Route(f"{MESSAGES_PATH}/count_tokens", self.count_tokens, methods=["POST"]),
            Route(f"{OLLAMA_PATH}/chat", self.ollama_chat, methods=["POST"]),
            Route(f"{OLLAMA_PATH}/generate", self.ollama_generate, methods=["POST"]),
            Route(f"{OLLAMA_PATH}/embed", self._llamacpp.embeddings, methods=["POST"]),
            Route(f"{OLLAMA_PATH}/embeddings", self._llamacpp.embeddings, methods=["POST"]),
            *self._ollama.routes(),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/apply-template", self.apply_template, methods=["POST"]),
            Route("/props", self.props),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/openapi.json", self.description),
            Route("/live", self.live),
        ]
        app = Starlette(
            routes=[*routes, *_page_routes()],
            exception_handlers={ApiError: _api_error, HTTPException: _http_error, Exception: _internal_error},
        )
        app.router.redirect_slashes = False
        paths = frozenset(route.path for route in routes)
        return AccessControl(app, self._listener, self._metrics, paths, self._account)

    def end(self) -> None:
        """Refuse waiting and further requests, and end streams, because the server ends."""
        self._models.end("draining", ENDING)

    # ---- OpenAI's API ----------------------------------------------------------------------------------------
    async def chat(self, request: Request) -> GenerationResponse:
        body = await read_body(request, ChatRequest)
        return await self._conversation(request, body, FunctionCallEncoder if body.functions else ChatEncoder)

    async def responses(self, request: Request) -> GenerationResponse:
        body = await read_body(request, ResponsesRequest)
        encoder = functools.partial(ResponsesEncoder, body.echoed())
        return await self._conversation(request, body.as_chat(), encoder)

    async def _conversation(
        self, request: Request, body: ChatRequest, encoder: Callable[..., ResponseEncoder]
    ) -> GenerationResponse:
        """Answer a conversation.

        encoder: called with the arguments of `ChatEncoder`
        """
        limit = body.max_completion_tokens or body.max_tokens or MAX_TOKENS
        model = self._models.find(body.model)
        prompt = await model.chat.write_prompt(body)
        encoder = functools.partial(encoder, answer=prompt.answer)
        return self._generate(
            request,
            model,
            body,
            [prompt.text],
            limit,
            encoder,
            frame=prompt.frame,
            calls=prompt.calls,
            shown_tokens=prompt.answer.shown_tokens,
        )

    async def completions(self, request: Request) -> GenerationResponse:
        body = await read_body(request, CompletionRequest)
        return self._completion(request, body, EchoEncoder if body.echo else CompletionEncoder)

    def _completion(
        self, request: Request, body: CompletionRequest, encoder: Callable[..., ResponseEncoder]
    ) -> GenerationResponse:
        """Continue prompts, or fill gaps."""
        model = self._models.find(body.model)
        if body.suffix:
            infill = functools.partial(InfillResponse, infill=model.infill, suffix=body.suffix)
            return self._generate(request, model, body, body.prompts, body.max_tokens, encoder, respond_with=infill)
        kind = EchoResponse if body.echo else GenerationResponse
        response = self._generate(request, model, body, body.prompts, body.max_tokens, encoder, respond_with=kind)
        charge_of(request.scope).set(_request_bytes(body.prompts, body.candidates) + _prompt_object_bytes(body.prompts))
        return response

    def _generate(
        self,
        request: Request,
        model: ServedModel,
        body: GenerationRequest,
        prompts: Sequence[str | list[int]],
        max_tokens: int,
        encoder: Callable[..., ResponseEncoder],
        *,
        frame: bool = True,
        respond_with: Callable[..., GenerationResponse] = GenerationResponse,
        calls: Calls | None = None,
        shown_tokens: tuple[str, ...] = (),
    ) -> GenerationResponse:
        """Return the response that generates the completions of a request. Raises ApiError if the request is too large.

        encoder: called with the arguments of `ResponseEncoder`
        frame: True if the tokenizer adds its begin and end tokens
        respond_with: called with the arguments of `GenerationResponse`
        calls: the calls that a completion may or must contain
        shown_tokens: names of special tokens that are text of a completion
        """
        if len(prompts) * body.candidates > MAX_SEQUENCES:
            param = "n" if body.candidates == body.n else "best_of"
            message = f"{body.candidates} completions for each of {len(prompts)} prompts exceed the limit of a request"
            raise ApiError(400, "invalid_value", f"{param}: {message}, {MAX_SEQUENCES}", param=param)
        biases = tuple(Bias(token=int(token), bias=bias) for token, bias in body.logit_bias.items())
        constraint, client = body.constraint, client_of(request, body.end_user)
        seed = secrets.randbits(62) if body.seed is None else body.seed
        needs_ranking = body.candidates > body.n
        charge_of(request.scope).grow(_request_bytes(prompts, body.candidates))
        text_or_tokens: list[tuple[str | None, tuple[int, ...] | None]] = [
            (prompt, None) if isinstance(prompt, str) else (None, _checked_tokens(prompt, model)) for prompt in prompts
        ]
        requests = [
            Generate(
                request=new_request_id(),
                prompt=prompt,
                tokens=tokens,
                frame=frame,
                max_tokens=max_tokens,
                seed=(seed + number) % (1 << 63),
                logit_bias=biases,
                grammar=constraint.text if constraint is not None else None,
                grammar_syntax=constraint.syntax if constraint is not None else "json",
                calls=calls,
                shown_tokens=shown_tokens,
                logprobs=0 if needs_ranking and body.logprobs_per_token is None else body.logprobs_per_token,
                stop=body.stop_strings if calls is None or calls.text else (),
                share_prefix=body.cache_prompt,
                owner=client,
                **body.options,
            )
            for prompt, tokens in text_or_tokens
            for number in range(body.candidates)
        ]
        with_usage = body.stream_options is not None and body.stream_options.include_usage
        return respond_with(
            self._models.run_acquirer(model),
            self._metrics,
            encoder(
                model.name,
                model.fingerprint,
                with_usage=with_usage,
                with_logprobs=body.logprobs_per_token is not None,
                end_tokens=model.package.manifest.end_tokens,
            ),
            requests,
            context_tokens=model.context_tokens,
            sequences_per_prompt=body.candidates,
            sent_per_prompt=body.n,
            stream=body.stream,
            client=client,
        )

    # ---- Anthropic's API -------------------------------------------------------------------------------------
    async def messages(self, request: Request) -> GenerationResponse:
        body = (await read_body(request, MessagesRequest)).as_chat()
        return await self._conversation(request, body, MessagesEncoder)

    async def count_tokens(self, request: Request) -> Response:
        body = (await read_body(request, CountTokensRequest)).as_chat()
        prompt = await self._models.find(body.model).chat.write_prompt(body)
        ask = Tokenize(request=new_request_id(), text=prompt.text, frame=prompt.frame)
        answer = await self._llamacpp.tokenized(ask, body.model, client_of(request, None))
        return _json({"input_tokens": len(answer.tokens)})

    # ---- Ollama's API ----------------------------------------------------------------------------------------
    async def ollama_chat(self, request: Request) -> GenerationResponse | Response:
        timer, body = RequestTimer(), await read_body(request, OllamaChatRequest)
        if body.loads:
            return _json(await self._ollama.loaded(body, {"message": {"role": "assistant", "content": ""}}))
        encoder = functools.partial(OllamaChatEncoder, body.model, timer)
        return await self._conversation(request, body.as_chat(), encoder)

    async def ollama_generate(self, request: Request) -> GenerationResponse | Response:
        timer, body = RequestTimer(), await read_body(request, OllamaGenerateRequest)
        if body.loads:
            return _json(await self._ollama.loaded(body, {"response": ""}))
        encoder: Callable[..., OllamaEncoder] = functools.partial(OllamaGenerateEncoder, body.model, timer)
        if body.is_plain:
            return self._completion(request, body.as_completion(), encoder)
        return await self._conversation(request, body.as_chat(), encoder)

    # ---- llama.cpp's endpoints -------------------------------------------------------------------------------
    async def tokenize(self, request: Request) -> Response:
        return _json(await self._llamacpp.tokenize(request, client_of(request, None)))

    async def detokenize(self, request: Request) -> Response:
        return _json(await self._llamacpp.detokenize(request, client_of(request, None)))

    async def apply_template(self, request: Request) -> Response:
        body = await read_body(request, ChatRequest)
        prompt = await self._models.find(body.model).chat.write_prompt(body)
        return _json({"prompt": prompt.text})

    async def props(self, request: Request) -> Response:
        return _json(await self._llamacpp.props(request.query_params.get("model")))

    # ---- about the run ---------------------------------------------------------------------------------------
    async def models(self, request: Request) -> Response:
        return _json({"object": "list", "data": self._models.facts()})

    async def model(self, request: Request) -> Response:
        name = self._models.find(request.path_params["name"]).name
        return _json(next(model for model in self._models.facts() if model["id"] == name))

    async def health(self, request: Request) -> Response:
        """Return the state of the runs. Raises ApiError (503) while a single run is not ready."""
        return _json(await self._models.health())

    async def live(self, request: Request) -> LiveResponse:
        return self._models.run_of(self._models.find(request.query_params.get("model"))).live.view()

    async def metrics(self, request: Request) -> Response:
        page = self._metrics.page(
            [
                (name, await run.coordinator.fresh_status(HEALTH_S), run.coordinator.waiting)
                for name, run in self._models.live
            ]
        )
        return Response(page, headers={"content-type": self._metrics.content_type})

    async def description(self, request: Request) -> Response:
        return _json(openapi_document(version("neuronpipe")))


def _request_bytes(prompts: Sequence[str | list[int]], candidates: int) -> int:
    """Return the memory of a request's sequences. Up to MAX_SENT of them also hold a copy of their prompt until it is
    delivered."""
    sequences = len(prompts) * candidates
    longest_bytes = max((MESSAGE_TOKEN_BYTES[isinstance(prompt, str)] * len(prompt) for prompt in prompts), default=0)
    return sequences * SEQUENCE_BYTES + min(sequences, MAX_SENT) * longest_bytes


def _prompt_object_bytes(prompts: Sequence[str | list[int]]) -> int:
    """Return the memory of prompts as Python objects, which is less than the bound that was reserved before parsing."""
    return sum(
        sys.getsizeof(prompt) if isinstance(prompt, str) else TUPLE_TOKEN_BYTES * len(prompt) for prompt in prompts
    )


def _checked_tokens(tokens: list[int], model: ServedModel) -> tuple[int, ...]:
    """Return a prompt's tokens. Raises ApiError if they are more than the context has."""
    if len(tokens) > model.context_tokens:
        raise prompt_too_long(model.context_tokens, len(tokens))
    return tuple(tokens)


def _with_and_without_version(path: str, serve: Callable[[Request], Any], method: str) -> list[Route]:
    """Return routes with and without `/v1`, since some clients are configured with the server's address alone."""
    return [Route(f"{version}{path}", serve, methods=[method]) for version in ("/v1", "")]


def _page_routes() -> list[BaseRoute]:
    """Return a route for each file of the page: `/` for index.html, `/page/NAME` for the others."""
    files = sorted(file for file in PAGE_FOLDER.glob("*") if file.is_file())
    return [Route("/" if file.name == PAGE_INDEX else f"/page/{file.name}", _serving(file)) for file in files]


def _serving(file: Path) -> Callable[[Request], Awaitable[Response]]:
    """Return a handler that reads the file at each request.

    It reads without a thread: files have a few kilobytes, and the stack of a thread alone has eight megabytes.
    """
    kind = guess_type(file.name)[0]

    async def serve(request: Request) -> Response:
        return Response(file.read_bytes(), headers=PAGE_HEADERS, media_type=kind)

    return serve


def _json(content: dict[str, Any]) -> Response:
    return Response(json.dumps(content), media_type="application/json")


async def _api_error(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, ApiError)
    return respond(problem, request.scope["path"])


async def _http_error(request: Request, error: Exception) -> Response:
    """Answer a request whose path or method does not exist."""
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
    detail = error.detail
    if error.status_code == 404:
        detail = "this path does not exist; the API is below /v1, and /openapi.json describes it"
    elif error.status_code == 405:
        detail = f"this path accepts only {' or '.join(sorted((error.headers or {})['Allow'].split(', ')))}"
    text = f"{safe_name(request.method)} {safe_name(request.url.path)}: {detail}"
    headers = tuple((error.headers or {}).items())
    return respond(ApiError(error.status_code, code, text, headers=headers), request.scope["path"])


async def _internal_error(request: Request, error: Exception) -> Response:
    """Answer a request that failed because of a bug; Starlette logs the exception."""
    problem = ApiError(500, "internal", "an internal error; the server's log has the details", kind="server_error")
    return respond(problem, request.scope["path"])
