"""The server under a crowd: many streams at once, clients that go away, requests that cannot be served.

    python benchmarks/serve_soak.py [--clients 256] [--seconds 60] [--disconnects 1000] [--model demo] [--tiny]

Starts `nibble serve`, learns what each prompt is answered alone, and then lets all clients ask again and again, with
random disconnects, aborts and oversize requests in between. Holds, or says what does not: no answer differs from its
solo run, no error but those provoked, memory of both processes stays flat, and in the end no page is held.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

OPTIONS = ("--kv-format", "nvfp4", "--kv-memory", "256MiB", "--max-running", "64", "--max-queue", "4096")
PROMPTS = 32


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def server(model: str, options: Sequence[str] = OPTIONS) -> Iterator[tuple[str, int]]:
    """Address and process id."""
    port = free_port()
    command = [sys.executable, "-m", "nibble", "serve", model, "--port", str(port), *options]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    url = f"http://127.0.0.1:{port}"
    try:
        while process.poll() is None:
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.2)
        yield url, process.pid
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    finally:
        process.kill()


def asked(number: int) -> dict[str, Any]:
    """Request `number`: some share a beginning, some are sampled with a seed of their own."""
    kind = number % PROMPTS
    prompt = f"# file {kind % 5}\nimport os\nimport sys\n\ndef function_{kind}(x):\n    return"
    sampled = {"temperature": 0.9, "seed": kind} if kind % 2 else {"temperature": 0}
    return {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": 12 + kind,
        "stream": True,
        "ignore_eos": True,
        **sampled,
    }


async def answer(
    client: httpx.AsyncClient,
    body: dict[str, Any],
    give_up: int | None = None,
    piece: Callable[[], None] = lambda: None,
) -> str | None:
    """The text of a stream; None where it was given up after some chunks. piece: called at each."""
    text, chunks = "", 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            return f"status {response.status_code}"
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return text
            if line:
                found = json.loads(line.removeprefix("data: "))
                piece()
                if "error" in found:
                    return f"error {found['error']['message']}"
                text += found["choices"][0]["text"]
                chunks += 1
                if give_up is not None and chunks >= give_up:
                    return None
    return "cut short"


class Soak:
    """What is counted while clients ask."""

    def __init__(self, expected: list[str | None], seconds: float, disconnects: int) -> None:
        self.expected, self.end = expected, time.monotonic() + seconds
        self.left, self.count, self.wrong = disconnects, Counter[str](), list[str]()

    async def ask(self, client: httpx.AsyncClient, dice: random.Random) -> None:
        while time.monotonic() < self.end or self.left > 0:
            number, how = dice.randrange(PROMPTS), dice.random()
            if how < 0.4 and self.left > 0:
                self.left -= 1
                await self.provoke(client, number, dice)
                continue
            found = await answer(client, asked(number))
            self.count["answers"] += 1
            if found != self.expected[number]:
                self.wrong.append(f"prompt {number}: {found!r} and not {self.expected[number]!r}")

    async def provoke(self, client: httpx.AsyncClient, number: int, dice: random.Random) -> None:
        kind = dice.choice(["gone", "gone", "cancelled", "oversize", "malformed"])
        self.count[kind] += 1
        if kind == "gone":
            await answer(client, asked(number), give_up=dice.randrange(1, 6))
        elif kind == "cancelled":
            task = asyncio.create_task(answer(client, {**asked(number), "stream": False, "max_tokens": 400}))
            await asyncio.sleep(dice.random())
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        else:
            body = {**asked(number), "prompt": "x = 1\n" * 9000} if kind == "oversize" else {"model": "demo"}
            if await answer(client, body) != "status 400":
                self.wrong.append(f"{kind} was not refused")


async def run(url: str, pid: int, options: argparse.Namespace) -> list[str]:
    """What does not hold."""
    limits = httpx.Limits(max_connections=options.clients + 8)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        expected = [await answer(client, asked(number)) for number in range(PROMPTS)]
        memory = [resident(pid)]
        soak = Soak(expected, options.seconds, options.disconnects)
        crowd = [soak.ask(client, random.Random(i)) for i in range(options.clients)]
        sampler = asyncio.create_task(watch(pid, memory))
        await asyncio.gather(*crowd)
        sampler.cancel()
        print(f"{dict(soak.count)}; resident MiB {memory[0]} -> {memory[len(memory) // 2]} -> {memory[-1]}")
        return [*soak.wrong[:10], *await settled(client), *grown(memory)]


async def settled(client: httpx.AsyncClient) -> list[str]:
    """Whether all pages come free."""
    for _ in range(100):
        health = (await client.get("/health")).json()
        if not health["open"] and not health["running"] and not health["held_pages"]:
            return []
        await asyncio.sleep(0.1)
    return [f"requests or pages are left: {health}"]


def grown(memory: list[int]) -> list[str]:
    """Once it is warm, memory stays: the last third against the second."""
    third = max(len(memory) // 3, 1)
    before, after = max(memory[third : 2 * third] or memory), max(memory[2 * third :] or memory)
    return [f"memory grew from {before} to {after} MiB"] if after > 1.1 * before + 16 else []


def resident(pid: int) -> int:
    """MiB of a process and its children."""
    children = subprocess.run(
        ["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False
    ).stdout.split()
    pages = sum(int(Path(f"/proc/{p}/statm").read_text().split()[1]) for p in (str(pid), *children))
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


async def watch(pid: int, memory: list[int]) -> None:
    while True:
        await asyncio.sleep(1)
        memory.append(resident(pid))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--disconnects", type=int, default=1000)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tiny", action="store_true", help="few clients, to try the benchmark itself")
    options = parser.parse_args()
    if options.tiny:
        options.clients, options.seconds, options.disconnects = 8, 3, 20
    with server(options.model) as (url, pid):
        wrong = asyncio.run(run(url, pid, options))
    print("\n".join(wrong) or "all holds")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
