"""The package: a converted model as a directory that services read straight from flash."""
