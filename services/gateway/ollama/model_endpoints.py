"""Endpoints of Ollama's API about the server and its models. Those that change models are refused."""

from __future__ import annotations

import functools
import json
from importlib.metadata import version
from typing import Any, NoReturn

from neuronpipe.services.gateway.http.access_control import client_of
from neuronpipe.services.gateway.http.api_errors import OLLAMA_PATH, ApiError
from neuronpipe.services.gateway.http.request_body import read_body
from neuronpipe.services.gateway.ollama.model_listing import described, listed, running
from neuronpipe.services.gateway.ollama.ollama_api import OllamaRequest, OllamaShowRequest
from neuronpipe.services.gateway.ollama.ollama_encoding import timestamp
from neuronpipe.services.gateway.runs.served_models import ServedModel, ServedModels
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

OLLAMA_VERSION = "0.12.11"
"""The version of Ollama whose API this is, the first with log-probabilities. Editors refuse servers that are older than
the features that they use."""
REFUSED_METHODS = ("DELETE", "GET", "POST", "PUT")
INSTEAD = {
    "pull": "`neuronpipe pull NAME` gets a model, and `neuronpipe serve NAME` serves it",
    "create": "`neuronpipe convert SOURCE` makes a package",
    "blobs/{digest}": "`neuronpipe convert SOURCE` makes a package from files on the server's machine",
    "copy": "a package is a directory, which `cp -r` copies",
    "delete": "`neuronpipe rm NAME` removes a model",
    "push": "packages are not published; a package is a directory, which can be copied to another machine",
}
"""By the path of an endpoint that is refused: what to do instead."""


class OllamaModels:
    """The handlers of these endpoints."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models

    def routes(self) -> list[Route]:
        handlers = (("version", "GET", self.version), ("tags", "GET", self.tags), ("ps", "GET", self.running))
        routes = [
            Route(f"{OLLAMA_PATH}/{name}", serve, methods=[method])
            for name, method, serve in (*handlers, ("show", "POST", self.show))
        ]
        return routes + [
            Route(f"{OLLAMA_PATH}/{name}", functools.partial(self.refuse, instead), methods=REFUSED_METHODS)
            for name, instead in INSTEAD.items()
        ]

    async def version(self, request: Request) -> Response:
        return _json({"version": OLLAMA_VERSION, "neuronpipe": version("neuronpipe")})

    async def tags(self, request: Request) -> Response:
        return _json({"models": [listed(model) for model in self._models.models]})

    async def running(self, request: Request) -> Response:
        live = [model for model in self._models.models if model.run is not None]
        return _json({"models": [running(model, self._models.unused_for_s(model)) for model in live]})

    async def show(self, request: Request) -> Response:
        body = await read_body(request, OllamaShowRequest)
        model = self._models.find(body.model or body.name)
        fills_gaps = await self._fills_gaps(model, client_of(request, None))
        return _json(described(model, fills_gaps=fills_gaps))

    async def _fills_gaps(self, model: ServedModel, client: str) -> bool:
        """Return True if the model has tokens for gaps. That is unknown, and False, until it first has a run."""
        if model.run is None and not model.infill.is_probed:
            return False
        try:
            await model.infill.format(client)
        except ApiError:
            return False
        return True

    async def loaded(self, body: OllamaRequest, message: dict[str, Any]) -> dict[str, Any]:
        """Start the model's run if it has none, or end it; return the response to a request without a prompt.

        Raises ApiError if the run cannot be started, or not ended.

        message: the member that has the text of a completion
        """
        model = self._models.find(body.model)
        if body.unloads:
            self._models.unload(model)
        else:
            async with self._models.run_acquirer(model)():
                pass
        reason = "unload" if body.unloads else "load"
        head = {"model": body.model or model.name, "created_at": timestamp()}
        return {**head, **message, "done": True, "done_reason": reason}

    async def refuse(self, instead: str, request: Request) -> NoReturn:
        raise ApiError(400, "unsupported_endpoint", f"models are not changed over HTTP: {instead}")


def _json(content: dict[str, Any]) -> Response:
    return Response(json.dumps(content), media_type="application/json")
