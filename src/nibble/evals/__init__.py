"""Evals: what a KV scheme costs in quality, measured through the engine as it serves."""
