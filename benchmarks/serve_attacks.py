"""The server under attack: malformed, hostile and huge requests while eight ordinary streams go on.

    python benchmarks/serve_attacks.py [--only WORD] [--model demo] [--stall 1.0]

Each attack runs in a process of its own, over a plain socket, so that nothing tidies up what it sends. Holds, or says
what does not: every ordinary stream is what it is alone, no attack is answered with a 5xx, none makes an ordinary
stream wait longer than --stall seconds for its next piece, and in the end no request is open and no page is held.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import socket
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from struct import pack
from typing import Any

import httpx
from attacks import BODIES, MIB, text
from serve_soak import answer, asked, resident, server, settled

STREAMS, PATIENCE_S = 8, 30.0
CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
Address = tuple[str, int]
Outcomes = Counter[str]


# How it is sent


def opened(address: Address) -> socket.socket:
    found = socket.create_connection(address, timeout=PATIENCE_S)
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return found


def status(connection: socket.socket) -> str:
    """Of the answer that comes, read to its end."""
    got = b""
    with suppress(ConnectionError):
        while part := connection.recv(1 << 16):
            got = got or part
    return (
        got.split(b" ", 2)[1].decode(errors="replace")
        if got.startswith(b"HTTP/") and b" " in got
        else "closed"
    )


def sent(address: Address, data: bytes) -> str:
    with opened(address) as connection:
        with suppress(ConnectionError):  # it may have been refused before it was read
            connection.sendall(data)
        with suppress(OSError):
            connection.shutdown(socket.SHUT_WR) if not data.startswith(b"POST") else None
        try:
            return status(connection)
        except TimeoutError:
            return "no answer"


def bodies(address: Address, name: str) -> Outcomes:
    return Counter(sent(address, data) for data in BODIES[name]())


def endless_chunks(address: Address) -> Outcomes:
    """Twelve bodies that never end, for some seconds; then one that is too long."""
    with ExitStack() as stack:
        found = [stack.enter_context(opened(address)) for _ in range(12)]
        for connection in found:
            connection.sendall(CHUNKED)
        for _ in range(30):
            time.sleep(0.1)
            for connection in found:
                connection.sendall(b"1\r\n \r\n")
        with suppress(ConnectionError):
            for _ in range(12):
                found[0].sendall(b"100000\r\n" + b" " * MIB + b"\r\n")
        return Counter([status(found[0]), *["open"] * 11])


def slow_headers(address: Address) -> Outcomes:
    with ExitStack() as stack:
        found = [stack.enter_context(opened(address)) for _ in range(64)]
        for letter in b"POST /v1/completions HTTP/1.1\r\nX: " + b"a" * 20:
            time.sleep(0.05)
            for connection in found:
                connection.sendall(bytes([letter]))
    return Counter(open=64)


def idle(address: Address) -> Outcomes:
    with ExitStack() as stack:
        for _ in range(1500):
            stack.enter_context(opened(address))
        return Counter([sent(address, b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")])


def pipelined(address: Address) -> Outcomes:
    one = text(max_tokens=4).replace(b"Connection: close\r\n", b"")
    with opened(address) as connection:
        connection.sendall(one * 50 + text(max_tokens=4))
        got = b""
        while part := connection.recv(1 << 16):
            got += part
    return Counter(
        {"200": got.count(b"HTTP/1.1 200"), "other": got.count(b"HTTP/1.1 ") - got.count(b"HTTP/1.1 200")}
    )


def resets(address: Address) -> Outcomes:
    """Connections that are reset while their answers stream."""
    for i in range(60):
        with opened(address) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, pack("ii", 1, 0))
            connection.sendall(text(stream=True, max_tokens=2000, ignore_eos=True, prompt=f"# {i}\n"))
            if i % 3:
                connection.recv(1 + 300 * (i % 5))
    return Counter(reset=60)


def never_read(address: Address) -> Outcomes:
    """Streams whose client asks for much and reads nothing."""
    with ExitStack() as stack:
        for i in range(6):
            connection = stack.enter_context(opened(address))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            connection.sendall(
                text(stream=True, max_tokens=500, logprobs=20, ignore_eos=True, prompt=f"# {i}\n")
            )
        time.sleep(4)
    return Counter(unread=6)


def half_closed(address: Address) -> Outcomes:
    """Bodies that stop halfway."""
    data = text(prompt="x" * 5000)
    for size in (1, 30, 120, 2000):
        with opened(address) as connection:
            connection.sendall(data[:size])
            connection.shutdown(socket.SHUT_WR)
            status(connection)
    return Counter(closed=4)


CONNECTIONS: dict[str, Callable[[Address], Outcomes]] = {
    "bodies that never end": endless_chunks,
    "slow headers, 64 clients": slow_headers,
    "1,500 idle connections": idle,
    "50 pipelined requests": pipelined,
    "60 resets while streaming": resets,
    "6 clients that never read": never_read,
    "bodies cut off": half_closed,
}


def attack(address: Address, name: str) -> Outcomes:
    return CONNECTIONS[name](address) if name in CONNECTIONS else bodies(address, name)


# The ordinary streams


@dataclass(slots=True)
class Seen:
    """What the ordinary streams saw: longest wait for a piece since it was last asked, answers, and wrong ones."""

    stall: float = 0.0
    answers: int = 0
    wrong: int = 0

    def taken(self) -> float:
        stall, self.stall = self.stall, 0.0
        return stall


def ordinary(number: int) -> dict[str, Any]:
    return {**asked(number), "max_tokens": 150}


async def stream(client: httpx.AsyncClient, seen: Seen, expected: list[str | None], which: int) -> None:
    """Asks one after another, noting waits. A stall under way counts from the piece before it."""
    number = which
    while True:
        before = time.monotonic()

        def piece() -> None:
            nonlocal before
            now = time.monotonic()
            seen.stall, before = max(seen.stall, now - before), now

        try:
            found = await answer(client, ordinary(number), piece=piece)
        except httpx.TransportError as error:
            found = repr(error)
            await asyncio.sleep(1)
        seen.answers += 1
        seen.wrong += found != expected[number]
        number = (number + STREAMS) % len(expected)


async def run(url: str, pid: int, names: list[str], limit: float) -> list[str]:
    """What does not hold."""
    wrong: list[str] = []
    found = httpx.URL(url)
    address = (found.host, found.port or 80)
    loop, seen = asyncio.get_running_loop(), Seen()
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        expected = [await answer(client, ordinary(number)) for number in range(2 * STREAMS)]
        tasks = [asyncio.create_task(stream(client, seen, expected, i)) for i in range(STREAMS)]
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            await loop.run_in_executor(pool, time.sleep, 0)
            seen.taken()
            await asyncio.sleep(5)
            print(f"{'(no attack)':28} {'stall':>8} {1000 * seen.taken():6.0f} ms", flush=True)
            for name in names:
                start = time.monotonic()
                outcomes = await loop.run_in_executor(pool, attack, address, name)
                took = time.monotonic() - start
                await asyncio.sleep(0.5)
                stall = seen.taken()
                wrong += [
                    f"{name}: {kind}" for kind in outcomes if kind.startswith("5") or kind == "no answer"
                ]
                wrong += [f"{name}: ordinary streams waited {stall:.2f} s"] if stall > limit else []
                told = ", ".join(f"{count} x {kind}" for kind, count in sorted(outcomes.items()))
                print(f"{name:28} {took:6.2f} s {1000 * stall:6.0f} ms   {told}", flush=True)
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        wrong += [f"a stream failed: {e!r}" for e in ended if not isinstance(e, asyncio.CancelledError)]
        print(f"{seen.answers} ordinary answers, {seen.wrong} of them wrong; {resident(pid)} MiB resident")
        wrong += [f"{seen.wrong} ordinary answers are wrong"] if seen.wrong else []
        return [*wrong, *await settled(client)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--only", default="", help="attacks with this in their name")
    parser.add_argument(
        "--stall", type=float, default=1.0, help="longest wait of an ordinary stream, in seconds"
    )
    options = parser.parse_args()
    names = [name for name in (*BODIES, *CONNECTIONS) if options.only in name]
    with server(options.model) as (url, pid):
        wrong = asyncio.run(run(url, pid, names, options.stall))
    print("\n".join(wrong) or "all holds")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
