"""A hub of models, asked through huggingface_hub: what a repository holds, and its bytes.

Files are read over HTTP, also where the hub offers xet: only so does a download go on where it was interrupted, and
only so does any mirror serve. huggingface_hub checks lengths; content is checked in `arrival.py`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import sys
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any, BinaryIO

from neuronpipe.plans.pull.repository import Reference, RemoteFile, Snapshot
from neuronpipe.protocol.errors import UserError, named, quoted

ENDPOINT = "https://huggingface.co"
ANSWER_S = 30.0
AGAIN = "the same command goes on from here"
_AS_IT_IS = {"Accept-Encoding": "identity"}  # compressed, a part of a file would not be one of the file


class Hub:
    """The hub that HF_ENDPOINT names, huggingface.co otherwise; HF_TOKEN is sent to it if there is one."""

    def __init__(self) -> None:
        """Raises UserError where huggingface_hub is not installed."""
        self.endpoint = (os.environ.get("HF_ENDPOINT") or ENDPOINT).rstrip("/")
        if not self.endpoint.startswith(("http://", "https://")):
            raise UserError(f"HF_ENDPOINT: {quoted(self.endpoint)} is no address; expected one such as {ENDPOINT}")
        os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
        try:
            import huggingface_hub  # 0.3 s, and not on every phone: only for this
            from huggingface_hub import errors, file_download, utils
        except ImportError:
            raise UserError(
                "pull needs huggingface_hub; "
                f"install it with `{shlex.quote(sys.executable)} -m pip install huggingface_hub`"
            ) from None
        self._hub: Any = huggingface_hub
        self._errors: Any = errors
        self._utils: Any = utils
        self._download: Any = file_download
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it tells of every retry
        self._utils.disable_progress_bars()

    def snapshot(self, reference: Reference, commit: str | None = None) -> Snapshot:
        """What the repository holds, at its revision's present commit or at a given one. Raises UserError."""
        wanted = Reference(reference.repository, None, commit or reference.revision)
        with self._explained(wanted):
            info = self._hub.HfApi(endpoint=self.endpoint).model_info(
                wanted.repository, revision=wanted.revision, files_metadata=True, timeout=ANSWER_S
            )
        files = {}
        for sibling in info.siblings or ():
            sha256 = sibling.lfs.sha256 if sibling.lfs else None
            files[sibling.rfilename] = RemoteFile(sibling.rfilename, sibling.size or 0, sha256, sibling.blob_id)
        if not info.sha or not files:
            raise UserError(f"{self.endpoint}: tells no commit or no files of {reference}: no hub, or a broken mirror")
        return Snapshot(reference.repository, info.sha, files)

    def read(self, snapshot: Snapshot, file: RemoteFile, start: int, count: int) -> bytes:
        """A few bytes of a file; fewer at its end. Raises UserError."""
        if (stop := min(start + count, file.bytes)) <= start:
            return b""
        headers = self._headers() | {"Range": f"bytes={start}-{stop - 1}"}
        session, data = self._utils.get_session(), bytearray()
        with (
            self._explained(Reference(snapshot.repository), file),
            session.stream("GET", self._address(snapshot, file), headers=headers, timeout=ANSWER_S) as answer,
        ):
            self._utils.hf_raise_for_status(answer)
            skip = start if answer.status_code == 200 else 0  # a mirror that knows no ranges sends it from the start
            for piece in answer.iter_bytes():
                data += piece[skip:]
                skip = max(skip - len(piece), 0)
                if len(data) >= stop - start:
                    break
        if len(data) < stop - start:
            raise UserError(f"{snapshot.repository}: {named(file.name)}: ends at byte {start + len(data)}: truncated")
        return bytes(data[: stop - start])

    def download(self, snapshot: Snapshot, file: RemoteFile, target: BinaryIO, have_bytes: int) -> None:
        """The rest of a file, written to `target`, which stands behind its first bytes. Goes on by itself when the
        connection breaks off, until nothing comes any more. Raises UserError, and what writing raises."""
        with self._explained(Reference(snapshot.repository), file):
            self._download.http_get(
                self._address(snapshot, file),
                target,
                resume_size=have_bytes,
                headers=self._headers(),
                expected_size=file.bytes,
            )

    def _headers(self) -> dict[str, str]:
        headers: dict[str, str] = self._utils.build_hf_headers(
            library_name="neuronpipe", library_version=version("neuronpipe")
        )
        return headers | _AS_IT_IS

    def _address(self, snapshot: Snapshot, file: RemoteFile) -> str:
        return str(
            self._hub.hf_hub_url(snapshot.repository, file.name, revision=snapshot.commit, endpoint=self.endpoint)
        )

    @contextlib.contextmanager
    def _explained(self, reference: Reference, file: RemoteFile | None = None) -> Iterator[None]:
        """Errors of the library and of the network, as one line that says what to do."""
        errors = self._errors
        what = reference.repository if file is None else f"{reference.repository}: {named(file.name)}"
        network = errors.HfHubHTTPError.__bases__[0]  # what everything its HTTP library raises begins with
        try:
            yield
        except errors.GatedRepoError:
            raise UserError(
                f"{what}: asks you to accept its terms at {self.endpoint}/{reference.repository}; then set HF_TOKEN"
            ) from None
        except errors.RevisionNotFoundError:
            raise UserError(f"{what}: has no revision {quoted(reference.revision)}") from None
        except errors.RepositoryNotFoundError:
            raise UserError(
                f"{what}: there is no such repository at {self.endpoint}; for a private one set HF_TOKEN"
            ) from None
        except errors.OfflineModeIsEnabled:
            raise UserError("HF_HUB_OFFLINE is set, so nothing is asked of a hub; unset it to pull") from None
        except errors.HfHubHTTPError as error:
            status = getattr(getattr(error, "response", None), "status_code", "an error")
            raise UserError(f"{what}: {self.endpoint} answered {status}; try again, {AGAIN}") from None
        except network as error:
            reason = named(str(error) or type(error).__name__)
            raise UserError(f"{what}: no connection to {self.endpoint}: {reason}; {AGAIN}") from None
        except OSError as error:
            if error.errno is not None:
                raise  # of this machine
            raise UserError(f"{what}: came with another length than {self.endpoint} said; {AGAIN}") from None
        except UserError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError) as error:  # of an answer that is not as it should be
            raise UserError(f"{what}: {self.endpoint} answered what no hub does: {named(str(error))}") from None
