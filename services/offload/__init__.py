"""Experimental backends that compute on an accelerator: offloaded blocks on a GPU, prompts and blocks on an NPU."""
