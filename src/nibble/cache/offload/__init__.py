"""The host tier of a cache: which pages are on the device, hot buffers, and the pool in host memory."""
