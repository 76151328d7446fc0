"""Python's garbage collection, paused where millions of objects are made that stay, and kept from them where it serves.

Importing torch and Transformers, and compiling a model, make so many that the collector walks all of them again and
again, and finds little. It is a seventh of the time of imports, and a tenth of that of compiling.
"""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


def freeze_gc() -> None:
    """Leave all objects that there are out of garbage collection, of a process that has them until it ends.

    A collection of the oldest objects walks through a million of them, some 0.3 to 0.9 s in which no answer goes on.
    """
    gc.collect()
    gc.freeze()
    # Or libraries complain at the end of the process of objects that are left.
    atexit.register(gc.unfreeze)


@contextmanager
def pause_gc() -> Iterator[None]:
    """Run the body without garbage collection, and leave what it made to collections of the oldest objects.

    Where the caller has paused it already, nothing is changed. Other threads of the process do without it meanwhile.
    """
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        # Moves new objects to the oldest generation: the next collection of the youngest would walk all of them.
        # Not where the host has frozen objects, which unfreeze() would return to the collector.
        if is_enabled and not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()
        if is_enabled:
            gc.enable()
