"""Readers of GGUF files: headers, models in parts, tokenizers, and PowerInfer's variant."""
