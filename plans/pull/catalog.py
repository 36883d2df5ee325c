"""The catalog: models that a person may want to run, by short names, in catalog.toml. The most capable comes first."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from neuronpipe.protocol.errors import UserError, quoted
from neuronpipe.protocol.frozen import frozen

if TYPE_CHECKING:
    from neuronpipe.plans.models.spec import ModelSpec

FILE = Path(__file__).with_name("catalog.toml")
FileType = Literal["BF16", "Q8_0", "Q4_K_M", "Q4_K_S", "MXFP4"]
MAX_SUGGESTED = 3


@frozen(kw_only=True)
class CatalogModel:
    """A model that a hub has. The fields are those of catalog.toml, which explains them.

    context_tokens: 0 for that of the model
    config: a document like config.json, without the keys that have the defaults of their class
    """

    name: str
    note: str
    repository: str
    file: str | None
    download_bytes: int
    file_type: FileType
    licence: str
    context_tokens: int
    predictor_rank: int
    null_keys: tuple[str, ...]
    config: dict[str, object]

    @property
    def reference(self) -> str:
        """The hub reference that `pull` takes: ORG/NAME, or ORG/NAME:FILE.gguf."""
        return self.repository if self.file is None else f"{self.repository}:{self.file}"

    @property
    def spec(self) -> ModelSpec:
        """The model, as its family reads the configuration. Raises UserError if no family can."""
        # Imported here: `pull` needs names only, and the families take 0.1 s to import.
        from neuronpipe.plans.models.family import Choices
        from neuronpipe.plans.models.registry import ARCHITECTURES
        from neuronpipe.plans.strict_json import Record

        choices = Choices(context_tokens=self.context_tokens or None)
        where = f"{FILE}: {self.name}"
        document = Record(self.config | dict.fromkeys(self.null_keys), where)
        (name,) = document.items("architectures")
        if name not in ARCHITECTURES:
            raise UserError(f"{where}: {quoted(name)} is of no family that can be read")
        architecture = ARCHITECTURES[name]
        return architecture.read(architecture.language_part(document), lambda tensor: False, choices)


@cache
def catalog() -> dict[str, CatalogModel]:
    """Return the models by name, the most capable first."""
    entries = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return {
        name: CatalogModel(
            name=name, **{"file": None, "context_tokens": 0, "predictor_rank": 0, "null_keys": ()} | entry
        )
        for name, entry in entries.items()
    }


def catalog_model(text: str) -> CatalogModel | None:
    """Return the model of a short name in any case; None if there is none."""
    return catalog().get(text.casefold())


def known_short_name(text: str) -> CatalogModel:
    """Return the model of a short name. Raises UserError, which suggests the nearest names, if there is none."""
    if (model := catalog_model(text)) is not None:
        return model
    listing = "`neuronpipe models --all` shows all, and a hub has others as ORG/NAME"
    near = nearest_names(text)
    suggestion = f"did you mean {', '.join(near)}? " if near else ""
    raise UserError(f"{quoted(text)}: no model has this short name; {suggestion}{listing}")


def refuse_unpulled(text: str) -> None:
    """Raise UserError, which says how to get it, if a text is the short name of a model."""
    if (model := catalog_model(text)) is not None:
        raise UserError(
            f"{text}: is not on this disk; `neuronpipe pull {model.name}` downloads it, and "
            f"`neuronpipe plan {model.name}` says what it needs"
        )


def nearest_names(text: str) -> list[str]:
    """Return at most MAX_SUGGESTED short names that resemble a text, the most similar first."""
    import difflib  # imported here: only a mistake pays for it

    word = text.casefold().replace(":", "-")  # other programs write NAME:SIZE
    beginning = [name for name in catalog() if len(word) > 1 and name.startswith(word)]
    return (beginning or difflib.get_close_matches(word, catalog(), n=MAX_SUGGESTED))[:MAX_SUGGESTED]
