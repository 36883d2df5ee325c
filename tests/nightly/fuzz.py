"""Fuzz everything that parses untrusted bytes with atheris, which is guided by coverage.

    python tests/nightly/fuzz.py [--seconds N] [TARGET ...]

Needs `pip install atheris`; without it, mutations are drawn without guidance. Targets named after verbs call the
command itself, as tests/fuzz/commands.py describes. A target ends with the first input that raises anything but an
error message for the user, takes more than ten seconds, or needs 2 GB. The input is written to crash-... in the current
folder.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

try:
    import atheris
except ImportError:
    atheris = None
with atheris.instrument_imports() if atheris else contextlib.nullcontext():
    from neuronpipe.plans.convert.checkpoint import Options
    from neuronpipe.plans.convert.conversion import open_checkpoint
    from neuronpipe.plans.convert.gguf.gguf_header import parse_gguf_header
    from neuronpipe.plans.package.parsing.parse import parse_manifest
    from neuronpipe.plans.package.safetensors_header import read_header
    from neuronpipe.plans.plan.document import parse_plan
    from neuronpipe.plans.plan.memory_budget import GRAMMAR_TOKEN_BYTES, MAX_HELPER_GROWTH_BYTES
    from neuronpipe.protocol.codec import Vocabulary
    from neuronpipe.protocol.errors import NotRunning, UserError, WireError
    from neuronpipe.protocol.messages.request import Generate
    from neuronpipe.protocol.run_directory import RUN_FILE, RunDirectory
    from neuronpipe.protocol.spec import all_messages
    from neuronpipe.services.coordinator.text.constrained_answers import ConstrainedAnswers
    from neuronpipe.services.coordinator.text.grammar import GrammarError, Grammars
    from neuronpipe.services.coordinator.text.tokenizer import FileTokenizer
    from neuronpipe.services.gateway.anthropic.messages_api import MessagesRequest
    from neuronpipe.services.gateway.http.api_errors import ApiError
    from neuronpipe.services.gateway.http.request_body import parse_body
    from neuronpipe.services.gateway.ollama.ollama_api import OllamaChatRequest, OllamaGenerateRequest
    from neuronpipe.services.gateway.openai.request_schema import ChatRequest, CompletionRequest
    from neuronpipe.services.gateway.templates.messages import ChatTurn
    from neuronpipe.services.gateway.templates.template_jobs import (
        JOB_S,
        WORK,
        PromptJob,
        Refused,
        TemplateError,
        TemplateSource,
        WrittenPrompt,
    )
    from neuronpipe.services.untrusted.helper import Helper, UntrustedError

from neuronpipe.launch.planning import DEMO

from tests.conformance.checkpoints import TINY, write_checkpoint
from tests.conformance.gguf_files import write_gguf
from tests.fuzz.commands import Fuzzed, damaged

MAX_S, MAX_BYTES = 10, 2 << 30
GOLDEN = Path(__file__).parents[1] / "conformance" / "golden_messages.json"
DEMO_IDS, SCHEMA_TOKENS = 4096, 8
TURNS = [{"role": role, "content": "a b"} for role in ("system", "user", "assistant", "user")]
SCHEMAS = [
    b'{"type": "object", "properties": {"a": {"type": "integer", "minimum": 3}, "b": {"enum": ["x", null]}}}',
    b'{"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 4}, {"type": "string", "pattern": "a"}],'
    b' "$defs": {"n": {"type": "number", "multipleOf": 2}}}',
]
TEMPLATES = [
    b"{% for m in messages %}{{ bos_token + m['role'] ~ m.content | trim | replace('a', 'b') }}{% endfor %}",
    b"{%- set n = namespace(x=[]) %}{% for i in range(3) %}{% set n.x = n.x + [i * 2] %}{% endfor %}{{ n.x | join }}",
    b"{% macro f(x) %}{% if x is defined and x[0].role != 'user' %}{{ x | tojson(indent=2) }}{% endif %}{% endmacro %}"
    b"{{ f(messages) | indent(2) }}{{ raise_exception('no') }}",
]
CHAT = (
    b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "top_logprobs": 2, "logprobs": true,'
    b' "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}, "stop": ["x"]}'
)
COMPLETION = (
    b'{"prompt": [[1, 2], [3]], "max_tokens": 4, "logit_bias": {"5": -100}, "stream": true, "seed": 1, "top_p": 0.5}'
)
MESSAGES = (
    b'{"max_tokens": 4, "system": [{"type": "text", "text": "s"}], "tools": [{"name": "f", "input_schema": {"a": 1}}],'
    b' "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": [{"type": "thinking"},'
    b' {"type": "tool_use", "id": "t", "name": "f", "input": {"a": [1]}}]}, {"role": "user", "content":'
    b' [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "7"}]}]}]}'
)
OLLAMA_CHAT = (
    b'{"model": "m:latest", "options": {"num_predict": 4, "stop": ["a"], "seed": -1}, "format": {"type": "object"},'
    b' "think": "low", "keep_alive": "5m", "tools": [{"type": "function", "function": {"name": "f"}}], "messages":'
    b' [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": [1]}}}]}, {"role": "tool",'
    b' "tool_name": "f", "content": "7"}]}'
)
OLLAMA_GENERATE = (
    b'{"prompt": "a", "system": "s", "raw": false, "options": {"top_k": 3}, "stream": false, "think": true}'
)
Target = Callable[[bytes], object]


def targets(folder: Path) -> dict[str, tuple[Target, list[bytes]]]:
    """Return by name the functions that parse, and valid inputs of each."""
    recipe = replace(TINY, layers=1, neurons=32)
    source = write_checkpoint(folder / "source", recipe)
    write_gguf(folder / "model.gguf", recipe)
    vocabulary = Vocabulary(*all_messages())
    weights = (source / "model.safetensors").read_bytes()

    def file(name: str, read: Callable[[Path], object]) -> Target:
        def target(data: bytes) -> object:
            (folder / name).write_bytes(data)
            return read(folder / name)

        return target

    def configuration(path: Path) -> None:
        (source / "config.json").write_bytes(path.read_bytes())
        open_checkpoint(source, Options(activation="relu")).files.close()

    def run_file(path: Path) -> None:
        path.rename(folder / RUN_FILE)
        RunDirectory.find(folder)

    templates = Helper(WORK, memory_bytes=MAX_HELPER_GROWTH_BYTES)

    def template(data: bytes) -> None:
        """Render a chat template in a helper process, with its limits of time and memory."""
        source = TemplateSource(data.decode("utf-8", "replace"), "<s>", "</s>")
        turns = [ChatTurn(turn["role"], turn["content"]) for turn in TURNS]
        try:
            WrittenPrompt.decoded(templates.call(PromptJob(source=source, turns=turns).encoded(), JOB_S))
        except UntrustedError as error:
            raise TemplateError(str(error)) from None

    def gguf_header(path: Path) -> None:
        with path.open("rb") as opened:
            parse_gguf_header(opened, path)

    return {
        "wire": (vocabulary.decode, [bytes.fromhex(golden["frame"]) for golden in json.loads(GOLDEN.read_text())]),
        "gguf": (file("x.gguf", gguf_header), [(folder / "model.gguf").read_bytes()[:4096]]),
        "safetensors": (file("x", read_header), [weights, weights[: 8 + int.from_bytes(weights[:8], "little")]]),
        "configuration": (file("x.json", configuration), [(source / "config.json").read_bytes()]),
        "manifest": (lambda data: parse_manifest(data, "x"), [(DEMO / "manifest.json").read_bytes()]),
        "plan": (lambda data: parse_plan(data, "x"), [_plan()]),
        "run": (file("x.run", run_file), [b'{"protocol": "1.0", "run": "a", "supervisor_pid": 1}']),
        "chat": (lambda data: parse_body(data, ChatRequest), [CHAT]),
        "messages": (lambda data: parse_body(data, MessagesRequest).as_chat(), [MESSAGES]),
        "ollama-chat": (lambda data: parse_body(data, OllamaChatRequest).as_chat(), [OLLAMA_CHAT]),
        "ollama-generate": (lambda data: parse_body(data, OllamaGenerateRequest).as_chat(), [OLLAMA_GENERATE]),
        "completion": (lambda data: parse_body(data, CompletionRequest), [COMPLETION]),
        "template": (template, TEMPLATES),
        "schema": (schema_target(), SCHEMAS),
        **Fuzzed(folder / "commands").targets(),
    }


def schema_target() -> Target:
    """Return a function that compiles a schema and takes eight of the tokens that it allows.

    It does so as the coordinator does: in a helper process, with the limits of time and memory of a run.
    """
    grammars = Grammars(FileTokenizer((DEMO / "tokenizer.json").read_bytes()), DEMO_IDS, [0])
    answers = ConstrainedAnswers(grammars, MAX_HELPER_GROWTH_BYTES, GRAMMAR_TOKEN_BYTES * DEMO_IDS)
    answers.set_memory(True)

    def schema(data: bytes) -> None:
        answer = answers.start(Generate(request="r", prompt="x", grammar=data.decode("utf-8", "replace")))
        for _ in range(SCHEMA_TOKENS):
            answers.wait([answer], MAX_S)
            if answer.failure is not None:
                raise GrammarError(answer.failure.message)
            allowed = int.from_bytes(answer.allowed, "little")
            if answer.complete or not allowed:
                break
            answer.take(allowed.bit_length() - 1)
        answer.close()

    for valid in SCHEMAS:
        schema(valid)  # if these are refused, no mutation of them gets far
    return schema


def _plan() -> bytes:
    command = [sys.executable, "-m", "neuronpipe.launch", "plan", str(DEMO), "--json"]
    return subprocess.run(command, check=True, capture_output=True).stdout


def check(target: Target, data: bytes) -> None:
    """Call a target, which may succeed or raise an error of one line for the user. Raises every other error."""
    began, message = time.monotonic(), ""
    try:
        target(data)
    except (UserError, WireError, NotRunning, ApiError, GrammarError, TemplateError, Refused) as error:
        message = str(error)
    assert len(message) < 10_000, "the error is long"
    assert "\n" not in message, "the error is not one line"
    assert time.monotonic() - began < MAX_S, "it took too long"


def mutated(draw: random.Random, seeds: list[bytes]) -> bytes:
    """Return a seed with a few bytes changed, removed, doubled or inserted from another seed."""
    data = bytearray(draw.choice(seeds))
    for _ in range(draw.randint(1, 6)):
        at, length = draw.randrange(len(data) + 1), draw.choice((1, 1, 2, 4, 8, 64))
        donor = draw.choice(seeds)
        data[at : at + draw.choice((0, length))] = draw.choice(
            (b"", draw.randbytes(length), b"\xff" * length, b"\0" * length, bytes(data[at : at + length]) * 2,
             donor[(start := draw.randrange(len(donor))) : start + length], b"9" * length, b"-1", b"[" * length)
        )  # fmt: skip
    return bytes(data)


def fuzz_randomly(target: Target, seeds: list[bytes], seconds: float, seed: int) -> int:
    """Check random mutations until the time is over. Return their number."""
    draw, until, count = random.Random(seed), time.monotonic() + seconds, 0
    while time.monotonic() < until:
        data = damaged(draw, draw.choice(seeds)) if draw.randrange(2) else mutated(draw, seeds)
        try:
            check(target, data)
        except BaseException:
            crash = Path(f"crash-{hashlib.sha1(data).hexdigest()[:12]}")
            crash.write_bytes(data)
            print(f"the input is in {crash}", flush=True)
            raise
        count += 1
    return count


def fuzz_with_atheris(target: Target, seeds: list[bytes], seconds: float, folder: Path) -> None:
    """Let atheris check mutations. It ends this process."""
    corpus = folder / "corpus"
    corpus.mkdir()
    for number, data in enumerate(seeds):
        (corpus / str(number)).write_bytes(data)
    limits = [f"-max_total_time={int(seconds)}", f"-timeout={MAX_S}", f"-rss_limit_mb={MAX_BYTES >> 20}"]
    atheris.Setup([sys.argv[0], *limits, str(corpus)], lambda data: check(target, data))
    atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("targets", nargs="*", metavar="TARGET")
    parser.add_argument("--seconds", type=float, default=300.0, help="for each target (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30), help="of mutations without atheris")
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES))
    with tempfile.TemporaryDirectory(prefix="np-") as name:
        all_targets = targets(Path(name))
        if unknown := set(arguments.targets) - all_targets.keys():
            parser.error(f"{min(unknown)!r} is none of {', '.join(all_targets)}")
        if atheris and len(arguments.targets) == 1:
            fuzz_with_atheris(*all_targets[arguments.targets[0]], arguments.seconds, Path(name))
        for target in arguments.targets or all_targets:
            if atheris:  # a process for each target, because atheris ends it
                subprocess.run([sys.executable, __file__, target, "--seconds", str(arguments.seconds)], check=True)
            else:
                count = fuzz_randomly(*all_targets[target], arguments.seconds, arguments.seed)
                print(f"{target}: {count} inputs, --seed {arguments.seed}", flush=True)


if __name__ == "__main__":
    main()
