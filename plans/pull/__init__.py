"""From the name of a model on a hub to a package of that name."""
