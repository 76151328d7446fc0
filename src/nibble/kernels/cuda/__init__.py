"""CUDA C++ kernels, compiled at first use by NVRTC: no compiler is needed on the user's machine, only cuda-bindings."""
