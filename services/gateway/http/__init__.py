"""The HTTP server: access control, request bodies, memory account, metrics and errors."""
