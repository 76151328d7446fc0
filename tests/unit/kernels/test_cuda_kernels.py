"""The CUDA C++ kernels compile, for every GPU and format that rows name, on a machine without a GPU or a compiler."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nibble.attention import backends
from nibble.errors import BackendError
from nibble.kernels.codecs import CUDA_FORMATS as FORMATS

pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")

from nibble.kernels import nvrtc as compiling
from nibble.kernels.attention import cuda as decode
from nibble.kernels.attention import prefill_sm90
from nibble.kernels.attention.cuda import MAX_BATCH, RESERVED, SOURCE, Variant, tiling_of
from nibble.kernels.collectives import push
from nibble.kernels.experts import cuda as experts
from nibble.kernels.experts.gate import CLAMPED, SILU
from nibble.kernels.experts.matrices import PackedExperts
from nibble.kernels.router import cuda as router
from nibble.kernels.weight_formats import EXPERT_FORMATS, WeightFormat, parts_of
from nibble.model_spec import Phase
from pairs import rotated

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

SHARED = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 103: 232448, 120: 101376, 121: 101376}
"""Bytes of shared memory that a block can have, by compute capability (CUDA programming guide, technical
specifications)."""
ROWS = [row for row in backends.get("cuda").support if Phase.DECODE in row.phase]
ARCHS = sorted({arch for row in ROWS for arch in row.arch or ()})


def variant(name: str, arch: int, dim: int = 128, page: int = 64, columns: int = 8) -> Variant:
    key, _, value = name.partition(":")
    k, v = FORMATS[key], FORMATS[value or key]
    tiling = tiling_of(k, v, dim, columns, SHARED[arch])
    return Variant(dim, k, v, columns, tiling, page, bf16=True, softcap=columns == 16)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIBBLE_CACHE", str(tmp_path))


@pytest.mark.parametrize("arch", ARCHS)
def test_compiles_for_every_gpu(arch: int) -> None:
    for name in ("nvfp4", "bf16"):
        assert compiling.cubin(SOURCE, arch, variant(name, arch).macros).startswith(compiling.ELF)


NAMES = ("nvfp4", *sorted({name for row in ROWS for name in row.format or ()} - {"nvfp4"}))


@pytest.mark.parametrize(("name", "sizes"), rotated(NAMES, [(64, 16, 8), (256, 128, 16), (128, 64, 32)]))
def test_compiles_for_every_format(name: str, sizes: tuple[int, int, int]) -> None:
    dim, page, columns = sizes
    assert compiling.cubin(SOURCE, 90, variant(name, 90, dim, page, columns).macros)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["lse", "join"])
@pytest.mark.parametrize(
    ("name", "arch", "dim", "columns"),
    [
        ("nvfp4", 90, 128, 8),
        ("nvfp4", 89, 128, 32),
        ("fp8_e4m3", 80, 256, 16),
        ("bf16", 120, 64, 16),
    ],
)
def test_compiles_for_attention_over_two_sources(
    what: str, name: str, arch: int, dim: int, columns: int
) -> None:
    plain = variant(name, arch, dim, columns=columns)
    code = compiling.cubin(SOURCE, arch, replace(plain, **{what: True}).macros)
    assert code.startswith(compiling.ELF) and code != compiling.cubin(SOURCE, arch, plain.macros)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dim", decode.HEAD_DIMS)
def test_a_block_fits(arch: int, dim: int) -> None:
    for name in FORMATS:
        for columns in [width for width in decode.WIDTHS if width <= decode.most_columns(dim)]:
            chosen = variant(name, arch, dim, columns=columns)
            assert chosen.shared_bytes(MAX_BATCH) + RESERVED <= SHARED[arch], f"{name} on SM{arch}"


def test_a_compiled_kernel_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    macros = variant("fp8_e4m3", 90).macros
    first = compiling.cubin(SOURCE, 90, macros)
    (kept,) = (tmp_path / compiling.CUBINS).iterdir()
    assert kept.read_bytes() == first
    monkeypatch.setattr(compiling, "_compile", lambda *_: pytest.fail("it is compiled again"))
    assert compiling.cubin(SOURCE, 90, macros) == first


def test_a_broken_file_in_the_cache_is_replaced(tmp_path: Path) -> None:
    macros = variant("fp8_e4m3", 90).macros
    first = compiling.cubin(SOURCE, 90, macros)
    (kept,) = (tmp_path / compiling.CUBINS).iterdir()
    kept.write_bytes(b"")
    assert compiling.cubin(SOURCE, 90, macros) == first == kept.read_bytes()


def test_a_gpu_that_nvrtc_does_not_know_is_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling.torch.cuda, "is_available", lambda: True)
    for capability, expected in (((9, 0), None), ((13, 7), "an NVRTC that knows SM137")):
        monkeypatch.setattr(compiling.torch.cuda, "get_device_capability", lambda found=capability: found)
        said = compiling.unavailable_reason.__wrapped__()
        assert said is None if expected is None else expected in said


def test_an_error_shows_what_nvrtc_said() -> None:
    with pytest.raises(BackendError, match=r"decode\.cu.*SIXTY_FOUR"):
        compiling.cubin(SOURCE, 90, {**variant("nvfp4", 90).macros, "HEAD_DIM": "SIXTY_FOUR"})


@pytest.mark.parametrize(("name", "globals"), rotated(["nvfp4", "fp8", "mxfp4"], [1, 0, 128]))
def test_products_with_packed_weights_compile(name: str, globals: int) -> None:
    from packed_weights import KINDS

    from nibble.kernels.quantized_linear import cuda
    from nibble.kernels.quantized_linear.matrix import PackedMatrix

    codes = torch.zeros(128, 128 * KINDS[name].format.bits // 32, dtype=torch.int32)
    scale = torch.ones(globals) if globals else None
    matrix = PackedMatrix(KINDS[name].format, codes, codes, torch.bfloat16, global_scale=scale)
    macros = cuda.macros(matrix)
    assert macros["GLOBAL"] == min(globals, 2)
    assert compiling.cubin(cuda.UNPACK, 90, macros).startswith(compiling.ELF)
    for splits in (1, 8):
        code = compiling.cubin(cuda.FEW, 90, macros | {"WARPS": cuda.WARPS, "SPLITS": splits})
        assert code.startswith(compiling.ELF)
    assert 4 * cuda.shared_bytes(matrix) <= SHARED[90]


def test_what_products_of_few_tokens_are_not_compiled_for() -> None:
    from nibble.kernels.quantized_linear import cuda

    macros = {"CODES": 1, "SCALES": 0, "GROUP": 128, "GLOBAL": 0, "WARPS": 4, "SPLITS": 1}
    assert compiling.cubin(cuda.FEW, 90, macros)
    for wrong, why in (({"SPLITS": 7}, "write as many outputs"), ({"GROUP": 48}, "begin together")):
        with pytest.raises(BackendError, match=why):
            compiling.cubin(cuda.FEW, 90, macros | wrong)


@pytest.mark.parametrize(
    ("shape", "splits"),
    [
        ((28672, 4096), 1),
        ((6144, 4096), 4),
        ((4096, 14336), 8),
        ((4096, 512), 1),
        ((3584, 3584), 4),
        ((2048, 1536), 2),
    ],
)
def test_inputs_are_split_until_processors_are_busy(shape: tuple[int, int], splits: int) -> None:
    from nibble.kernels.quantized_linear.cuda import splits_of

    assert splits_of(*shape, 132) == splits


EXPERTS = [
    WeightFormat(codes, group, scales, has_global=scales == "e4m3")
    for (codes, scales), groups in EXPERT_FORMATS.items()
    for group in groups
]


# All are compiled for SM90, whose limits are checked, and each for another, too.
@pytest.mark.sample(8)
@pytest.mark.parametrize(
    ("format", "arch"), [(one, 90) for one in EXPERTS] + rotated(EXPERTS, [80, 120]), ids=str
)
def test_products_with_packed_experts_compile(format: WeightFormat, arch: int) -> None:
    # Few experts: shapes count, and values do not.
    empty = torch.empty(32, 5760, 2880 // parts_of(format), dtype=torch.int16, device="meta")
    packed = PackedExperts(format, empty, empty, torch.bfloat16)
    if not experts.scales_fit(format):
        with pytest.raises(BackendError, match="has one scale"):
            use = experts.Use(format, (5760, 2880), experts.Tile(32, 8, 1))
            compiling.cubin(experts.SOURCE, arch, experts.macros(use))
        return
    inputs = 2880 if experts.row_fits(format, 2880) and not 2880 % (format.group or 1) else 2816
    for tokens, choices, gate in ((1, 8, SILU), (64, 512, CLAMPED)):
        tile = experts.tile_of(packed, tokens, choices, is_second=not gate)
        use = experts.Use(format, (5760, inputs), tile, gate)
        assert compiling.cubin(experts.SOURCE, arch, experts.macros(use)).startswith(compiling.ELF)
        shared = experts.shared_bytes(use, choices, 32)
        assert shared + experts.RESERVED <= SHARED[arch]
        if arch == 90:
            assert experts.resident_blocks(SHARED[90], shared, tile) >= 3, "processors would wait for memory"


@pytest.mark.parametrize("format", [experts.PLAIN, *EXPERTS], ids=str)
def test_products_of_a_token_that_choose_compile(format: WeightFormat) -> None:
    if not experts.scales_fit(format):
        return
    for (hidden, inner, top_k, count), gate in (
        ((2048, 768, 8, 128), SILU),
        ((2880, 2880, 4, 32), CLAMPED),
    ):
        if not experts.row_fits(format, hidden) or hidden % (format.group or 1):
            continue
        for outputs, inputs, own in ((2 * inner, hidden, gate), (hidden, inner, "")):
            empty = torch.empty(count, outputs, inputs // parts_of(format), dtype=torch.int16, device="meta")
            packed = PackedExperts(format, empty, empty, torch.bfloat16)
            tile = experts.tile_of(packed, 1, top_k, is_second=not own)
            choices = {"routed": count} if own else {"combine": top_k, "is_early": True}
            use = experts.Use(format, (outputs, inputs), tile, own, is_one=True, **choices)
            assert compiling.cubin(experts.SOURCE, 90, experts.macros(use)).startswith(compiling.ELF)
            # All blocks of the first product run at a time, so that the second may start while it ends.
            blocks = experts.resident_blocks(SHARED[90], experts.shared_bytes(use, top_k, count), tile)
            assert blocks >= 3


@pytest.mark.parametrize("inputs", [2048, 2880, 72, 7168])
def test_logits_of_a_token_compile(inputs: int) -> None:
    vectors = router.vectors_of(inputs)
    assert vectors * router.ROW_THREADS * 8 >= inputs
    assert compiling.cubin(router.LOGITS, 90, {"VECTORS": vectors}).startswith(compiling.ELF)


@pytest.mark.parametrize(
    ("experts_", "inputs"), [(128, 2048), (32, 2880), (256, 2048), (8, 4096), (513, 2048), (1024, 7168)]
)
def test_routers_compile(experts_: int, inputs: int) -> None:
    shape = router.shape_of(experts_, inputs) or router.choice_shape(experts_)
    assert shape.tiles * shape.cluster * 16 >= experts_
    assert compiling.cubin(router.SOURCE, 90, router.macros(shape)).startswith(compiling.ELF)


def test_rows_of_experts_that_are_whole_pieces() -> None:
    nvfp4 = WeightFormat("e2m1", 16, "e4m3", has_global=True)
    assert experts.row_fits(nvfp4, 2880) and experts.row_fits(WeightFormat("e4m3"), 144)
    assert not experts.row_fits(nvfp4, 272)


@pytest.mark.parametrize(
    ("tokens", "choices", "experts_", "columns"),
    [(1, 8, 128, 8), (8, 64, 128, 8), (64, 512, 128, 8), (64, 256, 32, 16), (64, 64, 2, 16), (9, 9, 1, 16)],
)
def test_tokens_of_an_expert_that_are_multiplied_at_a_time(
    tokens: int, choices: int, experts_: int, columns: int
) -> None:
    assert experts.columns_of(tokens, choices, experts_) == columns


def ptxas_report(source: Path, arch: str, macros: dict[str, str | int]) -> str:
    """What ptxas says of a source file: registers, stack, and products that wait for each other."""
    bindings, headers = compiling.nvrtc, compiling._headers(source.parent)
    names, texts = [name.encode() for name in headers], [text.encode() for text in headers.values()]
    _, program = bindings.nvrtcCreateProgram(source.read_bytes(), b"", len(names), texts, names)
    options = [f"--gpu-architecture=sm_{arch}", "--std=c++17", "--ptxas-options=-v"]
    options += [f"-D{name}={value}" for name, value in macros.items()]
    (status,) = bindings.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    assert status == bindings.nvrtcResult.NVRTC_SUCCESS
    log = b" " * bindings.nvrtcGetProgramLogSize(program)[1]
    bindings.nvrtcGetProgramLog(program, log)
    bindings.nvrtcDestroyProgram(program)
    return log.decode()


@pytest.mark.sample(6)
@pytest.mark.parametrize("dim", prefill_sm90.DIMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("capped", "windowed"), [(False, False), (True, False), (False, True), (True, True)])
def test_products_of_prompts_do_not_wait_for_each_other(
    dim: int, dtype: torch.dtype, capped: bool, windowed: bool
) -> None:
    """Where registers are few, or used between products, ptxas lets each product wait for the one before."""
    macros = prefill_sm90.macros_of(dim, dtype, capped=capped, windowed=windowed)
    report = ptxas_report(prefill_sm90.SOURCE, "90a", macros)
    assert " 0 bytes stack frame, 0 bytes spill stores" in report, report
    assert "Performance Loss" not in report, report


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("arch", [80, 90, 120])
def test_sums_over_gpus_compile(arch: int, size: int) -> None:
    assert compiling.cubin(push.SOURCE, arch, push.macros(size)).startswith(compiling.ELF)
