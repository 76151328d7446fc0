"""What the GPU benchmarks share: the copy bandwidth, the clock, the machine, options, and how results are published.

Times are taken by nibble.evals.fixtures. On a CPU a step is just run, which checks the benchmark and measures
nothing.
"""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from report import REPORTS, command_line, cpu, write_figures, write_report

from nibble.evals.fixtures import CALLS, L2_TIMES, Step, Timed, device_type, l2_bytes, time_calls

__all__ = ["CALLS", "L2_TIMES", "Step", "Timed", "device", "l2_bytes", "time_calls"]
device = device_type

FEW, STEP_MS, BYTES_PER_MS = 8, 8.0, 4e9
"""Fewer than CALLS calls make a step where they take long: FEW at least, STEP_MS in all."""


def calls_for(size: int) -> int:
    """How many calls a step should make that each read about `size` bytes."""
    if not torch.cuda.is_available():
        return 1
    return min(max(int(STEP_MS * BYTES_PER_MS / size), FEW), CALLS)


def copy_tbps(size: int = 2 << 30) -> float:
    """TB/s of a large copy on the device, bytes read and bytes written counted: what memory can do at best."""
    size = size if torch.cuda.is_available() else 1 << 20
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device())
    target = torch.empty_like(source)
    return 2 * size / time_calls(lambda: [target.copy_(source)], 1, graph=False).ms / 1e9


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
