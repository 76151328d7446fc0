"""Times that were measured on this machine: how `auto` follows them, when it does not, and the command that takes them."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from nibble.attention import backends
from nibble.attention.planner import evidence, support
from nibble.attention.planner.evidence import (
    LedgerEntry,
    Rankings,
    Timing,
    by_time,
    read_ledger,
    update_ledger,
    versions,
)
from nibble.attention.planner.explain import as_text
from nibble.attention.planner.resolve import resolve
from nibble.attention.planner.support import BackendInfo, Origin, Support
from nibble.cli import docs as tables
from nibble.cli.main import app
from nibble.config import Config
from nibble.errors import ConfigError
from nibble.evals import fixtures
from nibble.evals.fixtures import Workload
from nibble.hardware import lookup_gpu
from nibble.model_spec import Phase
from nibble.spec import CacheSpec
from planning import GPT_OSS, QWEN3_8B

H200 = lookup_gpu("h200")
NVFP4 = Config(model="m", kv_format="nvfp4")
RUN = CliRunner()


def table() -> dict[str, BackendInfo]:
    """Backends that serve all alike, in the default order of their origins; `third` cannot be recorded."""

    def info(name: str, origin: Origin, graphs: bool = True, **more: Any) -> BackendInfo:
        row = Support(
            phase=frozenset(Phase),
            kind=frozenset({"mha"}),
            format=None,
            source=f"{name}'s row",
            **more,
        )
        return BackendInfo(
            name=name, support=(row,), summary="", origin=origin, adapter=object, graphs=graphs
        )

    return {
        "first": info("first", Origin.OWN), "second": info("second", Origin.VENDOR), "third": info("third", Origin.REFERENCE, graphs=False),
        "odd": info("odd", Origin.PORTABLE, page=frozenset({48})),
    }  # fmt: skip


def times(phase: Phase, model_spec: Any = QWEN3_8B, config: Config = NVFP4, **ms: float | None) -> Rankings:
    """A measurement of one workload of a phase, backend by backend; None failed."""
    (part, *_) = support.scheme_groups(CacheSpec.from_config(config), model_spec)
    timings = tuple(
        Timing(
            name,
            None,
            48 if name == "odd" else 64,
            "hnd",
            {} if t is None else {"64x8K": t},
            "" if t else "broke",
        )
        for name, t in ms.items()
    )
    return by_time({evidence.subject(part, phase, "bfloat16"): timings})


def decode(found: Rankings, config: Config = NVFP4) -> str:
    return resolve(config, QWEN3_8B, H200, table(), measured=found).route(0, Phase.DECODE).backend


def test_auto_takes_the_fastest_that_was_measured_and_says_so() -> None:
    found = times(Phase.DECODE, first=0.3, second=0.25)
    plan = resolve(NVFP4, QWEN3_8B, H200, table(), measured=found)
    assert plan.route(0, Phase.DECODE).backend == "second"
    assert plan.route(0, Phase.PREFILL).backend == "first"  # which nobody measured
    said = "measured on this machine: 0.250 ms (64x8K); pages of 64, hnd"
    assert as_text(plan).count(said) == 1
    assert "first's row" in as_text(plan)
    again = resolve(NVFP4, QWEN3_8B, H200, table(), measured=times(Phase.DECODE, second=0.25, first=0.3))
    assert again == plan  # whatever the order in the file


def test_without_a_measurement_nothing_changes() -> None:
    plain = resolve(NVFP4, QWEN3_8B, H200, table())
    assert plain == resolve(NVFP4, QWEN3_8B, H200, table(), measured=evidence.NO_RANKINGS)
    of_others = times(Phase.DECODE, config=Config(model="m", kv_format="bf16"), first=0.3, second=0.1)
    assert plain == resolve(NVFP4, QWEN3_8B, H200, table(), measured=of_others)


def test_who_is_named_wins() -> None:
    found = times(Phase.DECODE, first=0.3, second=0.25)
    for asked in ({"attention_backend": "first"}, {"decode_backend": "first"}):
        plan = resolve(replace(NVFP4, **asked), QWEN3_8B, H200, table(), measured=found)
        assert plan.route(0, Phase.DECODE).backend == "first"
        assert "measured" not in as_text(plan)


def test_what_failed_is_last_and_what_cannot_be_recorded_waits() -> None:
    assert decode(times(Phase.DECODE, first=None, second=0.5)) == "second"
    assert decode(times(Phase.DECODE, first=None, third=0.5)) == "third"  # slow steps are better than none
    eager = times(Phase.DECODE, first=0.3, third=0.1)
    assert decode(eager) == "first"
    assert decode(eager, replace(NVFP4, graphs=False)) == "third"
    prompts = times(Phase.EXTEND, first=0.3, third=0.1)
    route = resolve(NVFP4, QWEN3_8B, H200, table(), measured=prompts).route(0, Phase.EXTEND)
    assert route.backend == "third"


def test_what_failed_and_serves_all_the_same_is_said_to_have_failed() -> None:
    plan = resolve(NVFP4, QWEN3_8B, H200, table(), measured=times(Phase.DECODE, first=None))
    route = plan.route(0, Phase.DECODE)
    assert (route.backend, route.failed, route.measured) == ("first", "broke", "")
    assert "first's row; failed when it was timed on this machine: broke" in as_text(plan)
    assert not plan.route(0, Phase.PREFILL).failed and as_text(plan).count("broke") == 1
    finished = resolve(NVFP4, QWEN3_8B, H200, table(), measured=times(Phase.DECODE, first=None, second=0.5))
    assert "failed" not in as_text(finished)


def test_a_time_on_other_pages_than_those_asked_for_says_nothing() -> None:
    found = times(Phase.DECODE, first=0.3, second=0.25)
    assert decode(found, replace(NVFP4, page_size=16)) == "first"
    assert decode(found, replace(NVFP4, page_size=64)) == "second"
    alone = resolve(NVFP4, QWEN3_8B, H200, table(), measured=times(Phase.DECODE, odd=0.01, first=0.3))
    assert (alone.page_size, alone.route(0, Phase.DECODE).backend) == (48, "odd")


def test_a_subject_is_all_that_a_kernel_sees() -> None:
    parts = support.scheme_groups(CacheSpec.from_config(NVFP4), GPT_OSS)
    subjects = {evidence.subject(part, phase, "bfloat16") for part in parts for phase in Phase}
    assert len(subjects) == 8
    assert "decode of mha in nvfp4, 64 heads, k 8x64+v 8x64, bfloat16, window 128, sinks" in subjects


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(evidence.TUNED_FOLDER, str(tmp_path))
    return tmp_path


def saved(**ms: float) -> Path:
    return evidence.save_tuned(H200, table(), subjects(times(Phase.DECODE, **ms)))


def subjects(rankings: Rankings) -> dict[str, tuple[Timing, ...]]:
    return {entry.match["subject"]: entry.order for entry in rankings.entries}


def test_what_is_written_is_read_and_other_subjects_are_kept(place: Path) -> None:
    assert evidence.load_tuned(H200, table()) == evidence.NO_RANKINGS
    path = saved(first=0.3, second=0.25)
    assert path.parent == place and list(place.iterdir()) == [path]
    other = subjects(times(Phase.EXTEND, first=1.0))
    evidence.save_tuned(H200, table(), other)
    found = evidence.load_tuned(H200, table())
    assert (
        subjects(found) == subjects(times(Phase.DECODE, first=0.3, second=0.25)) | other and not found.warning
    )


def test_other_backends_of_a_subject_are_kept_where_they_can_be_compared(place: Path) -> None:
    saved(first=0.3, second=0.25)
    saved(first=0.2)
    ((subject, timings),) = subjects(evidence.load_tuned(H200, table())).items()
    assert [(timing.backend, timing.ms) for timing in timings] == [
        ("first", {"64x8K": 0.2}), ("second", {"64x8K": 0.25})
    ]  # fmt: skip
    evidence.save_tuned(H200, table(), {subject: (Timing("first", None, 64, "hnd", {"64x4K": 0.1}),)})
    assert [timing.backend for timing in subjects(evidence.load_tuned(H200, table()))[subject]] == ["first"]


def entry(timing: dict[str, Any]) -> dict[str, Any]:
    return {"rankings": [{"match": {"subject": "a"}, "source": "", "order": [timing]}]}


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ("", "not what nibble tune writes"), ("[]", "not what nibble tune writes"), ('{"schema": 1}', "not what nibble tune writes"),
        ("\x00", "not what nibble tune writes"), ("[" * 100_000, "not what nibble tune writes"),
        ({"schema": 1}, "has schema 1"), ({"device": "NVIDIA B200"}, "is about NVIDIA B200"),
        ({"versions": {"torch": "1.0"}}, "measured with torch 1.0, and here it is"), ({"versions": 7}, "not what"),
        ({"support": "x"}, "other backends"), (entry({"backend": "first"}), "not what nibble tune writes"),
        (entry({"backend": "first", "stage_to": None, "page": 64, "packing": "hnd", "ms": {"w": -1}, "failure": ""}),
         "has times that are none"),
        (entry({"backend": "first", "stage_to": None, "page": 1e999, "packing": "hnd", "ms": {}, "failure": ""}),
         "not what nibble tune writes"),
        ({"rankings": [1]}, "not what nibble tune writes"),
    ],
)  # fmt: skip
def test_a_broken_or_foreign_file_is_a_warning(place: Path, broken: Any, says: str) -> None:
    path = saved(first=0.3, second=0.25)
    path.write_text(broken if isinstance(broken, str) else json.dumps(json.loads(path.read_text()) | broken))
    found = evidence.load_tuned(H200, table())
    assert not found.entries and says in found.warning and str(path) in found.warning
    plan = resolve(NVFP4, QWEN3_8B, H200, table(), measured=found)
    assert plan.route(0, Phase.DECODE).backend == "first" and found.warning in plan.notes
    saved(second=0.1)  # which nothing of the old file hinders
    assert not evidence.load_tuned(H200, table()).warning


def test_a_file_that_is_a_folder_or_bytes_is_a_warning(place: Path) -> None:
    path = evidence.tuned_path(H200)
    path.mkdir()
    assert str(path) in evidence.load_tuned(H200, table()).warning
    path.rmdir()
    path.write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in evidence.load_tuned(H200, table()).warning


def test_a_folder_that_cannot_be_written_is_an_error_that_says_where_else(place: Path) -> None:
    path = evidence.tuned_path(H200)
    path.mkdir()
    with pytest.raises(ConfigError, match=re.escape(f"cannot be kept in {path}") + ".*in \\$NIBBLE_TUNED"):
        saved(first=0.3)
    assert list(place.iterdir()) == [path]  # and nothing half written beside it


def test_a_run_that_dies_while_it_writes_leaves_the_older_file(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(path: Path, data: bytes) -> None:
        with path.open("wb") as file:
            file.write(data[: len(data) // 2])
        raise KeyboardInterrupt

    path, entry = (
        tmp_path / "ledger.json",
        LedgerEntry("b", "decode", "mha", "f", 90, "GPU", "2026-11-22"),
    )
    update_ledger(path, [entry])
    saved(first=0.3)
    kept = evidence.load_tuned(H200, table())
    monkeypatch.setattr(Path, "write_bytes", dies)
    with pytest.raises(KeyboardInterrupt):
        update_ledger(path, [replace(entry, phase="prefill")])
    with pytest.raises(KeyboardInterrupt):
        saved(first=0.1)
    assert read_ledger(path) == (entry,) and evidence.load_tuned(H200, table()) == kept
    assert {*tmp_path.iterdir(), *place.iterdir()} == {path, evidence.tuned_path(H200)}


def test_runs_that_write_a_ledger_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    entries = [LedgerEntry("b", "decode", "mha", f"f{i:02}", 90, "GPU", "2026-11-22") for i in range(40)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda entry: update_ledger(path, [entry]), entries))
    assert read_ledger(path) == tuple(entries)


def test_another_row_makes_times_stale_and_another_opinion_does_not(place: Path) -> None:
    saved(first=0.3, second=0.25)
    known = table()
    for change, stale in (
        ({"source": "new", "workspace_bytes": 1}, False),
        ({"page": frozenset({16, 64})}, True),
    ):
        row = replace(known["first"].support[0], **change)
        changed = known | {"first": replace(known["first"], support=(row,))}
        assert bool(evidence.load_tuned(H200, changed).warning) == stale


def test_versions_are_those_of_what_brings_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        "torch": "2.11.0+cu128",
        "triton": "3.6.0",
        "cuda-bindings": "13.1",
        "flashinfer-python": "0.7.2",
    }

    def version(name: str) -> str:
        if name not in found:
            raise evidence.metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(evidence.metadata, "version", version)
    monkeypatch.setattr(evidence, "cuda_version", lambda: "12.8")
    provided = {
        "cuda": ["cuda-pathfinder", "cuda-bindings"],
        "flashinfer": ["flashinfer-python"],
        "flash_attn": ["flash-attn", "flash-attn-4"],
    }
    files = {
        "flash-attn": ["flash_attn/__init__.py", "flash_attn/cuter.py"],
        "flash-attn-4": ["flash_attn/cute/__init__.py"],
    }
    found |= {"flash-attn": "2.8.3", "flash-attn-4": "4.0.0b36"}
    monkeypatch.setattr(evidence.metadata, "files", files.get)
    monkeypatch.setattr(evidence, "_providers", lambda: provided)
    known = backends.all_backends()
    common = {"torch": "2.11.0", "triton": "3.6.0", "CUDA": "12.8"}
    assert versions([known["sdpa"]]) == common
    assert versions([known["cuda"]]) == common | {"cuda-bindings": "13.1"}
    assert versions([known["flashinfer"]]) == common | {"flashinfer-python": "0.7.2"}
    assert versions([known["flashmla"]]) == common  # nobody installed it
    assert versions([known["fa4"]]) == common | {"flash-attn-4": "4.0.0b36"}  # not its elder sister
    monkeypatch.setattr(evidence, "cuda_version", lambda: None)
    assert versions([known["sdpa"]]) == {"torch": "2.11.0"}


def test_the_ledger_says_versions_and_reads_entries_of_old(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    entry = LedgerEntry(
        "triton",
        "decode",
        "mha",
        "nvfp4",
        90,
        "NVIDIA H200",
        "2026-11-21",
        {"torch": "2.11.0", "CUDA": "13.0"},
    )
    update_ledger(path, [entry])
    assert read_ledger(path) == (entry,)
    said = "verified on NVIDIA H200, 2026-11-21 (CUDA 13.0, torch 2.11.0)\n"
    assert said in tables.capability_table(path=path)
    content = json.loads(path.read_text())
    del content["entries"][0]["versions"]
    path.write_text(json.dumps(content))
    assert read_ledger(path) == (replace(entry, versions={}),)
    assert "verified on NVIDIA H200, 2026-11-21\n" in tables.capability_table(path=path)


def test_workloads_are_read_and_cut() -> None:
    parse = fixtures.parse_workload
    assert parse(Phase.DECODE, "64x8K") == Workload(Phase.DECODE, "64x8K", 64, 1, 8192)
    assert parse(Phase.EXTEND, "2K+32K") == Workload(Phase.EXTEND, "2K+32K", 1, 2048, 34 * 1024)
    assert parse(Phase.PREFILL, "2x70").new == 70 and parse(Phase.VERIFY, "2x3").new == 3
    for phase, wrong in (
        (Phase.DECODE, "8K"),
        (Phase.EXTEND, "2K"),
        (Phase.DECODE, "0x8"),
        (Phase.DECODE, "2xK"),
    ):
        with pytest.raises(ConfigError):
            parse(phase, wrong)
    names = [work.name for work in fixtures.fit_workloads(fixtures.default_workloads(False), 4096, 1 << 15)]
    assert names == ["1x4K", "240+3856", "819+3277", "8x4K", "1x4K", "32x1K", "8x4K"]
    assert all(
        work.new <= work.stored <= 4096
        for work in fixtures.fit_workloads(fixtures.default_workloads(False), 4096, 1 << 15)
    )


def test_tune_measures_and_plan_follows(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {Phase.PREFILL: ("1x40",), Phase.EXTEND: ("8+33",), Phase.DECODE: ("2x40", "1x60")}
    monkeypatch.setattr(fixtures, "ON_CPU", small)
    told = RUN.invoke(app, ["tune", "demo", "--kv-format", "nvfp4", "--json"])
    assert told.exit_code == 0, told.output
    content = json.loads(told.output)
    path = Path(content["path"])
    assert path.parent == place and len(content["measured"]) == 3
    timings = {len(entries): entries for entries in content["measured"].values()}
    assert {entry["backend"] for entry in timings[1]} == {"torch_ref"}  # decode: what stages may not
    assert set(timings[1][0]["ms"]) == {"2x40", "1x60"}
    shown = RUN.invoke(app, ["plan", "demo", "--kv-format", "nvfp4"])
    assert "torch_ref" in shown.output and "measured on this machine:" in shown.output
    assert RUN.invoke(app, ["tune", "demo", "--backends", "tritn"]).exit_code == 2
    unable = RUN.invoke(app, ["tune", "demo", "--backends", "trtllm_mla"])
    assert unable.exit_code == 2 and "trtllm_mla: none serves this model here" in unable.output
    without = RUN.invoke(app, ["plan", "demo", "--kv-format", "nvfp4", "--no-tuned"])
    other = RUN.invoke(app, ["plan", "demo", "--kv-format", "nvfp4", "--gpu", "h200"])
    assert "measured" not in without.output and "measured on this machine" not in other.output


def test_tune_says_what_changes_and_a_stale_file_is_named(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nibble.evals import tune
    from nibble.evals.tune import Result, entrants

    def results(what: Any, trial: Any, names: Any) -> Any:
        for option in entrants(what.request, what.engine_plan.plan, trial.part, trial.phase):
            ms = 0.1 if option.route.backend == "sdpa" else 1.0
            yield blank(option, trial, ms)

    def blank(entrant: Any, trial: Any, ms: float) -> Any:
        info = entrant.route
        return Result(
            info.backend, info.stage_to, entrant.page, entrant.packing, trial.phase, "w", 0, False, ms=ms
        )

    monkeypatch.setattr(tune, "run_trial", results)
    told = RUN.invoke(app, ["tune", "demo", "--kv-format", "fp32"])
    assert (
        "decode of full in fp32: sdpa, and not torch_ref; measured on this machine: 0.100 ms (w)"
        in told.output
    )
    path = next(place.iterdir())
    path.write_text(path.read_text().replace('"torch": "', '"torch": "0.'))
    shown = RUN.invoke(app, ["plan", "demo", "--kv-format", "fp32"])
    assert shown.exit_code == 0 and f"are not used: {path}: it was measured with torch 0." in shown.output


def test_tune_says_what_failed_and_stays(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nibble.evals import tune

    def run(what: Any, trial: Any, names: Any) -> Any:
        fails = trial.phase is Phase.DECODE
        result = tune.Result("torch_ref", None, 16, "nhd", trial.phase, "w", 0, False)
        yield replace(result, failure="no room") if fails else replace(result, ms=1.0)

    monkeypatch.setattr(tune, "run_trial", run)
    said = "decode of full in nvfp4+kmean+rot: torch_ref failed: no room; it stays, as it is by default"
    told = RUN.invoke(app, ["tune", "demo", "--kv-format", "nvfp4"])
    assert told.exit_code == 0 and told.output.count("it stays") == 1 and said in told.output
    assert json.loads(RUN.invoke(app, ["tune", "demo", "--kv-format", "nvfp4", "--json"]).output)[
        "failed"
    ] == [said]
    shown = json.loads(RUN.invoke(app, ["plan", "demo", "--kv-format", "nvfp4", "--json"]).output)
    routes = shown["groups"][0]["routes"]
    assert routes["decode"]["failed"] == "no room" and "failed" not in routes["prefill"]


def test_what_was_measured_before_the_device_broke_is_kept(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nibble.evals import tune

    def run(what: Any, trial: Any, names: Any) -> Any:
        if trial.phase is Phase.DECODE:
            raise tune.DeviceLostError("fast in decode 64x8K broke the device")
        yield tune.Result("sdpa", None, 16, "nhd", trial.phase, "w", 0, False, ms=1.0)

    monkeypatch.setattr(tune, "run_trial", run)
    told = RUN.invoke(app, ["tune", "demo", "--kv-format", "fp32"])
    assert told.exit_code == 1 and "broke the device" in told.output
    assert len(json.loads(next(place.iterdir()).read_text())["rankings"]) == 2


def test_phases_that_nobody_named_serves_are_left_out(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nibble.evals import tune

    told = RUN.invoke(app, ["tune", "demo", "--backends", "cuda"])
    assert told.exit_code == 2 and "cuda: none serves this model here" in told.output
    assert not list(place.iterdir())

    def run(what: Any, trial: Any, names: Any) -> Any:
        if trial.phase is Phase.DECODE:
            yield tune.Result("sdpa", None, 16, "nhd", trial.phase, "w", 0, False, ms=1.0)

    monkeypatch.setattr(tune, "run_trial", run)
    told = RUN.invoke(app, ["tune", "demo", "--kv-format", "fp32", "--backends", " sdpa"])
    assert told.exit_code == 0, told.output
    (ranking,) = json.loads(next(place.iterdir()).read_text())["rankings"]
    assert ranking["match"]["subject"].startswith("decode of")


def test_sparse_attention_is_not_timed(place: Path) -> None:
    told = RUN.invoke(app, ["tune", "demo-mla"])
    assert told.exit_code == 2 and "there is nothing to time" in told.output and not list(place.iterdir())
