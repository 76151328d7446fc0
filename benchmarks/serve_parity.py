"""Does the load test's client say what the server counted? GuideLLM's report against /metrics.

    nibble serve demo --kv-format nvfp4
    python benchmarks/serve_parity.py [URL] [options of nibble bench serve]

Runs `nibble bench serve` and reads the server's metrics before and after, so nothing else may use the server meanwhile.
Counts of requests and tokens must be equal. Latencies are shown side by side: the client's time to the first token is
longer by what HTTP takes, since the server's clock starts when it has read a request. GuideLLM's ITL is the time per
token after the first, which the server calls request_time_per_output_token.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from report import markdown

COUNTS = ("requests", "prompt tokens", "output tokens")
SETTLE_S = 1.0
"""A request's metrics may be written just after its client has read the end."""


def scrape(url: str) -> dict[str, float]:
    """Return Nibble's metrics by name; values that differ in labels only are added up."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        families = text_string_to_metric_families(response.read().decode())
    totals: dict[str, float] = {}
    for sample in (sample for family in families for sample in family.samples):
        name = sample.name.removeprefix("nibble:")
        totals[name] = totals.get(name, 0.0) + sample.value
    return totals


def server_figures(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return what a server counted between two scrapes. Latencies: means, in ms."""
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}

    def mean_ms(name: str) -> float:
        return 1000 * grown[f"{name}_seconds_sum"] / max(grown[f"{name}_seconds_count"], 1)

    return {
        "requests": grown["request_success_total"],
        "prompt tokens": grown["prompt_tokens_total"],
        "output tokens": grown["generation_tokens_total"],
        "TTFT": mean_ms("time_to_first_token"),
        "TPOT": mean_ms("request_time_per_output_token"),
    }


def client_figures(report: Mapping[str, Any]) -> dict[str, float]:
    """Return the same figures of a GuideLLM report, over all of its benchmarks."""
    requests = [request for entry in report["benchmarks"] for request in entry["requests"]["successful"]]

    def mean(name: str) -> float:
        values = [request[name] for request in requests if request[name] is not None]
        return sum(values) / max(len(values), 1)

    return {
        "requests": len(requests),
        "prompt tokens": sum(request["prompt_tokens"] for request in requests),
        "output tokens": sum(request["output_tokens"] for request in requests),
        "TTFT": mean("time_to_first_token_ms"),
        "TPOT": mean("inter_token_latency_ms"),
    }


def table(client: Mapping[str, float], server: Mapping[str, float]) -> str:
    """Return both sides as Markdown, means in ms."""
    rows = [
        (
            name,
            *(
                f"{side[name]:,.0f}" if name in COUNTS else f"{side[name]:.1f} ms"
                for side in (client, server)
            ),
        )
        for name in client
    ]
    return markdown(("", "GuideLLM", "/metrics"), rows)


def main(words: Sequence[str]) -> None:
    """Run a load test and compare; exit with 1 where a count differs."""
    url, options = (words[0], words[1:]) if words and not words[0].startswith("-") else ("", words)
    url = (url or "http://localhost:8000").rstrip("/")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "guidellm.json"
        before = scrape(url)
        command = [sys.executable, "-m", "nibble", "bench", "serve", url, "--json", str(path), *options]
        subprocess.run(command, check=True)
        time.sleep(SETTLE_S)
        client, server = client_figures(json.loads(path.read_text())), server_figures(before, scrape(url))
    print(table(client, server))
    if any(client[name] != server[name] for name in COUNTS):
        raise SystemExit("the client and the server do not count the same")


if __name__ == "__main__":
    main(sys.argv[1:])
