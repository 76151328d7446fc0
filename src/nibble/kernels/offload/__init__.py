"""Kernels that move tokens between the device and the host, and look up hot buffers."""
