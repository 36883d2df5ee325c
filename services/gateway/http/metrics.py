"""Figures for Prometheus: what the gateway counted, and how the run is at the moment."""

from __future__ import annotations

from collections.abc import Iterable

from neuronpipe.protocol.messages.client import Finished, Status
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TOKEN_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)


class Metrics:
    """One registry per gateway."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._responses = Counter("neuronpipe_http_responses", "Responses", ["path", "status"], registry=registry)
        self._texts = Counter("neuronpipe_texts", "Texts generated, by how they ended", ["reason"], registry=registry)
        self._prompt_tokens = Counter("neuronpipe_prompt_tokens", "Tokens of prompts", registry=registry)
        self._tokens = Counter("neuronpipe_generated_tokens", "Tokens generated", registry=registry)
        self._first = Histogram(
            "neuronpipe_first_token_seconds",
            "From when the run had the request to its first token",
            buckets=SECONDS,
            registry=registry,
        )
        self._between = Histogram(
            "neuronpipe_token_seconds", "Median time between a text's tokens", buckets=TOKEN_SECONDS, registry=registry
        )
        self._run = {
            name: Gauge(f"neuronpipe_run_{name}", text, ["model"], registry=registry)
            for name, text in (
                ("memory_bytes", "Memory of all processes and segments"),
                ("memory_peak_bytes", "The most it was"),
                ("memory_limit_bytes", "What the plan allows"),
                ("sequences_active", "Sequences that hold a KV slot"),
                ("sequences_waiting", "Requests that wait for one"),
                ("steps", "Steps done since the coordinator started"),
                ("tokens", "Tokens generated since the coordinator started"),
                ("flash_bytes", "Bytes read from flash since the loader started"),
                ("uptime_s", "Seconds since the coordinator started"),
            )
        }
        self._waiting = Gauge(
            "neuronpipe_texts_waiting", "Texts that wait for their turn here", ["model"], registry=registry
        )
        self._restarts = Gauge(
            "neuronpipe_run_restarts", "Restarts of a process", ["model", "process"], registry=registry
        )

    def responded(self, path: str, status: int) -> None:
        """A response was begun."""
        self._responses.labels(path, str(status)).inc()

    def finished(self, finished: Finished) -> None:
        """A text was generated."""
        self._texts.labels(finished.reason).inc()
        self._prompt_tokens.inc(finished.prompt_tokens)
        self._tokens.inc(finished.tokens)
        self._first.observe(finished.ttft_ms / 1000)
        if finished.tokens > 1:
            self._between.observe(finished.tbt_ms["p50"] / 1000)

    def page(self, runs: Iterable[tuple[str, Status, int]]) -> bytes:
        """Everything, in Prometheus' text format. runs: by the name of the model, with the texts that wait here."""
        for gauge in (self._waiting, self._restarts, *self._run.values()):
            gauge.clear()  # runs come and go
        for model, status, waiting_texts in runs:
            self._waiting.labels(model).set(waiting_texts)
            for name, gauge in self._run.items():
                gauge.labels(model).set(getattr(status, name))
            for process in status.processes:
                self._restarts.labels(model, f"{process.role}.{process.index}").set(process.restarts)
        return generate_latest(self._registry)
