"""What this machine can and cannot do for neuronpipe: checks.py; its neural processor: npu.py."""
