"""Predictors without training: fitted on a calibration text, evaluated on held-out text, written into the package."""
