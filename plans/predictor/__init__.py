"""Training-free predictors: fitted from a calibration text, judged on another, written into the package."""
