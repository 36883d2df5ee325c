"""Every bit as in another checkout: tokens and logits of packages in each of their modes, in memory and half resident.

    python tests/nightly/same_bits.py BEFORE [PACKAGE...]     (default: the demo)

BEFORE is a checkout of an earlier commit, set up (`git worktree add /tmp/before COMMIT && /tmp/before/launch/neuronpipe
--version`). Packages must be of a version that both read, and its `perplexity` must know `-o`. Logits come from the
decode path and from prefill. Ends with 1 where anything differs.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
DEMO = CHECKOUT / "plans" / "demo" / "package"
TEXT = "def total(prices, tax=0.2):\n    return sum(price * (1 + tax) for price in prices)\n" * 4
LOGITS_TOKENS, TEXT_TOKENS = 96, 64


def neuronpipe(checkout: Path, *words: str | Path) -> str:
    """What a command of a checkout prints. Ends all with its errors where it fails."""
    done = subprocess.run([checkout / "launch" / "neuronpipe", *words], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout


def text_for(package: Path) -> str:
    """A text that the package's tokenizer knows: a trajectory's tokens where it is synthetic."""
    presets = json.loads(neuronpipe(CHECKOUT, "inspect", package, "--json"))["workload"]
    if presets is None:
        return TEXT
    name = next(iter(presets["presets"]))
    return " ".join(f"{name}{number}" for number in range(4 * LOGITS_TOKENS))


def settings(package: Path) -> list[tuple[str, ...]]:
    """Options of the plans to compare: each mode with memory for everything, and for half of the neurons."""
    found_in = json.loads(neuronpipe(CHECKOUT, "inspect", package, "--json"))
    needs = {"exact": "id", "predicted": "predictor", "thresholded": "silent"}
    option_sets = []
    for mode in (mode for mode, field in needs.items() if found_in[field] is not None):
        memory = json.loads(neuronpipe(CHECKOUT, "plan", package, "--mode", mode, "--json"))["memory"]
        half = memory["least_bytes"] + memory["ffn_bytes"] // 2
        option_sets += [("--mode", mode), ("--mode", mode, "--memory", str(half))]
    return option_sets


def logits(checkout: Path, package: Path, text: Path, path: str, options: tuple[str, ...]) -> str:
    """SHA-256 of the logits of a text."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "logits.npy"
        limits = ("--tokens", str(LOGITS_TOKENS), "--json")
        neuronpipe(checkout, "perplexity", package, "--text", text, "--path", path, "-o", out, *limits, *options)
        return hashlib.sha256(out.read_bytes()).hexdigest()


def tokens(checkout: Path, package: Path, text: str, options: tuple[str, ...]) -> str:
    """The tokens of a text that goes on from the beginning of another."""
    prompt = text[:40].rpartition(" ")[0]
    said = json.loads(neuronpipe(checkout, "run", package, "-p", prompt, "-n", str(TEXT_TOKENS), "--json", *options))
    return json.dumps(said["token_ids"])


def compare(before: Path, package: Path) -> int:
    """The number of cases that differ, each told."""
    text = text_for(package)
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "text.txt"
        file.write_text(text)
        for options, path in itertools.product(settings(package), ("decode", "prefill", "tokens")):
            then, now = (
                tokens(checkout, package, text, options)
                if path == "tokens"
                else logits(checkout, package, file, path, options)
                for checkout in (before, CHECKOUT)
            )
            wrong += then != now
            print(f"{'same' if then == now else 'DIFFERS'}  {package.name} {' '.join(options)} {path}", flush=True)
    return wrong


def main() -> None:
    """Compare tokens and logits of all packages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("packages", type=Path, nargs="*", default=[DEMO])
    arguments = parser.parse_args()
    sys.exit(sum(compare(arguments.before, package) for package in arguments.packages) > 0)


if __name__ == "__main__":
    main()
