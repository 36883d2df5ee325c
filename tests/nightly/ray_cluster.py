"""Serve and score with Ray on a cluster of two nodes on loopback, with the demo model.

    python tests/nightly/ray_cluster.py [scaling] [losses] [models] [job]

Completions and streams are those of one server, also when a replica or a node is killed while they are generated; a
conversation stays with the replica that has its beginning; a queue starts a second replica; models are found by name; a
job of Ray Data rates texts as a server does. Ray is installed below build/nightly-ray first.
"""

from __future__ import annotations

import asyncio
import collections
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PLACE = ROOT / "build" / "nightly-ray"
DEMO = ROOT / "plans" / "demo" / "package"
INSTALLED = "NEURONPIPE_RAY_IS_INSTALLED"
PORT, MEMORY, PATIENCE_S = 18_431, "400MiB", 600.0
OPTIONS = "--workers 1 --prompt-cache 0 --no-idle-profile"
BODIES = [
    {"prompt": f"def quicksort_{number}(items):\n    ", "max_tokens": 150, "temperature": 0, "stream": number % 2 == 0}
    for number in range(8)
]


def text_of(data: bytes, *, streamed: bool) -> str:
    """Return the text of a whole response or of a stream, which must be complete."""
    if not streamed:
        return str(json.loads(data)["choices"][0]["text"])
    *events, done, rest = data.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", ""), data[-200:]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events if not event.startswith(":")]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


async def all_texts(address: str, bodies: Sequence[dict[str, Any]], meanwhile: Callable[[], None]) -> list[str]:
    """Send requests at once, and do something as soon as the first stream has begun."""
    import aiohttp

    begun = asyncio.Event()

    async def one(session: aiohttp.ClientSession, body: dict[str, Any]) -> str:
        async with session.post(f"{address}/v1/completions", json=body) as reply:
            assert reply.status == 200, await reply.text()
            data = b""
            async for piece in reply.content.iter_any():
                data += piece
                if body["stream"] and len(data) > 2000:
                    begun.set()
        return text_of(data, streamed=body["stream"])

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE_S)) as session:
        requests = [asyncio.create_task(one(session, body)) for body in bodies]
        await begun.wait()
        unfinished = sum(not request.done() for request in requests)
        await asyncio.to_thread(meanwhile)
        texts = await asyncio.gather(*requests)
    print(f"  {unfinished} of {len(bodies)} requests were under way", flush=True)
    return texts


def replicas(name: str = "Engine") -> list[int]:
    """Return the process ids of a deployment's replicas."""
    import psutil

    marks = f"ServeReplica:default:{name}"
    return [one.pid for one in psutil.process_iter() if marks in " ".join(_words(one))]


def _words(process: Any) -> list[str]:
    try:
        return list(process.cmdline())
    except Exception:  # it has ended
        return []


def eventually(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, "this did not become true in time"
        time.sleep(0.5)


def servers_of(pid: int) -> list[int]:
    """Return the process ids of the servers that a replica owns."""
    import psutil

    return [one.pid for one in psutil.Process(pid).children(recursive=True) if "serve" in _words(one)]


class ServedCluster:
    """Two nodes of Ray on loopback; Serve listens on the first.

    address: of Serve's HTTP
    """

    def __init__(self) -> None:
        import ray
        from ray import serve
        from ray.cluster_utils import Cluster

        memory_bytes = 600 << 20
        self.nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "memory": memory_bytes})
        self._worker = self.nodes.add_node(num_cpus=1, memory=memory_bytes)
        ray.init(address=self.nodes.address)
        self.address = f"http://127.0.0.1:{PORT}"
        serve.start(proxy_location="HeadOnly", http_options={"port": PORT})

    def serve(self, packages: str, **options: Any) -> None:
        """Serve packages, in place of what was served before."""
        from neuronpipe.services.examples.ray_serve import ClusterOptions, app
        from ray import serve

        serve.run(app(ClusterOptions(packages=packages, memory=MEMORY, options=OPTIONS, **options)))

    def running(self) -> int:
        """Return the number of replicas that are ready."""
        from ray import serve

        states = serve.status().applications["default"].deployments["Engine"].replica_states
        return int(states.get("RUNNING", 0))

    def texts(self, bodies: Sequence[dict[str, Any]], meanwhile: Callable[[], None] = lambda: None) -> list[str]:
        return asyncio.run(all_texts(self.address, bodies, meanwhile))

    def kill_node(self) -> None:
        """Kill the processes of the second node."""
        self.nodes.remove_node(self._worker, allow_graceful=False)

    def end(self) -> None:
        import ray
        from ray import serve

        serve.shutdown()
        ray.shutdown()
        self.nodes.shutdown()


def expected_texts() -> list[str]:
    """Return what one server without Ray answers."""
    from neuronpipe.services.examples.owned_run import OwnedRun

    single = OwnedRun([str(DEMO)], MEMORY, ["--sequences", "4", *OPTIONS.split()])
    try:
        return asyncio.run(all_texts(single.address, BODIES, lambda: None))
    finally:
        single.end()


def check_scaling(cluster: ServedCluster, folder: Path) -> None:
    """A queue starts a second replica."""
    cluster.serve(str(DEMO), max_replicas=2)
    assert cluster.running() == 1
    longer = [body | {"max_tokens": 200} for body in [*BODIES, *BODIES]]
    deadline = time.monotonic() + PATIENCE_S
    while cluster.running() < 2:  # Serve looks at half a minute before it starts one
        assert time.monotonic() < deadline, "no second replica was started"
        cluster.texts(longer)


def check_losses(cluster: ServedCluster, folder: Path) -> None:
    """A conversation stays with one replica; killed replicas, servers and nodes lose nothing."""
    expected = expected_texts()
    cluster.serve(str(DEMO), min_replicas=2, max_replicas=2)
    eventually(lambda: cluster.running() == 2)
    assert cluster.texts(BODIES) == expected
    assert asyncio.run(_cached_turns(cluster.address)) == 12

    def kill_replica() -> None:
        victim = replicas()[0]
        (server,) = servers_of(victim)[:1]
        os.kill(victim, signal.SIGKILL)
        eventually(lambda: not Path(f"/proc/{server}").exists())  # nothing of it stays

    def kill_server() -> None:
        os.kill(servers_of(replicas()[0])[0], signal.SIGKILL)

    for loss, left in ((kill_replica, 2), (kill_server, 2), (cluster.kill_node, 1)):
        print(f"  {loss.__name__}", flush=True)
        assert cluster.texts(BODIES, loss) == expected
        eventually(lambda left=left: cluster.running() == left)  # type: ignore[misc]


def check_models(cluster: ServedCluster, folder: Path) -> None:
    """Models are found by name."""
    from neuronpipe.plans.package.manifest import identity

    expected = expected_texts()
    names = ("one", "two")
    for name in names:
        shutil.copytree(DEMO, folder / name)
        manifest = folder / name / "manifest.json"
        values = {**json.loads(manifest.read_text()), "name": name}
        del values["id"]
        manifest.write_text(json.dumps(values | {"id": identity(values)}))
    cluster.serve(",".join(str(folder / name) for name in names))
    bodies = [{**BODIES[0], "model": name, "stream": False} for name in (*names, *names)]
    replies = asyncio.run(_replies(cluster.address, bodies))
    assert [reply["model"] for reply in replies] == [body["model"] for body in bodies]
    assert {reply["choices"][0]["text"] for reply in replies} == {expected[0]}


async def _replies(address: str, bodies: Sequence[dict[str, Any]]) -> list[Any]:
    import aiohttp

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE_S)) as session:
        replies = []
        for body in bodies:
            async with session.post(f"{address}/v1/completions", json=body) as reply:
                replies.append(await reply.json())
        return replies


async def _cached_turns(address: str) -> int:
    """Return how many of twelve prompts that go on where an earlier one ended met its keys and values."""
    first = [
        {"prompt": f"# conversation {number}\n" + "import os\n" * 20, "max_tokens": 4, "temperature": 0}
        for number in range(12)
    ]
    await _replies(address, first)
    again = [body | {"prompt": f"{body['prompt']}import sys\n"} for body in first]
    usages = [reply["usage"]["prompt_tokens_details"] for reply in await _replies(address, again)]
    return sum(usage["cached_tokens"] > 0 for usage in usages)


def check_job(cluster: ServedCluster, folder: Path) -> None:
    """Texts are completed and rated."""
    from neuronpipe.services.examples.owned_run import OwnedRun

    texts = [f"import os\nprint({number})\n" for number in range(40)]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    results = dict[str, dict[str, Any]]()
    for work in ("complete", "perplexity"):
        job = [sys.executable, "-m", "neuronpipe.services.examples.ray_data", work, DEMO, folder / "texts.jsonl"]
        more = [f"--option={word}" for word in OPTIONS.split()]
        words = [*map(str, job), str(folder / work), "--memory", MEMORY, "--max-tokens", "8", *more]
        subprocess.run(words, check=True, env=os.environ | {"RAY_ADDRESS": cluster.nodes.address})
        lines = [line for file in (folder / work).glob("*.json") for line in file.read_text().splitlines()]
        results[work] = {entry["text"]: entry for entry in map(json.loads, lines)}
        assert len(lines) == len(texts) == len(results[work])
    one = OwnedRun([str(DEMO)], MEMORY, OPTIONS.split())
    body = {"prompt": texts[7], "temperature": 0, "max_tokens": 8}
    assert results["complete"][texts[7]]["completion"] == one.post("/v1/completions", body)["choices"][0]["text"]
    scored = one.post("/v1/completions", {"prompt": texts[7], "echo": True, "logprobs": 0, "max_tokens": 0})
    rates = scored["choices"][0]["logprobs"]["token_logprobs"][1:]
    one.end()
    import math

    entry = results["perplexity"][texts[7]]
    assert entry["tokens"] == len(rates)
    assert math.isclose(entry["perplexity"], math.exp(-sum(rates) / len(rates)), rel_tol=1e-6)
    print(collections.Counter(round(entry["perplexity"], 1) for entry in results["perplexity"].values()))


CHECKS = {"scaling": check_scaling, "losses": check_losses, "models": check_models, "job": check_job}


def main() -> None:
    """Install Ray beside the checkout, and check with it."""
    if INSTALLED not in os.environ:
        if not PLACE.exists():
            subprocess.run([sys.executable, "-m", "venv", PLACE], check=True)
        subprocess.run([PLACE / "bin/pip", "install", "--quiet", ROOT, "ray[serve,data]", "protobuf<7"], check=True)
        words = [PLACE / "bin/python", *sys.argv]
        environment = os.environ | {INSTALLED: "1", "PATH": f"{PLACE}/bin:{os.environ['PATH']}"}
        sys.exit(subprocess.run(words, env=environment).returncode)
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_raylet_start_wait_time_s": "120"}
    for name in sys.argv[1:] or CHECKS:
        print(f"{name}: {CHECKS[name].__doc__}", flush=True)
        cluster = ServedCluster()
        with tempfile.TemporaryDirectory(prefix="np-") as folder:
            CHECKS[name](cluster, Path(folder))
        cluster.end()


if __name__ == "__main__":
    main()
