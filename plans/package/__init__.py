"""The package: a directory with a converted model, which services read directly from flash."""
