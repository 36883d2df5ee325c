"""The work of `profile device` (steps.py, accelerator.py, text_report.py, picture.py) and of `profile` with --activity
(activity.py) and --npu (npu.py)."""
