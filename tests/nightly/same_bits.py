"""Compare the tokens and logits of packages with those of another checkout, bit for bit.

    python tests/nightly/same_bits.py BEFORE [PACKAGE...]     (default: the demo)

BEFORE is a checkout of an earlier commit, set up (`git worktree add /tmp/before COMMIT && /tmp/before/launch/neuronpipe
--version`). Both must read the packages' version, and its `perplexity` must have the option `-o`. Each package is
compared in each of its modes, resident and with half of its neurons resident, by decode and by prefill. The exit status
is 1 if anything differs.
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

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "plans" / "demo" / "package"
TEXT = "def total(prices, tax=0.2):\n    return sum(price * (1 + tax) for price in prices)\n" * 4
LOGITS_TOKENS, TEXT_TOKENS = 96, 64


def neuronpipe(checkout: Path, *words: str | Path) -> str:
    """Return the output of a command of a checkout. If the command fails, exit with its errors."""
    done = subprocess.run([checkout / "launch" / "neuronpipe", *words], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout


def text_for(package: Path) -> str:
    """Return a text that the package's tokenizer can encode; for a synthetic package, tokens of a trajectory."""
    presets = json.loads(neuronpipe(ROOT, "inspect", package, "--json"))["workload"]
    if presets is None:
        return TEXT
    name = next(iter(presets["presets"]))
    return " ".join(f"{name}{number}" for number in range(4 * LOGITS_TOKENS))


def settings(package: Path) -> list[tuple[str, ...]]:
    """Return the options of the plans to compare: each mode with memory for all neurons, and for half of them."""
    fields = json.loads(neuronpipe(ROOT, "inspect", package, "--json"))
    needs = {"exact": "id", "predicted": "predictor", "thresholded": "silent"}
    options: list[tuple[str, ...]] = []
    for mode in (mode for mode, field in needs.items() if fields[field] is not None):
        memory = json.loads(neuronpipe(ROOT, "plan", package, "--mode", mode, "--json"))["memory"]
        half = memory["least_bytes"] + memory["ffn_bytes"] // 2
        options += [("--mode", mode), ("--mode", mode, "--memory", str(half))]
    return options


def logits(checkout: Path, package: Path, text: Path, path: str, options: tuple[str, ...]) -> str:
    """Return the SHA-256 of the logits of a text."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "logits.npy"
        limits = ("--tokens", str(LOGITS_TOKENS), "--json")
        neuronpipe(checkout, "perplexity", package, "--text", text, "--path", path, "-o", out, *limits, *options)
        return hashlib.sha256(out.read_bytes()).hexdigest()


def tokens(checkout: Path, package: Path, text: str, options: tuple[str, ...]) -> str:
    """Return the tokens generated after the beginning of a text."""
    prompt = text[:40].rpartition(" ")[0]
    answer = json.loads(neuronpipe(checkout, "run", package, "-p", prompt, "-n", str(TEXT_TOKENS), "--json", *options))
    return json.dumps(answer["token_ids"])


def compare(before: Path, package: Path) -> int:
    """Compare and print all cases of a package. Return the number of those that differ."""
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
                for checkout in (before, ROOT)
            )
            wrong += then != now
            print(f"{'same' if then == now else 'DIFFERS'}  {package.name} {' '.join(options)} {path}", flush=True)
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("packages", type=Path, nargs="*", default=[DEMO])
    arguments = parser.parse_args()
    sys.exit(sum(compare(arguments.before, package) for package in arguments.packages) > 0)


if __name__ == "__main__":
    main()
