"""A hub of models: the contents of a repository, and the bytes of its files.

Files are read over HTTP even if the hub offers xet, so that interrupted downloads can continue and all mirrors work.
This module checks lengths; downloads.py checks contents.
"""

from __future__ import annotations

import os
import time
from typing import BinaryIO
from urllib.parse import quote

from neuronpipe.plans.pull.http_answers import AGAIN, ENDPOINT, ConnectionBroken, Refused, Tell, Web
from neuronpipe.plans.pull.repository import Reference, RemoteFile, Snapshot, read_snapshot
from neuronpipe.plans.strict_json import parse_json
from neuronpipe.protocol.errors import UserError, quoted, safe_name

MAX_SNAPSHOT_BYTES = 8 << 20  # of a hub's description of a repository, which has about 300 bytes per file
MAX_TRIES = 6  # consecutive connections that break off before PROGRESS_BYTES have arrived
PROGRESS_BYTES = 1 << 20
PAUSE_S = 1.0


class Hub:
    """The hub at HF_ENDPOINT, by default huggingface.co. HF_TOKEN is sent to it if it is set."""

    def __init__(self, tell: Tell = lambda line: None) -> None:
        """Raises UserError as `Web`.

        tell: is called with a line about the reason if the hub asks to wait
        """
        self.endpoint = (os.environ.get("HF_ENDPOINT") or ENDPOINT).rstrip("/")
        self._web = Web(self.endpoint, tell)

    def snapshot(self, reference: Reference, commit: str | None = None) -> Snapshot:
        """Return the list of the repository's files at `commit`; None: at the current commit of the reference's
        revision. Raises UserError if it cannot be read."""
        repository, revision = reference.repository, commit or reference.revision
        address = f"{self.endpoint}/api/models/{repository}"
        if revision is not None:
            address += f"/revision/{quote(revision, safe='')}"
        try:
            with self._web.answer(f"{address}?blobs=true", repository) as answer:
                data = b"".join(answer.pieces(MAX_SNAPSHOT_BYTES))
        except Refused as refusal:
            raise self._explained(refusal, repository, revision) from None
        return read_snapshot(repository, parse_json(data, f"{repository}: {self.endpoint} answered what no hub does"))

    def read(self, snapshot: Snapshot, file: RemoteFile, start: int, count: int) -> bytes:
        """Return `count` bytes of a file from `start` on; fewer at its end. Raises UserError if they cannot be
        read."""
        if (stop := min(start + count, file.bytes)) <= start:
            return b""
        what, data = self._what(snapshot, file), bytearray()
        try:
            with self._web.answer(self._address(snapshot, file), what, start, stop) as answer:
                skip = self._skipped(what, answer.start, start)
                for piece in answer.pieces(file.bytes - answer.start):
                    data += piece[skip:]
                    skip = max(skip - len(piece), 0)
                    if len(data) >= stop - start:
                        break
        except Refused as refusal:
            raise self._explained(refusal, snapshot.repository, snapshot.commit, file) from None
        if len(data) < stop - start:
            raise UserError(f"{what}: ends at byte {start + len(data)}: truncated")
        return bytes(data[: stop - start])

    def download(self, snapshot: Snapshot, file: RemoteFile, target: BinaryIO) -> None:
        """Write the rest of a file to `target`, which is positioned after the bytes already received. Reconnects if the
        connection breaks off. Raises ConnectionBroken after MAX_TRIES connections without progress, UserError for other
        errors of the hub, and errors of `target.write`."""
        tries, counted_from = 0, target.tell()
        while (start := target.tell()) < file.bytes:
            try:
                self._download(snapshot, file, target, start)
            except Refused as refusal:
                raise self._explained(refusal, snapshot.repository, snapshot.commit, file) from None
            except ConnectionBroken:
                if target.tell() - counted_from >= PROGRESS_BYTES:
                    tries, counted_from = 0, target.tell()
                tries += 1
                if tries == MAX_TRIES:
                    raise
                time.sleep(PAUSE_S)

    def _download(self, snapshot: Snapshot, file: RemoteFile, target: BinaryIO, start: int) -> None:
        """Write the content of one answer. Raises ConnectionBroken if the file is not complete then, UserError if it is
        too long."""
        what, address = self._what(snapshot, file), self._address(snapshot, file)
        with self._web.answer(address, what, start or None) as answer:
            skip = self._skipped(what, answer.start, start)
            left_bytes = file.bytes - answer.start
            if answer.length_bytes not in (None, left_bytes):
                raise UserError(
                    f"{what}: {self.endpoint} gave {file.bytes} bytes as its length, and sends "
                    f"{answer.start + (answer.length_bytes or 0)}; use another mirror"
                )
            for piece in answer.pieces(left_bytes):
                target.write(piece[skip:])
                skip = max(skip - len(piece), 0)
        if target.tell() < file.bytes:
            raise ConnectionBroken(f"{what}: ended at byte {target.tell()} of {file.bytes}; {AGAIN}")

    def _skipped(self, what: str, first: int, required: int) -> int:
        """Return the number of bytes to skip of an answer from byte `first` on, since mirrors without ranges send the
        whole file. Raises UserError if `first` is neither 0 nor `required`."""
        if first not in (0, required):
            raise UserError(f"{what}: {self.endpoint} sends another part of it than was asked for; use another mirror")
        return required - first

    def _explained(
        self, refusal: Refused, repository: str, revision: str | None, file: RemoteFile | None = None
    ) -> UserError:
        """Return an error that says what to do about a refusal; the refusal itself if nothing is known."""
        what = repository if file is None else f"{repository}: {safe_name(file.name)}"
        if refusal.code == "GatedRepo":
            return UserError(f"{what}: asks you to accept its terms at {self.endpoint}/{repository}; then set HF_TOKEN")
        if refusal.code == "RevisionNotFound":
            return UserError(f"{what}: has no revision {quoted(revision)}")
        if refusal.code == "RepoNotFound" or refusal.status == 401:
            return UserError(
                f"{what}: there is no such repository at {self.endpoint}, or it is private and HF_TOKEN may not read it"
            )
        return refusal

    def _what(self, snapshot: Snapshot, file: RemoteFile) -> str:
        return f"{snapshot.repository}: {safe_name(file.name)}"

    def _address(self, snapshot: Snapshot, file: RemoteFile) -> str:
        return f"{self.endpoint}/{snapshot.repository}/resolve/{snapshot.commit}/{quote(file.name)}"
