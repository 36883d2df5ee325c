"""What is asked of a hub (a repository, a revision, a file in it), what is there, and which of its files a package
needs. Only data is ever taken: configuration, tokenizer, chat template and weights, none of which is run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field

from neuronpipe.plans.convert.chat_template import CONFIG, TEMPLATE
from neuronpipe.plans.convert.sentencepiece_model import ADDED
from neuronpipe.plans.pull.packages import EXAMPLE, name_like
from neuronpipe.protocol.errors import UserError, named, quoted
from neuronpipe.protocol.frozen import frozen

WEIGHTS, INDEX, TOKENIZER = "model.safetensors", "model.safetensors.index.json", "tokenizer.json"
SENTENCEPIECE = "tokenizer.model"
SMALL_FILES = ("config.json", "generation_config.json", CONFIG, TEMPLATE)
MAX_SMALL_BYTES = 64 << 20
MAX_SHOWN = 6
_REFERENCE = re.compile(
    r"(?:https?://[^/\s]+/+|hf\.co/|huggingface\.co/)?(?P<repository>[\w][\w.-]*/[\w][\w.-]*)/?(?::(?P<file>[^:@]+))?(?:@(?P<revision>[^@:]+))?",
    re.ASCII,
)
_PICKLES = re.compile(r"(pytorch_model.*\.bin|.*\.pth|.*\.pt)")
_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf")


@frozen(slots=True)
class Reference:
    """`ORG/NAME[:FILE.gguf][@REVISION]`, as a person gives it. revision None: the repository's main branch."""

    repository: str
    file: str | None = None
    revision: str | None = None

    @classmethod
    def parse(cls, text: str) -> Reference:
        """Raises UserError saying what is expected."""
        match = _REFERENCE.fullmatch(text)
        if match is None:
            raise UserError(f"{quoted(text)} names no repository; expected ORG/NAME[:FILE.gguf][@REVISION]{EXAMPLE}")
        file = match["file"]
        if file is not None and (not file.endswith(".gguf") or not file.isprintable() or ".." in file.split("/")):
            raise UserError(f"{quoted(file)}: only a .gguf file of a repository can be named")
        return cls(match["repository"], file, match["revision"])

    def __str__(self) -> str:
        file = f":{self.file}" if self.file else ""
        return self.repository + file + (f"@{self.revision}" if self.revision else "")

    @property
    def name(self) -> str:
        """What the package is called unless the person says otherwise: the repository's name, or the GGUF file's."""
        stem = self.repository.partition("/")[2] if self.file is None else self.file.rpartition("/")[2][:-5]
        return name_like(stem)


@frozen(slots=True)
class RemoteFile:
    """A file of a repository. sha256: of its content, where the hub keeps it apart from git; blob: git's own checksum
    of what git keeps."""

    name: str
    bytes: int
    sha256: str | None
    blob: str | None


@frozen
class Snapshot:
    """A repository at one commit: what is asked for later is of the same commit, whatever is pushed meanwhile."""

    repository: str
    commit: str
    files: Mapping[str, RemoteFile] = field(repr=False)

    def __str__(self) -> str:
        return f"{self.repository}@{self.commit[:12]}"

    def file(self, name: str) -> RemoteFile:
        """Raises UserError when the repository does not have it."""
        if name not in self.files:
            raise UserError(f"{self.repository}: {named(name)}: the repository has no such file")
        return self.files[name]

    def small_files(self, *, tokenizer: bool) -> list[RemoteFile]:
        """What a package needs besides weights. tokenizer: also its tokenizer. Raises UserError where there are no
        safetensors weights, or where something is missing or larger than such a file can be."""
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
        found = [self.files[name] for name in names if name in self.files]
        for file in found:
            if file.bytes > MAX_SMALL_BYTES:
                raise UserError(f"{self.repository}: {file.name}: {file.bytes} bytes are no such file")
        return found

    def gguf(self, name: str) -> RemoteFile:
        """The GGUF file of this name. Raises UserError that names those there are."""
        if name not in self.files:
            raise UserError(f"{self.repository}: {named(name)}: the repository has no such file; {self._ggufs()}")
        if (split := _SPLIT.search(name)) and split[2] != "00001":
            raise UserError(
                f"{self.repository}: {named(name)}: one of {int(split[2])} parts of a model; download them, merge them "
                "with llama-gguf-split, and use `neuronpipe convert`"
            )
        return self.files[name]

    def _ggufs(self) -> str:
        names = sorted(name for name in self.files if name.endswith(".gguf"))
        if not names:
            return "it has no GGUF files"
        more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
        return f"it has {', '.join(map(named, names[:MAX_SHOWN]))}{more}"

    def _refuse_without_weights(self) -> None:
        if any(name.endswith(".gguf") for name in self.files):
            raise UserError(
                f"{self.repository}: {self._ggufs()}; name one: `neuronpipe pull {self.repository}:FILE.gguf`"
            )
        if any(_PICKLES.fullmatch(name) for name in self.files):
            raise UserError(
                f"{self.repository}: has pickled weights and no safetensors; pickles can run code and are not read; "
                "look for a repository with safetensors or GGUF"
            )
        raise UserError(f"{self.repository}: has neither {WEIGHTS} nor {INDEX}: no model that can be converted")
