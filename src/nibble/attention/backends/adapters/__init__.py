"""The adapters that call each backend's kernels, one file a backend. Loaded by name, with torch."""
