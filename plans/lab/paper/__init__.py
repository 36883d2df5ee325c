"""The figures of the PowerInfer-2 paper, simulated."""
