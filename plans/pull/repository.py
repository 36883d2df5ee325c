"""A repository at a hub: references to it, its files at one commit, and which of them a package needs. Only data is
downloaded, which is never executed: configuration, tokenizer, chat template and weights."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import field

from neuronpipe.plans.convert.chat_template import CONFIG, TEMPLATE
from neuronpipe.plans.convert.sentencepiece_model import ADDED
from neuronpipe.plans.gguf_part_names import gguf_models, model_stem, part_of
from neuronpipe.plans.pull.package_library import name_like
from neuronpipe.plans.strict_json import Record
from neuronpipe.protocol.errors import UserError, quoted, safe_name
from neuronpipe.protocol.frozen import frozen

WEIGHTS, INDEX, TOKENIZER = "model.safetensors", "model.safetensors.index.json", "tokenizer.json"
SENTENCEPIECE = "tokenizer.model"
SMALL_FILES = ("config.json", "generation_config.json", CONFIG, TEMPLATE)
MAX_SMALL_BYTES = 64 << 20
MAX_FILES = 50_000
MAX_FILE_BYTES = 1 << 53
MAX_NAME_CHARACTERS = 1000
MAX_SHOWN = 6
EXAMPLE = "`neuronpipe pull HuggingFaceTB/SmolLM2-135M-Instruct`"
_REFERENCE = re.compile(
    r"(?:https?://[^/\s]+/+|hf\.co/|huggingface\.co/)?(?P<repository>[\w][\w.-]*/[\w][\w.-]*)/?(?::(?P<file>[^:@]+))?(?:@(?P<revision>[^@:]+))?",
    re.ASCII,
)
_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")  # git's SHA-1, or its SHA-256
_SHA256 = re.compile(r"[0-9a-f]{64}")
_PICKLES = re.compile(r"(pytorch_model.*\.bin|.*\.pth|.*\.pt)")


@frozen(slots=True)
class Reference:
    """A reference `ORG/NAME[:FILE.gguf][@REVISION]` of the user.

    file: a GGUF file, or the first part of a GGUF model; None: safetensors
    revision: None: the repository's main branch
    """

    repository: str
    file: str | None = None
    revision: str | None = None

    @classmethod
    def parse(cls, text: str) -> Reference:
        """Return the parsed reference. A URL of the repository is accepted, too. Raises UserError for other texts."""
        match = _REFERENCE.fullmatch(text)
        if match is None and text.endswith(".gguf") and ":" not in text:
            raise UserError(
                f"{quoted(text)} names no repository; a GGUF file on this disk needs no pull: "
                "`neuronpipe chat FILE.gguf`, and one at a hub is ORG/NAME:FILE.gguf"
            )
        if match is None:
            raise UserError(
                f"{quoted(text)} names no repository; expected ORG/NAME[:FILE.gguf][@REVISION], e.g. {EXAMPLE}"
            )
        file = match["file"]
        if file is not None and not (file.endswith(".gguf") and is_file_of_repository(file)):
            raise UserError(
                f"{quoted(file)}: only a .gguf file of a repository can be named, in full; "
                f"`neuronpipe pull {match['repository']}` says which there are, if there are several"
            )
        if file is not None and (part := part_of(file)) is not None:
            file = part.names[0]  # the user may name any part
        return cls(match["repository"], file, match["revision"])

    def __str__(self) -> str:
        file = f":{self.file}" if self.file else ""
        return self.repository + file + (f"@{self.revision}" if self.revision else "")

    @property
    def name(self) -> str:
        """Default name of the package: similar to the name of the repository or of the GGUF file."""
        stem = self.repository.partition("/")[2] if self.file is None else model_stem(self.file)
        return name_like(stem)


@frozen(slots=True)
class RemoteFile:
    """A file of a repository.

    name: its path within the repository
    sha256: checksum of the content, if the hub stores the file outside git
    blob: git's checksum, which is compared if sha256 is None
    """

    name: str
    bytes: int
    sha256: str | None
    blob: str | None


@frozen
class Snapshot:
    """A repository at one commit, which later requests use, too, so that new commits have no effect on a pull."""

    repository: str
    commit: str
    files: Mapping[str, RemoteFile] = field(repr=False)

    def __str__(self) -> str:
        return f"{self.repository}@{self.commit[:12]}"

    def file(self, name: str) -> RemoteFile:
        """Return a file by its path. Raises UserError if the repository does not have it."""
        if name not in self.files:
            raise UserError(f"{self.repository}: {safe_name(name)}: the repository has no such file")
        return self.files[name]

    def small_files(self, *, tokenizer: bool) -> list[RemoteFile]:
        """Return the files that a package needs besides weights. Raises UserError if there are no safetensors weights,
        or if a required file is missing or too large.

        tokenizer: include the tokenizer
        """
        if WEIGHTS not in self.files and INDEX not in self.files:
            self._refuse_without_weights()
        names = list(SMALL_FILES)
        if tokenizer and TOKENIZER in self.files:
            names.append(TOKENIZER)
        elif tokenizer and SENTENCEPIECE in self.files:
            names += [SENTENCEPIECE, ADDED]
        elif tokenizer:
            raise UserError(f"{self.repository}: has no {TOKENIZER} and no {SENTENCEPIECE}: pass --tokenizer FILE")
        self.file("config.json")
        if WEIGHTS not in self.files:
            names.append(INDEX)
        files = [self.files[name] for name in names if name in self.files]
        for file in files:
            if file.bytes > MAX_SMALL_BYTES:
                raise UserError(f"{self.repository}: {file.name}: {file.bytes} bytes are no such file")
        return files

    def gguf(self, name: str) -> RemoteFile:
        """Return the first or only file of a GGUF model. Raises UserError, which lists the GGUF files, if there is no
        such model.

        name: a file, any part of a model, or the common name of its parts without numbers
        """
        part = part_of(name) or gguf_models(self.files).get(name)
        first = name if part is None or (part_of(name) is None and name in self.files) else part.names[0]
        if first not in self.files:
            raise UserError(f"{self.repository}: {safe_name(name)}: the repository has no such file; {self._ggufs()}")
        return self.files[first]

    def _ggufs(self) -> str:
        models = gguf_models(self.files)
        if not models:
            return "it has no GGUF files"
        labels = [safe_name(name) + (f" in {part.count} parts" if part else "") for name, part in models.items()]
        more = f" and {len(labels) - MAX_SHOWN} more" if len(labels) > MAX_SHOWN else ""
        return f"it has {', '.join(labels[:MAX_SHOWN])}{more}"

    def _refuse_without_weights(self) -> None:
        if models := gguf_models(self.files):
            which, file = ("it", next(iter(models))) if len(models) == 1 else ("one", "FILE.gguf")
            reference = shlex.quote(f"{self.repository}:{file}")
            raise UserError(f"{self.repository}: {self._ggufs()}; name {which}: `neuronpipe pull {reference}`")
        if any(_PICKLES.fullmatch(name) for name in self.files):
            raise UserError(
                f"{self.repository}: has pickled weights and no safetensors; pickles can run code and are not read; "
                "look for a repository with safetensors or GGUF"
            )
        raise UserError(f"{self.repository}: has neither {WEIGHTS} nor {INDEX}: no model that can be converted")


def is_file_of_repository(name: str) -> bool:
    """Return True if a name is a printable relative path without `.` and `..`."""
    return 0 < len(name) <= MAX_NAME_CHARACTERS and name.isprintable() and not {"", ".", ".."} & set(name.split("/"))


def read_snapshot(repository: str, info: Record) -> Snapshot:
    """Return the snapshot that a hub's answer describes, without files whose names are no valid paths. Raises
    UserError, which names the field, if the answer is wrong."""
    commit = _matching(info, "sha", _COMMIT)
    siblings = info.records("siblings")
    if len(siblings) > MAX_FILES:
        info.fail("siblings", f"{len(siblings)} files are more than the {MAX_FILES} a repository may have here")
    files = {}
    for sibling in siblings:
        name = sibling.text("rfilename")
        if name in files:
            sibling.fail("rfilename", f"{quoted(name)} appears twice")
        if is_file_of_repository(name):
            files[name] = _remote_file(name, sibling)
    if not files:
        info.fail("siblings", "no files: no hub, or a broken mirror")
    return Snapshot(repository, commit, files)


def _remote_file(name: str, sibling: Record) -> RemoteFile:
    blob = _matching(sibling, "blobId", _COMMIT) if sibling.has("blobId") else None
    sha256 = _matching(sibling.record("lfs"), "sha256", _SHA256) if sibling.has("lfs") else None
    return RemoteFile(name, sibling.integer("size", 0, MAX_FILE_BYTES), sha256, blob)


def _matching(record: Record, name: str, pattern: re.Pattern[str]) -> str:
    value = record.text(name)
    if not pattern.fullmatch(value):
        record.fail(name, f"expected {pattern.pattern}, found {quoted(value)}")
    return value
