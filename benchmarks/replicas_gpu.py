"""Two replicas against one, through the real server: output tokens a second of an 8B model with random weights.

    python benchmarks/replicas_gpu.py [--replicas 2] [--requests 256] [--prompt 256] [--answer 384] [--rounds 2]
        [--waves 3] [--kv-format nvfp4] [--scratch /dev/shm] [--tiny]

Two servers stand side by side in the same GPUs' memory: one engine, and a replica on each GPU; only one of them has
work at a time. Each is kept at `--requests` answers at a time for each of its engines, of random tokens that no two
share, and then at as many as one engine gets; a request follows as another ends. Answers have `--answer` tokens and a
quarter more or less. They are awaited whole. Gate: greedy answers to prompts that are asked alone are those of one
engine, on every replica, and each replica serves its share.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from report import Aim, aims_table, markdown, ratio
from serve_soak import free_port

FLOOR, AIM = 1.95, 1.98
READY_S = 150.0
GATE_PROMPTS, GATE_TOKENS, LOGPROB_ERROR = 4, 12, 0.02


@dataclass(frozen=True)
class Run:
    """One server under load."""

    engines: int
    at_a_time: int
    """Requests."""
    tokens: int
    seconds: float
    served: tuple[int, ...]
    """Requests of each engine."""

    @property
    def tokens_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Server:
    """One that was started, and may still be loading."""

    url: str
    process: subprocess.Popen[bytes]


@contextmanager
def started(folder: Path, engines: int, options: argparse.Namespace) -> Iterator[Server]:
    """A server, which is stopped in the end."""
    port = free_port()
    command = [
        sys.executable, "-m", "nibble", "serve", str(folder), "--port", str(port), "--replicas", str(engines),
        "--kv-format", options.kv_format, "--kv-scales", "one", "--kv-window", "0", "--kv-transforms", "none",
        "--max-running", str(options.requests), "--max-context", str(options.prompt + 2 * options.answer),
        "--max-queue", "8192", *options.engine,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "4"}
    if engines == 1 and not options.tiny:
        environment["CUDA_VISIBLE_DEVICES"] = "0"
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        yield Server(f"http://127.0.0.1:{port}", process)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()


def wait_ready(server: Server) -> None:
    end = time.monotonic() + READY_S
    while time.monotonic() < end:
        if (status := server.process.poll()) is not None:
            raise SystemExit(f"a server has ended, with status {status}")
        try:
            if httpx.get(f"{server.url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise SystemExit(f"{server.url} is not ready after {READY_S} s")


def random_prompts(count: int, length: int, seed: int, vocabulary: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.choices(range(vocabulary), k=length) for _ in range(count)]


def said(prompt: Sequence[int], tokens: int, **fields: Any) -> bytes:
    """A request, as it goes over the wire."""
    values = {"prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **fields}
    body = json.dumps(values).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: nibble\r\nConnection: close\r\nContent-Type: application/json"
    )
    return f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


async def ask(url: str, request: bytes) -> bytes:
    """All that the server says to it. A plain socket: clients with pools of connections take longer than the server."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(request)
    found = await reader.read()
    writer.close()
    return found


def answer(raw: bytes, tokens: int) -> dict[str, Any]:
    """What a completion says; raises SystemExit where it is none of so many tokens."""
    head, _, body = raw.partition(b"\r\n\r\n")
    if b" 200 " not in head[:16]:
        raise SystemExit(f"a request failed: {raw[:500]!r}")
    data: dict[str, Any] = json.loads(body)
    if data["usage"]["completion_tokens"] != tokens:
        raise SystemExit(f"an answer has not {tokens} tokens: {data['usage']}")
    return data


async def load(url: str, engines: int, at_a_time: int, options: argparse.Namespace, seed: int) -> Run:
    """Answer some times so many requests, so many at a time, and return what it took."""
    count = options.waves * at_a_time
    prompts = random_prompts(count, options.prompt, seed, options.vocabulary)
    # Of other lengths, or all would end and be followed in the same step; as many of each length for each engine.
    rng, shortest, longest = random.Random(0), options.answer * 3 // 4, options.answer * 5 // 4
    lengths = [rng.randint(shortest, longest) for _ in range(options.waves * options.requests)]
    answers = [tokens for tokens in lengths for _ in range(at_a_time // options.requests)]
    bodies = [said(prompt, tokens) for prompt, tokens in zip(prompts, answers, strict=True)]
    places = asyncio.Semaphore(at_a_time)

    async def ask_in_turn(body: bytes) -> bytes:
        async with places:
            return await ask(url, body)

    before = finished(url, engines)
    start = time.perf_counter()
    found = await asyncio.gather(*(ask_in_turn(body) for body in bodies))
    seconds = time.perf_counter() - start
    for one, tokens in zip(found, answers, strict=True):
        answer(one, tokens)
    await asyncio.sleep(1.2)  # until the engines' counts have come
    after = finished(url, engines)
    share = tuple(b - a for a, b in zip(before, after, strict=True))
    return Run(engines, at_a_time, sum(answers), seconds, share)


def finished(url: str, engines: int) -> list[int]:
    cache = httpx.get(f"{url}/v1/cache", timeout=10).json()
    views = cache["replicas"] if engines > 1 else [cache]
    return [view["requests"]["finished"] for view in views]


def logprobs(data: dict[str, Any]) -> list[float]:
    return list(data["choices"][0]["logprobs"]["token_logprobs"])


async def gate(one: str, several: str, engines: int, options: argparse.Namespace) -> None:
    """Raise SystemExit where a replica answers anything else than one engine does."""
    prompts = random_prompts(GATE_PROMPTS, min(192, options.prompt), 7, options.vocabulary)
    served = [0] * engines

    async def probabilities(url: str, prompt: Sequence[int], **fields: Any) -> list[float]:
        request = said(prompt, GATE_TOKENS, logprobs=0, **fields)
        return logprobs(answer(await ask(url, request), GATE_TOKENS))

    for prompt in prompts:
        expected = await probabilities(one, prompt)
        before = finished(several, engines)
        # Salts share no pages, so that nothing but load decides who serves; it is asked until all have.
        for salt in range(8 * engines):
            given = await probabilities(several, prompt, cache_salt=f"{salt}")
            # There is no tokenizer, and another token would have another probability.
            if max(abs(a - b) for a, b in zip(given, expected, strict=True)) > LOGPROB_ERROR:
                raise SystemExit(f"gate: a replica says {given}, one engine {expected}")
        await asyncio.sleep(1.2)
        gained = [b - a for a, b in zip(before, finished(several, engines), strict=True)]
        served = [total + more for total, more in zip(served, gained, strict=True)]
        if min(served) > 0 and prompt is prompts[1]:
            break
    if min(served) == 0:
        raise SystemExit(f"gate: a replica served nothing: {served}")


async def measure(one: str, several: str, options: argparse.Namespace) -> list[Run]:
    await gate(one, several, options.replicas, options)
    print("gate: replicas answer as one engine does", flush=True)
    best: dict[tuple[int, int], Run] = {}
    many = options.requests * options.replicas
    for round_ in range(options.rounds):
        for url, engines, at_a_time in (
            (one, 1, options.requests), (several, options.replicas, many), (several, options.replicas, options.requests)
        ):  # fmt: skip
            run = await load(
                url, engines, at_a_time, options, 100 * round_ + 10 * engines + (at_a_time == many)
            )
            print(
                f"{engines} engines, {at_a_time} at a time: {run.tokens_s:.0f} tokens/s, {run.served}",
                flush=True,
            )
            key = engines, at_a_time
            best[key] = max(best.get(key, run), run, key=lambda one: one.tokens_s)
    return list(best.values())


def report(runs: Sequence[Run], options: argparse.Namespace) -> str:
    one, many, same = runs
    rows = [
        (run.engines, run.at_a_time, f"{run.seconds:.2f}", f"{run.tokens_s:.0f}",
         f"{run.tokens_s / one.tokens_s:.3f}", run.served) for run in runs
    ]  # fmt: skip
    head = ("engines", "at a time", "s", "output tokens/s", "times one engine", "served by each")
    aim = Aim(
        "replicas", f"{options.requests} answers at a time on each of {options.replicas}", FLOOR, AIM,
        ratio(many.tokens_s, one.tokens_s),
    )  # fmt: skip
    even = max(same.served) * options.replicas / sum(same.served)
    return f"{markdown(head, rows)}\n\n{aims_table([aim])}\n\nbusiest over mean, {same.at_a_time} at a time: {even:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--requests", type=int, default=256, help="answers at a time of one engine")
    parser.add_argument("--waves", type=int, default=3, help="times so many requests in all")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--answer", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--kv-format", default="nvfp4")
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--scratch", default="/dev/shm", help="where 16 GB of weights are written")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU: checks the benchmark")
    options = parser.parse_args()
    options.vocabulary = 300 if options.tiny else 100_000
    # Two engines share the first GPU.
    options.engine = ["--kv-memory", "64MiB", "--device", "cpu"] if options.tiny else [
        "--gpu-memory-utilization", "0.42"
    ]  # fmt: skip
    if options.tiny:
        options.shape, options.requests, options.prompt, options.answer, options.rounds = "tiny", 4, 24, 16, 1
    began, scratch = time.perf_counter(), Path(tempfile.mkdtemp(dir=options.scratch))
    try:
        # In a process of its own: what makes weights on the first GPU would keep memory there.
        device = "cpu" if options.tiny else "cuda"
        arguments = f"{options.shape!r}, Path({str(scratch / 'm')!r}), device={device!r}"
        code = f"from random_checkpoints import write; from pathlib import Path; write({arguments})"
        subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent)
        print(f"weights: {time.perf_counter() - began:.0f} s", flush=True)
        with ExitStack() as stack:
            one = stack.enter_context(started(scratch / "m", 1, options))
            wait_ready(one)
            # Now it finds compiled code, and computes by the same kernels.
            several = stack.enter_context(started(scratch / "m", options.replicas, options))
            wait_ready(several)
            print(f"servers: {time.perf_counter() - began:.0f} s", flush=True)
            runs = asyncio.run(measure(one.url, several.url, options))
        print(f"all: {time.perf_counter() - began:.0f} s\n\n{report(runs, options)}")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
