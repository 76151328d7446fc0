"""The adapter to Transformers: config, geometry, weights, KV scales and the attention function."""
