"""The engine: requests, batches, the loop over them, and the Python interface."""

from nibble.threads import fix_products, limit_spinning

# Here, because every engine is imported through this package, and before torch unless a program imported it itself.
limit_spinning()
fix_products()
