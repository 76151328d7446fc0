"""What plans and refusals say, and the pages that are generated from the same facts; test_matrix.py has the plans."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest

from nibble import formats
from nibble.attention import backends
from nibble.attention.backends import all_backends
from nibble.attention.planner.caveats import GPU_EXTRA, packages, untested
from nibble.attention.planner.evidence import LedgerEntry, read_ledger, update_ledger
from nibble.attention.planner.explain import as_dict, as_text
from nibble.attention.planner.resolve import attempt, require_runnable, resolve
from nibble.attention.planner.support import BackendInfo, Support, format_layers
from nibble.cli import docs as tables
from nibble.config import Config
from nibble.errors import ConfigError
from nibble.hardware import GIB, Hardware, lookup_gpu
from nibble.model_spec import HEADS, Phase
from planning import DEEPSEEK_V3, GEMMA2, PLAIN, QWEN3_8B, SHAPES, memory_plan

MACHINES = {"cpu": Hardware("cpu", 0, 32 * GIB)} | {
    name: lookup_gpu(name) for name in ("a100", "l40s", "h200", "b200", "rtx5090")
}


def config(kv_format: str) -> Config:
    return Config(model="m", kv_format=kv_format, **PLAIN)


def test_what_was_left_to_auto_is_explained() -> None:
    made = resolve(config("nvfp4"), QWEN3_8B, MACHINES["cpu"])
    topics = ("dtype float32:", "page size 16:", "packing nhd:")
    for topic in topics:
        assert any(note.startswith(topic) for note in made.notes)


def test_what_was_said_is_not_explained_away() -> None:
    asked = Config(model="m", kv_format="nvfp4", page_size=32, dtype="float32", attention_backend="torch_ref")
    made = resolve(asked, QWEN3_8B, MACHINES["cpu"])
    assert made.page_size == 32
    assert [note.split()[0] for note in made.notes] == ["packing"]


def test_auto_takes_only_what_runs() -> None:
    runs = {name for name, info in all_backends().items() if info.runnable}
    made = resolve(config("nvfp4"), QWEN3_8B, MACHINES["h200"])
    assert {route.backend for group in made.groups for route in group.routes} <= runs
    assert all(route.runnable for group in made.groups for route in group.routes)


def declared(table: dict[str, BackendInfo]) -> dict[str, BackendInfo]:
    """The table as if nothing had an adapter."""
    return {
        name: BackendInfo(name=name, support=info.support, summary=info.summary)
        for name, info in table.items()
    }


def test_a_refusal_names_backends_that_would_serve() -> None:
    table = declared(dict(all_backends()))
    reason = r"flashinfer +would serve it, but this version has no adapter for it"
    with pytest.raises(ConfigError, match=reason) as caught:
        resolve(config("bf16"), DEEPSEEK_V3, MACHINES["h200"], table)
    assert "what works" not in str(caught.value), "a command that cannot run is no remedy"


def test_a_named_backend_is_planned_before_it_runs() -> None:
    table = declared(dict(all_backends()))
    asked = Config(model="m", kv_format="nvfp4", attention_backend="flashinfer")
    made = resolve(asked, QWEN3_8B, MACHINES["h200"], table)
    assert not any(route.runnable for group in made.groups for route in group.routes)
    assert "declared only, this version cannot run it: flashinfer" in made.notes
    with pytest.raises(ConfigError, match="no adapter"):
        require_runnable(made, table)


def test_a_missing_package_is_named_with_its_install_command() -> None:
    row = Support(phase=frozenset(Phase), kind=frozenset({"mha"}), format=None)
    info = BackendInfo(
        name="vendor",
        support=(row,),
        summary="",
        adapter=object,
        packages=("no.such_package",),
        install="pip install it",
    )
    table = {"vendor": info}
    made = resolve(config("nvfp4"), QWEN3_8B, MACHINES["h200"], table)
    with pytest.raises(
        ConfigError, match=r"needs the package no\.such_package, which is missing: pip install it"
    ):
        require_runnable(made, table)


def test_an_unknown_backend_is_answered_with_the_nearest() -> None:
    asked = Config(model="m", decode_backend="tritn")
    with pytest.raises(ConfigError, match="did you mean 'triton'"):
        resolve(asked, QWEN3_8B, MACHINES["h200"])


def test_a_borrowed_layer_has_its_owners_scheme_and_a_note() -> None:
    asked = Config(model="m", kv_format="nvfp4", kv_layers="0=fp8_e4m3", **PLAIN)
    made = resolve(asked, SHAPES["shared-kv"], MACHINES["cpu"])
    assert {group.scheme: group.layers for group in made.groups} == {"fp8_e4m3": (0, 3), "nvfp4": (1, 2)}
    assert any(note.startswith("layer 3 reads the pages of layer 0") for note in made.notes)
    assert [entry.layer for entry in made.layout.layers] == [0, 1]


def test_a_rule_for_a_layer_that_stores_nothing_is_refused() -> None:
    """Layer 3 reads the pages of layer 0, so a rule for it alone would do nothing."""
    for rule in ("3=fp8_e4m3", "-1=fp8_e4m3", "1,3=fp8_e4m3"):
        asked = Config(model="m", kv_format="nvfp4", kv_layers=rule)
        with pytest.raises(
            ConfigError, match=r"--kv-layers has no effect on layers 3 of m: .* pages of layers 0; name"
        ):
            resolve(asked, SHAPES["shared-kv"], MACHINES["cpu"])
    both = Config(model="m", kv_format="nvfp4", kv_layers="0,3=fp8_e4m3")
    assert len(resolve(both, SHAPES["shared-kv"], MACHINES["cpu"]).groups) == 2


def test_what_a_plan_rests_on_is_noted() -> None:
    """Packages beyond the extra `gpu`, and what would serve without; GPUs on which a backend never ran."""
    for gpu, kv_format in (("rtx5090", "nvfp4"), ("h200", "nvfp4"), ("rtx3090", "nvfp4")):
        asked, machine = config(kv_format), lookup_gpu(gpu)
        plan = resolve(asked, QWEN3_8B, machine)
        needs = list(packages(plan, all_backends(), partial(attempt, asked, QWEN3_8B, machine)))
        never = list(untested(plan, machine))
        if gpu == "rtx5090":
            assert needs[0].startswith(
                "needs more than pip install '.[gpu]' (trtllm_mha: pip install 'flashinfer"
            )
            assert needs[0].endswith("without: triton (prefill, extend), cuda (decode, verify)")
            assert never == [
                "declared, never run on SM120: triton (prefill, extend), trtllm_mha (decode, verify)"
            ]
        elif gpu == "rtx3090":
            assert needs == [] and never[0].startswith("declared, never run on SM86: triton")
        else:
            assert needs == never == []


def test_the_extra_gpu_is_that_of_the_package() -> None:
    content = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    names = {re.split(r"[>=]", entry)[0] for entry in content["project"]["optional-dependencies"]["gpu"]}
    assert {name.replace("-", ".") for name in names} == GPU_EXTRA


@pytest.mark.parametrize("gpu", ["a100", "rtx3090", "l4", "b200", "rtx5090"])
def test_a_plan_cites_times_of_its_own_gpu_only(gpu: str) -> None:
    for kv_format, model in (("nvfp4", QWEN3_8B), ("bf16", DEEPSEEK_V3), ("fp8_e4m3", GEMMA2)):
        text = as_text(resolve(config(kv_format), model, lookup_gpu(gpu)))
        assert "H200" not in text


def test_a_reason_is_given_once() -> None:
    text = as_text(resolve(config("nvfp4"), QWEN3_8B, lookup_gpu("h200")))
    for route in resolve(config("nvfp4"), QWEN3_8B, lookup_gpu("h200")).routes:
        lines = [line for line in text.splitlines() if route.why in line]
        assert lines and all(line.startswith("  ") for line in lines)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sm42", "sm42 is not served: there are kernels for SM80, "),
        ("sm75", "sm75 is not served"),
        ("", "unknown GPU ''"),
        ("mi300x", "a chip of AMD"),
        ("gfx942", "a chip of AMD"),
        ("m3", "a chip of Apple"),
        ("M4 Max", "a chip of Apple"),
        ("mps", "a chip of Apple"),
        ("gaudi3", "a chip of Intel"),
        ("rtx5080", "did you mean 'rtx5090'"),
    ],
)
def test_gpus_that_are_not_served(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lookup_gpu(name)
    assert lookup_gpu("SM90").arch == lookup_gpu("sm_90a").arch == 90


def test_registration_adds_one_backend_and_refuses_a_second_of_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backends, "_registry", dict(backends._registry))
    row = Support(phase=frozenset(Phase), kind=frozenset({"mha"}), format=None, source="a test")
    toy = backends.register(BackendInfo(name="toy", support=(row,), summary="a toy", adapter=object))
    made = resolve(config("nvfp4"), QWEN3_8B, MACHINES["h200"])
    assert {route.backend for group in made.groups for route in group.routes} == {"toy"}
    assert "`toy`" in tables.capability_table()
    assert backends.register(toy) is toy
    with pytest.raises(ConfigError, match="registered already"):
        backends.register(BackendInfo(name="toy", support=(), summary="another"))


def test_explanations_of_a_mixed_staged_plan() -> None:
    asked = Config(
        model="m", kv_format="nvfp4", kv_layers="0=fp8_e4m3", prefill_backend="fa4", decode_backend="triton"
    )
    made = resolve(asked, QWEN3_8B, MACHINES["b200"])
    money = memory_plan(asked, QWEN3_8B, MACHINES["b200"], made)
    content = json.loads(json.dumps(as_dict(made, money)))
    assert content["groups"][1]["routes"]["prefill"]["stage_to"] == "bf16"
    assert content["bytes_per_token"] == 8 * (256 + 35 * 144)
    assert content["budget"]["pool"] == content["budget"]["pages"] * 64 * content["bytes_per_token"]
    text = as_text(made, money)
    for part in (
        "full: layers 0 in fp8_e4m3",
        "fa4 (staged to bf16)",
        "pages of 64 tokens",
        "3.48 x fewer",
        "note: ",
    ):
        assert part in text


def test_the_capability_table_says_what_was_verified(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.json"
    entry = LedgerEntry(
        "triton", "decode", "mha", "nvfp4", 90, "NVIDIA H200", "2026-11-20", {"torch": "2.11.0"}
    )
    before = tables.capability_table(path=ledger)
    update_ledger(ledger, [entry])
    after = tables.capability_table(path=ledger)
    assert "verified[" not in before
    (number,) = set(re.findall(r"PEV declared; D verified\[\^(\d+)\]", after))
    assert f"[^{number}]: verified on NVIDIA H200, 2026-11-20 (torch 2.11.0)" in after


def test_a_refused_cell_of_the_capability_table_says_why() -> None:
    table = tables.capability_table()
    notes = dict(re.findall(r"^\[\^(\d+)\]: refused: (.*)$", table, re.MULTILINE))
    lines = {
        line.split(" | ")[0]: line.split(" | ") for line in table.partition("## mha")[2].splitlines()[::-1]
    }
    (_, _, cpu, sm80, *_), (_, _, elsewhere, *_) = lines["| `cuda`"], lines["| `fa3`"]
    assert notes[re.sub(r"^-\[\^(\d+)\]$", r"\1", cpu)] == "only on GPUs"
    assert notes[re.sub(r"^DV declared; PE -\[\^(\d+)\]$", r"\1", sm80)] == "only for decode, verify"
    assert notes[re.sub(r"^-\[\^(\d+)\]$", r"\1", elsewhere)] == "only on SM90"
    assert "|  |" not in table


def test_a_row_for_any_format_is_verified_by_those_that_fit(tmp_path: Path) -> None:
    """Formats of latents store no heads, so nobody can verify them there."""
    ledger = tmp_path / "ledger.json"
    fitting = [name for name in formats.names() if not any(formats.get(name).refuses(s) for s in HEADS)]
    update_ledger(
        ledger,
        [LedgerEntry("torch_ref", "decode", "mha", name, 0, "CPU", "2026-11-20", {}) for name in fitting[1:]],
    )
    assert "verified[" not in tables.capability_table(path=ledger)
    update_ledger(ledger, [LedgerEntry("torch_ref", "decode", "mha", fitting[0], 0, "CPU", "2026-11-20", {})])
    assert "| `torch_ref` | any | PEV declared; D verified[^" in tables.capability_table(path=ledger)


def test_conditions_of_rows_that_differ_in_their_format_are_one_line() -> None:
    told = [
        line for line in tables.capability_table().splitlines() if line.startswith("| `trtllm_mla` | DV |")
    ]
    assert len(told) == 1 and "| 1 to 64, 128 |" in told[0]
    lines = [
        line for line in tables.capability_table().splitlines() if line.startswith("| `cutlass_mla` | DV")
    ]
    assert len(lines) == 1 and "bf16, fp16" in lines[0]


def test_the_ledger_keeps_the_newest_entry_of_a_combination(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    entries = [
        LedgerEntry("b", "decode", "mha", "f", 90, "GPU", date, {}) for date in ("2026-01-01", "2026-02-02")
    ]
    update_ledger(path, entries[:1])
    update_ledger(path, entries[1:])
    assert read_ledger(path) == (entries[1],)
    path.write_text('{"schema": 1, "entries": [{}]}')
    with pytest.raises(ConfigError, match="cannot read the ledger"):
        read_ledger(path)


def test_the_formats_page_holds_every_format_and_its_bytes() -> None:
    page = tables.formats_table()
    for line in ("| `nvfp4` | 144 | 3.56 |", "| `mxfp4` | 136 | 3.76 |", "| `k8v4` | 200 | 2.56 |", "NaN"):
        assert line in page


@pytest.mark.parametrize(("addressing", "works"), [("paged", False), ("ragged", True)])
def test_a_sparse_kernel_reads_staged_pages_by_offset(addressing: str, works: bool) -> None:
    """Staged pages are numbered anew, so slot numbers of the pool would point elsewhere."""
    row = Support(
        phase=frozenset(Phase),
        kind=frozenset({"dsa"}),
        format=frozenset({"bf16"}),
        addressing=frozenset({addressing}),
    )
    table = {"sparse": BackendInfo(name="sparse", support=(row,), summary="", adapter=object)}
    asked = Config(model="m", kv_format="fp8_e4m3", allow_staging=True)
    if works:
        assert (
            resolve(asked, SHAPES["deepseek-v3.2"], MACHINES["h200"], table).route(0, Phase.DECODE).stage_to
            == "bf16"
        )
    else:
        with pytest.raises(ConfigError, match=r"staged to bf16: addressing ragged is not in \{paged\}"):
            resolve(asked, SHAPES["deepseek-v3.2"], MACHINES["h200"], table)


def test_a_softcapped_model_keeps_its_scheme_where_it_can() -> None:
    made = resolve(config("nvfp4"), GEMMA2, MACHINES["h200"], declared=True)
    assert {group.scheme for group in made.groups} == {"nvfp4"}


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ((0, 1, 2, 5), "0-2,5"),
        ((0, 35, 1, 2), "0-2,35"),
        (range(0, 42, 2), "0-40 by 2"),
        ((5, 11, 17), "5,11,17"),
        ((3,), "3"),
        ((), ""),
    ],
)
def test_layers_are_listed_in_order_and_in_short(layers: Iterable[int], words: str) -> None:
    assert format_layers(layers) == words
