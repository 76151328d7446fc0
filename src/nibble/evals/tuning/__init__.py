"""Time the attention backends of a model on this machine."""
