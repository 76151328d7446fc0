"""The engine: requests, batches, the loop over them, and the Python interface."""
