"""Metrics for Prometheus: the gateway's counters and the present state of each run."""

from __future__ import annotations

from collections.abc import Iterable

from neuronpipe.protocol.messages.client import Finished, Status
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TOKEN_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)


class Metrics:
    """The metrics of one gateway, in a registry of their own."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._responses = Counter("neuronpipe_http_responses", "Responses", ["path", "status"], registry=registry)
        self._sequences = Counter(
            "neuronpipe_texts", "Sequences by the reason of their end", ["reason"], registry=registry
        )
        self._prompt_tokens = Counter("neuronpipe_prompt_tokens", "Prompt tokens", registry=registry)
        self._tokens = Counter("neuronpipe_generated_tokens", "Generated tokens", registry=registry)
        self._first = Histogram(
            "neuronpipe_first_token_seconds",
            "Time to first token, from when the run had the request",
            buckets=SECONDS,
            registry=registry,
        )
        self._between = Histogram(
            "neuronpipe_token_seconds",
            "Median time between a sequence's tokens",
            buckets=TOKEN_SECONDS,
            registry=registry,
        )
        self._run = {
            name: Gauge(f"neuronpipe_run_{name}", text, ["model"], registry=registry)
            for name, text in (
                ("memory_bytes", "Memory of all processes and segments"),
                ("memory_peak_bytes", "Peak memory of all processes and segments"),
                ("memory_limit_bytes", "Memory limit of the plan"),
                ("sequences_active", "Sequences that hold a KV slot"),
                ("sequences_waiting", "Sequences that wait for a KV slot"),
                ("steps", "Steps computed since the coordinator started"),
                ("tokens", "Tokens generated since the coordinator started"),
                ("flash_bytes", "Bytes read from flash since the loader started"),
                ("uptime_s", "Seconds since the coordinator started"),
            )
        }
        self._waiting = Gauge(
            "neuronpipe_texts_waiting", "Sequences that wait in the gateway", ["model"], registry=registry
        )
        self._restarts = Gauge(
            "neuronpipe_run_restarts", "Restarts of a process", ["model", "process"], registry=registry
        )

    def responded(self, path: str, status: int) -> None:
        self._responses.labels(path, str(status)).inc()

    def finished(self, finished: Finished) -> None:
        self._sequences.labels(finished.reason).inc()
        self._prompt_tokens.inc(finished.prompt_tokens)
        self._tokens.inc(finished.tokens)
        self._first.observe(finished.ttft_ms / 1000)
        if finished.tokens > 1:
            self._between.observe(finished.tbt_ms["p50"] / 1000)

    def page(self, runs: Iterable[tuple[str, Status, int]]) -> bytes:
        """Return all metrics in Prometheus' text format.

        runs: (model name, status, number of sequences that wait in the gateway) of each live run
        """
        for gauge in (self._waiting, self._restarts, *self._run.values()):
            gauge.clear()  # a run of the last page may have ended
        for model, status, waiting_sequences in runs:
            self._waiting.labels(model).set(waiting_sequences)
            for name, gauge in self._run.items():
                gauge.labels(model).set(getattr(status, name))
            for process in status.processes:
                self._restarts.labels(model, f"{process.role}.{process.index}").set(process.restarts)
        return generate_latest(self._registry)
