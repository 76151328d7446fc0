"""Codecs of the cache formats for kernels: Triton encoders and decoders, and CUDA traits."""
