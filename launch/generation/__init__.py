"""Generating text with a run: options and prompt of a request, the stream of its tokens, the output of the answer."""
