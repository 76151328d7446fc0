"""What a server says of itself, as `nibble top` asks for it: /metrics and /v1/plan.

Owns Server and Scrape. Must not know how the server counts, nor how it is shown.
"""

from __future__ import annotations

import http.client
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nibble.errors import ConfigError, NibbleError

TIMEOUT_S = 5.0
LOCAL = ("localhost", "127.0.0.1", "[::1]")
APART = ("state", "finished_reason", "layer")
"""Labels that tell numbers of one name apart; over others they are added up."""


class Server:
    """What a server says of itself."""

    def __init__(self, url: str, key: str | None) -> None:
        self.url = (url if "://" in url else f"http://{url}").rstrip("/")
        sound = re.fullmatch(r"https?://([\w.-]+|\[[\da-f:.]+\])(:\d+)?(/\S*)?", self.url)
        if not sound:
            raise ConfigError(f"{url!r} is not the address of a server; write it as http://localhost:8000")
        self._key = key
        own = [urllib.request.ProxyHandler({})] if sound[1] in LOCAL else []
        self._opener = urllib.request.build_opener(*own)
        self._plan: dict[str, Any] = {}

    def look(self) -> Scrape:
        """Its metrics now; raises NibbleError where there are none."""
        found = Scrape.of(self._get("/metrics"), time.monotonic())
        if not found.values:
            raise NibbleError(f"{self.url}/metrics has no metrics of a nibble server")
        return found

    def plan(self) -> dict[str, Any]:
        """What it serves; empty while it does not say. Asked for until it is known, for it does not change."""
        if not self._plan:
            try:
                self._plan = json.loads(self._get("/v1/plan"))
            except (NibbleError, ValueError):
                return {}
        return self._plan

    def _get(self, path: str) -> str:
        request = urllib.request.Request(self.url + path)
        if self._key:
            request.add_unredirected_header("Authorization", f"Bearer {self._key}")
        try:
            with self._opener.open(request, timeout=TIMEOUT_S) as response:
                return str(response.read().decode())
        except urllib.error.HTTPError as error:
            with error:
                raise NibbleError(f"{self.url}{path} says {error.code}: {_said(error)}") from None
        except urllib.error.URLError as error:
            raise NibbleError(f"cannot reach {self.url}: {error.reason}") from None
        except (OSError, http.client.HTTPException, UnicodeDecodeError) as error:
            raise NibbleError(f"cannot read {self.url}{path}: {error}") from None


def _said(error: urllib.error.HTTPError) -> str:
    """The message of an error in OpenAI's shape; of another, its status in words."""
    try:
        return str(json.loads(error.read())["error"]["message"])
    except (ValueError, KeyError, TypeError, OSError):
        return str(error.reason)


Buckets = dict[float, float]
"""Of a histogram: bound -> how many were at most that."""


@dataclass(frozen=True, slots=True)
class Scrape:
    """Metrics at a time. values: by name, and by `name.state` where a label tells several apart."""

    time: float
    values: Mapping[str, float]
    histograms: Mapping[str, Buckets]

    @classmethod
    def of(cls, text: str, now: float) -> Scrape:
        from prometheus_client.parser import text_string_to_metric_families

        values: dict[str, float] = {}
        histograms: dict[str, Buckets] = {}
        try:
            families = list(text_string_to_metric_families(text))
        except ValueError as error:
            raise NibbleError(f"what the server says of its metrics cannot be read: {error}") from None
        for sample in (sample for family in families for sample in family.samples):
            if not sample.name.startswith("nibble:"):
                continue
            name = sample.name.removeprefix("nibble:")
            if "le" in sample.labels:
                buckets = histograms.setdefault(name.removesuffix("_bucket"), {})
                bound = float(sample.labels["le"])
                buckets[bound] = buckets.get(bound, 0.0) + sample.value
            else:
                told = next((sample.labels[label] for label in APART if label in sample.labels), None)
                key = f"{name}.{told}" if told else name
                values[key] = values.get(key, 0.0) + sample.value
        return cls(now, values, histograms)
