"""Translation between the options, requests and answers of llama-server and those of neuronpipe, without I/O."""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "llama3": "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    "command-r": "{% for m in messages %}<|START_OF_TURN_TOKEN|>"
    "<|{{ {'assistant': 'CHATBOT'}.get(m.role, m.role | upper) }}_TOKEN|>{{ m.content | trim }}<|END_OF_TURN_TOKEN|>"
    "{% endfor %}{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}",
}
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty", "ignore_eos")
RENAMED = {"repeat_penalty": "repetition_penalty"}
# Fields without an effect, or that the shim handles.
DROPPED = (
    "add_special",
    "backend_sampling",
    "cache_prompt",
    "id_slot",
    "model",
    "parse_tool_calls",
    "post_sampling_probs",
    "reasoning_format",
    "return_progress",
    "return_tokens",
    "samplers",
    "timings_per_token",
    "verbose",
)
DEFAULT_TOKENS = 128  # if neither the request nor the option has a limit


class Refusal(Exception):
    """An error answer: its status and body."""

    def __init__(self, status: int, body: Any) -> None:
        super().__init__(str(body))
        self.status, self.body = status, body


@dataclass(frozen=True)
class Options:
    """The options of the command line that have an effect."""

    host: str
    port: int
    slots: int
    context_tokens: int
    max_tokens: int
    temperature: float
    seed: int
    template: str
    settings: dict[str, Any]
    alias: str
    aliases: tuple[str, ...]
    tags: tuple[str, ...]
    model_path: str
    key: str | None
    origins: tuple[str, ...]
    shows_slots: bool
    shows_page: bool
    verbose: bool

    @classmethod
    def read(cls, words: Sequence[str]) -> Options:
        """Parse a command line, ignoring unknown options."""
        parser = argparse.ArgumentParser(allow_abbrev=False)
        for name, kind, default in (
            ("--host", str, "127.0.0.1"),
            ("--port", int, 8080),
            ("--parallel", int, 1),
            ("--ctx-size", int, 512),
            ("--n-predict", int, -1),
            ("--temp", float, 0.8),
            ("--seed", int, 42),
            ("--chat-template", str, "chatml"),
            ("--chat-template-file", str, None),
            ("--alias", str, "model"),
            ("--tags", str, ""),
            ("--hf-repo", str, "model"),
            ("--api-key", str, None),
            ("--cors-origins", str, "*"),
            ("--reasoning", str, "auto"),
        ):
            parser.add_argument(name, type=kind, default=default)
        for flag in ("--slots", "--no-ui", "--verbose", "--kv-unified"):
            parser.add_argument(flag, action="store_true")
        parsed, _ = parser.parse_known_args(words)
        aliases = tuple(sorted(parsed.alias.split(",")))
        file = parsed.chat_template_file
        return cls(
            host=parsed.host.split(",")[0],
            port=parsed.port,
            slots=parsed.parallel,
            context_tokens=parsed.ctx_size if parsed.kv_unified else parsed.ctx_size // parsed.parallel,
            max_tokens=parsed.n_predict,
            temperature=parsed.temp,
            seed=parsed.seed,
            template=Path(file).read_text() if file else TEMPLATES.get(parsed.chat_template, parsed.chat_template),
            settings={"enable_thinking": parsed.reasoning != "off", **_dates()},
            alias=aliases[0],
            aliases=aliases,
            tags=tuple(filter(None, parsed.tags.split(","))),
            model_path=f"{parsed.hf_repo}.gguf",
            key=parsed.api_key,
            origins=tuple(parsed.cors_origins.split(",")),
            shows_slots=parsed.slots,
            shows_page=not parsed.no_ui,
            verbose=parsed.verbose,
        )


class Clock:
    """The times when a request was sent and when its first token arrived."""

    def __init__(self) -> None:
        self._sent, self._first = time.monotonic(), 0.0

    def note_token(self) -> None:
        """Record the arrival of a token."""
        self._first = self._first or time.monotonic()

    def timings(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Return llama-server's timings. The first token of an answer that was not streamed is assumed halfway."""
        now = time.monotonic()
        first = self._first or (self._sent + now) / 2
        cached = usage.get("prompt_tokens_details", usage.get("input_tokens_details", {})).get("cached_tokens", 0)
        prompt = usage.get("prompt_tokens", usage.get("input_tokens", 0)) - cached
        tokens = usage.get("completion_tokens", usage.get("output_tokens", 0))
        prompt_ms, predicted_ms = 1000 * (first - self._sent), 1000 * (now - first)
        steps = max(tokens - 1, 0)  # the first token comes from the prefill
        return {
            "cache_n": cached,
            "prompt_n": prompt,
            "prompt_ms": prompt_ms,
            "prompt_per_token_ms": prompt_ms / max(prompt, 1),
            "prompt_per_second": 1000 * prompt / prompt_ms,
            "predicted_n": tokens,
            "predicted_ms": predicted_ms,
            "predicted_per_token_ms": predicted_ms / steps if steps else 0.0,
            "predicted_per_second": 1000 / predicted_ms * steps if steps else 0.0,
        }


class Translator:
    """Translates requests to those of neuronpipe, and answers to those of llama-server."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.clock = Clock

    # ---- requests --------------------------------------------------------------------------------------------
    def conversation(self, body: dict[str, Any]) -> dict[str, Any]:
        """Translate a request to OpenAI's chat completions."""
        sent = self._common(body)
        limit = self._limit(body.get("max_tokens", body.get("n_predict")))
        sent |= {"max_tokens": limit} if limit is not None and "max_completion_tokens" not in body else {}
        sent.pop("n_predict", None)
        settings = self.options.settings | (body.get("chat_template_kwargs") or {})
        sent["chat_template_kwargs"] = settings
        messages = body.get("messages")
        last = messages[-1] if isinstance(messages, list) and messages and isinstance(messages[-1], dict) else {}
        if last.get("role") == "assistant" and not last.get("tool_calls"):
            sent["continue_final_message"] = True
        return sent

    def plain(self, endpoint: str, body: dict[str, Any]) -> dict[str, Any]:
        """Translate a request to OpenAI's completions or responses."""
        sent = self._common(body)
        if endpoint == "/completions":
            limit = self._limit(sent.pop("n_predict", body.get("max_tokens")))
            sent |= {"max_tokens": DEFAULT_TOKENS if limit is None else limit}
        return sent

    def native(self, body: dict[str, Any], prompt: list[int], tokens: Callable[[str], list[int]]) -> dict[str, Any]:
        """Translate a request in llama.cpp's own format to one of OpenAI's completions."""
        limit = self._limit(body.get("n_predict", body.get("max_tokens")))
        sent = {name: body[name] for name in (*SAMPLING, "stop", "grammar", "stream") if body.get(name) is not None}
        sent = self._with_defaults(sent) | {"prompt": prompt, "max_tokens": -1 if limit is None else limit}
        sent |= {new: body[name] for name, new in RENAMED.items() if name in body}
        if body.get("json_schema") is not None:
            sent["response_format"] = _schema(body["json_schema"])
        if body.get("n_probs"):
            sent["logprobs"] = body["n_probs"]
        if body.get("logit_bias"):
            sent["logit_bias"] = _biases(body["logit_bias"], tokens)
        if body.get("stream"):
            sent["stream_options"] = {"include_usage": True}
        return sent

    def _common(self, body: dict[str, Any]) -> dict[str, Any]:
        sent = {RENAMED.get(name, name): value for name, value in body.items() if name not in DROPPED}
        if "json_schema" in sent:
            sent["response_format"] = _schema(sent.pop("json_schema"))
        form = sent.get("response_format")
        if isinstance(form, dict) and form.get("type") == "json_object" and "schema" in form:
            sent["response_format"] = _schema(form["schema"])
        return self._with_defaults(sent)

    def _with_defaults(self, sent: dict[str, Any]) -> dict[str, Any]:
        return {"temperature": self.options.temperature, "seed": self.options.seed, **sent}

    def _limit(self, tokens: int | None) -> int | None:
        """Return the limit of a request, by default the option's; None if it is negative, which means no limit."""
        limit = self.options.max_tokens if tokens is None else tokens
        return None if limit < 0 else limit

    # ---- answers ---------------------------------------------------------------------------------------------
    def changed(self, answer: dict[str, Any], clock: Clock) -> dict[str, Any]:
        """Add llama-server's fields to an answer of OpenAI's API."""
        return self._with_names(answer) | {"timings": clock.timings(answer.get("usage") or {})}

    def changed_stream(self, events: Iterator[dict[str, Any]], clock: Clock) -> Iterator[dict[str, Any]]:
        """Add llama-server's fields to a stream: timings in the last event; the first event has only the role."""
        for event in events:
            for choice in event.get("choices", ()):
                if "role" in choice.get("delta", ()):
                    choice["delta"]["content"] = None
                else:
                    clock.note_token()
            usage = event.get("usage") or (event.get("response") or {}).get("usage")
            yield self._with_names(event) | ({"timings": clock.timings(usage)} if usage else {})

    def _with_names(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Set llama-server's names of build and model."""
        more = {"model": self.options.alias} if "model" in answer else {}
        if answer.get("system_fingerprint"):
            more["system_fingerprint"] = f"b0-{answer['system_fingerprint']}"
        return answer | more

    def native_answer(
        self,
        answer: dict[str, Any],
        body: dict[str, Any],
        sent: dict[str, Any],
        prompt: str,
        clock: Clock,
        tokens: Callable[[str], list[int]],
    ) -> dict[str, Any]:
        """Translate an answer to llama.cpp's own format. Token ids are those of the tokenized text."""
        choice = answer["choices"][0]
        native = self._end(choice["text"], choice["finish_reason"], answer["usage"], body, sent, clock)
        native |= {"content": choice["text"], "prompt": prompt}
        native["tokens"] = tokens(choice["text"]) if body.get("return_tokens") else []
        if choice.get("logprobs"):
            native["completion_probabilities"] = list(_probabilities(choice["logprobs"], tokens))
        fields = body.get("response_fields")
        return {name: _at(native, name) for name in fields} if fields else native

    def native_stream(
        self,
        events: Iterator[dict[str, Any]],
        body: dict[str, Any],
        sent: dict[str, Any],
        clock: Clock,
        tokens: Callable[[str], list[int]],
    ) -> Iterator[dict[str, Any]]:
        """Translate a stream to llama.cpp's own format. The last event has no text."""
        text, reason = "", "length"
        for event in events:
            for choice in event["choices"]:
                clock.note_token()
                reason = choice["finish_reason"] or reason
                if choice["text"]:
                    text += choice["text"]
                    piece = {"content": choice["text"], "tokens": tokens(choice["text"]), "stop": False}
                    rated = choice.get("logprobs")
                    more = {"completion_probabilities": list(_probabilities(rated, tokens))} if rated else {}
                    yield piece | more
            if event.get("usage"):
                end = self._end(text, reason, event["usage"], body, sent, clock)
                yield end | {"content": "", "tokens": []}

    def _end(
        self, text: str, reason: str, usage: dict[str, Any], body: dict[str, Any], sent: dict[str, Any], clock: Clock
    ) -> dict[str, Any]:
        cut = reason == "length" and (sent["max_tokens"] < 0 or usage["completion_tokens"] < sent["max_tokens"])
        settings = {name: sent.get(name) for name in ("temperature", "seed", "stop")}
        off = {"adaptive_target": -1.0, "adaptive_decay": 0.0, "logit_bias": []}
        return {
            "stop": True,
            "stop_type": "limit" if reason == "length" else "word" if body.get("stop") else "eos",
            "truncated": cut,
            "has_new_line": "\n" in text,
            "timings": clock.timings(usage),
            "generation_settings": settings | off | {"n_predict": sent["max_tokens"]},
        }

    def error(self, status: int, answer: Any) -> Any:
        """Translate an error answer; return other answers unchanged."""
        if status < 400:
            return answer
        if isinstance(answer, str):
            answer = {"error": {"message": answer}}
        error = dict(answer["error"])
        kinds = {
            400: "invalid_request_error",
            401: "authentication_error",
            404: "not_found_error",
            501: "not_supported_error",
        }
        more: dict[str, Any] = {"code": status, "type": kinds.get(status, "server_error")}
        if error.get("code") == "context_length_exceeded":
            context, prompt, *_ = map(int, re.findall(r"\d+", error["message"]))
            more = {"code": 400, "type": "exceed_context_size_error", "n_ctx": context, "n_prompt_tokens": prompt}
            error["message"] = f"the request exceeds the available context size: {error['message']}"
        return {"error": error | more}

    def models(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Return the list of models with the alias and tags of the options."""
        names = {"id": self.options.alias, "aliases": self.options.aliases, "tags": self.options.tags}
        return answer | {"data": [model | names for model in answer["data"]]}

    def props(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Return the server's properties with the values of the options."""
        settings = answer["default_generation_settings"]
        settings["params"] |= {"seed": self.options.seed, "temperature": self.options.temperature}
        return answer | {"model_path": self.options.model_path, "model_alias": self.options.alias}

    def slots(self, metrics: str) -> list[dict[str, Any]]:
        """Return the list of slots, as many of which are busy as sequences are active."""
        (active,) = re.findall(r"^neuronpipe_run_sequences_active(?:\{.*\})? (\S+)", metrics, re.MULTILINE)
        context = self.options.context_tokens
        return [{"id": n, "n_ctx": context, "is_processing": n < float(active)} for n in range(self.options.slots)]


def _dates() -> dict[str, str]:
    """Return the variables with today's date that llama.cpp passes to every template."""
    now = datetime.now()
    return {"date_string": now.strftime("%d %b %Y"), "datetime": now.strftime("%b %d %Y %H:%M:%S GMT")}


def _schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def _biases(logit_bias: Any, tokens: Callable[[str], list[int]]) -> dict[str, float]:
    """Return the biases by token id, from a list of pairs or an object whose keys are tokens or texts. The bias of a
    text applies to each of its tokens."""
    biases: dict[str, float] = {}
    for key, bias in logit_bias.items() if isinstance(logit_bias, dict) else logit_bias:
        ids = tokens(key) if isinstance(key, str) and not key.isdigit() else [int(key)]
        biases |= {str(token): -100.0 if bias is False else float(bias) for token in ids}
    return biases


def _probabilities(rated: dict[str, Any], tokens: Callable[[str], list[int]]) -> Iterator[dict[str, Any]]:
    for text, logprob, top in zip(rated["tokens"], rated["token_logprobs"], rated["top_logprobs"], strict=True):
        likely = [_probability(candidate, value, tokens) for candidate, value in top.items()]
        yield _probability(text, logprob, tokens) | {"top_logprobs": likely}


def _probability(text: str, logprob: float, tokens: Callable[[str], list[int]]) -> dict[str, Any]:
    return {"id": (tokens(text) or [0])[0], "token": text, "logprob": logprob, "bytes": list(text.encode())}


def _at(answer: dict[str, Any], path: str) -> Any:
    """Return a copy of a field; the path `a/b` is the field b of a."""
    value: Any = answer
    for name in path.split("/"):
        value = value[name]
    return json.loads(json.dumps(value))
