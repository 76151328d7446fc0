"""Nibble on a real Ray cluster of one machine: three node processes, engines on CPUs, and what becomes of 64 streams.

    pip install 'nibble-llm[ray]' openai 'lm-eval[api]'
    python benchmarks/ray_cluster.py                      all of it, several minutes on two cores
    python benchmarks/ray_cluster.py --only replica node
    python benchmarks/ray_cluster.py --report             also writes benchmarks/reports/ray_cluster_PROCESSOR_DATE.md

- scaling: one engine under 32 streams becomes two; idle, they become one again.
- replica, engine, node: two engines, 64 streams, kill -9 of a replica (Ray's process), of the engine's own process, or
  of every process of a node. Every stream must end with [DONE] or with an error that its client sees; requests that
  come meanwhile must be answered; a second engine must come back.
- hosts: one engine whose two ranks are on two nodes; it answers as in one process does, and all processes of one of its
  nodes are killed. Its streams must end with an error, and it must come back.
- front: of two fronts one is killed: its streams break, which their clients see, and its requests end in the engines.
- clients: the openai package, and lm-eval, whose log-likelihoods must be those of the engine in this process.
- routers: the same conversations through each request router, for reuse of the prefix cache and for balance.

All traffic stays on 127.0.0.1. Exit code 1 where anything is not as it must be.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

# Ray finds the address of the network otherwise, and would listen there.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import httpx
import ray
from ray import serve
from ray.cluster_utils import Cluster

from nibble.ray import build_app

ROOT = Path(__file__).parents[1]
APP = "nibble"
MODEL = {
    "model": "demo", "device": "cpu", "kv_format": "nvfp4", "kv_memory": "8MiB", "threads": 1, "max_running": 64,
    "max_context": 1024, "kv_window": 0, "drain": 5.0, "front_cpus": 4,
    "placement": {"cpus": 0.1, "resources": {"engine": 1}},
}  # fmt: skip
STREAMS, TOKENS = 64, 40
PAGE = 32
MEMORIES = ["3MiB", "2MiB"]
"""Of each engine's cache, for routers: what all hold together is about half of the conversations, or a third."""
Row = tuple[str, str]


class Lab:
    """A cluster, and what is deployed on it."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        memory = {"object_store_memory": 80 << 20, "node_ip_address": "127.0.0.1"}
        # One engine on each node, so that each death is that of one engine, and there is room for another.
        head = {"num_cpus": 8, "include_dashboard": False, "resources": {"engine": 1}, **memory}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        # A front takes four CPUs and does not fit here, so that none of these nodes is more than engines.
        self.node_args = {"num_cpus": 2, "resources": {"engine": 1}, **memory}
        self.nodes = [self.cluster.add_node(**self.node_args) for _ in range(2)]
        ray.init(address=self.cluster.address, log_to_driver=False, logging_level="ERROR")
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": self.port})

    def deploy(self, prefix: str = "/", **options: Any) -> None:
        """Serve with these options, and wait for it."""
        serve.run(build_app({**MODEL, **options}), name=APP, route_prefix=prefix)
        wait(lambda: httpx.get(f"{self.url}{prefix.rstrip('/')}/health/ready").status_code == 200, 60)

    def engines(self) -> int:
        """Engines that run."""
        deployment = serve.status().applications[APP].deployments["Engine"]
        return int(deployment.replica_states.get("RUNNING", 0))

    def stats(self) -> list[dict[str, float]]:
        """Counts of each engine."""
        answers = serve.get_deployment_handle("Engine", app_name=APP).broadcast("stats")
        return list(answers.results(timeout_s=20))

    def raylets(self) -> dict[int, Any]:
        """Nodes by the process of their raylet."""
        nodes = self.cluster.list_all_nodes()
        return {node.all_processes["raylet"][0].process.pid: node for node in nodes}

    def replicas(self, deployment: str = "Engine") -> list[int]:
        """Processes of Ray that have engines, or fronts."""
        raylets = self.raylets()
        return [
            pid
            for pid, (parent, command) in processes().items()
            if parent in raylets and command.startswith(f"ray::ServeReplica:{APP}:{deployment}")
        ]

    def close(self) -> None:
        serve.shutdown()
        ray.shutdown()
        self.cluster.shutdown()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def processes() -> dict[int, tuple[int, str]]:
    """Parents and command lines of this machine's processes."""
    table = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        table[int(folder.name)] = parent, command
    return table


def below(root: int) -> list[int]:
    """A process and all that it started, directly or not."""
    table = processes()
    tree = [root]
    for pid in tree:
        tree += [child for child, (parent, _) in table.items() if parent == pid]
    return tree


def wait(condition: Callable[[], bool], seconds: float) -> float:
    """Wait until something holds; return how long it took."""
    start = time.monotonic()
    while time.monotonic() < start + seconds:
        try:
            if condition():
                return time.monotonic() - start
        except (httpx.TransportError, KeyError):
            pass
        time.sleep(0.1)
    raise SystemExit(f"not so within {seconds:.0f} s: {condition.__doc__ or condition.__qualname__}")


# --- streams


class Stream:
    """One streamed request, and how it ended: done, error, cut (the connection broke), or silent."""

    def __init__(self, url: str, number: int, tokens: int) -> None:
        self.url, self.tokens, self.received, self.end, self.error = url, tokens, 0, "", ""
        self.body = {
            "prompt": f"{number}: the", "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True,
        }  # fmt: skip

    async def run(self, client: httpx.AsyncClient) -> None:
        self.end = "silent"
        try:
            async with client.stream("POST", f"{self.url}/v1/completions", json=self.body) as response:
                if response.status_code != 200:
                    body = await response.aread()
                    self.end, self.error = "error", json.loads(body)["error"]["message"]
                    return
                async for line in response.aiter_lines():
                    self._take(line)
        except httpx.HTTPError as error:
            self.end, self.error = "cut", repr(error)

    def _take(self, line: str) -> None:
        if line == "data: [DONE]":
            self.end = "done" if self.end == "silent" else self.end
        elif line.startswith("data: "):
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                self.end, self.error = "error", chunk["error"]["message"]
            else:
                self.received += 1


async def flood(
    url: str, count: int, tokens: int, midway: Callable[[], None], late: int = 0
) -> tuple[list[Stream], list[Stream]]:
    """Run streams; call `midway` once a third of the tokens is there, and send `late` more requests right after.

    Returns:
        The streams, and the late ones.
    """
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=300, limits=limits) as client:
        streams = [Stream(url, i, tokens) for i in range(count)]
        tasks = [asyncio.create_task(stream.run(client)) for stream in streams]
        while sum(stream.received for stream in streams) < count * tokens / 3:
            await asyncio.sleep(0.05)
            if all(task.done() for task in tasks):
                raise SystemExit(f"no stream got far: {Counter(stream.error for stream in streams)}")
        midway()
        more = [Stream(url, count + i, 8) for i in range(late)]
        await asyncio.gather(*tasks, *(stream.run(client) for stream in more))
    return streams, more


# --- what is shown


def scaling(lab: Lab) -> Iterator[Row]:
    quick = {"upscale_delay_s": 2, "downscale_delay_s": 10, "look_back_period_s": 12}
    lab.deploy(autoscaling={"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 8, **quick})
    assert lab.engines() == 1

    async def load() -> tuple[list[Stream], float]:
        start, took = time.monotonic(), 0.0

        async def watch() -> None:
            nonlocal took
            while await asyncio.to_thread(lab.engines) < 2:
                await asyncio.sleep(0.2)
            took = time.monotonic() - start

        watching = asyncio.create_task(watch())
        streams: list[Stream] = []
        while not took and time.monotonic() < start + 150:
            batch, _ = await flood(lab.url, 32, TOKENS, lambda: None)
            streams += batch
        watching.cancel()
        return streams, took

    streams, up = asyncio.run(load())
    ends = Counter(stream.end for stream in streams)
    yield "one engine under 32 streams: two after", f"{up:.1f} s"
    yield "streams meanwhile", f"{len(streams)}, {dict(ends)}"
    must(ends["done"] == len(streams) and up > 0, "a stream failed while engines were added, or none was")
    down = wait(lambda: lab.engines() == 1, 90)
    yield "idle: one again after", f"{down:.1f} s"


def death(lab: Lab, what: str, kill: Callable[[], str]) -> Iterator[Row]:
    """Kill something under 64 streams."""
    lab.deploy(replicas=2)
    wait(lambda: lab.engines() == 2 and len(lab.replicas()) == 2, 60)
    # Until the front has asked both, and its router follows both.
    time.sleep(2)
    victims: list[str] = []
    at: list[float] = []

    def midway() -> None:
        at.append(time.monotonic())
        victims.append(kill())

    streams, late = asyncio.run(flood(lab.url, STREAMS, TOKENS, midway, late=8))
    ended = time.monotonic()
    ends, late_ends = Counter(one.end for one in streams), Counter(one.end for one in late)
    yield f"{what} killed ({victims[0]}): {STREAMS} streams", str(dict(ends))
    yield "  their errors", "; ".join({one.error for one in streams if one.error}) or "none"
    yield "  8 requests sent right after", str(dict(late_ends))
    complete = [one for one in streams if one.end == "done"]
    must(ends["silent"] == 0, "a stream ended silently")
    must(all(one.received == TOKENS for one in complete), "a complete stream lacks tokens")
    must(0 < ends["done"] < STREAMS, "it killed no stream, or all")
    must(late_ends["done"] == len(late), "a request that came later was not answered")
    wait(lambda: lab.engines() == 2 and len(lab.replicas()) == 2, 120)
    yield (
        "  all streams ended, two engines again, after",
        f"{ended - at[0]:.1f} s, {time.monotonic() - at[0]:.1f} s",
    )
    again, _ = asyncio.run(flood(lab.url, 16, 16, lambda: None))
    yield "  16 streams then", str(dict(Counter(one.end for one in again)))
    must(all(one.end == "done" for one in again), "streams fail after all is back")


def replica(lab: Lab) -> Iterator[Row]:
    def kill() -> str:
        pid = lab.replicas()[0]
        engine = below(pid)[1:]
        os.kill(pid, signal.SIGKILL)
        orphans.extend(engine)
        return "Ray's process"

    orphans: list[int] = []
    yield from death(lab, "a replica", kill)
    alive = [pid for pid in orphans if "nibble.server.worker" in processes().get(pid, (0, ""))[1]]
    yield "  engine processes that outlived it", str(len(alive))
    must(orphans != [] and not alive, "an engine outlived its replica")


def engine(lab: Lab) -> Iterator[Row]:
    def kill() -> str:
        table = processes()
        (pid,) = [one for one in below(lab.replicas()[0])[1:] if "nibble.server.worker" in table[one][1]]
        os.kill(pid, signal.SIGKILL)
        return "the engine's own process"

    yield from death(lab, "an engine", kill)


def node(lab: Lab) -> Iterator[Row]:
    def kill() -> str:
        owner = next(
            pid
            for pid, one in lab.raylets().items()
            if one in lab.nodes and {*below(pid)} & {*lab.replicas()}
        )
        victim = lab.raylets()[owner]
        tree = below(owner)
        for pid in tree:
            os.kill(pid, signal.SIGKILL)
        lab.cluster.remove_node(victim, allow_graceful=False)
        return f"all {len(tree)} processes"

    yield from death(lab, "a node", kill)
    lab.nodes.append(lab.cluster.add_node(**lab.node_args))
    yield "  nodes", str(sum(one["Alive"] for one in ray.nodes()))


def hosts(lab: Lab) -> Iterator[Row]:
    lab.deploy(tp=2, placement={**MODEL["placement"], "hosts": 2})
    (replica,) = lab.replicas()
    owners = {pid: [one for one in below(pid) if is_rank(one)] for pid in lab.raylets()}
    (own,) = [pid for pid in owners if replica in below(pid)]
    (other,) = [pid for pid, ranks in owners.items() if any(replica not in above(one) for one in ranks)]
    must(own != other, "both ranks are on one node")
    question = {"prompt": [[5, 6, 7], list(range(5, 90))], "max_tokens": 24, "temperature": 0}
    answer = httpx.post(f"{lab.url}/v1/completions", json=question, timeout=60).json()
    texts = [choice["text"] for choice in answer["choices"]]
    must(texts == alone(question), "answers differ from those of the engine in process")
    yield "one engine on two nodes, tp 2", "answers are those of one process"

    # The first node cannot be killed, for it has the cluster's books.
    victim = next(pid for pid in (other, own) if lab.raylets()[pid] in lab.nodes)
    at: list[float] = []

    def midway() -> None:
        at.append(time.monotonic())
        node = lab.raylets()[victim]
        for pid in below(victim):
            os.kill(pid, signal.SIGKILL)
        lab.cluster.remove_node(node, allow_graceful=False)

    streams, _ = asyncio.run(flood(lab.url, 16, TOKENS, midway))
    ends = Counter(one.end for one in streams)
    yield f"a node of it killed ({'its own' if victim == own else 'the other'}): 16 streams", str(dict(ends))
    yield "  their errors", "; ".join({one.error for one in streams if one.error}) or "none"
    must(ends["silent"] == 0 and ends["error"] + ends["cut"] > 0, "streams end silently, or go on")
    wait(lambda: lab.engines() == 1 and replica not in lab.replicas() and len(lab.replicas()) == 1, 120)
    yield "  it runs again, on two other nodes, after", f"{time.monotonic() - at[0]:.1f} s"
    again, _ = asyncio.run(flood(lab.url, 8, 16, lambda: None))
    must(all(one.end == "done" for one in again), "streams fail after it is back")
    lab.nodes.append(lab.cluster.add_node(**lab.node_args))


def is_rank(pid: int) -> bool:
    """Whether a process is a rank that a RankHost, or an engine, has started."""
    return "nibble.engine.rank " in processes().get(pid, (0, ""))[1]


def above(pid: int) -> list[int]:
    """The processes that a process comes from."""
    table, line = processes(), []
    while pid in table and pid > 1:
        pid = table[pid][0]
        line.append(pid)
    return line


def alone(question: dict[str, Any]) -> list[str]:
    """What the engine in this process answers, its ranks processes of this host."""
    from nibble import LLM

    names = ("device", "kv_format", "kv_memory", "kv_window", "threads", "max_context")
    with LLM("demo", tp=2, **{name: MODEL[name] for name in names}) as llm:
        outputs = llm.generate(
            question["prompt"], max_tokens=question["max_tokens"], temperature=question["temperature"]
        )
        return [output.completions[0].text for output in outputs]


def front(lab: Lab) -> Iterator[Row]:
    lab.deploy(replicas=2, fronts=2)
    wait(lambda: lab.engines() == 2 and len(lab.replicas("Front")) == 2, 60)
    time.sleep(2)
    victim = lab.replicas("Front")[0]
    streams, late = asyncio.run(
        flood(lab.url, STREAMS, TOKENS, lambda: os.kill(victim, signal.SIGKILL), late=8)
    )
    ends, late_ends = Counter(one.end for one in streams), Counter(one.end for one in late)
    yield f"one of two fronts killed: {STREAMS} streams", str(dict(ends))
    yield "  8 requests sent right after", str(dict(late_ends))
    must(
        ends["silent"] == 0 and 0 < ends["done"] < STREAMS, "a stream ended silently, or none or all were cut"
    )
    must(late_ends["done"] == len(late), "a request that came later was not answered")
    wait(lambda: victim not in lab.replicas("Front") and len(lab.replicas("Front")) == 2, 90)
    took = wait(lambda: sum(one["running"] for one in lab.stats()) == 0, 30)
    yield "  requests that it left in the engines ended after", f"{took:.1f} s"


def clients(lab: Lab) -> Iterator[Row]:
    lab.deploy(replicas=2)
    yield from openai_client(lab.url)
    yield from lm_eval_client(lab.url)
    yield from a_client_that_goes(lab)
    yield from under_a_prefix(lab)


def a_client_that_goes(lab: Lab) -> Iterator[Row]:
    body = {"prompt": "Once", "max_tokens": 900, "temperature": 0, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{lab.url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        for _ in range(4):
            next(lines)
        # Engines say what they do every half second.
        wait(lambda: sum(one["running"] for one in lab.stats()) == 1, 10)
    took = wait(lambda: sum(one["running"] for one in lab.stats()) == 0, 15)
    time.sleep(1)
    written = sum(one["decode_tokens"] for one in lab.stats())
    time.sleep(1)
    must(sum(one["decode_tokens"] for one in lab.stats()) == written, "an answer that nobody reads goes on")
    yield "a client that goes: its request ends after", f"{took:.1f} s"


def under_a_prefix(lab: Lab) -> Iterator[Row]:
    lab.deploy(prefix="/llm", api_key="KEY")
    url, key = f"{lab.url}/llm", {"Authorization": "Bearer KEY"}
    names = [one["id"] for one in httpx.get(f"{url}/v1/models", headers=key).json()["data"]]
    must(names == ["demo"], f"the models under a prefix are {names}")
    refused = httpx.get(f"{url}/v1/models")
    must(refused.status_code == 401 and "error" in refused.json(), "no key is needed")
    wrong = httpx.post(f"{url}/v1/messages", headers=key, json={"model": "demo"})
    must(
        wrong.status_code == 400 and wrong.json()["type"] == "error",
        "an error is not in the shape of its API",
    )
    answer = httpx.post(
        f"{url}/v1/completions", headers=key, json={"prompt": "a", "max_tokens": 2}, timeout=60
    )
    must(answer.status_code == 200, f"a completion is {answer.status_code}")
    yield "route_prefix /llm, with a key", "models, a completion, and errors are as they must be"


def openai_client(url: str) -> Iterator[Row]:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    question: Any = [{"role": "user", "content": "What is it?"}]
    options: Any = {"model": "demo", "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(messages=question, **options)
    parts = list(client.chat.completions.create(messages=question, stream=True, **options))
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    must(text == whole.choices[0].message.content, "a stream's text is not that of the whole answer")
    several = client.completions.create(prompt=["The", "A", "One"], n=2, **options)
    must(len(several.choices) == 6, "answers are missing")
    try:
        client.completions.create(prompt="x", model="other")
    except openai.NotFoundError as error:
        yield "openai: wrong model", f"404, {error.code}"
    yield "openai: chat, stream, 3 prompts with 2 answers each", "as they must be"


def lm_eval_client(url: str) -> Iterator[Row]:
    sys.path.insert(0, str(ROOT / "tests/support"))
    import lm_eval
    from lm_eval.tasks import TaskManager

    from lm_tasks import save_tasks
    from nibble import LLM
    from nibble.evals.lm_eval_model import NibbleLM

    with tempfile.TemporaryDirectory() as folder:
        tasks = save_tasks(Path(folder) / "tasks")
        names = [str(tasks / f"local_{name}.yaml") for name in ("choice", "generate")]

        def evaluate(model: Any, **options: Any) -> Any:
            manager = TaskManager(include_defaults=False)
            return lm_eval.simple_evaluate(
                model, tasks=names, task_manager=manager, bootstrap_iters=0, **options
            )

        args = {"model": "demo", "base_url": f"{url}/v1/completions", "max_length": 1024, "num_concurrent": 3}
        remote = evaluate("local-completions", model_args=args)
        llm = LLM("demo", device="cpu", kv_format="nvfp4", kv_memory="8MiB", kv_window=0, threads=1)
        local = evaluate(NibbleLM(llm))
        llm.close()
    mine, theirs = (
        [resp for sample in result["samples"]["local_choice"] for (resp,) in sample["resps"]]
        for result in (remote, local)
    )
    must(len(mine) == 18, f"lm-eval has {len(mine)} log-likelihoods")
    worst = max(abs(one[0] - other[0]) for one, other in zip(mine, theirs, strict=True))
    words = [
        [sample["resps"] for sample in result["samples"]["local_generate"]] for result in (remote, local)
    ]
    yield "lm-eval: choices", f"acc {remote['results']['local_choice']['acc,none']:.3f}"
    yield "lm-eval: largest difference of a log-likelihood to the engine in process", f"{worst:.1e}"
    must(worst < 1e-3, "log-likelihoods differ from those of the engine in process")
    must(words[0] == words[1], "answers differ from those of the engine in process")


# --- routers


def conversations(rng: random.Random) -> list[list[list[int]]]:
    """Prompts of conversations, turn by turn: under one of six beginnings, some more popular, and growing."""
    beginnings = [[rng.randrange(5, 4000) for _ in range(rng.randrange(200, 500))] for _ in range(6)]
    result = []
    for _ in range(48):
        context = list(rng.choices(beginnings, [1 / (i + 1) for i in range(6)])[0])
        turns = []
        for _ in range(rng.randrange(1, 7)):
            context = context + [rng.randrange(5, 4000) for _ in range(rng.randrange(30, 150))]
            turns.append(context)
        result.append(turns)
    return result


def findable(sessions: Sequence[Sequence[Sequence[int]]]) -> int:
    """Tokens that a cache finds from which nothing is ever evicted, in whole pages."""
    pages: set[tuple[int, ...]] = set()
    total = 0
    for turn in range(max(map(len, sessions))):
        for session in sessions:
            if turn < len(session):
                prompt = session[turn]
                heads = [tuple(prompt[:end]) for end in range(PAGE, len(prompt), PAGE)]
                total += PAGE * sum(head in pages for head in heads)
                pages.update(heads)
    return total


async def converse(url: str, sessions: Sequence[Sequence[Sequence[int]]]) -> tuple[int, int]:
    """Hold conversations, eight at a time; return tokens of prompts, and those that were cached."""
    slots, totals = asyncio.Semaphore(8), [0, 0]

    async def hold(client: httpx.AsyncClient, turns: Sequence[Sequence[int]]) -> None:
        async with slots:
            for prompt in turns:
                body = {"prompt": list(prompt), "max_tokens": 8, "temperature": 0, "ignore_eos": True}
                answer = (await client.post(f"{url}/v1/completions", json=body)).json()
                if "usage" not in answer:
                    raise SystemExit(f"a prompt of {len(prompt)} tokens is answered with {answer}")
                usage = answer["usage"]
                totals[0] += usage["prompt_tokens"]
                totals[1] += usage["prompt_tokens_details"]["cached_tokens"]

    async with httpx.AsyncClient(timeout=300) as client:
        await asyncio.gather(*(hold(client, turns) for turns in sessions))
    return totals[0], totals[1]


def routers(lab: Lab) -> Iterator[Row]:
    sessions = conversations(random.Random(7))
    most = findable(sessions)
    for memory, name in itertools.product(MEMORIES, ("kv", "ray-prefix", "power-of-two")):
        lab.deploy(replicas=3, router=name, page_size=PAGE, max_context=1536, kv_memory=memory)
        wait(lambda: lab.engines() == 3 and len(lab.replicas()) == 3, 60)
        time.sleep(2)
        start = time.monotonic()
        total, cached = asyncio.run(converse(lab.url, sessions))
        took = time.monotonic() - start
        time.sleep(1)
        stats = lab.stats()
        work = [one["prompt_tokens"] + 4 * one["decode_tokens"] for one in stats]
        evicted = sum(one.get("cache_evicted", 0) for one in stats)
        yield (
            f"router {name}, {memory} for each of three caches",
            f"cached {cached} of {total} prompt tokens, {cached / most:.3f} of what one endless cache finds; "
            f"work of the busiest engine {max(work) / (sum(work) / len(work)):.2f} of the mean; "
            f"{evicted:.0f} pages evicted; {took:.0f} s",
        )
        serve.delete(APP)


FAILURES: list[str] = []


def must(holds: bool, otherwise: str) -> None:
    if not holds:
        FAILURES.append(otherwise)
        print(f"  FAILED: {otherwise}", flush=True)


PARTS: dict[str, Callable[[Lab], Iterator[Row]]] = {
    "scaling": scaling, "replica": replica, "engine": engine, "node": node, "hosts": hosts, "front": front,
    "clients": clients,
    "routers": routers,
}  # fmt: skip


@contextmanager
def laboratory() -> Iterator[Lab]:
    lab = Lab()
    try:
        yield lab
    finally:
        lab.close()


def report(rows: Sequence[Row]) -> Path:
    """Write a report; return its file."""
    from platform import python_version

    model = next(
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    )
    slug = "-".join(model.lower().replace("(r)", "-r").replace("@", "").split()[:4]).replace("--", "-")
    path = ROOT / f"benchmarks/reports/ray_cluster_{slug}_{date.today()}.md"
    lines = [
        "# Nibble on a Ray cluster of one machine", "",
        f"- Processor: {model}, {os.cpu_count()} cores, shared with other work",
        f"- Python {python_version()}, Ray {ray.__version__}",
        f"- Date: {date.today()}", f"- Command: `python benchmarks/ray_cluster.py {' '.join(sys.argv[1:])}`",
        f"- Cluster: a head and two nodes, a process each; engines of `demo`, {MODEL['kv_format']}, on CPUs; one front",
        "- Seconds say how long things took there, and nothing of speed.", "",
        "| what | seen |", "| --- | --- |", *(f"| {name.strip()} | {value} |" for name, value in rows), "",
        f"{len(FAILURES)} of the things that must hold did not." if FAILURES else "All that must hold did.",
    ]  # fmt: skip
    path.write_text("\n".join(lines) + "\n")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--kv-memory", nargs="+", default=MEMORIES, help="of each engine's cache, for routers"
    )
    parser.add_argument("--report", action="store_true")
    args = parser.parse_args()
    MEMORIES[:] = args.kv_memory
    logging.getLogger("httpx").setLevel(logging.WARNING)
    rows: list[Row] = []
    with laboratory() as lab:
        for name in args.only:
            for row in PARTS[name](lab):
                rows.append(row)
                print(f"{row[0]:<60} {row[1]}", flush=True)
    if args.report:
        print(report(rows))
    raise SystemExit(bool(FAILURES))


if __name__ == "__main__":
    main()
