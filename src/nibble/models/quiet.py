"""Keeps Transformers' chatter off the user's terminal, and shortens its errors.

Its progress bars and load reports are replaced by our own errors, which say the same in one line; what else
it warns of is passed on. Owns quiet() and first_line(). Must not know of models.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging as transformers_logging

_REPORT = "LOAD REPORT"
_LOUD = ("transformers.modeling_utils", "transformers.utils.loading_report")


def _no_report(record: logging.LogRecord) -> bool:
    return _REPORT not in record.getMessage()


@contextmanager
def quiet() -> Iterator[None]:
    """Without progress bars and load reports, which models/checkpoint.py turns into errors."""
    bars = transformers_logging.is_progress_bar_enabled()
    loggers = [logging.getLogger(name) for name in _LOUD]
    transformers_logging.disable_progress_bar()
    for logger in loggers:
        logger.addFilter(_no_report)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(_no_report)
        if bars:
            transformers_logging.enable_progress_bar()


def first_line(error: BaseException) -> str:
    """The first line of an error's text; a KeyError's text is only the key."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
