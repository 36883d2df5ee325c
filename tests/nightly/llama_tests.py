"""Run llama.cpp's server tests, unmodified, against `neuronpipe serve` behind a translating shim (llama_server.py).

    python tests/nightly/llama_tests.py [--write] [TEST...]

The tests come with the source distribution of llama-cpp-python, which is downloaded once to build/llama-tests. LEFT_OUT
lists those that do not apply, with reasons. bench/results/llama-server-tests.md lists those that fail, with reasons;
all others must pass. --write renews it; failures without a reason get a question mark, to be replaced by hand.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
PLACE = FOLDER.parents[1] / "build" / "llama-tests"
SOURCE = "llama-cpp-python==0.3.36"
INSIDE = ("tools/server/tests/", "models/templates/")  # below vendor/llama.cpp
NEEDS = ("pytest>=8", "pytest-xdist", "requests", "openai", "wget", "filelock", "numpy", "prometheus-client", "aiohttp")
RESULTS = FOLDER.parent / "bench" / "results" / "llama-server-tests.md"
UNEXPLAINED = "?"
BAR = r"\|"  # escaped for a table
# Tests whose names begin so do not apply.
LEFT_OUT = {
    "test_basic.py::test_load_split_model": "a split GGUF of theirs",
    "test_chat_completion.py::test_return_progress": "progress of prompts",
    "test_compat_anthropic.py": "the API of another company, which is not served",
    "test_compat_gcp.py": "the wrapper of another company's cloud",
    "test_compat_oai_responses.py::test_responses_stream_with_llama_telemetry": "progress of prompts",
    "test_completion.py::test_completion_stream_with_openai_library_stops": "a model of 2 GB",
    "test_completion.py::test_n_probs_post": "probabilities after sampling",
    "test_completion.py::test_cache_vs_nocache_prompt": "skipped by themselves",
    "test_ctx_shift.py::test_ctx_shift_enabled": "forgetting the beginning of a text",
    "test_embedding.py": "embeddings: the model continues texts",
    "test_infill.py": "filling a middle: needs a model that was trained for it",
    "test_kv_keep_only_active.py": "lines of their log",
    "test_lora.py": "LoRA",
    "test_mcp_servers.py": "a client of MCP within the server",
    "test_metrics.py::test_metrics_embedding": "embeddings",
    "test_metrics.py::test_metrics_predicted": "the names of their figures",
    "test_metrics.py::test_metrics_prom": "the names of their figures",
    "test_metrics.py::test_metrics_slots": "the names of their figures",
    "test_metrics.py::test_metrics_timings_on": "progress of prompts",
    "test_metrics.py::test_metrics_disabled": "an option to turn figures off",
    "test_proxy.py": "a proxy for MCP within the server",
    "test_rerank.py": "ranking",
    "test_router.py": "their router of models",
    "test_security.py::test_access_static": "the files of their page",
    "test_security.py::test_cors_proxy": "a proxy for MCP within the server",
    "test_security.py::test_local_media": "images",
    "test_sleep.py": "unloading the model while nobody asks",
    "test_slot_save.py": "saving KV slots to files",
    "test_speculative.py": "speculation with a second model",
    "test_stream.py": "streams of their router that are taken up again",
    "test_tools_builtin.py": "functions that the server itself runs",
    "test_vision_api.py": "images",
}


def run(*words: str | Path, **options: object) -> None:
    """Run a program that must succeed."""
    subprocess.run([*map(str, words)], check=True, **options)  # type: ignore[call-overload]


def llama_cpp_tests() -> Path:
    """Return the folder of llama.cpp's tests, which are downloaded if necessary."""
    folder = PLACE / "llama.cpp"
    if not folder.exists():
        PLACE.mkdir(parents=True, exist_ok=True)
        run(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", PLACE, SOURCE)
        (archive,) = PLACE.glob("*.tar.gz")
        with tarfile.open(archive) as files:
            for member in files:
                path = member.name.partition("/vendor/llama.cpp/")[2]
                if path.startswith(INSIDE):
                    member.name = path
                    files.extract(member, folder.with_suffix(".part"), filter="data")
        folder.with_suffix(".part").rename(folder)
        archive.unlink()
    return folder / "tools/server/tests"


def python() -> Path:
    """Return an interpreter with the modules that the tests import."""
    folder = PLACE / "venv"
    if not (folder / "ready").exists():
        run(sys.executable, "-m", "venv", "--clear", folder)
        run(folder / "bin/python", "-m", "pip", "install", "-q", *NEEDS)
        (folder / "ready").touch()
    return folder / "bin/python"


def free_port() -> int:
    """Return a port on which the tests can start one server after the other."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def results(tests: Path, interpreter: Path, names: Iterable[str]) -> dict[str, bool]:
    """Run the tests that apply. Return for each whether it passed."""
    server = PLACE / "llama-server"
    server.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FOLDER / "llama_server.py"}" "$@"\n')
    server.chmod(0o755)
    packages = PLACE / "packages"
    packages.mkdir(exist_ok=True)
    left_out = [word for name in LEFT_OUT for word in ("--deselect", f"unit/{name}")]
    process = subprocess.Popen(
        [interpreter, "-m", "pytest", "-p", "llama_plugin", "-m", "not slow", "-v", "--tb=no", *left_out, *names],
        cwd=tests,
        env={
            **os.environ,
            "PYTHONPATH": f"{tests}:{FOLDER}",
            "LLAMA_SERVER_BIN_PATH": str(server),
            "NEURONPIPE_LLAMA_PACKAGES": str(packages),
            "PORT": str(free_port()),
        },
        stdout=subprocess.PIPE,
        text=True,
    )
    outcomes: dict[str, bool] = {}
    assert process.stdout is not None
    for line in process.stdout:
        match = re.match(r"unit/(\S+::.*?) (PASSED|FAILED|ERROR)\b", line)
        if match:
            outcomes[match[1]] = match[2] == "PASSED" and outcomes.get(match[1], True)
            print(f"{match[2]:7} {match[1]}", flush=True)
    process.wait()
    return outcomes


def explained() -> dict[str, str]:
    """Return the known failures and their reasons."""
    rows = (re.match(r"\| `(.+)` \| (.*) \|$", line) for line in RESULTS.read_text().splitlines())
    return {row[1].replace(BAR, "|"): row[2] for row in rows if row}


def written(outcomes: dict[str, bool], reasons: dict[str, str]) -> str:
    """Return the text of the file of results: the counts and the failures."""
    failed = [name for name, passed in outcomes.items() if not passed]
    rows = [f"| `{name.replace('|', BAR)}` | {reasons.get(name, UNEXPLAINED)} |" for name in failed]
    head = RESULTS.read_text().partition("\n| passed |")[0]
    counts = f"\n| passed | apply |\n|---|---|\n| {len(outcomes) - len(failed)} | {len(outcomes)} |\n"
    return "\n".join([head + counts, "| fails | why |", "|---|---|", *rows, ""])


def main() -> int:
    """Run the tests and compare their outcomes with the list of failures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="renew the list of failures")
    parser.add_argument("tests", nargs="*", help="such as unit/test_basic.py; all without")
    arguments = parser.parse_args()
    if arguments.write and arguments.tests:
        parser.error("--write needs all tests")
    outcomes = results(llama_cpp_tests(), python(), arguments.tests)
    reasons = explained()
    if arguments.write:
        RESULTS.write_text(written(outcomes, reasons))
    unexpected = [name for name, passed in outcomes.items() if not passed and name not in reasons]
    mended = [name for name, passed in outcomes.items() if passed and name in reasons]
    print(
        f"{sum(outcomes.values())} of {len(outcomes)} passed, {len(mended)} of which are listed as failures; "
        f"{len(unexpected)} failed unexpectedly"
    )
    for name in unexpected:
        print(f"unexpected: {name}")
    return 1 if unexpected or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
