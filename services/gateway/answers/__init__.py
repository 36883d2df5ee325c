"""Parsing of completions: reasoning, text and function calls, without sockets and clock."""
