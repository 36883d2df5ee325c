"""The graphs of a model as files, and what they were prepared as for a chip: contexts, from which a session begins at
once. `neuronpipe compile` writes them, into the package's folder `npu` unless it is told another:

    graphs-NEURONS/       graphs, for a worker that is no Python program (program/README.md)
    socSOC-NEURONS/       contexts for a chip

NEURONS are those of the feed-forward graph; a folder serves all models of one shape. `graphs.json` in it says what
there is, how integers stand for values, and what each file's checksum is; it is written last. A runtime computes a
damaged context and says nothing, and one of another chip too: so all of that is compared before.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from neuronpipe.plans.package.atomic_output import make_folder, whole_file
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.runtime_memory import GRAPH_TOKENS, MAX_PRODUCT_NEURONS
from neuronpipe.plans.strict_json import read_file
from neuronpipe.protocol.errors import UserError, quoted, safe_name
from neuronpipe.protocol.schema import json_object
from neuronpipe.services.offload.npu.chips import Chip

if TYPE_CHECKING:
    from neuronpipe.services.offload.npu.graphs import Graph, Scale

FORMAT, VERSION = "neuronpipe-graphs", 3
INDEX, FOLDER = "graphs.json", "npu"
MAX_INDEX_BYTES = 1 << 20
MAX_CONTEXT_BYTES = 1 << 30

Prepare = Callable[["Graph"], bytes]
"""What a graph is stored as."""


def folder_of(package: Path, chip: Chip | None, neurons: int) -> Path:
    """Where a package's graphs lie, or its contexts for a chip."""
    return package / FOLDER / f"{_kind(chip)}-{neurons}"


def _kind(chip: Chip | None) -> str:
    return "graphs" if chip is None else f"soc{chip.soc}"


def neurons_there(package: Path, chip: Chip) -> list[int]:
    """Of which sizes there are contexts for a chip."""
    beginning = f"{_kind(chip)}-"
    found = (path.parent.name.removeprefix(beginning) for path in package.glob(f"{FOLDER}/{beginning}*/{INDEX}"))
    return sorted(int(size) for size in found if size.isascii() and size.isdigit())


def model_graphs(manifest: Manifest, neurons: int) -> list[Graph]:
    """All that prompts of this model need. neurons: most of one product; they decide the ranges, so the numerics."""
    from neuronpipe.services.offload.npu.graphs import Shapes, feed_forward_graph, matrix_graph

    shapes = Shapes.of(manifest, neurons)
    return [
        *(matrix_graph(tokens, shape) for shape in shapes.matrices.values() for tokens in GRAPH_TOKENS),
        *(feed_forward_graph(tokens, shapes.feed_forward) for tokens in GRAPH_TOKENS),
    ]


def write_graphs(
    folder: Path,
    manifest: Manifest,
    neurons: int,
    *,
    chip: Chip | None = None,
    qnn: str = "",
    prepare: Prepare = lambda graph: graph.model,
    progress: Callable[[int, int], None] = lambda done, all_: None,
) -> None:
    """Write them, or what `prepare` makes of each for a chip. qnn: the version of what prepares. Raises UserError."""
    graphs, sums = model_graphs(manifest, neurons), {}
    make_folder(folder)
    try:
        (folder / INDEX).unlink(missing_ok=True)
        for number, graph in enumerate(graphs):
            progress(number, len(graphs))
            content = prepare(graph)
            (folder / _file(graph.name)).write_bytes(content)
            sums[graph.name] = hashlib.sha256(content).hexdigest()
    except OSError as error:
        raise UserError(f"{error.filename or folder}: cannot be written: {error.strerror}") from None
    with whole_file(folder / INDEX) as place:
        place.write_text(json.dumps(_index(manifest, neurons, chip, qnn, sums), indent=1) + "\n", encoding="utf-8")


def _file(name: str) -> str:
    return f"{name}.onnx"


def _index(manifest: Manifest, neurons: int, chip: Chip | None, qnn: str, sums: dict[str, str]) -> dict[str, Any]:
    """graphs.json. sums: the checksum of each graph's file; "" where it is not known."""
    from neuronpipe.services.offload.npu.graphs import MIDDLE, Scale, Shapes

    def files(kind: str) -> dict[str, list[str]]:
        names = [f"{kind}-{tokens}" for tokens in GRAPH_TOKENS]
        return {"files": [_file(name) for name in names], "sha256": [sums.get(name, "") for name in names]}

    model, shapes = manifest.model, Shapes.of(manifest, neurons)
    shape = shapes.feed_forward
    of_chip = {} if chip is None else {"chip": _chip(chip), "qnn": qnn}
    return {
        "format": FORMAT,
        "version": VERSION,
        **of_chip,
        "width": model.width,
        "neurons": neurons,
        "most_neurons": MAX_PRODUCT_NEURONS,
        "activation": model.activation,
        "scaling": "token" if shapes.by_token else "static",
        "tokens": list(GRAPH_TOKENS),
        "matrices": [
            {
                "rows": rows,
                "columns": columns,
                **files(f"matrix-{rows}x{columns}"),
                "x": _scale(matrix.inputs),
                "y": _scale(matrix.outputs),
            }
            for (rows, columns), matrix in shapes.matrices.items()
        ],
        "feed_forward": {
            **files("feed_forward"),
            "x": _scale(shape.inputs),
            "factor": _scale(Scale.within(1.0, signed=False)),
            "y": _scale(shape.outputs),
            "peaks": [{"name": name, "signed": scale.zero == MIDDLE} for name, scale in shape.peaks.items()],
        },
    }


def _chip(chip: Chip) -> dict[str, Any]:
    return {"soc": chip.soc, "name": chip.name, "arch": chip.arch, "soc_ids": list(chip.soc_ids)}


def _scale(scale: Scale) -> dict[str, Any]:
    return {"step": scale.step, "zero": scale.zero}


class Contexts:
    """The contexts of a chip in a folder, compared with what a model and a runtime need: a call gives that of a graph.

    qnn: the version of the runtime that is here; None: it is not asked.
    Raises UserError, with the command that makes them again, where they are of another version, another chip or another
    runtime, do not fit the model, or are damaged.
    """

    def __init__(self, folder: Path, manifest: Manifest, chip: Chip, neurons: int, qnn: str | None) -> None:
        self._folder = folder
        self._again = f"compile again: `neuronpipe compile PACKAGE --soc {chip.soc}`"
        found = self._read()
        self._compare(found, {"format": FORMAT, "version": VERSION})
        self._compare(found, {"chip": _chip(chip)})
        if qnn is not None and found.get("qnn") != qnn:
            self._fail("qnn", f"{quoted(found.get('qnn'))} prepared these contexts, and {quoted(qnn)} is here")
        self._sums = self._sums_of(found)
        self._compare(found, _index(manifest, neurons, chip, str(found.get("qnn")), self._sums))

    def __call__(self, graph: Graph) -> bytes:
        """The context of this graph."""
        return self._content(graph.name)

    def check_files(self) -> None:
        """That each is there and whole."""
        for name in self._sums:
            self._content(name)

    def _content(self, name: str) -> bytes:
        path = self._folder / _file(name)
        content = read_file(path, MAX_CONTEXT_BYTES)
        if hashlib.sha256(content).hexdigest() != self._sums.get(name):
            raise UserError(f"{path}: does not match its checksum; {self._again}")
        return content

    def _read(self) -> dict[str, Any]:
        path = self._folder / INDEX
        return json_object(read_file(path, MAX_INDEX_BYTES), str(path))

    def _compare(self, found: dict[str, Any], wanted: dict[str, Any]) -> None:
        for name, value in wanted.items():
            if found.get(name) != value:
                self._fail(name, f"{quoted(found.get(name))} does not fit; here it is {quoted(value)}")

    def _fail(self, name: str, problem: str) -> NoReturn:
        raise UserError(f"{self._folder / INDEX}: {safe_name(name)}: {problem}; {self._again}")

    def _sums_of(self, found: dict[str, Any]) -> dict[str, str]:
        """By graph, as the index has them."""
        sums: dict[str, str] = {}
        try:
            for one in (*found["matrices"], found["feed_forward"]):
                for file, checksum in zip(one["files"], one["sha256"], strict=True):
                    sums[file.removesuffix(".onnx")] = checksum
        except (KeyError, TypeError, ValueError, AttributeError):
            self._fail("files", "its checksums are not what they must be")
        return sums


def contexts_for(package: Path, manifest: Manifest, chip: Chip, neurons: int, qnn: str) -> Contexts | None:
    """The contexts of a chip, of graphs for so many neurons; None where none were made. Raises UserError where there
    are some, and none that suits."""
    there = neurons_there(package, chip)
    if there and neurons not in there:
        raise UserError(
            f"{package / FOLDER}: has contexts for {chip.name} of {' and '.join(map(str, there))} neurons, and this "
            f"plan computes {neurons} at once; compile: `neuronpipe compile {package} --soc {chip.soc} --plan FILE`"
        )
    return Contexts(folder_of(package, chip, neurons), manifest, chip, neurons, qnn) if there else None


def suit(folder: Path, manifest: Manifest, chip: Chip, neurons: int, qnn: str) -> bool:
    """Whether all contexts that this model needs are in a folder."""
    try:
        Contexts(folder, manifest, chip, neurons, qnn).check_files()
    except UserError:
        return False
    return True
