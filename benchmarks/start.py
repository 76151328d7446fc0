"""How long a start takes: the first of a machine, and the next, in fresh processes with one cache folder.

    python benchmarks/start.py [--model llama-3.1-8b] [--weights fp8a8] [--scheme nvfp4] [--starts 2] [--cache FOLDER]
    python benchmarks/start.py --checkpoint FOLDER [--write] ...

**Measured**: the seconds from the beginning of a process until it is ready, without those of weights; those of each
part of a start, of what is between the parts, and of imports, package by package (`bytecode`: where Python's lies,
nibble/bytecode.py); and where the compiler's go (`tracing`, `aot`, `inductor`: each includes the next). Weights are
random, and made on the GPU (--weights: packed, a name of packed_weights.KINDS), or read from a checkpoint, which
--write makes of such weights, with shards of 5 GB, in BF16 or in FP8 by blocks (`--weights fp8` or `fp8a8`, where a
checkpoint asks for activations in FP8 too).

**Counted**: graphs that were traced (0: the code was read from disk), what torch's caches answered, and kernels that
Triton and NVRTC compiled, beside those found on disk: `ahead`, in threads while something else was done
(kernels/ahead.py), or while the start waited (`waited for`, by part, kernel and seconds). A last step after each start
tells whether anything is compiled later: every number of rows from 2 to 17 is a prompt, then requests decode together;
`files` are new ones in the cache folder, of any compiler.

With a checkpoint also **host memory** while its weights are read, at the most, beyond what the process had before:
`resident` with pages of files, `anonymous` without, and the largest shard.

Without --cache the folder is new, so the first start is a machine's first. NIBBLE_LOG=1 shows why code was not taken
from disk.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

BEGIN, RESULT = "NIBBLE_START_BEGAN", "result: "
IMPORTED = (
    "torch",
    "torch._dynamo",
    "transformers.modeling_utils",
    "nibble.engine.llm",
    "nibble.kernels.nvrtc",
)
"""Packages in the order in which a start imports them."""
LENGTHS = tuple(range(2, 18))
"""New tokens of the prompts after a start."""
CODE = (".cubin", ".so", ".bin")
"""Ends of files that compilers write."""
SHOWN = ("fxgraph_cache_hit", "fxgraph_cache_miss", "fxgraph_cache_bypass", "autograd_cache_hit", "autograd_cache_miss",
         "autograd_cache_bypass", "autograd_cache_saved", "unique_graphs")  # fmt: skip


def start(options: argparse.Namespace) -> dict[str, Any]:
    """Start an engine in this process, as the command line does."""
    from nibble.bytecode import keep_bytecode

    with keep_bytecode():
        return measure(options)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Start an engine, and say what that took."""
    began = float(os.environ[BEGIN])
    if os.environ.get("NIBBLE_LOG"):
        logging.basicConfig()
        logging.getLogger("nibble.compile").setLevel(logging.INFO)
    imports = import_all()
    kernels_of = Kernels()
    compiled = kernels_of.counts
    import torch
    from torch._dynamo.utils import compilation_time_metrics, counters

    memory = dict[str, int]()
    imported = time.time() - began
    with engine_of(options, memory) as llm:
        startup = llm.engine.startup
        ready = time.time() - began
        graphs, kernels, kept = counters["stats"]["unique_graphs"], Counter(compiled), files_kept()
        begin = time.perf_counter()
        for length in LENGTHS:
            llm.generate(
                [list(range(5, 5 + length))] * (length - 1), max_tokens=4, ignore_eos=True, progress=False
            )
        later = time.perf_counter() - begin
    spent = {name: sum(compilation_time_metrics.get(key, [0.0])) for name, key in (
        ("tracing", "bytecode_tracing"), ("aot", "create_aot_dispatcher_function"), ("inductor", "compile_fx_inner"),
        ("load", "AOTAutogradCache.inductor_load"),
    )}  # fmt: skip
    found = {
        name: n for group in ("stats", "aot_autograd", "inductor") for name, n in counters[group].items()
    }
    bypasses = sorted(name for name in found if "bypass" in name or "error" in name)
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "bytecode": sys.pycache_prefix or "beside the source",
        "imports": imported,
        "imports of": imports,
        "between parts": ready - imported - sum(startup.seconds.values()),
        "ready without weights": ready - startup.seconds["weights"],
        "parts": startup.seconds,
        "compiler": spent,
        "counters": {name: found.get(name, 0) for name in (*SHOWN, *bypasses)},
        "triton": dict(kernels),
        "nvrtc": dict(kernels_of.nvrtc),
        "waited for": kernels_of.waits,
        "after the start": {
            "seconds": later,
            "graphs": counters["stats"]["unique_graphs"] - graphs,
            "kernels": sum(compiled[kind] - kernels[kind] for kind in ("compiled", "compiled ahead")),
            "files": sorted(files_kept() - kept),
        },
        **({"host memory": memory} if memory else {}),
    }


def import_all() -> dict[str, float]:
    """Import what a start imports, as `from nibble import LLM` does; the seconds of each package with what it needs."""
    from nibble.garbage import pause_gc

    seconds = {}
    with pause_gc():
        for name in IMPORTED:
            begin = time.perf_counter()
            importlib.import_module(name)
            seconds[name] = time.perf_counter() - begin
    return seconds


@contextmanager
def engine_of(options: argparse.Namespace, memory: dict[str, int]) -> Iterator[Any]:
    """The engine. memory: takes the host's, in bytes, where a checkpoint is read."""
    from packed_weights import KINDS
    from random_models import PLAIN, served

    from nibble.models.activations import FULL

    settings = {
        "kv_format": options.scheme,
        "device": options.device,
        "compile_cache": True,
        "kv_memory": options.kv_memory,
    }
    if not options.checkpoint:
        with served(options.model, weights=options.weights, **settings) as engine:
            yield engine.llm
        return
    from nibble import LLM
    from nibble.engine import build

    load = build.load  # type: ignore[attr-defined]
    if options.weights and not KINDS[options.weights].activations:
        settings["activations"] = FULL

    def measured(*arguments: Any, **others: Any) -> Any:
        with host_memory(memory):
            return load(*arguments, **others)

    with mock.patch.object(build, "load", measured):
        llm = LLM(str(options.checkpoint), kv_scales="one", **PLAIN, **settings)
    memory["largest shard"] = max(x.stat().st_size for x in options.checkpoint.glob("*.safetensors"))
    with llm:
        yield llm


@contextmanager
def host_memory(memory: dict[str, int]) -> Iterator[None]:
    """Notes the most memory of this process, beyond what it had, looking every few milliseconds."""
    import torch

    if torch.cuda.is_available():
        # What the driver and its libraries take is not the weights'.
        x = torch.ones(64, 64, dtype=torch.bfloat16, device="cuda")
        (x @ x).sum().item()
    names = {"VmRSS": "resident", "RssAnon": "anonymous"}
    over = threading.Event()

    def status() -> dict[str, int]:
        lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
        return {names[line[0][:-1]]: int(line[1]) << 10 for line in lines if line and line[0][:-1] in names}

    before = status()

    def watch() -> None:
        while True:
            is_over = over.wait(0.005)
            for name, size in status().items():
                memory[name] = max(memory.get(name, 0), size - before[name])
            if is_over:  # what is read faster than that is looked at once
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def files_kept() -> set[str]:
    """The files of compiled code in the cache folder."""
    cache = Path(os.environ["NIBBLE_CACHE"])
    return {str(path.relative_to(cache)) for path in cache.rglob("*") if path.suffix in CODE}


class Kernels:
    """Counts what is compiled in this process from now on."""

    def __init__(self) -> None:
        import triton

        from nibble.kernels import nvrtc

        self.counts, self.nvrtc = Counter[str](), Counter[str]()
        self.waits: list[tuple[str, str, float]] = []
        """Part of the start, kernel and seconds of each that was compiled while nothing else was done."""
        self._part = "before"
        self._own = nvrtc._compile
        triton.knobs.compilation.listener = self._note_triton
        nvrtc._compile = self._compile  # type: ignore[assignment]
        logger = logging.getLogger("nibble.start")
        handler = logging.Handler(logging.DEBUG)
        handler.emit = self._note_part  # type: ignore[method-assign]
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
        logger.propagate = False

    def _note_part(self, record: logging.LogRecord) -> None:
        facts = record.facts  # type: ignore[attr-defined]
        self._part = facts["part"] if record.levelno == logging.DEBUG else "between"

    def _note_triton(
        self, *, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool
    ) -> None:
        self._note(self.counts, "found" if cache_hit else "compiled", src.name, times.total / 1e6)

    def _note(self, counts: Counter[str], kind: str, name: str, seconds: float) -> None:
        is_ahead = threading.current_thread().name.startswith("nibble-ahead")
        if not is_ahead and kind == "compiled":
            self.waits.append((self._part, name, round(seconds, 2)))
        kind += " ahead" * is_ahead
        counts[kind] += 1
        counts[f"{kind} ms"] += round(seconds * 1000)

    def _compile(self, text: str, name: str, *others: Any) -> bytes:
        begin = time.perf_counter()
        code: bytes = self._own(text, name, *others)
        self._note(self.nvrtc, "compiled", name, time.perf_counter() - begin)
        return code


def table_of(number: int, result: dict[str, Any]) -> str:
    """The parts of a start, and what each waited for."""
    waits: dict[str, list[tuple[str, float]]] = {}
    for part, kernel, seconds in result["waited for"]:
        waits.setdefault(part, []).append((kernel, seconds))
    lines = [
        f"start {number} on {result['gpu']}: ready after {result['ready without weights']:.1f} s beside weights"
    ]
    for part, seconds in (("imports", result["imports"]), *result["parts"].items()):
        kernels = waits.pop(part, [])
        what = f"  compiled {len(kernels)} kernels in {sum(s for _, s in kernels):.1f} s" if kernels else ""
        longest = ", ".join(f"{name} {s:.1f}" for name, s in sorted(kernels, key=lambda entry: -entry[1])[:4])
        lines.append(f"  {part:15} {seconds:6.1f} s{what}{': ' + longest if longest else ''}")
    lines.append(f"  between parts   {result['between parts']:6.1f} s")
    lines.append(f"  bytecode {result['bytecode']}")
    lines.append(f"  imports of { ({name: round(s, 1) for name, s in result['imports of'].items()}) }")
    rest = sum(len(kernels) for kernels in waits.values())
    lines.append(f"  compiled elsewhere: {rest}; triton {result['triton']}; nvrtc {result['nvrtc']}")
    lines.append(f"  compiler { ({name: round(s, 1) for name, s in result['compiler'].items()}) }")
    after = result["after the start"]
    lines.append(
        f"  after it: {after['graphs']} graphs, {after['kernels']} kernels, {len(after['files'])} files"
    )
    if memory := result.get("host memory"):
        share = max(memory["resident"], memory["anonymous"]) / memory["largest shard"]
        lines.append(f"  host memory at most {share:.2f} of the largest shard: {memory}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--weights", default="", help="a format of packed matrices; BF16 if left out")
    parser.add_argument("--checkpoint", type=Path, help="a folder with weights to read")
    parser.add_argument("--write", action="store_true", help="write it first, of random weights")
    parser.add_argument("--scheme", default="nvfp4")
    parser.add_argument("--kv-memory", help="of the pool; all that is free if left out")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--cache", help="Nibble's cache folder; a new one if left out")
    parser.add_argument("--once", action="store_true", help="start in this process")
    options = parser.parse_args()
    if options.once:
        print(RESULT + json.dumps(start(options)))
        return
    if options.write:
        from random_checkpoints import write

        # In a process of its own, so that nothing stays on the GPU.
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            pool.submit(write, options.model, options.checkpoint, options.weights, options.device).result()
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(options.cache or folder)
        for i in range(options.starts):
            result = in_process(cache)
            print(f"start {i + 1}", json.dumps(result, indent=1), flush=True)
            # Apart, as programs read the other.
            print(table_of(i + 1, result), file=sys.stderr, flush=True)


def in_process(cache: Path) -> dict[str, Any]:
    """Start an engine in a process of its own."""
    own = {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}  # Nibble's defaults are what is measured
    environment = {name: value for name, value in os.environ.items() if name not in own}
    done = subprocess.run(
        [sys.executable, __file__, *sys.argv[1:], "--once"],
        env=environment | {"NIBBLE_CACHE": str(cache), BEGIN: str(time.time())},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    line = next(line for line in reversed(done.stdout.splitlines()) if line.startswith(RESULT))
    result: dict[str, Any] = json.loads(line.removeprefix(RESULT))
    return result


if __name__ == "__main__":
    main()
