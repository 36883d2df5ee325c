"""The packages that are served, by name, and the run of each."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from neuronpipe.plans.package.manifest import MANIFEST
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.document import Plan
from neuronpipe.protocol.errors import quoted
from neuronpipe.services.gateway.client.run_client import AcquireRun, CoordinatorClient
from neuronpipe.services.gateway.http.api_errors import ApiError, unavailable
from neuronpipe.services.gateway.openai.chat_prompt import PromptWriter
from neuronpipe.services.gateway.openai.infill import Infill
from neuronpipe.services.gateway.runs.live_view import LiveFeed
from neuronpipe.services.gateway.templates.template_pool import TemplatePool

HEALTH_S = 2.0
LATEST = ":latest"  # clients of Ollama's API add it to names without a tag


class Run(NamedTuple):
    """A live run: its client and its snapshots."""

    coordinator: CoordinatorClient
    live: LiveFeed

    @classmethod
    def of(cls, endpoint: str, directory: Path, ended: Callable[[], str | None] | None = None) -> Run:
        """Connect to a run.

        ended: `run_ended` of `CoordinatorClient`
        """
        return cls(CoordinatorClient(endpoint, ended), LiveFeed(directory))

    def end(self, code: str, reason: str) -> None:
        """Refuse waiting and further requests and end its streams, because the run or the server has ended."""
        self.coordinator.end(code, reason)
        self.live.end(reason)


class ServedModel:
    """One package, with or without a run.

    chat: writes prompts with its chat template
    infill: writes infill prompts; set by `ServedModels`
    run: its live run, if any
    run_bytes: memory of a run by its plan
    accelerator_bytes: the part of it that an accelerator has
    modified_at: when the package was written, in seconds since 1970
    """

    def __init__(self, package: Package, plan: Plan) -> None:
        self.package, self.context_tokens, self.sequences = package, plan.compute.context_tokens, plan.compute.sequences
        self.name = package.manifest.name
        self.fingerprint = f"np_{package.manifest.id[:12]}"
        self.chat = PromptWriter(package)
        self.infill: Infill
        self.run: Run | None = None
        self.run_bytes, self.accelerator_bytes = plan.memory.total_bytes(), plan.memory.accelerator_bytes
        self.modified_at = (package.path / MANIFEST).stat().st_mtime
        self._created = int(time.time())

    def facts(self) -> dict[str, Any]:
        """Return the model object of `/v1/models`."""
        return {
            "id": self.name,
            "object": "model",
            "created": self._created,
            "owned_by": "neuronpipe",
            "chat_template": self.package.manifest.chat is not None,
            "context_tokens": self.context_tokens,
        }


class ServedModels:
    """The packages of the server. This class serves one package whose run lasts; `HostedModels` serves several.

    templates_bytes: the bytes by which chat templates may make one helper process grow
    """

    def __init__(self, models: Sequence[ServedModel], templates_bytes: int) -> None:
        self._by_name = {model.name: model for model in models}
        self._first = models[0]
        self._templates = TemplatePool(templates_bytes)
        for model in models:
            model.infill = Infill(self.run_acquirer(model))
            model.chat.templates = self._templates

    def find(self, name: str | None) -> ServedModel:
        """Return the package of this name, with or without LATEST; the first if the request names none.

        Raises ApiError if there is none.
        """
        if name is None:
            return self._first
        if name not in self._by_name:
            name = name.removesuffix(LATEST)
        if name not in self._by_name:
            served_names = ", ".join(map(repr, self._by_name))
            message = f"the model {quoted(name)} is not served here; this server has {served_names}"
            raise ApiError(404, "model_not_found", message, param="model")
        return self._by_name[name]

    def facts(self) -> list[dict[str, Any]]:
        """Return the model objects of `/v1/models`."""
        return [model.facts() for model in self._by_name.values()]

    @property
    def models(self) -> list[ServedModel]:
        return list(self._by_name.values())

    def unused_for_s(self, model: ServedModel) -> float:
        """Return after which time without requests the run of a package ends; infinite if it does not."""
        return math.inf

    def unload(self, model: ServedModel) -> None:
        """End the run of a package. Raises ApiError if other requests use it, or if it lasts as long as the server."""
        message = f"keep_alive: the run of {model.name} lasts as long as this server; `neuronpipe serve --keep-alive` "
        message += "starts a server whose runs end, and `neuronpipe down` ends a run"
        raise ApiError(400, "unsupported_parameter", message, param="keep_alive")

    @property
    def live(self) -> list[tuple[str, Run]]:
        """Return name and run of each package that has a live run."""
        return [(model.name, model.run) for model in self._by_name.values() if model.run is not None]

    def run_of(self, model: ServedModel) -> Run:
        """Return the run of a package. Raises ApiError if it has none."""
        if model.run is None:
            raise unavailable("asleep", f"{model.name} has no run now; the next request for it starts one")
        return model.run

    def run_acquirer(self, model: ServedModel) -> AcquireRun:
        """Return the function with which a request for this package acquires its run."""
        return partial(self._acquire, model)

    @asynccontextmanager
    async def _acquire(self, model: ServedModel) -> AsyncIterator[CoordinatorClient]:
        yield self.run_of(model).coordinator

    async def health(self) -> dict[str, Any]:
        """Return the body of `/health`. Raises ApiError while the run starts or its coordinator is being restarted."""
        status = await self.run_of(self._first).coordinator.fresh_status(HEALTH_S)
        if not status.ready:
            raise unavailable("starting", status.notes() or "not all processes of the run are ready")
        return {"status": "ok"}

    async def try_templates(self) -> None:
        for model in self._by_name.values():
            await model.chat.report()

    def end(self, code: str, reason: str) -> None:
        """Refuse waiting and further requests, because the server ends."""
        for _, run in self.live:
            run.end(code, reason)

    async def close(self) -> None:
        """Close the connections to all runs, and end the helper processes of chat templates."""
        self._templates.close()
        for _, run in self.live:
            await run.coordinator.close()
