"""Train the demo model: `python -m neuronpipe.plans.lab.demo_training.train OUT [--tokens N] [--device cuda]`.

Needs PyTorch, tokenizers and safetensors (`pip install neuronpipe[train]`). On a CPU, run it under tcmalloc
(`LD_PRELOAD=libtcmalloc_minimal.so.4`): large temporary tensors then stay mapped, which halves the time of a step. The
optimizer is AdamW in bf16 autocast; the learning rate falls linearly to 0 over `--tokens`. A checkpoint is written
every few minutes; the same command continues from it, also with another `--tokens`. OUT becomes a Hugging Face
directory that `neuronpipe convert` reads.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
from neuronpipe.plans.demo.corpus import DOCUMENT_END, documents
from neuronpipe.plans.lab.demo_training.model import DemoModel, Shape
from neuronpipe.plans.lab.demo_training.train_tokenizer import train_tokenizer
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch.nn import functional

PEAK_LEARNING_RATE = 2e-3
WARMUP_TOKENS = 400_000
STEP_TOKENS = 8192
SHORT_WINDOW_TOKENS, SHORT_WINDOW_SHARE = 256, 0.8  # attention over short windows is cheaper
CHECKPOINT_EVERY_S = 240.0
HELD_OUT_TOKENS = 100_000


def tokens_of(out: Path, *, held_out: bool) -> np.ndarray:
    """Return the token ids of the held-out or the training set, uint16. They are cached in OUT, as is the tokenizer."""
    cache = out / ("held_out.npy" if held_out else "train.npy")
    if not cache.exists():
        tokenizer_path = out / "tokenizer.json"
        if not tokenizer_path.exists():
            train_tokenizer(documents(held_out=False)).save(str(tokenizer_path))
        tokenizer = Tokenizer.from_file(str(tokenizer_path))
        end = tokenizer.token_to_id(DOCUMENT_END)
        ids: list[int] = []
        for text in documents(held_out=held_out):
            ids += [end, *tokenizer.encode(text).ids]
        np.save(cache, np.asarray(ids, dtype=np.uint16))
    return np.load(cache)


def held_out_loss(model: DemoModel, ids: np.ndarray, device: str) -> float:
    """Return the mean loss in nats per token over whole contexts."""
    length = model.shape.context_tokens
    windows = torch.from_numpy(ids[: len(ids) // length * length].astype(np.int64)).view(-1, length)
    total = 0.0
    with torch.no_grad(), torch.autocast(device, dtype=torch.bfloat16):
        for window in windows.split(8):
            x = window.to(device)
            logits = model(x[:, :-1]).float()
            total += functional.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten()).item() * len(x)
    return total / len(windows)


def learning_rate(seen_tokens: int, total_tokens: int) -> float:
    """Return the learning rate: linear decay to 0 at `total_tokens`, times a linear warm-up."""
    warm = min(1.0, seen_tokens / WARMUP_TOKENS)
    return PEAK_LEARNING_RATE * warm * max(0.0, 1.0 - seen_tokens / total_tokens)


def window_tokens(seen_tokens: int, total_tokens: int, context_tokens: int) -> int:
    """Return the length of a training window: short at first, the whole context in the last part."""
    return SHORT_WINDOW_TOKENS if seen_tokens < SHORT_WINDOW_SHARE * total_tokens else context_tokens


def train(out: Path, total_tokens: int, device: str) -> None:
    """Train for `total_tokens` in all, continuing from OUT/checkpoint.pt if it exists, and export the model."""
    torch.manual_seed(7)
    shape = Shape()
    train_ids, held_out_ids = tokens_of(out, held_out=False), tokens_of(out, held_out=True)[:HELD_OUT_TOKENS]
    print(f"{len(train_ids):,} training tokens, {len(held_out_ids):,} held-out tokens", flush=True)
    model = DemoModel(shape).to(device)
    decayed = [p for p in model.parameters() if p.dim() == 2]
    plain = [p for p in model.parameters() if p.dim() != 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
    )
    seen_tokens = 0
    checkpoint = out / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        seen_tokens = state["seen_tokens"]
        print(f"continuing at {seen_tokens:,} tokens", flush=True)
    rng = np.random.default_rng(seen_tokens)
    saved_at = logged_at = started_at = time.monotonic()
    start_tokens = seen_tokens
    running_loss = math.nan
    while seen_tokens < total_tokens:
        length = window_tokens(seen_tokens, total_tokens, shape.context_tokens)
        batch = STEP_TOKENS // length
        starts = rng.integers(0, len(train_ids) - length - 1, size=batch)
        window = np.stack([train_ids[s : s + length + 1] for s in starts]).astype(np.int64)
        tokens = torch.from_numpy(window).to(device)
        rate = learning_rate(seen_tokens, total_tokens)
        for group in optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = model(tokens[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seen_tokens += STEP_TOKENS
        running_loss = loss.item() if math.isnan(running_loss) else 0.95 * running_loss + 0.05 * loss.item()
        now = time.monotonic()
        if now - logged_at > 20:
            speed = (seen_tokens - start_tokens) / (now - started_at)
            print(f"{seen_tokens:,} tokens, loss {running_loss:.3f}, lr {rate:.2e}, {speed:.0f} tokens/s", flush=True)
            logged_at = now
        if now - saved_at > CHECKPOINT_EVERY_S or seen_tokens >= total_tokens:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "seen_tokens": seen_tokens}
            torch.save(state, checkpoint.with_suffix(".tmp"))
            checkpoint.with_suffix(".tmp").replace(checkpoint)
            export(model, out)
            print(f"saved at {seen_tokens:,} tokens", flush=True)
            saved_at = now
    loss_nats = held_out_loss(model, held_out_ids, device)
    print(f"held-out loss {loss_nats:.4f}, perplexity {math.exp(loss_nats):.3f}", flush=True)


def export(model: DemoModel, out: Path) -> None:
    tensors = {f"model.{name}": p.detach().float().cpu().contiguous() for name, p in model.named_parameters()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(model.huggingface_config(), indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, help="directory for the checkpoint and the finished model")
    parser.add_argument("--tokens", type=int, default=24_000_000, help="length of the schedule")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    train(arguments.out, arguments.tokens, arguments.device)


if __name__ == "__main__":
    main()
