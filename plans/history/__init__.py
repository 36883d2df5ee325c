"""The history of a package on a device: what its runs counted and measured, for the next plan."""
