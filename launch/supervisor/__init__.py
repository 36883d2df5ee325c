"""The process above a run: how it is started, what it does, and how it is asked to do something."""
