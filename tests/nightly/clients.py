"""Every client that is known to work, in its newest version, against a server of the demo.

    python tests/nightly/clients.py [NAME...]      # all, or these

Each client's file is `tests/clients/use_NAME.py` or `tests/clients/node/use_NAME.mjs`. Each has an environment of its
own below build/nightly-clients, made anew, since they want different versions of the same packages. guidellm needs 6 GB
there and runs only where it is named. Prints a table; ends with 1 when something fails that is not expected to.
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
    "openai": ("openai", "zod"),
    "langchain": ("@langchain/openai", "@langchain/core", "zod"),
}
_NO_SCHEMA = (
    "asks for a schema only where litellm lists the model's name; else its prompt explains, which the demo ignores"
)
EXPECTED = {("dspy", "structured"): _NO_SCHEMA, ("dspy", "structured_by_the_server"): _NO_SCHEMA}


class Outcome(NamedTuple):
    """The outcome of one call of a client: its error in one line, or None."""

    client: str
    what: str
    error: str | None

    @property
    def line(self) -> str:
        """Return the line of the table."""
        result = "ok" if self.error is None else self.error
        why = EXPECTED.get((self.client, self.what))
        expected = f"  [expected: {why}]" if why and self.error else ""
        return f"{self.client:22} {self.what:28} {result}{expected}"

    @property
    def wrong(self) -> bool:
        """An error that nobody expects, or none where one was."""
        return (self.error is None) == ((self.client, self.what) in EXPECTED)


def run(*words: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, or for ten minutes."""
    return subprocess.run([*map(str, words)], cwd=cwd, capture_output=True, text=True, timeout=LIMIT_S)


def installed(done: subprocess.CompletedProcess[str]) -> None:
    """Raises RuntimeError with the last line of an installation that failed."""
    if done.returncode:
        raise RuntimeError((done.stderr.strip() or done.stdout.strip() or "failed").splitlines()[-1])


def python(name: str) -> tuple[str | Path, Path]:
    """The interpreter of a client's new environment, and the client's file."""
    folder = PLACE / name
    shutil.rmtree(folder, ignore_errors=True)
    installed(run(sys.executable, "-m", "venv", folder))
    installed(run(folder / "bin/python", "-m", "pip", "install", "--quiet", "--no-compile", *PYTHON[name]))
    return folder / "bin/python", CLIENTS / f"use_{name}.py"


def node(name: str) -> tuple[str | Path, Path]:
    """`node`, and the client's file in a folder where its packages are."""
    folder = PLACE / f"node-{name}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "package.json").write_text('{"private": true, "type": "module"}')
    installed(run("npm", "install", "--no-audit", "--no-fund", *NODE[name], cwd=folder))
    for file in (CLIENTS / "node").glob("*.mjs"):
        shutil.copy(file, folder)
    return "node", folder / f"use_{name}.mjs"


def tried(client: str, environment: Callable[[], tuple[str | Path, Path]], url: str) -> Iterator[Outcome]:
    """Yield the outcomes that a client's file reports, and a failure if it ends early."""
    try:
        program, file = environment()
        done = run(program, file, url, MODEL, DEMO)
    except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        yield Outcome(client, "installation", " ".join(str(error).split())[:300])
        return
    reports: list[dict[str, Any]] = [
        json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"what"')
    ]
    for report in reports:
        yield Outcome(client, report["what"], report["error"])
    if done.returncode or not reports:
        yield Outcome(client, "program", (done.stderr.strip() or "nothing was said").splitlines()[-1][:300])


def against(shell: Shell, names: list[str]) -> list[Outcome]:
    """Run all clients one after the other."""
    outcomes: list[Outcome] = []
    with served(shell, "--sequences", "2", notices=True) as server:
        url = f"http://127.0.0.1:{server.port}/v1"
        for name in PYTHON:
            if name in names or (not names and name not in ONLY_WHEN_NAMED):
                outcomes += printed(tried(name, lambda name=name: python(name), url))  # type: ignore[misc]
        for name in NODE:
            if not names or f"node-{name}" in names:
                outcomes += printed(tried(f"node-{name}", lambda name=name: node(name), url))  # type: ignore[misc]
    return outcomes


def printed(outcomes: Iterator[Outcome]) -> Iterator[Outcome]:
    """Print each outcome as it comes and yield it."""
    for outcome in outcomes:
        print(outcome.line, flush=True)
        yield outcome


def main() -> int:
    """Run the named clients, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*PYTHON, *(f"node-{name}" for name in NODE)]
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[*names, []], help=f"of {', '.join(names)}")
    with scratch_shell() as shell:
        outcomes = against(shell, parser.parse_args().names)
    wrong = sum(outcome.wrong for outcome in outcomes)
    print(f"{len(outcomes) - wrong} of {len(outcomes)} as expected")
    return 1 if wrong or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
