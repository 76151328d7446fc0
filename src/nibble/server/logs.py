"""What the server logs, as lines of text or of JSON: one for each exchange, and one for each turn in the engine's life.

Owns the two formats and the line of an exchange. A log record's message is the event's name, its `facts` are what is
known of it. Text of prompts is there only if that was asked for. Must not know when anything happens.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nibble.server.exchange import Exchange

log = logging.getLogger("nibble.server")
BARE = re.compile(r"[^\s\"'=\\\x00-\x1f\x7f-\x9f]+")
"""A value that needs no quotes: no client can begin a line of its own."""
QUIET = ("GET", "HEAD")
"""Methods of what is asked every few seconds: worth a line only in a debug log, unless the client made a mistake."""


def tell(event: str, level: int = logging.INFO, **facts: Any) -> None:
    """Logs an event of the server."""
    log.log(level, event, extra={"facts": facts})


def configure(form: str) -> None:
    """Lets the loggers of Nibble and of uvicorn write to standard error. form: text or json."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Lines(as_json if form == "json" else as_text))
    for name, level in (("nibble", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


class Lines(logging.Formatter):
    """Records as lines."""

    def __init__(self, line: Callable[[Mapping[str, Any]], str]) -> None:
        super().__init__()
        self._line = line

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        about = {"time": f"{moment}.{int(record.msecs):03d}Z", "level": record.levelname.lower()}
        facts: dict[str, Any] = dict(getattr(record, "facts", {}))
        if record.exc_info:
            facts["exception"] = self.formatException(record.exc_info)
        return self._line({**about, "event": record.getMessage(), **facts})


def as_json(told: Mapping[str, Any]) -> str:
    return json.dumps(told, ensure_ascii=False, separators=(",", ":"), default=str)


def as_text(told: Mapping[str, Any]) -> str:
    """`TIME LEVEL EVENT key=value ...`; an exception stands below, as Python shows it."""
    rest = dict(told)
    head = " ".join(str(rest.pop(name)) for name in ("time", "level", "event"))
    below = rest.pop("exception", None)
    line = " ".join((head, *(f"{name}={_shown(value)}" for name, value in rest.items())))
    return f"{line}\n{below}" if below else line


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if BARE.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def plan_in_short(about: Mapping[str, Any]) -> dict[str, Any]:
    """What the engine told of its plan (wire.Ready), in a few words."""
    groups, budget = about.get("groups", ()), about.get("budget", {})
    routes = [group["routes"] for group in groups]
    return {
        "kv_format": ",".join(dict.fromkeys(group["scheme"] for group in groups)),
        "prefill": ",".join(dict.fromkeys(route["prefill"]["backend"] for route in routes)),
        "decode": ",".join(dict.fromkeys(route["decode"]["backend"] for route in routes)),
        "dtype": about.get("dtype"),
        "page_size": about.get("page_size"),
        "cache_tokens": budget.get("tokens"),
        "bytes_per_token": about.get("bytes_per_token"),
        "startup_s": round(sum(about.get("startup", {}).values()), 2),
    }


def decode_costs(about: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What every generated token pays for a backend that cannot read the cache; nothing where all can."""
    return [
        {name: cost[name] for name in ("group", "scheme", "backend", "factor", "words")}
        for cost in about.get("staging", ())
        if cost["phase"] == "decode"
    ]


def access_log(exchange: Exchange, *, texts: bool) -> None:
    """The line of an exchange. texts: with what was asked, prompts and all."""
    quiet = exchange.method in QUIET and not 400 <= exchange.status < 500
    tell("request", logging.DEBUG if quiet else logging.INFO, **facts_of(exchange, texts=texts))


def facts_of(exchange: Exchange, *, texts: bool) -> dict[str, Any]:
    """What is known of an exchange; seconds are counted from its arrival."""
    found: dict[str, Any] = {"id": exchange.id, "method": exchange.method, "path": exchange.path}
    found |= {"status": exchange.status, "total_s": round(exchange.ended - exchange.arrived, 4)}
    if not exchange.operation:
        return found
    timers, first = exchange.timers, exchange.first
    found |= {
        "model": exchange.model,
        "prompt_tokens": sum(timer.prompt for timer in timers),
        "cached_tokens": sum(timer.cached for timer in timers),
        "output_tokens": sum(timer.tokens for timer in timers),
        "queue_s": _after(exchange, max((t.started for t in timers if t.started is not None), default=None)),
        "ttft_s": _after(exchange, first),
        "finish": ",".join(dict.fromkeys(exchange.finish_reasons)) or None,
    }
    return found | ({"request": exchange.asked()} if texts else {})


def _after(exchange: Exchange, moment: float | None) -> float | None:
    return None if moment is None else round(moment - exchange.arrived, 4)
