"""Prompts' recurrences in CUDA C++: they compile without a GPU, and their source, run on a CPU, agrees with naive.py.

tests/gpu/test_recurrence_prompt_gpu.py is the same on a GPU.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import cuda_on_cpu
from nibble.kernels import GPU
from nibble.kernels.recurrence import prompt as kernels
from nibble.kernels.recurrence.types import StateMetadata
from nibble.kernels.state_formats import FORMATS
from prompts import Case, Prompt, difference, prompt

SOURCES = Path(kernels.__file__).parent
OUTPUT = {"fp32": 0.004, "bf16": 0.005, "int8": 0.008, "fp8": 0.02}
"""Largest error of outputs. Products round their factors to bfloat16; by that, few codes become their neighbours."""
MATRICES = {"fp32": 0.003, "bf16": 0.005, "int8": 0.012, "fp8": 0.03}
FAR_CODES = {"fp32": 0, "bf16": 0, "int8": 0.001, "fp8": 0.005}
"""Largest share of values that are more than a code apart. A value of E4M3 that was large and is small keeps its error."""
needs_compiler = pytest.mark.skipif(cuda_on_cpu.COMPILER is None, reason="needs g++")

CASES = (
    Case(),
    Case("int8"),
    Case("bf16", by_column=True, key_heads=2),
    Case("fp8", delta=False, beta=torch.float32),
    Case(
        "int8",
        delta=False,
        heads=4,
        lengths=(40, 9, 33),
        starts=(7, 0, 16),
        padding=(1,),
        drafts=5,
        strided=True,
    ),
)
MORE = (
    *(
        Case(format, delta=delta, by_column=by_column)
        for format in FORMATS
        for delta in (True, False)
        for by_column in (True, False)
    ),
    Case("int8", heads=4, rows=64, columns=48, lengths=(100,), starts=(0,)),  # two pairs of heads, four warps
    Case("bf16", heads=3, key_heads=3, rows=16, columns=16, beta=None, lengths=(20, 130), starts=(14, 9)),
    Case(
        "fp8", heads=3, columns=128, lengths=(33, 65), starts=(31, 0), padding=(0,), drafts=20, strided=True
    ),
    Case("fp32", lengths=(200,), starts=(15,), pace=3.0),
)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch kernels on a CPU, of a GPU with few multiprocessors."""

    def kernel(source: str, arch: int, device: int, shared: int, macros: tuple[tuple[str, int], ...]) -> Any:
        return cuda_on_cpu.Kernel(SOURCES / f"{source}.cu", dict(macros))

    monkeypatch.setattr(kernels, "_kernel", kernel)
    monkeypatch.setattr(kernels, "gpu_of", lambda device: GPU(90, 2, 232448))


def run(step: Prompt) -> torch.Tensor:
    return kernels.recurrence(*step.inputs, step.state, step.metadata, delta=step.case.delta)


@needs_compiler
@pytest.mark.sample(6)
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE)], ids=str
)
def test_it_agrees_with_the_definition(case: Case) -> None:
    before = prompt(case)
    ours, theirs = before.copy(), before.copy()
    o_THV = run(ours)
    apart = difference(before, ours, o_THV, theirs, theirs.expected())
    assert apart.strays == 0, str(apart)
    assert apart.output <= OUTPUT[case.format] and apart.matrices <= MATRICES[case.format], str(apart)
    assert apart.far_codes <= FAR_CODES[case.format] and apart.keys == 0 and apart.decays <= 1e-6, str(apart)
    assert apart.updates <= OUTPUT[case.format], str(apart)


@needs_compiler
@pytest.mark.slow
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("format", FORMATS)
def test_errors_are_those_of_the_format(format: str, delta: bool) -> None:
    """Against float64, token by token: hardly larger than those of the definition."""
    ours = prompt(Case(format, delta, lengths=(400,), starts=(0,), columns=64, pace=0.01), spare_rows=0)
    theirs = ours.copy()
    q, k, v, decay, beta = (torch.empty(0) if x is None else x.double() for x in ours.inputs)
    q, k = (x.repeat_interleave(ours.case.heads, dim=1) for x in (q, k))
    matrix_HVK, rows = torch.zeros(ours.case.heads, 32, 64, dtype=torch.float64), []
    for token in range(len(v)):
        matrix_HVK *= decay[token].exp()[:, None, None]
        value = v[token] - (matrix_HVK * k[token, :, None]).sum(-1) if delta else v[token]
        matrix_HVK += (beta[token, :, None] * value)[..., None] * k[token, :, None]
        rows.append((matrix_HVK * q[token, :, None]).sum(-1))
    exact_THV = torch.stack(rows)
    mine, definition = (
        float((o - exact_THV).norm() / exact_THV.norm()) for o in (run(ours), theirs.expected().bfloat16())
    )
    assert mine <= 1.1 * definition + 0.001


@needs_compiler
@pytest.mark.slow
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("format", FORMATS)
def test_chunks_are_one_prompt(format: str) -> None:
    tokens, cut = 100, 37
    once = prompt(Case(format, lengths=(tokens,), starts=(0,)), spare_rows=0)
    twice = once.copy()
    whole_THV = run(once)
    parts = []
    for start, stop in ((0, cut), (cut, tokens)):
        inputs = tuple(x if x is None else x[start:stop] for x in twice.inputs)
        places = (
            twice.metadata.slots_B,
            *(torch.tensor(x, dtype=torch.int32) for x in ([start], [0, stop - start])),
        )
        step = dataclasses.replace(twice, inputs=inputs, metadata=StateMetadata(*places, stop - start))
        parts.append(run(step))
    error = (torch.cat(parts).float() - whole_THV.float()).norm() / whole_THV.float().norm()
    assert 0 < error <= OUTPUT[format]


@pytest.mark.parametrize("by_column", [False, True])
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_sizes_are_those_of_the_source(format: str, delta: bool, by_column: bool) -> None:
    """The sums that scan_records.cuh and scan.cu have."""
    shape = kernels.Shape(64, format, delta, by_column)
    values = {**shape.scan_macros(2), "BLOCK": 16}
    text = (SOURCES / "scan_records.cuh").read_text() + (SOURCES / "scan.cu").read_text()
    for line in text.splitlines():
        if line.startswith("constexpr int ") and "(" not in line.split("=")[0]:
            for part in line.removeprefix("constexpr int ").split("//")[0].strip().rstrip(";").split(", "):
                name, _, value = part.partition(" = ")
                is_sum = value and set(value) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZ_0123456789+-*/() ")
                # Both RECORDs stand there, that by column first.
                if is_sum and (name != "RECORD" or ("K" in value) == by_column):
                    values[name] = eval(value.replace("/", "//"), {}, values)
    assert (values["RECORD"], values["STAGE"]) == (shape.record_bytes, shape.stage_bytes(2))


VARIANTS = [
    (source, macros)
    for format in FORMATS
    for delta in (True, False)
    for by_column in (False, True)
    for shape in [kernels.Shape(128, format, delta, by_column, 2)]
    for source, macros in (
        ("scan", shape.scan_macros(2)),
        ("scan_columns" if by_column else "scan_prepare", shape.prepare_macros(4)),
    )
]


@pytest.mark.parametrize(
    ("arch", "variants"),
    [
        (90, [VARIANTS[0]]),
        pytest.param(90, VARIANTS, marks=pytest.mark.slow),
        pytest.param(
            80,
            [v for v in VARIANTS if v[1].get("FORMAT") != kernels.CODES["float8_e4m3fn"]],
            marks=pytest.mark.slow,
        ),
        pytest.param(120, VARIANTS[:8], marks=pytest.mark.slow),
    ],
)
def test_it_compiles(
    arch: int, variants: list[tuple[str, dict[str, int]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling = pytest.importorskip("nibble.kernels.nvrtc", reason="cuda-bindings is not installed")
    monkeypatch.setenv("NIBBLE_CACHE", str(tmp_path))
    for source, macros in variants:
        assert compiling.cubin(SOURCES / f"{source}.cu", arch, macros).startswith(compiling.ELF)


def test_a_block_fits() -> None:
    """Into what SM90 has of shared memory, twice, and what SM120 has, once."""
    for by_column in (False, True):
        shape = kernels.Shape(128, "fp32", True, by_column)
        for warps, most in ((2, 232448 // 2), (2, 101376), (4, 101376)):
            assert kernels.STAGES[by_column] * shape.stage_bytes(warps) + 1024 <= most


def test_tables() -> None:
    assert [kernels.heads_of(heads, 2) for heads in (2, 4, 6, 8, 12, 32)] == [1, 2, 1, 4, 2, 4]
    assert [kernels.warps_of(128, 32, n, 132) for n in (1, 2, 3, 8)] == [2, 2, 4, 4]
    assert [kernels.warps_of(values, 64, 8, 132) for values in (16, 32, 48, 64, 80, 96)] == [1, 2, 1, 4, 1, 2]
    # A request of every length at every place has room for its blocks.
    for start in range(16):
        for before in range(16):
            for length in range(40):
                room = (before + length) // 16 + 3 - before // 16
                assert room >= -(-(start % 16 + length) // 16)


def test_a_cpu_is_not_served() -> None:
    step = prompt(Case())
    assert not kernels.serves(*step.inputs, step.state, step.metadata)
