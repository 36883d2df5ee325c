"""Replicas of a server behind Ray Serve, on one machine or many: for a client the HTTP of one `neuronpipe serve`.

    pip install neuronpipe "ray[serve]"
    serve run neuronpipe.services.examples.ray_serve:app packages=a-model,another memory=8GiB max_replicas=8

Each replica owns a server with a memory limit of its own, and restarts when `/health` fails. The entrance is a process
on the head node: it sends the requests of a conversation to the replica that has computed its beginning, and those of a
model to replicas that have a run of it, while these have room. When a replica or its node dies, it sends the request to
another, which generates the same completion. A stream goes on where it broke off.

Packages must be on every node. Serve's HTTP port has no key and no encryption: put what your cluster has before it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, NamedTuple

import aiohttp
from neuronpipe.services.examples.owned_run import OwnedRun
from neuronpipe.services.examples.replica_routing import ResumedStream, is_ending, ranked, routing_key, with_seed
from pydantic import BaseModel, ByteSize
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

RETRY_S = 120.0  # a node's loss is noticed within a minute
PAUSE_S = 0.5  # between attempts
GATHER_S = 0.02  # tokens that arrive within this time are sent together: an object of Ray takes a millisecond
SEPARATORS = {"text/event-stream": b"\n\n", "application/x-ndjson": b"\n"}  # of the events of a stream
PASSED_ON = ("content-type", "authorization", "x-api-key", "anthropic-version")


class ClusterOptions(BaseModel):
    """The options of `serve run`.

    packages: names or paths, separated by commas
    memory: the limit of each replica, such as 8GiB; Ray places a replica where this much is free
    cpus: cores of each replica
    sequences: sequences that a replica computes at once, and the queue length at which another replica is started
    options: further options of `neuronpipe serve`, separated by blanks
    """

    packages: str
    memory: ByteSize
    cpus: float = 1.0
    sequences: int = 4
    min_replicas: int = 1
    max_replicas: int = 1
    options: str = ""


class Forwarded(NamedTuple):
    """A request as a replica gets it.

    key, model: how the router chooses the replica; model is empty if replicas have one model
    attempt: 0, then 1 at the replica that comes next in the router's order, and so on
    """

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    key: str
    model: str
    attempt: int = 0


class Head(NamedTuple):
    """The beginning of a replica's answer; its body follows in pieces."""

    status: int
    headers: dict[str, str]


class ServerEnding(Exception):
    """The server of a replica ends or has no run."""


class PrefixRouter(FIFOMixin, RequestRouter):  # type: ignore[misc]
    """Sends a conversation to one replica while that has room, and to the next in the order of `ranked` otherwise."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # wait between rounds while all replicas are full
        request = Forwarded(*pending_request.args[0])
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        loaded = {name: replica.multiplexed_model_ids for name, replica in replicas.items()}
        order = ranked(request.key, request.model, loaded)
        first = request.attempt % len(order) if order else 0
        return [[replicas[name]] for name in order[first:] + order[:first]]

    def _get_pending_request_matching_metadata(self, request_metadata: Any = None) -> PendingRequest | None:
        """Return the request for which a replica was chosen; None if it has gone, for the oldest request instead.

        Without FIFOMixin Ray 2.55 forgets a request whose routing task ends because there are more than needed.
        """
        return self._get_pending_request_matching_internal_request_id(request_metadata)


@serve.deployment(
    request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
    health_check_period_s=5,
    health_check_timeout_s=30,
)
class Engine:
    """A replica: a server with its runs."""

    def __init__(self, options: ClusterOptions) -> None:
        more = ["--sequences", str(options.sequences), *options.options.split()]
        self._run = OwnedRun(options.packages.split(","), str(int(options.memory)), more)
        self._session: aiohttp.ClientSession | None = None

    async def answer(self, request: Forwarded) -> AsyncGenerator[Head | bytes, None]:
        """Yield the head of the answer, then its body in pieces."""
        request = Forwarded(*request)
        if request.model:
            await self._uses(request.model)
        data = request.body or None
        async with self._http().request(
            request.method, self._run.address + request.path, headers=request.headers, data=data
        ) as reply:
            names = ("content-type", "retry-after", "x-request-id")
            yield Head(reply.status, {name: reply.headers[name] for name in names if name in reply.headers})
            is_stream = reply.content_type in SEPARATORS
            async for piece in reply.content.iter_any():
                yield piece
                if is_stream:
                    await asyncio.sleep(GATHER_S)

    @serve.multiplexed(max_num_models_per_replica=1)  # type: ignore[untyped-decorator]
    async def _uses(self, model: str) -> str:
        """Tell the router which model this replica is used for. The server itself decides which models have runs."""
        return model

    async def check_health(self) -> None:
        """Raise an exception if the server does not serve; after three of them Ray replaces the replica."""
        if not self._run.alive:
            raise RuntimeError("the server has ended")
        async with self._http().get(self._run.address + "/health") as reply:
            reply.raise_for_status()

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        return self._session

    def __del__(self) -> None:
        if hasattr(self, "_run"):
            self._run.end()


@serve.deployment(max_ongoing_requests=10_000)
class Entrance:
    """Passes requests on, and tries them again at other replicas.

    several: True if there are several models
    """

    def __init__(self, engine: DeploymentHandle, several: bool) -> None:
        self._engine, self._several = engine, several

    async def __call__(self, request: Request) -> Response:
        pieces = self._answered(await self._forwarded(request))
        try:
            head = await anext(pieces)
        except (RayError, RayServeException, ServerEnding) as lost:
            error = {"message": f"no replica answers: {lost}", "type": "server_error", "code": "starting"}
            return JSONResponse({"error": error}, 503, {"Retry-After": "5"})
        assert isinstance(head, Head)
        return StreamingResponse(pieces, head.status, head.headers)

    async def _forwarded(self, request: Request) -> Forwarded:
        data = await request.body()
        try:
            body = json.loads(data)
        except ValueError:
            body = None
        key = model = ""
        if isinstance(body, dict):
            key, name = routing_key(body), body.get("model")
            model = name if self._several and isinstance(name, str) else ""
            data = json.dumps(with_seed(request.url.path, body)).encode()
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
        return Forwarded(request.method, path, headers, data, key, model)

    async def _answered(self, request: Forwarded) -> AsyncIterator[Any]:
        """Yield the head of an answer, then its body. Only streams of events have begun when a replica is lost."""
        stream: ResumedStream | None = None
        deadline = asyncio.get_running_loop().time() + RETRY_S
        while True:
            replica = self._engine.options(stream=True, multiplexed_model_id=request.model)
            pieces, ended = replica.answer.remote(tuple(request)), False
            try:
                head, whole = Head(*await anext(pieces)), b""
                separator = SEPARATORS.get(head.headers.get("content-type", "").partition(";")[0])
                if stream is None and separator is not None:
                    stream = ResumedStream(separator)
                    yield head
                elif stream is not None and separator is None:
                    return  # refused this time: the stream ends without its last event
                async for piece in pieces:
                    if stream is None:
                        whole += piece
                    elif new := stream.push(piece):
                        yield new
                ended = True
                if stream.broken if stream is not None else head.status == 503 and is_ending(whole):
                    raise ServerEnding(whole.decode(errors="replace"))
                if stream is None:
                    yield head
                yield stream.finish() if stream is not None else whole
                return
            except (RayError, ServerEnding):
                ended = True
                if stream is not None and request.method != "POST":
                    return  # the live view: its client asks again
                if asyncio.get_running_loop().time() > deadline:
                    raise
                if stream is not None:
                    stream.begin()
                request = request._replace(attempt=request.attempt + 1)
                await asyncio.sleep(PAUSE_S)
            finally:
                if not ended:  # the client has gone
                    pieces.cancel()


def app(options: ClusterOptions) -> serve.Application:
    """Build the application for `serve run` and for files of `serve deploy`."""
    engine = Engine.options(  # type: ignore[attr-defined]
        max_ongoing_requests=2 * options.sequences,
        ray_actor_options={"num_cpus": options.cpus, "memory": int(options.memory)},
        autoscaling_config={
            "min_replicas": options.min_replicas,
            "max_replicas": options.max_replicas,
            "target_ongoing_requests": options.sequences,
        },
    )
    # Only what is lost with the head node may be lost with the entrance.
    at_head = {"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}}
    entrance = Entrance.options(ray_actor_options=at_head)  # type: ignore[attr-defined]
    return entrance.bind(engine.bind(options), "," in options.packages)
