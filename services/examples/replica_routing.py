"""The choice of a replica for a request, and streams that go on at another replica: without Ray, sockets and clock."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

PLAIN_CHARACTERS = 128  # of a prompt without messages: it may grow behind them
BEGINNINGS = ("instructions", "system", "messages", "input", "prompt")  # fields that hold the beginning of a prompt
_SEEDED = re.compile(r"(/v1)?/(chat/completions|completions|responses|messages)")
_OLLAMA = re.compile(r"/api/(chat|generate)")
_ID = re.compile(rb"\b[a-z]+[-_][0-9a-f]{24}\b")
_CANDIDATE = re.compile(rb'"choices": ?\[\{"index": ?(\d+)')
_ENDING = re.compile(rb'"code": ?"(draining|starting|restarting)"')  # in a text its quotes would have backslashes
_KEEP_ALIVES = (b":", b"event: ping")


def routing_key(body: Mapping[str, Any]) -> str:
    """Return the key that the requests of a conversation share, so that they meet the prompt cache of one replica.

    The key is the model with what stays while a conversation grows: instructions, and messages up to the first one of
    the user. `prompt_cache_key` of OpenAI's API takes its place.
    """
    model, cache_key = body.get("model"), body.get("prompt_cache_key")
    parts = (
        [cache_key] if isinstance(cache_key, str) else [_beginning(body[name]) for name in BEGINNINGS if name in body]
    )
    text = json.dumps([model, parts], ensure_ascii=True, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _beginning(value: Any) -> Any:
    if isinstance(value, str):
        return value[:PLAIN_CHARACTERS]
    if not isinstance(value, list):
        return value
    roles = [message.get("role") if isinstance(message, dict) else None for message in value]
    if not any(roles):
        return value[:PLAIN_CHARACTERS]  # tokens, or several prompts
    return value[: roles.index("user") + 1 if "user" in roles else 1]


def ranked(key: str, model: str, loaded: Mapping[str, Collection[str]]) -> list[str]:
    """Return replicas in the order in which they should be tried.

    Replicas that have a run of the model come first. Among equals the highest hash of key and replica wins, so a
    replica that comes or goes moves no conversation but its own.

    model: its name; empty if replicas have one model
    loaded: the models that have a run, by replica
    """

    def rank(replica: str) -> tuple[bool, bytes]:
        return model in loaded[replica], hashlib.sha256(f"{key} {replica}".encode()).digest()

    return sorted(loaded, key=rank, reverse=True)


def is_ending(data: bytes) -> bool:
    """Return True if an error says that the server ends or has no run, so that another one should answer."""
    return _ENDING.search(data) is not None


def with_seed(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a request whose completion another replica can generate again: with a seed if it has none."""
    seed = secrets.randbits(32)
    if _SEEDED.fullmatch(path) and body.get("seed") is None:
        return body | {"seed": seed}
    options = body.get("options") or {}
    if _OLLAMA.fullmatch(path) and isinstance(options, dict) and options.get("seed", -1) == -1:
        return body | {"options": options | {"seed": seed}}
    return body


class ResumedStream:
    """One stream of events from several attempts at a request.

    Each attempt generates the same events, because its seed is the same. Events that were delivered are dropped, and
    the ids of a later attempt are replaced by those of the first. Candidates are told apart, because their events are
    mixed in any order. What is held back is one event.

    separator: what ends an event
    broken: True once the attempt ends with an error that another server would not have
    """

    def __init__(self, separator: bytes) -> None:
        self._separator = separator
        self._delivered: Counter[bytes] = Counter()  # number of events by candidate
        self._ids: defaultdict[bytes, list[bytes]] = defaultdict(list)  # in their order, by candidate
        self._response_id = b""
        self.begin()

    def begin(self) -> None:
        """Begin an attempt, the first one or a further one."""
        self._buffer, self.broken = b"", False
        self._seen: Counter[bytes] = Counter()
        self._new_ids: defaultdict[bytes, list[bytes]] = defaultdict(list)
        self._new_response_id = b""

    def push(self, data: bytes) -> bytes:
        """Return the events that are complete with this data and were not delivered yet."""
        *events, self._buffer = (self._buffer + data).split(self._separator)
        return b"".join(event + self._separator for event in self._delivering(events))

    def finish(self) -> bytes:
        """Return what is left when an attempt has ended as it should."""
        last_event, self._buffer = self._buffer, b""
        return b"".join(self._delivering([last_event])) if last_event else b""

    def _delivering(self, events: Sequence[bytes]) -> Iterator[bytes]:
        for event in events:
            self.broken = self.broken or is_ending(event)
            if self.broken:
                return
            if event.strip().startswith(_KEEP_ALIVES):
                yield event
                continue
            match = _CANDIDATE.search(event)
            candidate = match[1] if match else b""
            self._seen[candidate] += 1
            event = _ID.sub(lambda id_, candidate=candidate: self._first_id(candidate, id_[0]), event)  # type: ignore[misc]
            if self._seen[candidate] > self._delivered[candidate]:
                self._delivered[candidate] += 1
                yield event

    def _first_id(self, candidate: bytes, new: bytes) -> bytes:
        """Return the id that the first attempt has in place of this one. The first id is that of the response."""
        self._new_response_id = self._new_response_id or new
        self._response_id = self._response_id or new
        if new == self._new_response_id:
            return self._response_id
        ids, new_ids = self._ids[candidate], self._new_ids[candidate]
        if new not in new_ids:
            new_ids.append(new)
        number = new_ids.index(new)
        if number == len(ids):
            ids.append(new)
        return ids[number]
