"""Chat templates, rendered in helper processes, and the call formats that are detected in them."""
