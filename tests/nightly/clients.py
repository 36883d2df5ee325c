"""Test the supported clients, in their newest versions, against a server of the demo.

    python tests/nightly/clients.py [NAME...]      # all clients, or the named ones

Each client's file is `tests/clients/use_NAME.py` or `tests/clients/node/use_NAME.mjs`. Each gets a new environment
below build/nightly-clients, because they require different versions of the same packages. guidellm needs 6 GB there and
runs only if it is named. Prints a table; the exit status is 1 if a result is not the expected one.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from neuronpipe.launch.planning import DEMO

from tests.http_client import served
from tests.pipeline import Shell, scratch_shell

ROOT = Path(__file__).resolve().parents[2]
PLACE = ROOT / "build" / "nightly-clients"
CLIENTS = ROOT / "tests" / "clients"
MODEL = "neuronpipe-demo"
LIMIT_S = 600
PYTHON = {
    "openai": ("openai",),
    "langchain": ("langchain-openai",),
    "pydantic_ai": ("pydantic-ai-slim[openai]",),
    "litellm": ("litellm", "mcp"),  # without mcp it calls no functions
    "instructor": ("instructor",),
    "llm": ("llm",),
    "agents": ("openai-agents",),
    "dspy": ("dspy",),
    "llama_index": ("llama-index-llms-openai-like",),
    "haystack": ("haystack-ai",),
    "guidance": ("guidance", "openai"),
    "lm_eval": ("lm-eval[api]", "transformers"),
    "guidellm": ("guidellm",),
}
ONLY_WHEN_NAMED = ("guidellm",)
NODE = {
    "ai": ("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "zod"),
    "ollama": ("ollama",),
    "openai": ("openai", "zod"),
    "langchain": ("@langchain/openai", "@langchain/core", "zod"),
}
_NO_SCHEMA = (
    "asks for a schema only where litellm lists the model's name; else its prompt explains, which the demo ignores"
)
EXPECTED = {("dspy", "structured"): _NO_SCHEMA, ("dspy", "structured_by_the_server"): _NO_SCHEMA}


class Result(NamedTuple):
    """The result of one check of a client, with the error in one line, if any."""

    client: str
    check: str
    error: str | None

    @property
    def line(self) -> str:
        """The line of the table."""
        outcome = "ok" if self.error is None else self.error
        why = EXPECTED.get((self.client, self.check))
        expected = f"  [expected: {why}]" if why and self.error else ""
        return f"{self.client:22} {self.check:28} {outcome}{expected}"

    @property
    def wrong(self) -> bool:
        """True for an unexpected error, or if an expected one is missing."""
        return (self.error is None) == ((self.client, self.check) in EXPECTED)


def run(*words: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program for at most LIMIT_S seconds."""
    return subprocess.run([*map(str, words)], cwd=cwd, capture_output=True, text=True, timeout=LIMIT_S)


def check_installation(done: subprocess.CompletedProcess[str]) -> None:
    """Raise RuntimeError with the last line of an installation that failed."""
    if done.returncode:
        raise RuntimeError((done.stderr.strip() or done.stdout.strip() or "failed").splitlines()[-1])


def python(name: str) -> tuple[str | Path, Path]:
    """Create an environment for a client. Return its interpreter, and the client's file."""
    folder = PLACE / name
    shutil.rmtree(folder, ignore_errors=True)
    check_installation(run(sys.executable, "-m", "venv", folder))
    check_installation(run(folder / "bin/python", "-m", "pip", "install", "--quiet", "--no-compile", *PYTHON[name]))
    return folder / "bin/python", CLIENTS / f"use_{name}.py"


def node(name: str) -> tuple[str | Path, Path]:
    """Install a client's packages in a new folder. Return `node`, and the client's file in that folder."""
    folder = PLACE / f"node-{name}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "package.json").write_text('{"private": true, "type": "module"}')
    check_installation(run("npm", "install", "--no-audit", "--no-fund", *NODE[name], cwd=folder))
    for file in (CLIENTS / "node").glob("*.mjs"):
        shutil.copy(file, folder)
    return "node", folder / f"use_{name}.mjs"


def check_client(client: str, install: Callable[[], tuple[str | Path, Path]], url: str) -> Iterator[Result]:
    """Run a client's file. Yield the results that it reports, and one more if the program fails."""
    try:
        program, file = install()
        done = run(program, file, url, MODEL, DEMO)
    except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        yield Result(client, "installation", " ".join(str(error).split())[:300])
        return
    reports: list[dict[str, Any]] = [
        json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"what"')
    ]
    for report in reports:
        yield Result(client, report["what"], report["error"])
    if done.returncode or not reports:
        yield Result(client, "program", (done.stderr.strip() or "no output").splitlines()[-1][:300])


def check_clients(shell: Shell, names: list[str]) -> list[Result]:
    """Check the named clients, or all, one after the other, and print each result."""
    results: list[Result] = []
    with served(shell, "--sequences", "2", notices=True) as server:
        url = f"http://127.0.0.1:{server.port}/v1"
        for name in PYTHON:
            if name in names or (not names and name not in ONLY_WHEN_NAMED):
                results += printed(check_client(name, lambda name=name: python(name), url))  # type: ignore[misc]
        for name in NODE:
            if not names or f"node-{name}" in names:
                results += printed(check_client(f"node-{name}", lambda name=name: node(name), url))  # type: ignore[misc]
    return results


def printed(results: Iterator[Result]) -> Iterator[Result]:
    """Yield the results, printing each as it comes."""
    for result in results:
        print(result.line, flush=True)
        yield result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    clients = [*PYTHON, *(f"node-{name}" for name in NODE)]
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[*clients, []], help=f"of {', '.join(clients)}")
    with scratch_shell() as shell:
        results = check_clients(shell, parser.parse_args().names)
    wrong = sum(result.wrong for result in results)
    print(f"{len(results) - wrong} of {len(results)} as expected")
    return 1 if wrong or not results else 0


if __name__ == "__main__":
    sys.exit(main())
