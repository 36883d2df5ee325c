"""The graphs of a model as files, and contexts: graphs prepared for a chip, from which a session starts at once.

`neuronpipe compile` writes them, by default into the package's folder `npu`:

    graphs-NEURONS/       graphs, for the worker without Python (program/README.md)
    socSOC-NEURONS/       contexts for a chip

NEURONS is the number of neurons of the feed-forward graph; a folder serves all models of one shape. Its `graphs.json`
lists the files, their checksums, and the scales of the integers; it is written last. The runtime silently computes a
damaged context, or one for another chip, so everything is compared before use.
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
"""A function from a graph to the bytes that are stored for it."""


def folder_of(package: Path, chip: Chip | None, neurons: int) -> Path:
    """Return the folder of a package's graphs, or of its contexts for a chip."""
    return package / FOLDER / f"{_kind(chip)}-{neurons}"


def _kind(chip: Chip | None) -> str:
    return "graphs" if chip is None else f"soc{chip.soc}"


def compiled_neurons(package: Path, chip: Chip) -> list[int]:
    """Return the numbers of neurons for which the package has contexts for a chip."""
    prefix = f"{_kind(chip)}-"
    sizes = (path.parent.name.removeprefix(prefix) for path in package.glob(f"{FOLDER}/{prefix}*/{INDEX}"))
    return sorted(int(size) for size in sizes if size.isascii() and size.isdigit())


def model_graphs(manifest: Manifest, neurons: int) -> list[Graph]:
    """Return all graphs that prompts of this model need.

    neurons: the largest product, which decides the ranges and so the numerics
    """
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
    """Write the graphs, each as `prepare` returns it. Raises UserError if a file cannot be written.

    qnn: the version of the library that prepares them for the chip
    """
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
    """Return the content of graphs.json.

    sums: the checksum of each graph's file, "" if it is not known
    """
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
    """The contexts of a chip in a folder, verified against a model and a runtime. A call returns the context of a
    graph.

    qnn: the version of the installed runtime; None to accept any

    Raises UserError, with the command that compiles again, if they are of another version, chip or runtime, or do not
    fit the model.
    """

    def __init__(self, folder: Path, manifest: Manifest, chip: Chip, neurons: int, qnn: str | None) -> None:
        self._folder = folder
        self._again = f"compile again: `neuronpipe compile PACKAGE --soc {chip.soc}`"
        index = self._read()
        self._compare(index, {"format": FORMAT, "version": VERSION})
        self._compare(index, {"chip": _chip(chip)})
        if qnn is not None and index.get("qnn") != qnn:
            self._fail("qnn", f"{quoted(index.get('qnn'))} prepared these contexts, and {quoted(qnn)} is installed")
        self._sums = self._sums_of(index)
        self._compare(index, _index(manifest, neurons, chip, str(index.get("qnn")), self._sums))

    def __call__(self, graph: Graph) -> bytes:
        """Return the context of this graph. Raises UserError if its file is damaged."""
        return self._content(graph.name)

    def check_files(self) -> None:
        """Raise UserError unless every file exists and matches its checksum."""
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

    def _compare(self, index: dict[str, Any], required: dict[str, Any]) -> None:
        for name, value in required.items():
            if index.get(name) != value:
                self._fail(name, f"{quoted(index.get(name))} does not fit; here it is {quoted(value)}")

    def _fail(self, name: str, problem: str) -> NoReturn:
        raise UserError(f"{self._folder / INDEX}: {safe_name(name)}: {problem}; {self._again}")

    def _sums_of(self, index: dict[str, Any]) -> dict[str, str]:
        sums: dict[str, str] = {}
        try:
            for entry in (*index["matrices"], index["feed_forward"]):
                for file, checksum in zip(entry["files"], entry["sha256"], strict=True):
                    sums[file.removesuffix(".onnx")] = checksum
        except (KeyError, TypeError, ValueError, AttributeError):
            self._fail("files", "its checksums are not what they must be")
        return sums


def contexts_for(package: Path, manifest: Manifest, chip: Chip, neurons: int, qnn: str) -> Contexts | None:
    """Return the contexts of a chip for graphs of this many neurons, or None if the package has none for the chip.
    Raises UserError if it has only unsuitable ones."""
    sizes = compiled_neurons(package, chip)
    if sizes and neurons not in sizes:
        raise UserError(
            f"{package / FOLDER}: has contexts for {chip.name} of {' and '.join(map(str, sizes))} neurons, and this "
            f"plan computes {neurons} at once; compile: `neuronpipe compile {package} --soc {chip.soc} --plan FILE`"
        )
    return Contexts(folder_of(package, chip, neurons), manifest, chip, neurons, qnn) if sizes else None


def suit(folder: Path, manifest: Manifest, chip: Chip, neurons: int, qnn: str) -> bool:
    """Return True if the folder has all contexts that this model needs, undamaged."""
    try:
        Contexts(folder, manifest, chip, neurons, qnn).check_files()
    except UserError:
        return False
    return True
