"""The time of a call on this machine: the median replay of a CUDA graph of many calls, or of the calls themselves.

A step is a function that makes several calls, as the layers of a model would, and returns their outputs. It is
captured once and replayed; the median replay, over the number of calls, is the time of one call. So the gap between
two launches counts as it does in an engine, and nothing that the host does in between. What is not captured is called
as it is: with the host ahead of the GPU, as among the large kernels of a prompt, its work counts only where the GPU
has to wait for it; otherwise all of it does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

Step = Callable[[], Sequence[Tensor]]
SPEND_MS = 60.0
"""What the replays of one measurement may take together; at least FEWEST and at most MOST are made."""
FEWEST, MOST = 5, 60
L2_TIMES = 4
"""A measurement goes through at least so many times the L2 cache before it comes back to the same bytes."""
CALLS = 32
"""Calls of a step: the layers of a model."""
LEAD, MOST_LEAD_MS, CYCLES = 1.5, 200.0, 2_000_000
"""How far the host gets ahead: so many times what it needs for a step. CYCLES: of a GPU in a ms, rather too many."""


@dataclass(frozen=True)
class Timed:
    """A measurement."""

    ms: float
    """Median time of one call."""
    outputs: Sequence[Tensor]
    """What the replays wrote."""
    captured: bool
    """False where it could not be a graph."""


def time_calls(
    step: Step,
    calls: int,
    *,
    graph: bool = True,
    queue_ahead: bool = False,
    device: str | None = None,
    spend_ms: float = SPEND_MS,
    fewest: int = FEWEST,
) -> Timed:
    """Return the time of one of `calls` calls. On a CPU nothing is captured.

    Outputs are poisoned before the last replay, so that what is not written shows.

    Args:
        step: Makes the calls.
        calls: How many it makes.
        graph: False for steps that talk to the host, whose time then counts too.
        queue_ahead: Count the host's time only where the GPU waits for it.
        device: The torch device type; this machine's if None.
        spend_ms: What all replays may take together.
        fewest: Replays to make at least.
    """
    if (device or here()) == "cpu":
        outputs, replay, captured = _eager(step)
        once_ms, fewest = _cpu_ms, 1
    else:
        outputs, replay, captured = _captured(step) if graph else _eager(step)
        lead_ms = _lead_ms(step) if queue_ahead and not captured else 0.0
        once_ms = partial(_replay_ms, lead_ms=lead_ms)
    # The number of repeats follows from one replay; 1e-3 ms stands for a time that is too short to divide by.
    repeats = min(max(int(spend_ms / max(once_ms(replay), 1e-3)), fewest), MOST)
    ms = statistics.median(once_ms(replay) for _ in range(repeats)) / calls
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


def _lead_ms(step: Step) -> float:
    """Return how long the GPU is to sleep so that a whole step is queued behind it."""
    torch.cuda.synchronize()
    return min(LEAD * _cpu_ms(step), MOST_LEAD_MS)


def _replay_ms(replay: Callable[[], object], lead_ms: float) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # While the GPU sleeps the host queues the calls, so that its own time does not count.
    torch.cuda._sleep(int(lead_ms * CYCLES))
    start.record()
    replay()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


def _cpu_ms(replay: Callable[[], object]) -> float:
    start = time.perf_counter()
    replay()
    return (time.perf_counter() - start) * 1e3


def here() -> str:
    """Return the torch device type of this machine."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def l2_bytes(device: str | None = None) -> int:
    """Return the size of the L2 cache; on a CPU, where caches are not outgrown, next to nothing."""
    return torch.cuda.get_device_properties(0).L2_cache_size if (device or here()) == "cuda" else 1
