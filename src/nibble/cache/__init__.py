"""The KV cache: pages and who holds them, the prefix tree, and the bytes."""
