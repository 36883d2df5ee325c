"""Profiles of a device, as text (text_report.py) and as curves (picture.py); of a package, recorded by a run
(activity.py) or measured for neural processors (npu.py)."""
