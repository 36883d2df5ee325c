"""Tests of accelerators need an OpenCL device. Where there is none they are skipped, but not on a build machine."""

from __future__ import annotations

import os

import pytest


def require_opencl() -> None:
    """Skip the test, or the whole module that asks, without pyopencl or a device."""
    pytest.importorskip("pyopencl", reason="the extra [gpu] is not installed")
    import pyopencl

    try:
        there = any(platform.get_devices() for platform in pyopencl.get_platforms())
    except pyopencl.Error:  # no driver at all
        there = False
    if not there and os.environ.get("CI") != "true":
        pytest.skip("there is no OpenCL device", allow_module_level=True)
