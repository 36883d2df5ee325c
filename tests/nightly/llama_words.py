"""llama-server's words in ours, and ours in its: options, fields of requests, answers. No input or output."""

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
# What changes nothing here, or what the shim itself sees to.
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
DEFAULT_TOKENS = 128  # where neither the request nor the option says how many


class Refusal(Exception):
    """An error to answer with: its status, and what it says."""

    def __init__(self, status: int, body: Any) -> None:
        super().__init__(str(body))
        self.status, self.body = status, body


@dataclass(frozen=True)
class Options:
    """What of the command line has a meaning."""

    host: str
    port: int
    slots: int
    context_tokens: int
    most_tokens: int
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
        """The command line; options that are not known here are passed over."""
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
        given, _ = parser.parse_known_args(words)
        aliases = tuple(sorted(given.alias.split(",")))
        file = given.chat_template_file
        return cls(
            host=given.host.split(",")[0],
            port=given.port,
            slots=given.parallel,
            context_tokens=given.ctx_size if given.kv_unified else given.ctx_size // given.parallel,
            most_tokens=given.n_predict,
            temperature=given.temp,
            seed=given.seed,
            template=Path(file).read_text() if file else TEMPLATES.get(given.chat_template, given.chat_template),
            settings={"enable_thinking": given.reasoning != "off", **_dates()},
            alias=aliases[0],
            aliases=aliases,
            tags=tuple(filter(None, given.tags.split(","))),
            model_path=f"{given.hf_repo}.gguf",
            key=given.api_key,
            origins=tuple(given.cors_origins.split(",")),
            shows_slots=given.slots,
            shows_page=not given.no_ui,
            verbose=given.verbose,
        )


class Clock:
    """When a request was sent, and when its first token came."""

    def __init__(self) -> None:
        self._sent, self._first = time.monotonic(), 0.0

    def ticked(self) -> None:
        """A piece came."""
        self._first = self._first or time.monotonic()

    def timings(self, usage: dict[str, Any]) -> dict[str, Any]:
        """As llama-server has them. What was not streamed is taken to have its first token halfway."""
        now = time.monotonic()
        first = self._first or (self._sent + now) / 2
        cached = usage.get("prompt_tokens_details", usage.get("input_tokens_details", {})).get("cached_tokens", 0)
        prompt = usage.get("prompt_tokens", usage.get("input_tokens", 0)) - cached
        tokens = usage.get("completion_tokens", usage.get("output_tokens", 0))
        prompt_ms, predicted_ms = 1000 * (first - self._sent), 1000 * (now - first)
        steps = max(tokens - 1, 0)  # the first token comes of the prompt
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


class Words:
    """Requests in our words, answers in theirs."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.clock = Clock

    # ---- requests --------------------------------------------------------------------------------------------
    def conversation(self, body: dict[str, Any]) -> dict[str, Any]:
        """A chat request."""
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

    def plain(self, asked: str, body: dict[str, Any]) -> dict[str, Any]:
        """A request of OpenAI's completions or responses."""
        sent = self._common(body)
        if asked == "/completions":
            limit = self._limit(sent.pop("n_predict", body.get("max_tokens")))
            sent |= {"max_tokens": DEFAULT_TOKENS if limit is None else limit}
        return sent

    def native(self, body: dict[str, Any], prompt: list[int], tokens: Callable[[str], list[int]]) -> dict[str, Any]:
        """llama.cpp's completion as one of OpenAI's."""
        limit = self._limit(body.get("n_predict", body.get("max_tokens")))
        sent = {name: body[name] for name in (*SAMPLING, "stop", "grammar", "stream") if body.get(name) is not None}
        sent = self._with_defaults(sent) | {"prompt": prompt, "max_tokens": -1 if limit is None else limit}
        sent |= {ours: body[theirs] for theirs, ours in RENAMED.items() if theirs in body}
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
        """The option is for requests that say nothing; None: as many as fit."""
        limit = self.options.most_tokens if tokens is None else tokens
        return None if limit < 0 else limit

    # ---- answers ---------------------------------------------------------------------------------------------
    def changed(self, answer: dict[str, Any], clock: Clock) -> dict[str, Any]:
        """OpenAI's answer with what llama-server adds to it."""
        return self._named(answer) | {"timings": clock.timings(answer.get("usage") or {})}

    def changed_stream(self, events: Iterator[dict[str, Any]], clock: Clock) -> Iterator[dict[str, Any]]:
        """The same of a stream: the last event has the times, and the first one names the role alone."""
        for event in events:
            for choice in event.get("choices", ()):
                if "role" in choice.get("delta", ()):
                    choice["delta"]["content"] = None
                else:
                    clock.ticked()
            usage = event.get("usage") or (event.get("response") or {}).get("usage")
            yield self._named(event) | ({"timings": clock.timings(usage)} if usage else {})

    def _named(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Their names of build and model."""
        more = {"model": self.options.alias} if "model" in answer else {}
        if answer.get("system_fingerprint"):
            more["system_fingerprint"] = f"b0-{answer['system_fingerprint']}"
        return answer | more

    def native_answer(
        self,
        found: dict[str, Any],
        body: dict[str, Any],
        sent: dict[str, Any],
        prompt: str,
        clock: Clock,
        tokens: Callable[[str], list[int]],
    ) -> dict[str, Any]:
        """llama.cpp's answer. Token ids are those that its text has when it is read again."""
        choice = found["choices"][0]
        made = self._end(choice["text"], choice["finish_reason"], found["usage"], body, sent, clock)
        made |= {"content": choice["text"], "prompt": prompt}
        made["tokens"] = tokens(choice["text"]) if body.get("return_tokens") else []
        if choice.get("logprobs"):
            made["completion_probabilities"] = list(_probabilities(choice["logprobs"], tokens))
        fields = body.get("response_fields")
        return {name: _at(made, name) for name in fields} if fields else made

    def native_stream(
        self,
        events: Iterator[dict[str, Any]],
        body: dict[str, Any],
        sent: dict[str, Any],
        clock: Clock,
        tokens: Callable[[str], list[int]],
    ) -> Iterator[dict[str, Any]]:
        """The same, piece by piece; the last one has no text."""
        text, reason = "", "length"
        for event in events:
            for choice in event["choices"]:
                clock.ticked()
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
        """Their kinds of errors; what is no error stays as it is."""
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
        """The one model by its alias."""
        names = {"id": self.options.alias, "aliases": self.options.aliases, "tags": self.options.tags}
        return answer | {"data": [one | names for one in answer["data"]]}

    def props(self, answer: dict[str, Any]) -> dict[str, Any]:
        """With what the options say."""
        settings = answer["default_generation_settings"]
        settings["params"] |= {"seed": self.options.seed, "temperature": self.options.temperature}
        return answer | {"model_path": self.options.model_path, "model_alias": self.options.alias}

    def slots(self, metrics: str) -> list[dict[str, Any]]:
        """As many busy ones as texts are under way."""
        (active,) = re.findall(r"^neuronpipe_run_sequences_active(?:\{.*\})? (\S+)", metrics, re.MULTILINE)
        context = self.options.context_tokens
        return [{"id": n, "n_ctx": context, "is_processing": n < float(active)} for n in range(self.options.slots)]


def _dates() -> dict[str, str]:
    """What llama.cpp tells every template of the day."""
    now = datetime.now()
    return {"date_string": now.strftime("%d %b %Y"), "datetime": now.strftime("%b %d %Y %H:%M:%S GMT")}


def _schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def _biases(given: Any, tokens: Callable[[str], list[int]]) -> dict[str, float]:
    """Tokens or texts, as a list of pairs or an object; the bias of a text is that of each of its tokens."""
    made: dict[str, float] = {}
    for what, bias in given.items() if isinstance(given, dict) else given:
        ids = tokens(what) if isinstance(what, str) and not what.isdigit() else [int(what)]
        made |= {str(token): -100.0 if bias is False else float(bias) for token in ids}
    return made


def _probabilities(rated: dict[str, Any], tokens: Callable[[str], list[int]]) -> Iterator[dict[str, Any]]:
    for text, logprob, top in zip(rated["tokens"], rated["token_logprobs"], rated["top_logprobs"], strict=True):
        likely = [_probability(other, value, tokens) for other, value in top.items()]
        yield _probability(text, logprob, tokens) | {"top_logprobs": likely}


def _probability(text: str, logprob: float, tokens: Callable[[str], list[int]]) -> dict[str, Any]:
    return {"id": (tokens(text) or [0])[0], "token": text, "logprob": logprob, "bytes": list(text.encode())}


def _at(answer: dict[str, Any], path: str) -> Any:
    """`a/b` is the field b of a."""
    found: Any = answer
    for name in path.split("/"):
        found = found[name]
    return json.loads(json.dumps(found))
