"""Blocks of neurons on a GPU, by OpenCL: the backend `opencl` of the accelerator."""
