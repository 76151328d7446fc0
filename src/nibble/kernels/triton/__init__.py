"""Triton twins of the operations one level up. Imported only where triton is installed."""
