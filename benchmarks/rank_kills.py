"""A server whose model is divided among processes, of which one is killed or frozen under load, again and again.

    python benchmarks/rank_kills.py [--times 20] [--streams 32] [--tp 2] [--signal kill] [--model demo] [--limit 1.0]

Starts `nibble serve --tp N`. Each time it opens as many streams, waits for a random moment, sends the signal to a
random rank (0 is the engine's own process), and measures until the last stream has ended with an error, and until the
server is ready again. Holds, or says what does not: every stream ends with an error event within --limit seconds (a
frozen process is noticed later: `--signal stop --limit 15`), which names the rank and the cause; the next answer is
right; no process is left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from serve_soak import server

PATIENCE_S = 180.0
ASKED: dict[str, Any] = {"model": "demo", "prompt": "import os\n", "temperature": 0, "ignore_eos": True}
CAUSES = {"kill": "was killed by signal 9", "stop": "is stopped"}


@dataclass(frozen=True, slots=True)
class End:
    """How a stream ended: when, by time.monotonic(), and with which error."""

    at: float
    error: str


def children(pid: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False)
    return list(map(int, found.stdout.split()))


def ranks_of(server_pid: int) -> dict[int, int]:
    """Processes of the ranks."""
    (engine,) = children(server_pid)
    ranks = {0: engine}
    for pid in children(engine):
        arguments = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        if "nibble.engine.rank" in arguments:
            ranks[int(arguments[-3])] = pid
    return ranks


async def stream(client: httpx.AsyncClient, number: int, count: list[int]) -> End:
    """Read a stream to its end, and count it once it has begun."""
    body = {**ASKED, "prompt": f"# {number}\nimport os\n", "max_tokens": 3000, "stream": True}
    error, begun = "no error event", False
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    error = event["error"]["message"]
                elif not begun:
                    begun = True
                    count.append(number)
    except httpx.HTTPError as failure:
        error = repr(failure)
    return End(time.monotonic(), error)


async def ready(client: httpx.AsyncClient) -> None:
    while (await client.get("/health")).status_code != 200:
        await asyncio.sleep(0.05)


async def answer(client: httpx.AsyncClient) -> str:
    response = await client.post("/v1/completions", json={**ASKED, "max_tokens": 16})
    return response.json()["choices"][0]["text"] if response.status_code == 200 else response.text


def left(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


async def once(
    client: httpx.AsyncClient, options: argparse.Namespace, pid: int, expected: str, number: int
) -> tuple[float, list[str]]:
    """Kill once; return how long the last stream took to end, and what does not hold."""
    ranks = ranks_of(pid)
    wrong = [] if len(ranks) == options.tp else [f"there are {len(ranks)} ranks"]
    count = list[int]()
    tasks = [asyncio.create_task(stream(client, i, count)) for i in range(options.streams)]
    while len(count) < options.streams and not any(task.done() for task in tasks):
        await asyncio.sleep(0.01)
    await asyncio.sleep(random.random())
    wrong += ["a stream ended before the signal"] if any(task.done() for task in tasks) else []
    rank = random.choice(sorted(ranks))
    os.kill(ranks[rank], getattr(signal, f"SIG{options.signal.upper()}"))
    killed = time.monotonic()
    async with asyncio.timeout(PATIENCE_S):
        ends = await asyncio.gather(*tasks)
        waits = [end.at - killed for end in ends]
        await ready(client)
        until_ready = time.monotonic() - killed
    cause = re.compile(rf"rank {rank} of {options.tp}\b.*{CAUSES[options.signal]}")
    wrong += sorted({f"error: {end.error}" for end in ends if not cause.search(end.error)})
    wrong += [f"a stream ended after {max(waits):.2f} s"] if max(waits) > options.limit else []
    wrong += [f"processes are left: {pids}"] if (pids := left(list(ranks.values()))) else []
    if (text := await answer(client)) != expected:
        wrong.append(f"the next answer is {text!r} and not {expected!r}")
    print(
        f"{number:3} | {rank:4} | {statistics.median(waits):8.3f} | {max(waits):7.3f} | {until_ready:7.1f} | "
        f"{'; '.join(wrong) or 'holds'}",
        flush=True,
    )
    return max(waits), wrong


async def run(url: str, pid: int, options: argparse.Namespace) -> list[str]:
    limits = httpx.Limits(max_connections=options.streams + 4)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits) as client:
        expected = await answer(client)
        print("  # | rank | median s |  last s | ready s |", flush=True)
        rounds = [await once(client, options, pid, expected, i + 1) for i in range(options.times)]
        print(
            f"{options.times} times, {options.streams} streams: the last stream ended after "
            f"{max(longest for longest, _ in rounds):.3f} s at most"
        )
        return [what for _, wrong in rounds for what in wrong]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--signal", choices=CAUSES, default="kill")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--limit", type=float, default=1.0, help="seconds until every stream has ended")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random.seed(options.seed)
    ASKED["model"] = options.model
    serving = ("--kv-format", "bf16", "--kv-memory", "256MiB", "--max-running", str(options.streams))
    with server(options.model, (*serving, "--tp", str(options.tp))) as (url, pid):
        wrong = asyncio.run(run(url, pid, options))
    print("\n".join(wrong) or "all holds")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
