"""The rules of a 4-bit cache, case by case: what a well-known engine allows, where its check has holes, and ours.

Held against the table of facts as declared, adapters or not. Backend names map as torch_native = sdpa. Where our
answer differs from theirs, the comment says why. H1 to H6 are the holes of that check:

H1 mixed pairs are let through with a warning      H4 `assert`, and no command that works
H2 the base flag is tested, not the resolved pair  H5 nothing on verify, page size, head_dim, prefix, GPU
H3 one list of backends for two recipes            H6 an accepted name that fails later
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from nibble.attention.backends import all_backends
from nibble.attention.planner.plan import Plan
from nibble.attention.planner.resolve import resolve
from nibble.attention.planner.support import BackendInfo, Support
from nibble.config import Config
from nibble.errors import ConfigError, Unsupported
from nibble.hardware import lookup_gpu
from nibble.model_spec import ModelSpec, Phase
from planning import DEEPSEEK_V3, DEEPSEEK_V32, GEMMA2, GPT_OSS, HEAD_72, HEAD_80, QWEN3_8B, parse_command

MX, NV = "fp4_mx16", "nvfp4"


@dataclass(frozen=True)
class Case:
    """routes: `prefill extend decode verify` as printed, for every group. reasons: parts of the refusal."""

    name: str
    model_spec: ModelSpec
    gpu: str
    options: dict[str, Any]
    routes: str = ""
    page: int = 64
    packing: str = "nhd"
    reasons: tuple[str, ...] = ()
    remedy: str = ""
    keywords: dict[str, Any] = field(default_factory=dict)


def pair(kv_format: str, prefill: str, decode: str, **options: Any) -> dict[str, Any]:
    return {"kv_format": kv_format, "prefill_backend": prefill, "decode_backend": decode, **options}


def both(kv_format: str, backend: str, **options: Any) -> dict[str, Any]:
    return {"kv_format": kv_format, "attention_backend": backend, **options}


def plan(case: Case) -> Plan:
    config = Config(model="m", **case.options)
    return resolve(config, case.model_spec, lookup_gpu(case.gpu), declared=True, **case.keywords)


S = "(staged to bf16)"
STAGE = {"allow_staging": True}
HOT = {"hisparse": "on"}

ACCEPTED = [
    # Prefill fa4 with MHA. They list triton, torch_native and flex_attention for decoding.
    Case("fa4-mha-triton", QWEN3_8B, "b200", pair(MX, "fa4", "triton"), f"fa4 {S}, fa4 {S}, triton, triton"),
    # The two others dequantise the whole cache in every step: allowed there unasked, here when asked for.
    Case("fa4-mha-torch_native", QWEN3_8B, "b200", pair(MX, "fa4", "sdpa", **STAGE), f"fa4 {S}, fa4 {S}, sdpa {S}, sdpa {S}"),
    Case("fa4-mha-flex", QWEN3_8B, "b200", pair(MX, "fa4", "flex_attention", **STAGE), f"fa4 {S}, fa4 {S}, flex_attention {S}, flex_attention {S}"),
    # Prefill fa4 with MLA: cutlass_mla, flashinfer, trtllm_mla. None reads 4 bits, so again when asked for.
    Case("fa4-mla-cutlass_mla", DEEPSEEK_V3, "b200", pair(MX, "fa4", "cutlass_mla", **STAGE), f"fa4 {S}, fa4 {S}, cutlass_mla {S}, cutlass_mla {S}", 32),
    Case("fa4-mla-flashinfer", DEEPSEEK_V3, "b200", pair(MX, "fa4", "flashinfer", **STAGE), f"fa4 {S}, fa4 {S}, flashinfer {S}, flashinfer {S}", 32),
    Case("fa4-mla-trtllm_mla", DEEPSEEK_V3, "b200", pair(MX, "fa4", "trtllm_mla", **STAGE), f"fa4 {S}, fa4 {S}, trtllm_mla {S}, trtllm_mla {S}", 32),
    # The same backend in both phases, MHA: triton, torch_native, flex_attention, trtllm_mha.
    # refused by the peer, whose Triton kernel for MLA reads no 4-bit latents; ours does
    Case("fa4-mla-triton", DEEPSEEK_V3, "b200", pair(MX, "fa4", "triton"), f"fa4 {S}, fa4 {S}, triton, triton", 32),
    Case("same-mha-triton", QWEN3_8B, "b200", both(MX, "triton"), "triton, triton, triton, triton"),
    Case("same-mha-torch_native", QWEN3_8B, "b200", both(MX, "sdpa", **STAGE), f"sdpa, sdpa, sdpa {S}, sdpa {S}"),
    Case("same-mha-flex", QWEN3_8B, "b200", both(MX, "flex_attention", **STAGE), f"flex_attention {S}, flex_attention {S}, flex_attention {S}, flex_attention {S}"),
    # The same backend in both phases, MLA: cutlass_mla, flashinfer, trtllm_mla, flashmla.
    Case("same-mla-flashinfer", DEEPSEEK_V3, "h200", both(MX, "flashinfer", **STAGE), f"flashinfer {S}, flashinfer {S}, flashinfer {S}, flashinfer {S}"),
    Case("same-mla-trtllm_mla", DEEPSEEK_V3, "b200", pair(MX, "flashinfer", "trtllm_mla", **STAGE), f"flashinfer {S}, flashinfer {S}, trtllm_mla {S}, trtllm_mla {S}"),
    # flashmla, cutlass_mla and trtllm_mla only decode; there another backend prefills behind the same name, here it is named.
    Case("same-mla-flashmla", DEEPSEEK_V3, "h200", pair(MX, "flashinfer", "flashmla", **STAGE), f"flashinfer {S}, flashinfer {S}, flashmla {S}, flashmla {S}"),
    # They refuse all that is not CUDA. The reference serves a CPU.
    Case("non-cuda", QWEN3_8B, "cpu", {"kv_format": NV}, "torch_ref, torch_ref, torch_ref, torch_ref", 16),
    # They refuse nvfp4 outside SM100 and SM120. Portable kernels dequantise in registers, and FlashInfer's FA2 reads it.
    Case("nvfp4-hopper-triton", QWEN3_8B, "h200", both(NV, "triton"), "triton, triton, triton, triton"),
    Case("nvfp4-hopper-flashinfer", QWEN3_8B, "h200", both(NV, "flashinfer"), "flashinfer, flashinfer, flashinfer, flashinfer"),
    Case("nvfp4-ampere", QWEN3_8B, "a100", both(NV, "triton"), "triton, triton, triton, triton"),
    # H1: the pair that they recommend for nvfp4 gets past them unchecked. On SM100 we refuse it, see below.
    Case("H1-recommended-sm120", QWEN3_8B, "rtx5090", pair(NV, "flashinfer", "trtllm_mha"), "flashinfer, flashinfer, trtllm_mha, trtllm_mha", 64, "hnd"),
    # H2: the base flag names a backend that cannot, but no phase uses it.
    Case("H2-base-unused", QWEN3_8B, "h200", pair(NV, "triton", "triton", attention_backend="cutlass_mla"), "triton, triton, triton, triton"),
    # H3: nvfp4 with triton passes their list but has no access method there. Here triton reads it.
    Case("H3-nvfp4-triton", QWEN3_8B, "b200", both(NV, "triton"), "triton, triton, triton, triton"),
    # H5: page size, jointly over phases, and as asked. fa3 reads pages of 64 as two of 32 each.
    Case("H5-page-of-both", DEEPSEEK_V3, "h200", pair("bf16", "flashinfer", "fa3"), "flashinfer, flashinfer, fa3, fa3", 64),
    Case("H5-page-asked", QWEN3_8B, "b200", both("bf16", "trtllm_mha", page_size=16), "trtllm_mha, trtllm_mha, trtllm_mha, trtllm_mha", 16, "hnd"),
    # H5: head_dim 80 suits blocks of 16.
    Case("H5-head-80", HEAD_80, "h200", both(NV, "triton"), "triton, triton, triton, triton"),
    # H5: no verify is no obstacle until draft tokens are asked for; the plan has no such route.
    Case("H5-no-verify", QWEN3_8B, "b200", pair("bf16", "fa4", "fa4"), "fa4, fa4, fa4"),
    # H6: their older name for the block-16 recipe is accepted by the parser and refused later. Here it is an alias.
    Case("H6-alias", QWEN3_8B, "b200", pair("fp4_e2m1", "fa4", "triton"), f"fa4 {S}, fa4 {S}, triton, triton"),
    # DSA: sparse kernels by format, as the peer routes them: bf16 to the flat one, FP8 to the one that reads records
    Case("dsa-bf16", DEEPSEEK_V32, "h200", both("bf16", "flashmla"), "flashmla, flashmla, flashmla, flashmla"),
    Case("dsa-fp8", DEEPSEEK_V32, "h200", pair("fp8_ds_mla", "torch_ref", "flashmla"), "torch_ref, torch_ref, flashmla, flashmla", 64, "record"),
    # HiSparse: the same routes, as hot slots are slots of the pool; nothing is staged, and nobody verifies.
    Case("hisparse-bf16", DEEPSEEK_V32, "h200", both("bf16", "flashmla", **HOT), "flashmla, flashmla, flashmla"),
    Case("hisparse-fp8", DEEPSEEK_V32, "h200", pair("fp8_ds_mla", "triton", "flashmla", **HOT), "triton, triton, flashmla", 64, "record"),
    Case("hisparse-nvfp4", DEEPSEEK_V32, "h200", {"kv_format": "nvfp4_ds_mla", **HOT}, "triton, triton, triton", 64, "record"),
    Case("hisparse-ampere", DEEPSEEK_V32, "a100", {"kv_format": "fp8_ds_mla", **HOT}, "triton, triton, triton", 64, "record"),
    # H1: mixed pairs share one storage. What is staged is repacked on its way, so only page sizes must agree.
    Case("H1-pair-one-page", QWEN3_8B, "h200", pair(NV, "fa3", "cuda"), f"fa3 {S}, fa3 {S}, cuda, cuda", 64, "hnd"),
    Case("H1-pair-one-packing", DEEPSEEK_V32, "h200", pair("bf16", "flashmla", "triton"), "flashmla, flashmla, triton, triton"),
    Case("k8v4", QWEN3_8B, "h200", {"kv_format": "k8v4"}, "cuda, cuda, cuda, cuda", 64, "hnd"),
]  # fmt: skip

REFUSED = [
    # Prefill fa4, MHA: outside their list. trtllm_mha has no block-16 rows, and wants another page size besides.
    Case("fa4-mha-trtllm_mha", QWEN3_8B, "b200", pair(MX, "fa4", "trtllm_mha"), reasons=("trtllm_mha  format fp4_mx16 is not in",), remedy="--decode-backend cuda"),
    Case("fa4-mha-flashinfer", QWEN3_8B, "b200", pair(MX, "fa4", "flashinfer"), reasons=("flashinfer  format fp4_mx16 is not in {bf16}",), remedy="--decode-backend cuda"),
    Case("fa4-mha-fa4", QWEN3_8B, "b200", pair(MX, "fa4", "fa4"), reasons=("fa4  format fp4_mx16 is not in {bf16", "--allow-staging"), remedy="--decode-backend cuda"),
    Case("fa4-mha-fa3", QWEN3_8B, "b200", pair(MX, "fa4", "fa3"), reasons=("arch SM100 is not in {SM90}",), remedy="--decode-backend cuda"),
    # On their list, but every step would dequantise the cache.
    Case("fa4-mha-torch_native-unasked", QWEN3_8B, "b200", pair(MX, "fa4", "sdpa"), reasons=("it could read pages staged to bf16, with --allow-staging",), remedy="--decode-backend cuda"),
    Case("fa4-mla-cutlass_mla-unasked", DEEPSEEK_V3, "b200", pair(MX, "fa4", "cutlass_mla"), reasons=("cutlass_mla  format fp4_mx16 is not in {bf16", "--allow-staging"), remedy="--decode-backend triton"),
    # Prefill fa4, MLA: outside their list. flashmla's dense kernel is Hopper's.
    Case("fa4-mla-flashmla", DEEPSEEK_V3, "b200", pair(MX, "fa4", "flashmla", **STAGE), reasons=("flashmla", "arch SM100 is not in {SM90}"), remedy="--decode-backend triton"),
    # The same backend in both phases.
    Case("same-mha-flashinfer", QWEN3_8B, "b200", both(MX, "flashinfer"), reasons=("flashinfer  format fp4_mx16 is not in",), remedy="--decode-backend cuda"),
    Case("same-mha-fa3", QWEN3_8B, "h200", both(MX, "fa3"), reasons=("fa3  format fp4_mx16 is not in {bf16",), remedy="--decode-backend cuda"),
    # On their list. Its pages are head-major, and staged pages are not.
    Case("same-mha-trtllm_mha-mx", QWEN3_8B, "b200", both(MX, "trtllm_mha"), reasons=("format fp4_mx16", "staged to bf16: packing nhd is not in {hnd}"), remedy="--attention-backend triton"),
    Case("same-mla-cutlass_mla", DEEPSEEK_V3, "b200", both(MX, "cutlass_mla", **STAGE), reasons=("phase prefill is not in {decode, verify}",), remedy="--prefill-backend"),
    Case("same-mla-trtllm_mla", DEEPSEEK_V3, "b200", both(MX, "trtllm_mla", **STAGE), reasons=("phase prefill is not in {decode, verify}",), remedy="--prefill-backend"),
    Case("same-mla-flashmla", DEEPSEEK_V3, "h200", both(MX, "flashmla", **STAGE), reasons=("phase prefill is not in {decode, verify}",), remedy="--prefill-backend triton"),
    Case("same-mla-fa3", DEEPSEEK_V3, "h200", both(MX, "fa3"), reasons=("fa3  format fp4_mx16 is not in {bf16",), remedy="--decode-backend triton"),
    Case("non-cuda", QWEN3_8B, "cpu", both(NV, "triton"), reasons=("arch CPU is not in {SM80",), remedy="torch_ref"),
    Case("nvfp4-hopper-trtllm_mha", QWEN3_8B, "h200", pair(NV, "flashinfer", "trtllm_mha"), reasons=("trtllm_mha  format nvfp4 is not in {bf16}",), remedy="--decode-backend cuda"),
    # On their list, and recommended. trtllm-gen wants V's scales interleaved, which our pools do not store.
    Case("same-mha-trtllm_mha-nvfp4", QWEN3_8B, "b200", both(NV, "trtllm_mha"), reasons=("trtllm_mha  format nvfp4 is not in",), remedy="--attention-backend triton"),
    Case("H1-recommended-sm100", QWEN3_8B, "b200", pair(NV, "flashinfer", "trtllm_mha"), reasons=("trtllm_mha  format nvfp4 is not in",), remedy="--decode-backend cuda"),
    # H1: mixed pairs.
    Case("H1-mixed-kind", QWEN3_8B, "h200", pair(NV, "triton", "flashmla"), reasons=("kind mha is not in",), remedy="--decode-backend cuda"),
    Case("H1-mixed-gpu", QWEN3_8B, "b200", pair(NV, "fa3", "triton"), reasons=("arch SM100 is not in {SM90}",), remedy="--prefill-backend"),
    # H2: the base flag names one that can, the phases do not use it.
    Case("H2-pair-cannot", QWEN3_8B, "h200", pair(NV, "fa3", "fa3", attention_backend="triton"), reasons=("decode of mha in nvfp4", "fa3"), remedy="--decode-backend cuda"),
    # H3: nvfp4 with MLA passes their list, and nothing there reads it.
    Case("H3-nvfp4-mla", DEEPSEEK_V3, "b200", both(NV, "trtllm_mla"), reasons=("trtllm_mla  ", "format nvfp4 is not in {bf16"), remedy="-backend triton"),
    Case("H3-mxfp4-is-not-block-16", QWEN3_8B, "b200", both("mxfp4", "trtllm_mha"), reasons=("format mxfp4",), remedy="--attention-backend triton"),
    # H5: verify, page sizes, head_dim, windows and sinks, GPUs.
    Case("H5-verify", QWEN3_8B, "b200", pair("bf16", "fa4", "fa4"), reasons=("verify of mha", "phase verify is not in {prefill, extend, decode}"), remedy="--decode-backend", keywords={"verify": True}),
    Case("H5-joint-page", QWEN3_8B, "b200", pair("bf16", "fa4", "trtllm_mha"), reasons=("one page size and one packing", "packing in common", "fa4 (prefill, extend)  page must be in", "page must be in {16, 32, 64}"), remedy="--decode-backend fa4"),
    Case("H5-joint-packing", QWEN3_8B, "h200", pair("bf16", "fa3", "cuda"), reasons=(": no packing in common", "packing must be in {nhd}", "packing must be in {hnd}"), remedy="--decode-backend fa3"),
    Case("H5-page-asked", DEEPSEEK_V3, "h200", pair("bf16", "flashinfer", "flashmla", page_size=16), reasons=("page 16 is not in {64}",), remedy="--decode-backend fa3"),
    Case("H5-page-asked-of-both", QWEN3_8B, "b200", both("bf16", "fa4", page_size=128), reasons=("page 128 is not in {16, 32, 64}",), remedy="--page-size 64"),
    Case("H5-head-72", HEAD_72, "h200", both(NV, "triton"), reasons=("stream k", "16 values", "heads of 72", "formats that fit", "fp8_e4m3")),
    Case("H5-head-80-block-32", HEAD_80, "h200", both("mxfp4", "triton"), reasons=("stream k", "32 values", "formats that fit", "nvfp4"), remedy="--kv-format"),
    Case("H5-sinks", GPT_OSS, "h200", both(NV, "flashinfer"), reasons=("no sinks",), remedy="--attention-backend cuda"),
    Case("H5-softcap", GEMMA2, "b200", both(NV, "trtllm_mha"), reasons=("no softcap",), remedy="--attention-backend triton"),
    Case("k8v4-flashinfer", QWEN3_8B, "h200", both("k8v4", "flashinfer"), reasons=("format fp8_e4m3:nvfp4 is not in",), remedy="--decode-backend cuda"),
    Case("dsa-nvfp4-flashmla", DEEPSEEK_V32, "h200", pair("nvfp4_ds_mla", "torch_ref", "flashmla"), reasons=("format nvfp4_ds_mla is not in {bf16}", "flashmla"), remedy="--decode-backend triton"),
    # HiSparse: other formats are refused by the peer's kernels, which read them staged at most.
    Case("hisparse-flat-fp8", DEEPSEEK_V32, "h200", pair("fp8_e4m3", "triton", "flashmla", **HOT), reasons=("flashmla  format fp8_e4m3 is not in {bf16}",), remedy="--decode-backend triton"),
    Case("hisparse-nvfp4-flashmla", DEEPSEEK_V32, "h200", pair("nvfp4_ds_mla", "triton", "flashmla", **HOT), reasons=("format nvfp4_ds_mla is not in {bf16}",), remedy="--decode-backend triton"),
    Case("hisparse-staged-prefill", DEEPSEEK_V32, "h200", pair("fp8_ds_mla", "flashmla", "triton", **HOT), reasons=("prefill of dsa", "format fp8_ds_mla is not in {bf16}"), remedy="--prefill-backend triton"),
    Case("dsa-latent-of-heads", QWEN3_8B, "h200", {"kv_format": "fp8_ds_mla"}, reasons=("stores the latent of MLA, which k is not", "formats that fit"), remedy="--kv-format"),
    Case("kmean-softcap", GEMMA2, "b200", {"kv_format": "nvfp4+kmean"}, reasons=("kmean shifts scores, which score capping",), remedy="--kv-format nvfp4 "),
]  # fmt: skip


@pytest.mark.parametrize("case", ACCEPTED, ids=lambda case: case.name)
def test_accepted(case: Case) -> None:
    made = plan(case)
    for group in made.groups:
        assert ", ".join(map(str, group.routes)) == case.routes
    assert (made.page_size, made.layout.packing) == (case.page, case.packing)


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_refused_with_reasons_and_a_command_that_works(case: Case) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(case)
    text = str(caught.value)
    for reason in case.reasons:
        assert reason in text
    assert caught.value.suggestion
    command = caught.value.suggestion.as_command()
    assert case.remedy in command
    config, hardware, declared = parse_command(command)
    resolve(config, case.model_spec, hardware, declared=declared, **case.keywords)


def test_H4_a_refusal_is_an_error_not_an_assertion() -> None:
    code = (
        "from planning import QWEN3_8B; from nibble.config import Config; from nibble.hardware import lookup_gpu\n"
        "from nibble.attention.planner.resolve import resolve; from nibble.errors import Unsupported\n"
        "try: resolve(Config(model='m', kv_format='nvfp4', attention_backend='fa3'), QWEN3_8B, lookup_gpu('b200'))\n"
        "except Unsupported as error: print(type(error).__name__, len(error.refusal.reasons))"
    )
    done = subprocess.run(
        [sys.executable, "-O", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert done.stdout.split() == ["Unsupported", "1"]


def test_H5_a_backend_that_cannot_extend_is_refused() -> None:
    """Chunked prefill and prefix hits read a quantised prefix, so PREFILL alone is not enough."""
    row = Support(phase=frozenset({Phase.PREFILL}), kind=frozenset({"mha"}), format=frozenset({NV}))
    table = {**all_backends(), "cold": BackendInfo(name="cold", support=(row,), summary="prefills only")}
    with pytest.raises(
        Unsupported, match=r"extend of mha in nvfp4[^\n]*\n  cold  phase extend is not in \{prefill\}"
    ):
        resolve(Config(model="m", **pair(NV, "cold", "triton")), QWEN3_8B, lookup_gpu("h200"), table)


@pytest.mark.parametrize(
    ("pages", "packings", "divided"),
    [
        ((64, 128), ("nhd", "nhd"), "no page size in common"),
        ((64, 64), ("nhd", "hnd"), "no packing in common"),
        ((64, 128), ("nhd", "hnd"), "no page size and no packing in common"),
    ],
)
def test_H5_what_divides_a_pair_is_named(
    pages: tuple[int, int], packings: tuple[str, str], divided: str
) -> None:
    phases = frozenset({Phase.PREFILL, Phase.EXTEND}), frozenset({Phase.DECODE})
    table = {
        name: BackendInfo(name=name, support=(row,), summary="", adapter=object)
        for name, row in (
            (
                name,
                Support(
                    phase=phase, kind=frozenset({"mha"}), format=frozenset({"bf16"}),
                    page=frozenset({page}), packing=frozenset({packing}),
                ),
            )
            for name, phase, page, packing in zip(("early", "late"), phases, pages, packings, strict=True)
        )
    }  # fmt: skip
    with pytest.raises(Unsupported, match=f": {divided}\n") as caught:
        resolve(Config(model="m", **pair("bf16", "early", "late")), QWEN3_8B, lookup_gpu("h200"), table)
    assert list(caught.value.refusal.reasons) == ["early (prefill, extend)", "late (decode)"]
    assert caught.value.refusal.reasons["late (decode)"][0] == f"page must be in {{{pages[1]}}}"


def test_H5_the_prefix_cache_changes_no_route() -> None:
    """Attention reads what is stored in every phase, so a hit and a miss take the same routes."""
    config = Config(model="m", kv_format=NV)
    on, off = (
        resolve(replace(config, prefix_cache=flag), QWEN3_8B, lookup_gpu("h200"), declared=True)
        for flag in (True, False)
    )
    assert on == off


def test_H5_what_has_no_verify_says_so() -> None:
    made = plan(next(case for case in ACCEPTED if case.name == "H5-no-verify"))
    assert "no verify of full in bf16: fa4 does not serve draft tokens over this storage" in made.notes
    with pytest.raises(Unsupported, match="verify"):
        made.route(0, Phase.VERIFY)


def test_H6_an_alias_is_the_same_plan() -> None:
    old, new = (
        resolve(Config(model="m", kv_format=name), QWEN3_8B, lookup_gpu("b200"), declared=True)
        for name in ("fp4_e2m1", MX)
    )
    assert old == new
