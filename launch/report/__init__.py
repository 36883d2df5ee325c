"""Benchmark reports to share: the document, what it says of the device, and its Markdown."""
