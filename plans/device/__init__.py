"""The device profile: what this machine is and may do (probe.py), and who runs on which core (cores.py)."""
