"""Options that several verbs share, and what they are when they are not typed."""
