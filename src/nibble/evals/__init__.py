"""Evals: what a KV scheme costs in quality, measured through the engine as it serves.

Owns perplexity, recall, agreement, attention error, and the report of them. Must not know of the terminal.
"""
