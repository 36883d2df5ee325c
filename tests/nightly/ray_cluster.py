"""Serve and score with Ray on a cluster of two nodes on loopback, with the demo model.

    python tests/nightly/ray_cluster.py

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


def check_cluster(folder: Path) -> None:
    import ray
    from neuronpipe.plans.package.manifest import identity
    from neuronpipe.services.examples.owned_run import OwnedRun
    from neuronpipe.services.examples.ray_serve import ClusterOptions, app
    from ray import serve
    from ray.cluster_utils import Cluster

    single = OwnedRun([str(DEMO)], MEMORY, ["--sequences", "4", *OPTIONS.split()])
    expected = asyncio.run(all_texts(single.address, BODIES, lambda: None))
    single.end()
    memory_bytes = 600 << 20
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "memory": memory_bytes})
    worker = cluster.add_node(num_cpus=1, memory=memory_bytes)
    ray.init(address=cluster.address)
    address = f"http://127.0.0.1:{PORT}"
    serve.start(proxy_location="HeadOnly", http_options={"port": PORT})

    def running() -> int:
        states = serve.status().applications["default"].deployments["Engine"].replica_states
        return int(states.get("RUNNING", 0))

    def options(packages: str, **more: Any) -> ClusterOptions:
        return ClusterOptions(packages=packages, memory=MEMORY, options=OPTIONS, **more)

    print("a queue starts a second replica", flush=True)
    serve.run(app(options(str(DEMO), max_replicas=2)))
    assert running() == 1
    longer = [body | {"max_tokens": 200} for body in [*BODIES, *BODIES]]
    deadline = time.monotonic() + PATIENCE_S
    while running() < 2:  # Serve looks at half a minute before it starts one
        assert time.monotonic() < deadline, "no second replica was started"
        asyncio.run(all_texts(address, longer, lambda: None))

    print("both replicas answer, and a conversation stays with one", flush=True)
    serve.run(app(options(str(DEMO), min_replicas=2, max_replicas=2)))
    eventually(lambda: running() == 2)
    assert asyncio.run(all_texts(address, BODIES, lambda: None)) == expected
    assert asyncio.run(_cached_turns(address)) == 12

    print("a replica is killed", flush=True)

    def kill_replica() -> None:
        victim = replicas()[0]
        (server,) = servers_of(victim)[:1]
        os.kill(victim, signal.SIGKILL)
        eventually(lambda: not Path(f"/proc/{server}").exists())  # nothing of it stays

    assert asyncio.run(all_texts(address, BODIES, kill_replica)) == expected
    eventually(lambda: running() == 2)

    print("a server is killed below a replica", flush=True)
    assert (
        asyncio.run(all_texts(address, BODIES, lambda: os.kill(servers_of(replicas()[0])[0], signal.SIGKILL)))
        == expected
    )
    eventually(lambda: running() == 2)

    print("a node is killed", flush=True)
    remove = lambda: cluster.remove_node(worker, allow_graceful=False)  # noqa: E731
    assert asyncio.run(all_texts(address, BODIES, remove)) == expected
    eventually(lambda: running() == 1)

    print("models are found by name", flush=True)
    serve.delete("default")
    names = ("one", "two")
    for name in names:
        shutil.copytree(DEMO, folder / name)
        manifest = folder / name / "manifest.json"
        values = {**json.loads(manifest.read_text()), "name": name}
        del values["id"]
        manifest.write_text(json.dumps(values | {"id": identity(values)}))
    serve.run(app(options(",".join(str(folder / name) for name in names))))
    bodies = [{**BODIES[0], "model": name, "stream": False} for name in (*names, *names)]
    replies = asyncio.run(_replies(address, bodies))
    assert [reply["model"] for reply in replies] == [body["model"] for body in bodies]
    assert {reply["choices"][0]["text"] for reply in replies} == {expected[0]}
    serve.shutdown()

    print("texts are rated and completed", flush=True)
    check_job(folder, cluster.address)
    ray.shutdown()
    cluster.shutdown()


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


def check_job(folder: Path, address: str) -> None:
    from neuronpipe.services.examples.owned_run import OwnedRun

    texts = [f"import os\nprint({number})\n" for number in range(40)]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    results = dict[str, dict[str, Any]]()
    for work in ("complete", "perplexity"):
        job = [sys.executable, "-m", "neuronpipe.services.examples.ray_data", work, DEMO, folder / "texts.jsonl"]
        more = [f"--option={word}" for word in OPTIONS.split()]
        words = [*map(str, job), str(folder / work), "--memory", MEMORY, "--max-tokens", "8", *more]
        subprocess.run(words, check=True, env=os.environ | {"RAY_ADDRESS": address})
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


def main() -> None:
    """Install Ray beside the checkout, and check with it."""
    if "--installed" not in sys.argv:
        if not PLACE.exists():
            subprocess.run([sys.executable, "-m", "venv", PLACE], check=True)
        subprocess.run([PLACE / "bin/pip", "install", "--quiet", ROOT, "ray[serve,data]", "protobuf<7"], check=True)
        words = [PLACE / "bin/python", __file__, "--installed"]
        sys.exit(subprocess.run(words, env=os.environ | {"PATH": f"{PLACE}/bin:{os.environ['PATH']}"}).returncode)
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_raylet_start_wait_time_s": "120"}
    with tempfile.TemporaryDirectory(prefix="np-") as folder:
        check_cluster(Path(folder))


if __name__ == "__main__":
    main()
