"""What the GPU benchmarks share: the time of a CUDA graph's replay, the copy bandwidth, the clock, the machine.

A step is a function that makes several calls, as the layers of a model would, and returns their outputs. It is
captured once and replayed; the median replay, over the number of calls, is the time of one call. So the gap between
two launches counts as it does in an engine, and nothing that the host does in between. On a CPU the step is just run,
which checks the benchmark and measures nothing.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from report import REPORTS, command_line, cpu, write_figures, write_report
from torch import Tensor

Step = Callable[[], Sequence[Tensor]]
SPEND_MS = 60.0
"""What the replays of one measurement may take together; at least FEWEST and at most MOST are made."""
FEWEST, MOST = 5, 60
L2_TIMES = 4
"""A measurement goes through at least so many times the L2 cache before it comes back to the same bytes."""
CALLS = 32
"""Calls of a step: the layers of a model. Fewer where they take long: FEW at least, STEP_MS in all."""
FEW, STEP_MS, BYTES_PER_MS = 8, 8.0, 4e9


@dataclass(frozen=True)
class Timed:
    """ms: median time of one call. outputs: what the replays wrote. captured: False where it could not be a graph."""

    ms: float
    outputs: Sequence[Tensor]
    captured: bool


def calls_for(size: int) -> int:
    """How many calls a step should make that each read about `size` bytes."""
    if not torch.cuda.is_available():
        return 1
    return min(max(int(STEP_MS * BYTES_PER_MS / size), FEW), CALLS)


def timed(step: Step, calls: int, *, graph: bool = True) -> Timed:
    """The time of one of `calls` calls. Outputs are poisoned before the last replay, so that what is not written shows.

    graph: False for steps that talk to the host, whose time then counts too.
    """
    if not torch.cuda.is_available():
        start = time.perf_counter()
        outputs = step()
        return Timed((time.perf_counter() - start) * 1e3 / calls, outputs, False)
    outputs, replay, captured = _captured(step) if graph else _eager(step)
    once = _replay_ms(replay)
    repeats = min(max(int(SPEND_MS / max(once, 1e-3)), FEWEST), MOST)
    ms = statistics.median(_replay_ms(replay) for _ in range(repeats)) / calls
    if captured:
        for output in outputs:
            output.fill_(float("nan"))
        replay()
    torch.cuda.synchronize()
    return Timed(ms, outputs, captured)


def _captured(step: Step) -> tuple[Sequence[Tensor], Callable[[], object], bool]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # compiles, tunes and allocates what a capture may not
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    return outputs, graph.replay, True


def _eager(step: Step) -> tuple[Sequence[Tensor], Callable[[], object], bool]:
    return step(), step, False


def _replay_ms(replay: Callable[[], object]) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    replay()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


def copy_tbps(size: int = 2 << 30) -> float:
    """TB/s of a large copy on the device, bytes read and bytes written counted: what memory can do at best."""
    size = size if torch.cuda.is_available() else 1 << 20
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device())
    target = torch.empty_like(source)
    return 2 * size / timed(lambda: [target.copy_(source)], 1, graph=False).ms / 1e9


def sm_clock(step: Step) -> int | None:
    """The SM clock in MHz while `step` runs; None where nothing says so."""
    command = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"]
    if not torch.cuda.is_available():
        return None
    try:
        asked = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return None
    while asked.poll() is None:
        step()
        torch.cuda.synchronize()
    answer = asked.communicate()[0].split()
    return int(answer[0]) if answer and answer[0].isdigit() else None


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def l2_bytes() -> int:
    """The size of the L2 cache; on a CPU, where nothing is measured, next to nothing."""
    return torch.cuda.get_device_properties(0).L2_cache_size if torch.cuda.is_available() else 1


def machine() -> str:
    """The name of what is measured."""
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else cpu()


def versions(*more: str) -> tuple[str, ...]:
    """What a report says beside the machine."""
    found = [f"torch {torch.__version__}", *more]
    if torch.cuda.is_available():
        import triton

        found += [f"CUDA {torch.version.cuda}", f"Triton {triton.__version__}"]
    return tuple(found)


def add_common_options(parser: argparse.ArgumentParser, formats: Sequence[str]) -> None:
    """What is measured, and where results go."""
    parser.add_argument(
        "--tiny", action="store_true", help="a few tokens, to try the benchmark itself on a CPU"
    )
    parser.add_argument("--formats", default=",".join(formats))
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="leave FlashInfer out")
    add_output_options(parser)


def add_backends_option(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument("--backends", default=default, help="Nibble's backends; those not here are left out")


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Where results go beside the terminal."""
    parser.add_argument("--out", type=Path, help="a folder for the report and all figures as JSON")
    parser.add_argument("--report", action="store_true", help="write a dated report to benchmarks/reports")


def publish(
    what: str,
    options: argparse.Namespace,
    doc: str,
    texts: Sequence[str],
    facts: Sequence[str],
    **figures: Any,
) -> None:
    """Prints the texts of a benchmark, and writes report and figures where they are asked for.

    doc: the benchmark's docstring; a report begins with what stands below its command.
    """
    body = "\n\n".join(text for text in texts if text) + "\n"
    print("\n" + body)
    about = "\n\n".join(part.replace("\n", " ") for part in doc.strip().split("\n\n")[2:])
    for folder in filter(None, (options.out, REPORTS if options.report else None)):
        print(write_report(what, f"{about}\n\n{body}", command_line(), machine(), folder, facts))
    if options.out:
        write_figures(what, options.out, machine=machine(), versions=list(facts), **figures)
