"""The verbs by group. Each module declares its arguments in `add_arguments` and does its work in `main`."""
