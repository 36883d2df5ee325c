"""The supervisor process of a run: starting it, its work, and its control socket."""
