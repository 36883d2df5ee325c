"""The wire: messages, links, codec, channels, the run directory and the shared segments. SPEC.md specifies them."""
