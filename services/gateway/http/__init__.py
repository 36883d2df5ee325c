"""The HTTP server: access, request bodies, memory account, metrics and errors."""
