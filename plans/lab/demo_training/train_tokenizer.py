"""Training of the demo model's tokenizer: byte-level BPE of 4,096 tokens, without a begin token."""

from __future__ import annotations

from collections.abc import Iterable

from neuronpipe.plans.demo.corpus import DOCUMENT_END
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 4096


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Return a tokenizer with merges from `texts`. Whitespace is not changed, since Python needs indentation."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[DOCUMENT_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
