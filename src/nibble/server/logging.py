"""The log's two formats, text and JSON. A record's message is the event's name; its `facts` are what is known of it."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

log = logging.getLogger("nibble.server")
BARE = re.compile(r"[^\s\"'=\\\x00-\x1f\x7f-\x9f]+")
"""A value that needs no quotes. Others are quoted, so no client can begin a line of its own."""


def log_event(event: str, level: int = logging.INFO, **facts: Any) -> None:
    """Log an event of the server."""
    log.log(level, event, extra={"facts": facts})


def configure(log_format: str) -> None:
    """Let the loggers of Nibble and of uvicorn write to standard error, as text or json."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(as_json if log_format == "json" else as_text))
    for name, level in (("nibble", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        # Without propagation no handler of the root writes a line a second time.
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


class LineFormatter(logging.Formatter):
    """Records as lines, by a function from facts to text."""

    def __init__(self, line: Callable[[Mapping[str, Any]], str]) -> None:
        super().__init__()
        self._line = line

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record; its exception is one of the facts."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        head = {"time": f"{moment}.{int(record.msecs):03d}Z", "level": record.levelname.lower()}
        facts: dict[str, Any] = dict(getattr(record, "facts", {}))
        if record.exc_info:
            facts["exception"] = self.formatException(record.exc_info)
        return self._line({**head, "event": record.getMessage(), **facts})


def as_json(facts: Mapping[str, Any]) -> str:
    """Return one JSON object."""
    return json.dumps(facts, ensure_ascii=False, separators=(",", ":"), default=str)


def as_text(facts: Mapping[str, Any]) -> str:
    """Return `TIME LEVEL EVENT key=value ...`; an exception stands below, as Python shows it."""
    rest = dict(facts)
    # These have no spaces and the same place in each line, so they need no names.
    head = " ".join(str(rest.pop(name)) for name in ("time", "level", "event"))
    exception = rest.pop("exception", None)
    line = " ".join((head, *(f"{name}={_quoted(value)}" for name, value in rest.items())))
    return f"{line}\n{exception}" if exception else line


def _quoted(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if BARE.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def plan_summary(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the few facts of an engine's plan (as in its Ready message) that are logged when it is ready."""
    groups, budget = about.get("groups", ()), about.get("budget", {})
    routes = [group["routes"] for group in groups]
    return {
        "kv_format": ",".join(dict.fromkeys(group["scheme"] for group in groups)),
        "scheme": about.get("meaning") or None,
        "prefill": ",".join(dict.fromkeys(route["prefill"]["backend"] for route in routes)),
        "decode": ",".join(dict.fromkeys(route["decode"]["backend"] for route in routes)),
        "dtype": about.get("dtype"),
        "page_size": about.get("page_size"),
        "cache_tokens": budget.get("tokens"),
        "bytes_per_token": about.get("bytes_per_token"),
        "startup_s": round(sum(about.get("startup", {}).values()), 2),
        "note": about.get("kv_scales"),
    }


def decode_costs(about: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what every generated token costs with a backend that cannot read the cache; [] where all can."""
    return [
        {name: cost[name] for name in ("group", "scheme", "backend", "factor", "words")}
        for cost in about.get("staging", ())
        if cost["phase"] == "decode"
    ]
