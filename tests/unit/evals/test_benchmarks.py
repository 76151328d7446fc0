"""The benchmarks' own arithmetic, and that each of them runs: timings are for the GPU, mistakes are found here."""

from __future__ import annotations

import itertools
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

HOME = Path(__file__).parents[3] / "benchmarks"
sys.path.insert(0, str(HOME))

import append  # noqa: E402
import backends  # noqa: E402
import decode_attention as decode  # noqa: E402
import engine_load  # noqa: E402
import extend  # noqa: E402
import hybrid_replay  # noqa: E402
import paged  # noqa: E402
import replay  # noqa: E402
import serve_overhead  # noqa: E402
import serve_parity  # noqa: E402
import state_drift  # noqa: E402
import torch  # noqa: E402
from report import Aim, aims_table, worst  # noqa: E402

from nibble.attention.backends import all_backends  # noqa: E402
from nibble.attention.planner.evidence import shipped_rankings  # noqa: E402
from nibble.evals import tune as race  # noqa: E402
from nibble.hardware import lookup_gpu  # noqa: E402
from nibble.model_spec import Phase  # noqa: E402

pytestmark = pytest.mark.slow


def test_shapes_and_heads_are_read() -> None:
    assert paged.requests("B64x8K") == (8192,) * 64
    assert paged.requests("1x128K+31x4K") == (131072, *[4096] * 31)
    assert paged.heads("64/4") == paged.Heads(64, 4, 128) and paged.heads("32/8/64").dim == 64
    assert paged.Heads().bytes_per_token("nvfp4") == 8 * 144
    for wrong in ("64*8K", "8K", ""):
        with pytest.raises(SystemExit):
            paged.requests(wrong)


@pytest.mark.parametrize(
    ("value", "least", "verdict"),
    [(3.4, True, "aim"), (3.0, True, "floor"), (2.6, True, "MISSED"), (None, True, "not measured"),
     (3.4, False, "MISSED"), (2.0, False, "aim")],
)  # fmt: skip
def test_a_verdict(value: float | None, least: bool, verdict: str) -> None:
    aim = Aim("K1", "what", 2.7, 3.3, value, least) if least else Aim("K1", "what", 3.3, 2.7, value, least)
    assert aim.verdict == verdict
    assert verdict in aims_table([aim])


def test_the_worst_of_what_is_not_all_known_is_unknown() -> None:
    assert worst([2.0, 1.0]) == 1.0 and worst([2.0, 1.0], least=False) == 2.0
    assert worst([2.0, None]) is None and worst([]) is None


def cell(kernel: str, fmt: str, shape: str, ms: float, page: int = 64) -> decode.Cell:
    size = sum(paged.requests(shape)) * paged.Heads().bytes_per_token(fmt)
    return decode.Cell("32/8 d128", shape, kernel, fmt, page, "hnd", ms, size, 1e-3, 2e-3, True)


def test_the_lines_of_decode_attention() -> None:
    cells = [
        cell("cuda", "nvfp4", "64x8K", 0.2), cell("triton", "nvfp4", "64x8K", 0.5),
        cell("cuda", "nvfp4", "1x128K+31x4K", 0.1), cell("FlashInfer", "bf16", "64x8K", 0.6),
        cell("FlashInfer XQA", "bf16", "64x8K", 0.7), cell("FlashInfer", "bf16", "64x8K", 0.58, page=16),
        cell("FlashInfer XQA", "fp8_e4m3", "64x8K", 0.3), cell("cuda", "fp8_e4m3", "64x8K", 0.25),
    ]  # fmt: skip
    lines = {(aim.name, aim.what.rpartition(" ")[2]): aim.value for aim in decode.aims(cells, 4.27)}
    assert lines["K1", "64x8K"] == pytest.approx(2.9)  # the better page of the best peer, the better backend
    assert lines["K1", "64x32K"] is None and lines["K3", "64x32K"] is None
    assert lines["K7", "64x8K"] == pytest.approx(1.2)
    tokens = (131072 + 31 * 4096) / (64 * 8192)
    assert lines["K5", "64x8K)"] == pytest.approx(0.1 / (0.2 * tokens))
    table = decode.table(cells, 4.27)
    assert "0.580 ms" in table and "0.600 ms" not in table and "**cuda**" in table


def costs() -> engine_load.Costs:
    steps = [
        engine_load.Decode(n, context, 5 + 0.1 * n + 1e-4 * n * context)
        for n in (1, 8, 32)
        for context in (1024, 9216)
    ]
    return engine_load.Costs({1024: 20000.0, 16384: 10000.0}, steps)


def test_costs_fit_what_was_measured() -> None:
    found = costs()
    assert found.per_token_ms == pytest.approx(1e-4) and found.misfit < 1e-6
    assert found.decode_ms(16, 16 * 4096) == pytest.approx(5 + 1.6 + 1e-4 * 16 * 4096)
    assert found.rate(2048) == 20000 and found.rate(30000) == 10000


def stub(pages: int, running: int) -> Any:
    """As much of an LLM as compute() reads."""
    scheduler = SimpleNamespace(max_running=running, token_budget=8192, max_context=20480)
    runner = SimpleNamespace(pool=SimpleNamespace(pages=pages, layout=SimpleNamespace(page_size=64)))
    engine = SimpleNamespace(runner=runner, scheduler=scheduler)
    return SimpleNamespace(engine=engine, config=SimpleNamespace(prefix_cache=True))


def test_a_workload_is_computed_by_the_scheduler() -> None:
    work = engine_load.Workload.parse("1K/2K")
    assert str(work) == "1K/2K"
    alone = engine_load.compute(stub(10_000, 32), costs(), work, 1)
    decodes = sum(5.1 + 1e-4 * (1024 + i) for i in range(2048)) / 1e3
    assert alone.seconds == pytest.approx(1024 / 20000 + decodes, rel=0.02)
    assert alone.first_s == pytest.approx(1024 / 20000, rel=0.01) and alone.preemptions == 0
    roomy = engine_load.compute(stub(10_000, 32), costs(), work, 32)
    tight = engine_load.compute(stub(500, 32), costs(), work, 32)
    assert tight.tokens_s < roomy.tokens_s and tight.preemptions > 0


@pytest.mark.parametrize(
    ("module", "arguments", "expected"),
    [
        (decode, ["--backends", "torch_ref", "--formats", "nvfp4,bf16"], "**torch_ref** | nvfp4"),
        (append, ["--formats", "nvfp4+rot,bf16"], "Nibble | nvfp4+rot"),
        (extend, ["--backends", "torch_ref,sdpa", "--formats", "nvfp4,bf16"], "sdpa, staged | nvfp4"),
        (backends, ["--only", "gqa/nvfp4,mla16//decode,sinks-window/bf16"], "| nvfp4 | sdpa, staged |"),
    ],
)
def test_a_benchmark_runs(
    module: Any,
    arguments: list[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "--tiny", "--out", str(tmp_path), *arguments])
    module.main()
    assert expected in capsys.readouterr().out
    assert json.loads(next(tmp_path.glob("*.json")).read_text())["cells"]
    assert expected in next(tmp_path.glob("*.md")).read_text()


def raced(backend: str, ms: float | None, *, graphs: bool = True, chosen: bool = False) -> race.Result:
    return race.Result(backend, None, 64, "hnd", Phase.DECODE, "64x8K", 1, graphs, chosen, ms, 1e-3)


def test_what_auto_chose_is_judged_by_those_that_can_be_recorded() -> None:
    auto, rival = raced("a", 0.30, chosen=True), raced("b", 0.25)
    eager, broken = raced("c", 0.20, graphs=False), raced("d", None)
    found = backends.verdict("gqa/bf16/decode/64x8K", [auto, rival, eager, broken])
    assert found.ratio == pytest.approx(1.2) and found.best == rival and found.any == eager
    text = backends.summary([found, backends.verdict("mqa", [rival])])
    assert "1 of 1 jobs are above 1.05" in text and "not raced in: mqa" in text and "c 0.200 | 1.50" in text


def test_the_order_of_backends_is_held_against_their_places() -> None:
    fast, slow, eager = raced("a", 0.2), raced("b", 0.4), raced("c", 0.1, graphs=False)
    other = {
        "gqa/bf16/decode/1x32K": [replace(x, workload="1x32K", ms=y) for x, y in ((fast, 0.8), (slow, 0.2))]
    }
    text = backends.orders({"gqa/bf16/decode/64x8K": [fast, slow], **other})
    assert "b 1.41 (1); a 2.00 (1) |  |" in text  # by the means of both workloads
    text = backends.orders({"x/64x8K": [replace(fast, place=2), slow, eager, raced("d", None)]})
    assert "c 1.00 (1, eager); a 2.00 (2); b 4.00 (1); d inf (1) | other than ranked |" in text


def test_a_recorded_race_is_judged_by_the_choices_of_today(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def cells(need: str, works: tuple[str, ...], **times: float) -> list[dict[str, object]]:
        return [
            {"job": f"{need}/{work}", "backend": name, "stage_to": None, "page": 32, "ms": ms}
            for work in works
            for name, ms in times.items()
        ]

    decode = cells("gqa/nvfp4/decode", ("64x8K", "16x8K"), cuda=0.2, triton=0.1, flashinfer=0.01)
    verify = cells("softcap/nvfp4/verify", ("16x8K",), triton=0.1)
    later = [{**cell, "page": 64, "ms": 0.12} for cell in decode if cell["backend"] == "triton"]
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, found in zip(paths, (decode + verify, later), strict=True):
        path.write_text(json.dumps({"cells": found}))
    monkeypatch.setattr(sys, "argv", ["x", *map(str, paths)])
    replay.main()
    out = capsys.readouterr().out
    assert "gqa/nvfp4/decode | cuda | triton | 1.67 | ABOVE |" in out, (
        "on the plan's pages, by who can be recorded"
    )
    assert "softcap/nvfp4/verify | not recorded | triton | inf | ABOVE |" in out and "2 of 2 needs" in out
    monkeypatch.setattr(sys, "argv", ["x", *map(str, paths), "--without", "cuda,flashinfer"])
    replay.main()
    out = capsys.readouterr().out
    assert "gqa/nvfp4/decode | triton | triton | 1.00 |" in out and "flashinfer" not in out
    monkeypatch.setattr(sys, "argv", ["x", str(paths[0]), "--only", "mla16"])
    with pytest.raises(SystemExit, match="2"):
        replay.main()
    assert "these files have no time" in capsys.readouterr().err


def test_shipped_rankings_agree_with_the_recorded_race() -> None:
    """Over the workloads of a need together, none is ranked before one that is more than a tenth faster."""
    records = replay.read([HOME / "reports/backends_nvidia-h200.json"])
    h200, times = lookup_gpu("h200"), dict[tuple[str, str], dict[str, float]]()
    for (job, backend, stage_to), pages in records.items():
        need, _, workload = job.rpartition("/")
        ms = min(cell["ms"] for cell in pages.values())
        times.setdefault((need, backend + "+" * bool(stage_to)), {})[workload] = ms
    options = backends.arguments().parse_args([])
    options.phases = "prefill,extend,decode"
    for job in backends.jobs(options, h200, all_backends()):
        need = f"{job.shape}/{job.scheme}/{job.work.phase}"
        ranking = shipped_rankings(h200.name).first(job.request.need(job.part, job.work.phase), "")
        assert ranking is not None
        raced = [
            (name, times[need, name])
            for timing in ranking.order
            if (need, name := timing.backend + "+" * bool(timing.stage_to)) in times
        ]
        for (first, before), (second, after) in itertools.pairwise(raced):
            shared = before.keys() & after.keys()
            ratio = math.prod(before[work] / after[work] for work in shared) ** (1 / len(shared))
            assert ratio < 1.1, f"{need}: {first} is ranked before {second}, and takes {ratio:.2f} x its time"


def test_what_failed_in_a_race_has_no_time(tmp_path: Path) -> None:
    cell = {"job": "gqa/nvfp4/decode/64x8K", "backend": "cuda", "stage_to": None, "page": 64, "ms": None}
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"cells": [cell, {**cell, "page": 32, "ms": 0.1}]}))
    assert [list(pages) for pages in replay.read([path]).values()] == [[32]]


def test_jobs_are_selected_and_one_failure_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(race, "BOUNDS", {torch.float32: -1.0})
    monkeypatch.setattr(sys, "argv", ["x", "--tiny", "--only", "gqa/bf16/decode"])
    backends.main()
    out = capsys.readouterr().out
    assert "1 jobs" in out and out.count("a wrong answer has no speed") >= 2 and "auto failed" in out


def test_a_wrong_kernel_is_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = paged.attend
    monkeypatch.setattr(paged, "attend", lambda *args: right(*args) * 1.001)
    monkeypatch.setattr(sys, "argv", ["x", "--tiny", "--backends", "torch_ref", "--formats", "bf16"])
    with pytest.raises(SystemExit, match="wrong answer"):
        decode.main()


def test_an_engine_is_measured() -> None:
    import engine_gpu

    options = engine_gpu.arguments().parse_args(["--tiny", "--full", "32/64@2"])
    result = engine_gpu.measure("tiny", "nvfp4", engine_gpu.plan(options), 1.0)
    assert [(s.requests, s.context) for s in result.costs.decodes] == [(1, 32), (1, 96), (3, 32), (3, 96)]
    assert len(result.outcomes) == 4 and result.real[0].tokens_s > 0
    assert "**measured**" in engine_gpu.computed_table([result])
    assert "does not fit" not in engine_gpu.measured_table([result])
    json.dumps(engine_gpu.figures(result))


def test_an_engine_with_packed_weights() -> None:
    import engine_load
    from random_models import served

    from nibble.models.linear import quantized_layers

    options = {"device": "cpu", "max_context": 256, "kv_memory": "4MiB", "quantized_weights": "packed"}
    with served("tiny", weights="nvfp4", **options) as made:
        layers = quantized_layers(made.llm.engine.runner.model)
        assert len(layers) == 2 * 4 and made.streamed_bytes() > sum(layer.matrix.nbytes for layer in layers)
        error, _ = engine_load.gate(made.llm, made.prompt, made.expected_TV, 0.05)
    with served("tiny", **options | {"quantized_weights": "auto"}) as plain:
        distance = (plain.expected_TV - made.expected_TV).norm() / plain.expected_TV.norm()
    assert distance > 2 * error


def test_a_start_reads_a_checkpoint(tmp_path: Path) -> None:
    import random_checkpoints
    import start

    logits = {}
    for weights in ("", "fp8"):
        folder = tmp_path / f"weights {weights}"
        random_checkpoints.write("tiny", folder, weights, "cpu", shard=50_000)
        sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
        options = SimpleNamespace(
            checkpoint=folder, weights=weights, scheme="fp32", device="cpu", kv_memory=None
        )
        memory = dict[str, int]()
        with start.engine_of(options, memory) as llm:
            logits[weights] = llm.logits(list(range(5, 60)))
        assert len(sizes) > 2 and memory["largest shard"] == max(sizes)
        assert memory.keys() == {"resident", "anonymous", "largest shard"}
    # Eight bits are near.
    error = (logits["fp8"] - logits[""]).norm() / logits[""].norm()
    assert 0 < error < 0.1


def test_tiles_of_products_are_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import linear

    monkeypatch.setattr(sys, "argv", ["x", "--tiny", "--tiles", "64x128x4,64x128x4x8"])
    linear.main()
    out = capsys.readouterr().out
    tiles = "library", "triton's choice", "triton 64x128x4", "triton 64x128x4x8"
    assert all(f"| tiny | 8 | {tile} |" in out for tile in tiles)
    monkeypatch.setattr(linear, "linear", lambda x, weight, *_, **__: x @ weight.T * 1.02)
    with pytest.raises(SystemExit, match="is off by"):
        linear.main()


def test_routers_are_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import router

    monkeypatch.setattr(sys, "argv", ["x", "--tiny", "--rows", "3,17"])
    router.main()
    out = capsys.readouterr().out
    assert "| tiny | 3 | product |" in out and "| tiny | 17 | product |" not in out
    assert all(f"| tiny | {rows} | topk float32 |" in out for rows in (3, 17))
    assert "| sampler | 17 | largest of 5000 float32 |" in out
    monkeypatch.setattr(router.fast, "topk", lambda x, k: (x[:, :k], None))
    with pytest.raises(SystemExit, match="topk float32 of 3 rows is wrong"):
        router.main()


def test_chains_of_products_try_tiles_that_run_at_once() -> None:
    import product_chains

    from nibble.kernels.linear import sm90

    for rows in (32, 64, 128):
        for name in ("qkv", "o", "down"):
            outputs, inputs = product_chains.WEIGHTS[name]
            found = product_chains.tiles(outputs, inputs, rows, 132)
            assert len(found) > 10 and len({*found}) == len(found)
            assert all(tile.fits(inputs, rows) for tile in found)
            assert sm90.tile_of(outputs, inputs, rows, 132) in found
    assert {product_chains.name_of(tile) for tile in product_chains.tiles(28672, 4096, 128, 132)} == {
        "2x1x3", "4x1x3", "4x1x4",
    }  # fmt: skip


def test_products_are_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import quantized_linear
    from packed_weights import KINDS

    monkeypatch.setattr(sys, "argv", ["x", "--tiny"])
    quantized_linear.main()
    out = capsys.readouterr().out
    assert "WRONG" not in out and all(f"| tiny | {name} |" in out for name in (*KINDS, "bf16"))
    monkeypatch.setattr(quantized_linear.naive, "E2M1", (0.0,) * 16)
    with pytest.raises(SystemExit, match="wrong answers"):
        quantized_linear.main()


def test_schedules_are_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With a stand-in for the library, whose second candidate is the fastest, and whose third computes wrong."""
    import weight_schedules as bench

    from nibble.kernels.quantized_linear import naive, schedules

    slow, fast, wrong = (
        bench._settings(8, "mma", (128, 128, 64, 32), (stages, 1), False) for stages in (4, 6, 8)
    )
    times = {4: 10.0, 6: 5.0, 8: 1.0}
    current: list[int] = []

    def multiply(x: torch.Tensor, x_scale: Any, matrix: Any, locks: Any) -> torch.Tensor:
        y = naive.quantized_linear(x, matrix, x_scale)
        return y.roll(1, -1) if current[-1] == 8 else y

    def product(x: torch.Tensor, matrix: Any, locks: Any) -> torch.Tensor:
        codes, scale = naive.quantize_activations(x, matrix.activations) if matrix.activations else (x, None)
        return multiply(codes, scale, matrix, locks)

    monkeypatch.setattr(bench.humming, "import_library", lambda: None)
    monkeypatch.setattr(bench, "SHAPES", {"qkv": (256, 512)})
    monkeypatch.setattr(bench.humming, "layer_config", lambda key, device: None)
    monkeypatch.setattr(bench, "candidates", lambda case, config: [slow, fast, wrong])
    monkeypatch.setattr(
        bench, "compile_one", lambda _, settings: SimpleNamespace(kernel_id=settings["num_stages"])
    )
    monkeypatch.setattr(bench.humming, "prepare", lambda matrix: (matrix, None))
    monkeypatch.setattr(bench.humming, "use", lambda kernels, layout, device: current.append(int(kernels[2])))
    monkeypatch.setattr(bench.humming, "quantized_linear", multiply)
    monkeypatch.setattr(bench.quantized_linear, "quantized_linear", product)
    monkeypatch.setattr(bench, "time_us", lambda calls, x: (calls[0](x), times[current[-1]])[1])
    arguments = ["x", "--formats", "fp8,fp8a8", "--shapes", "qkv", "--rows", "1,8"]
    monkeypatch.setattr(sys, "argv", arguments)
    bench.main()
    out = capsys.readouterr().out
    assert out.count("WRONG") == 4 and "| qkv | fp8a8 | 8 | 10.0 | 5.0 |" in out
    entry = "(90, 'e4m3, groups of 128', 'group', 3): {8: {'mma_type': 'mma', 'block_shape': (8, 128, 128)"
    assert entry in out
    # What it prints is what the table takes.
    lines = [line for line in out.splitlines() if line.startswith("    (90,")]
    table = eval("{" + "".join(lines) + "}")
    monkeypatch.setattr(schedules, "MEASURED", table)
    assert schedules.measured(bench.KINDS["fp8a8"].key((256, 512)), 90) == {8: fast}


@pytest.mark.parametrize("name", ["int4", "int4z", "fp8", "fp8row", "nvfp4", "mxfp4"])
def test_weights_are_quantised_as_finely_as_their_format_allows(name: str) -> None:
    from packed_weights import KINDS, quantize

    from nibble.kernels.quantized_linear import naive

    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    error = naive.dequantize(quantize(weight, KINDS[name].format)) - weight
    assert error.norm() / weight.norm() < (0.04 if name.startswith("fp8") else 0.16)


def test_a_stream_is_read() -> None:
    said = [
        {"choices": [{"text": "a"}]},
        {"choices": [{"text": "é"}]},
        {"choices": [], "usage": {"completion_tokens": 2}},
    ]
    body = b"".join(f"data: {json.dumps(one)}\n\n".encode() for one in said) + serve_overhead.END
    parts = [body[:7], body[7:90], body[90:]]
    chunked = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    assert serve_overhead.unchunked(b"HTTP/1.1 200 OK\r\n\r\n" + chunked) == body
    assert serve_overhead.read(b"HTTP/1.1 200 OK\r\n\r\n" + chunked) == ("aé", 2, 2)


def test_prompts_differ_from_round_to_round() -> None:
    text = "".join(f"line {i}\n" for i in range(9000))
    asked = [prompt for round_ in range(4) for prompt in serve_overhead.prompts(text, 32, round_)]
    assert len(set(asked)) == len(asked) and {len(prompt) for prompt in asked} == {240}


def test_parity_of_a_client_and_a_server() -> None:
    before = {"request_success_total": 2.0, "prompt_tokens_total": 10.0}
    after = {
        "request_success_total": 4.0, "prompt_tokens_total": 26.0, "generation_tokens_total": 8.0,
        "time_to_first_token_seconds_sum": 0.2, "time_to_first_token_seconds_count": 2.0,
        "request_time_per_output_token_seconds_sum": 0.02, "request_time_per_output_token_seconds_count": 2.0,
    }  # fmt: skip
    server = serve_parity.server_figures(before, after)
    assert server == {
        "requests": 2, "prompt tokens": 16, "output tokens": 8, "TTFT": pytest.approx(100), "TPOT": pytest.approx(10),
    }  # fmt: skip
    request = {
        "prompt_tokens": 8, "output_tokens": 4, "time_to_first_token_ms": 104.0, "inter_token_latency_ms": 10.0,
    }  # fmt: skip
    single = request | {"inter_token_latency_ms": None, "time_to_first_token_ms": 106.0}
    entries = [{"requests": {"successful": [request]}}, {"requests": {"successful": [single]}}]
    client = serve_parity.client_figures({"benchmarks": entries})
    assert [client[name] for name in serve_parity.COUNTS] == [server[name] for name in serve_parity.COUNTS]
    assert (client["TTFT"], client["TPOT"]) == (105.0, 10.0)
    assert "| requests | 2 | 2 |" in serve_parity.table(client, server)
    assert "| TTFT | 105.0 ms | 100.0 ms |" in serve_parity.table(client, server)


def test_drift_of_states(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert list(state_drift.powers(100)) == [16, 32, 64]
    pieces = list(state_drift.bounds(4096))
    assert pieces[0] == (0, 16) and pieces[-1] == (3072, 4096)
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(pieces))
    monkeypatch.setattr(
        sys, "argv", ["x", "--tiny", "--out", str(tmp_path), "--plot", str(tmp_path / "drift.svg")]
    )
    state_drift.main()
    drifts = json.loads((tmp_path / "state_drift.json").read_text())["results"]
    worst = {(drift["format"], drift["steps"]): drift["state_mean"] for drift in drifts}
    # int8 has 7 bits beside the sign for a row, BF16 has 8 for each value, FP8 has 4.
    assert all(0 < worst["bf16", at] < worst["int8", at] < worst["fp8", at] < 0.1 for at in (16, 64, 256))
    assert "| 256 |" in capsys.readouterr().out and (tmp_path / "drift.svg").stat().st_size > 1000


def test_reuse_of_conversations() -> None:
    words = hybrid_replay.topics("demo", conversations=4, turns=3, system=50)
    assert [len(spoken) for spoken in words] == [4] * 4
    assert words[0][0] == words[2][0] != words[1][0] and words[0][1] != words[2][1]
    turns = [hybrid_replay.Turn(0, i, [], text, 0.1, 100, 90 * i, 8 * i) for i, text in enumerate("ab")]
    cold = [("a", 0.4), ("x", 0.5)]
    assert [(aim.value, aim.verdict) for aim in hybrid_replay.aims(turns, cold)] == [
        (pytest.approx(90 / 98), "floor"), (0.5, "MISSED")
    ]  # fmt: skip
    table = hybrid_replay.table(turns, cold)
    assert "| 1 | 100 | 0.0% | 0.0% | 100 ms | 400 ms |" in table and "| 98.0% | 90.0% |" in table


def test_drafts_are_forced_by_the_kernel_as_by_torch() -> None:
    """The coin of verify_steps.py, which decides on a GPU."""
    pytest.importorskip("triton")
    import forced_drafts
    import verify_steps

    rng = torch.Generator().manual_seed(0)
    for requests, length in itertools.product((2, 4, 8), (4, 8)):
        new_B = torch.randint(0, length + 1, (requests,), generator=rng)
        ids_BL = torch.randint(-9, 5, (requests, length), generator=rng)
        ids_BL[ids_BL == -1] = 3  # what was sampled last is no draft
        drafts_KR, tokens_S = (torch.randint(0, 5, shape, generator=rng) for shape in ((16, 20), (99,)))
        counts_B, others = (
            torch.randint(0, 8, (requests,), generator=rng),
            (SimpleNamespace(latest_R=drafts_KR[0]), drafts_KR),
        )
        inputs: tuple[Any, ...] = (
            torch.arange(requests),
            new_B,
            ids_BL,
            tokens_S[: max(int(new_B.sum()), 1)],
            *others,
        )
        forced, expected = (
            force(counts_B, *inputs)[: new_B.sum()]
            for force in (forced_drafts.force, verify_steps.force_by_torch)
        )
        assert torch.equal(forced, expected) and (
            new_B.sum() < 4 or not torch.equal(forced, tokens_S[: len(forced)])
        )
