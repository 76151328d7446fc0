"""What HTTP costs: tokens per second of streams through `nibble serve`, against LLM.generate with the same load.

    python benchmarks/serve_overhead.py [--streams 32] [--tokens 128] [--rounds 5] [--kv-format bf16] [--report]

Both answer the same prompts, greedily, to the same length. Rounds alternate, after one warm-up of each, and medians are
compared. Engines compute with one thread each (OMP_NUM_THREADS=1), so that the server's two processes and the client,
which are all in the figure, have the other cores of the machine. The client is a process of its own: plain sockets, it
looks for ends of streams and reads no JSON while a round is timed. Gate: every stream has all of its tokens, and its
text is what LLM.generate says.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from report import Aim, aims_table, markdown, write_report
from serve_soak import server

ONE_THREAD = "1"
END = b"data: [DONE]\n\n"
SHARE = 0.9
Options = argparse.Namespace


def prompts(text: str, streams: int, round_: int, letters: int = 240) -> list[str]:
    """Different texts, and others in each round, so that the prefix cache helps neither side."""
    step = (len(text) - letters) // (streams * 16)
    return [
        text[(at := (round_ * streams + i) * step % (len(text) - letters)) : at + letters]
        for i in range(streams)
    ]


def engine_options(options: Options) -> dict[str, Any]:
    return {"kv_format": options.kv_format, "kv_memory": "256MiB", "max_running": max(64, options.streams)}


# The client: `--client`, rounds as JSON lines on standard input, what it took as JSON lines on standard output


async def stream(host: str, port: int, body: dict[str, Any]) -> bytes:
    """All that the server says to one request."""
    said = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(f"{head}Content-Length: {len(said)}\r\n\r\n".encode() + said)
    found = bytearray()
    while END not in found[-64:]:
        part = await reader.read(1 << 16)
        if not part:
            raise SystemExit(f"a stream was cut short: {bytes(found[-500:])!r}")
        found += part
    writer.close()
    return bytes(found)


def unchunked(raw: bytes) -> bytes:
    """The body of an HTTP answer that came in chunks."""
    _, _, rest = raw.partition(b"\r\n\r\n")
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return body


def read(raw: bytes) -> tuple[str, int, int]:
    """Text, tokens and events of a stream."""
    lines = [line[6:] for line in unchunked(raw).split(b"\n") if line.startswith(b"data: {")]
    chunks = [json.loads(line) for line in lines]
    text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    return text, chunks[-1]["usage"]["completion_tokens"], len(lines) - 1


async def answered(url: str, bodies: Sequence[dict[str, Any]]) -> dict[str, Any]:
    address = urlsplit(url)
    assert address.hostname and address.port
    start = time.perf_counter()
    raw = await asyncio.gather(*(stream(address.hostname, address.port, body) for body in bodies))
    seconds = time.perf_counter() - start
    found = [read(one) for one in raw]
    return {
        "seconds": seconds, "texts": [text for text, _, _ in found], "tokens": [count for _, count, _ in found],
        "events": sum(events for _, _, events in found),
    }  # fmt: skip


def client(url: str) -> None:
    for line in sys.stdin:
        print(json.dumps(asyncio.run(answered(url, json.loads(line)))), flush=True)


# The two that are compared


class Served:
    """The server's side: a client process that is told prompts."""

    def __init__(self, url: str, tokens: int) -> None:
        self._tokens = tokens
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--client", url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def answer(self, asked: Sequence[str]) -> dict[str, Any]:
        shared = {
            "model": "demo",
            "max_tokens": self._tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        bodies = [{**shared, "prompt": prompt, "stream_options": {"include_usage": True}} for prompt in asked]
        assert self._process.stdin and self._process.stdout
        print(json.dumps(bodies), file=self._process.stdin, flush=True)
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def direct(llm: Any, asked: Sequence[str], tokens: int) -> tuple[float, float, list[str]]:
    """Seconds, seconds of processor time, and texts of LLM.generate."""
    start, spent = time.perf_counter(), time.process_time()
    outputs = llm.generate(list(asked), max_tokens=tokens, ignore_eos=True, temperature=0, progress=False)
    texts = [output.text for output in outputs]
    return time.perf_counter() - start, time.process_time() - spent, texts


@contextmanager
def both(options: Options) -> Iterator[tuple[Any, Served, dict[str, int]]]:
    """LLM, the server's client, and process ids of the server by name."""
    from nibble import LLM

    settings = engine_options(options)
    llm = LLM("demo", device="cpu", **settings)
    flags = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    with server("demo", flags) as (url, pid):
        children = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=True)
        served = Served(url, options.tokens)
        try:
            yield llm, served, {"http": pid, "engine": int(children.stdout.split()[0])}
        finally:
            served.close()


def busy(pid: int) -> float:
    """Seconds of processor time that a process has had."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:  # noqa: PTH123  # not a file with a size
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(options: Options) -> str:
    from nibble.models.checkpoint import download

    text = (download("demo") / "heldout.txt").read_text(encoding="utf-8")
    total = options.streams * options.tokens
    times: dict[str, list[float]] = {"LLM.generate": [], "nibble serve": []}
    cpu: dict[str, list[float]] = {"LLM.generate": [], "engine": [], "http": []}
    events = 0
    with both(options) as (llm, served, processes):
        for round_ in range(options.rounds + 1):
            asked = prompts(text, options.streams, round_)
            seconds, spent, expected = direct(llm, asked, options.tokens)
            before = {name: busy(pid) for name, pid in processes.items()}
            found = served.answer(asked)
            if found["texts"] != expected or found["tokens"] != [options.tokens] * options.streams:
                raise SystemExit("the server's answers are not LLM.generate's: no timing is worth anything")
            if round_:
                times["LLM.generate"].append(seconds)
                times["nibble serve"].append(found["seconds"])
                events += found["events"]
                cpu["LLM.generate"].append(spent)
                for name, pid in processes.items():
                    cpu[name].append(busy(pid) - before[name])
            print(
                f"round {round_}: {total / seconds:.0f} and {total / found['seconds']:.0f} tokens/s",
                flush=True,
            )
    medians = {name: total / statistics.median(values) for name, values in times.items()}
    ratios = [a / b for a, b in zip(times["LLM.generate"], times["nibble serve"], strict=True)]
    aim = Aim(
        "serve",
        f"tokens/s at {options.streams} streams, of LLM.generate's",
        SHARE,
        SHARE,
        statistics.median(ratios),
    )
    rows = [
        (name, f"{speed:.0f}", f"{speed / medians['LLM.generate']:.2f}") for name, speed in medians.items()
    ]
    per_token = ", ".join(f"{name} {1e6 * statistics.median(v) / total:.0f}" for name, v in cpu.items())
    note = (
        f"demo in {options.kv_format} on {os.cpu_count()} cores: {options.streams} streams of {options.tokens} tokens, "
        f"greedy, one thread for each engine, medians of {options.rounds} rounds that alternate (the ratio: "
        f"of rounds' ratios, {min(ratios):.2f} to {max(ratios):.2f}). "
        f"Processor time in microseconds per token: {per_token}. Tokens per event that was sent: "
        f"{total * options.rounds / events:.2f}."
    )
    table = markdown(("", "tokens/s", "of LLM.generate"), rows)
    return f"{table}\n\n{aims_table([aim])}\n\n{note}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kv-format", default="bf16")
    parser.add_argument("--report", action="store_true", help="write a dated report to benchmarks/reports")
    parser.add_argument("--client", metavar="URL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        client(options.client)
        return
    os.environ["OMP_NUM_THREADS"] = ONE_THREAD  # before torch is imported
    found = measure(options)
    print(found)
    if options.report:
        print(write_report("serve_overhead", f"{found}\n", "python benchmarks/serve_overhead.py --report"))


if __name__ == "__main__":
    main()
