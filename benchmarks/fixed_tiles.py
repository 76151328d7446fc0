"""Times and checks of fixed attention; see main(). `python .gpu_fixed.py` on the GPU."""
import functools, importlib.util, itertools, os, subprocess, sys, time, traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]
os.environ.setdefault("TRITON_CACHE_DIR", "/tmp/triton_fixed")
T0 = time.time()
import torch  # noqa: E402
import paged  # noqa: E402
from nibble import formats  # noqa: E402
from nibble.kernels import gpu_of  # noqa: E402
from nibble.kernels.attention import naive  # noqa: E402
from nibble.kernels.attention.fixed import FixedTile, fixed_attention, fixed_tiles  # noqa: E402
from nibble.kernels.attention.triton import paged_attention  # noqa: E402
from nibble.kernels.types import AttentionBatch, AttentionParams, Paged  # noqa: E402
from nibble.model_spec import Phase  # noqa: E402

PARAMS = AttentionParams(128**-0.5)


@functools.cache
def old_module():
    spec = importlib.util.spec_from_file_location("old_fixed", ROOT / ".old_fixed.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["old_fixed"] = module
    spec.loader.exec_module(module)
    return module


def fixed(rows, keys=64, warps=4, stages=3, regs=None, **options):
    tile = FixedTile(rows, keys, warps, stages, regs)
    return lambda q, k, v, batch: fixed_attention(q, k, v, batch, PARAMS, shape=tile, **options)


def old(**options):
    return lambda q, k, v, batch: old_module().fixed_attention(q, k, v, batch, PARAMS, **options)


DECODES = {
    **{f"rows {r} stages {s} regs {g}": fixed(r, stages=s, regs=g)
       for r, s, g in [(8, 2, None), (8, 3, None), (8, 4, None), (8, 5, None), (8, 3, 96), (8, 4, 96), (8, 3, 80), (16, 2, None), (16, 3, None), (16, 4, None), (16, 3, 128), (16, 3, 96), (16, 1, None), (8, 1, None), (64, 3, None)]},
    **{f"rows {r} size {z}": fixed(r, size=z) for r in (8, 16) for z in (512, 2048)},
    "rows 8 keys 128 stages 2": fixed(8, 128, 4, 2),
    "rows 16 keys 128 stages 2 warps 8": fixed(16, 128, 8, 2),
    "rows 8 keys 128 stages 2 warps 8": fixed(8, 128, 8, 2),
    "old fixed": old(),
    "normal triton": lambda q, k, v, batch: paged_attention(q, k, v, batch, PARAMS),
}
PROMPTS = {
    **{f"rows {r} stages {s} regs {g} size {z}": fixed(r, stages=s, regs=g, size=z, spread=False)
       for r, s, g, z in [(32, 2, None, 1024), (32, 3, None, 1024), (32, 3, 168, 1024), (32, 3, 128, 1024), (64, 2, None, 1024), (64, 3, None, 1024), (64, 3, None, 2048),
                          (64, 4, None, 1024), (64, 3, 168, 1024), (64, 1, None, 1024), (16, 3, None, 1024)]},
    "rows 128 warps 8": fixed(128, warps=8, spread=False),
    "rows 64 warps 8": fixed(64, warps=8, spread=False),
    "old fixed": old(),
    "normal triton": lambda q, k, v, batch: paged_attention(q, k, v, batch, PARAMS, 8192),
}
JOBS = [("decode", n) for n in DECODES] + [("prompt", n) for n in PROMPTS]
WORKERS = 14


class Work:
    """The cache of `lens` and a batch over it, the last `new` tokens of each being queries."""

    def __init__(self, count, length, new):
        self.cache = paged.make_cache(paged.Heads(), [length] * count, "nvfp4", "hnd", 64, layers=1)
        view = self.cache.view(0)
        self.k, self.v = view.streams["k"].paged, view.streams["v"].paged
        phase = Phase.DECODE if new == 1 else Phase.EXTEND
        self.batch = self.cache.segment(phase, [new] * count)
        self.q = torch.randn(count * new, 32, 128, device="cuda").bfloat16()

    def run(self, attend):
        return attend(self.q, self.k, self.v, self.batch)


def compile_some(worker):
    """Fills the compiler's cache."""
    decode, prompt = Work(2, 8192, 1), Work(1, 512, 512)
    for i, (kind, name) in enumerate(JOBS):
        if i % WORKERS != worker:
            continue
        try:
            (decode if kind == "decode" else prompt).run((DECODES if kind == "decode" else PROMPTS)[name])
        except Exception as error:
            print(f"compile {kind} {name}: {str(error)[:200]!r}")
    torch.cuda.synchronize()


def timed(work, attend, calls):
    """Microseconds of a call in a CUDA graph."""
    work.run(attend)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            work.run(attend)
    times = []
    for _ in range(4):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / calls)
    del graph
    return sorted(times)[1]


def table(title, work, variants, calls):
    print(f"--- {title}", flush=True)
    first, results = None, []
    for name, attend in variants.items():
        try:
            us = timed(work, attend, calls)
            out = work.run(attend).float()
            note = ""
            if name.startswith("rows") and "keys" not in name and ("size" not in name or "size 1024" in name):
                first = out if first is None else first
                note = "same bits" if torch.equal(out, first) else f"OTHER BITS by {float((out - first).abs().max()):.1e}"
            results.append((us, f"{us:8.1f} us  {name:44s} {note}"))
            print(results[-1][1], flush=True)
        except Exception as error:
            print(f"  failed   {name}: {str(error)[:160]!r}", flush=True)
    print("best:", min(results)[1] if results else None, f"[{time.time() - T0:.0f} s]", flush=True)


def same_bits(name, dim, group, heads=2, length=2500):
    """Rows of a prompt against decode steps, chunks and other tiles."""
    torch.manual_seed(0)
    fmt = formats.get(name)
    scale = torch.tensor(0.02 if fmt.needs_scale else 1.0, device="cuda")
    k, v = (Paged(fmt, dim, fmt.encode(torch.randn(40, heads, 64, dim, device="cuda"), scale), scale) for _ in "kv")
    table_BN = torch.randperm(40, device="cuda").int()[None]
    q = torch.randn(length, heads * group, dim, device="cuda").bfloat16()
    known, bad = fixed_tiles(group, k, v, q.dtype, gpu_of(q.device)), []
    for window in (None, 300) if name == "nvfp4" else (None,):
        params = AttentionParams(dim**-0.5, window)

        def attend(end, count, **options):
            batch = AttentionBatch.from_lens(Phase.EXTEND, 0, (count,), (end,), table_BN)
            return fixed_attention(q[end - count : end], k, v, batch, params, **options)

        whole = attend(length, length)
        batch = AttentionBatch.from_lens(Phase.EXTEND, 0, (64,), (length,), table_BN)
        expected = naive.paged_attention(q[-64:].float(), k, v, batch, params)
        error = float((whole[-64:].float() - expected).norm() / expected.norm())
        for shape, spread in itertools.product(known, (False, True)):
            found = attend(length, 100, shape=shape, spread=spread)
            if not torch.equal(found, whole[-100:]):
                bad.append(f"{shape.rows} rows, shared {spread}: {float((found - whole[-100:]).abs().max()):.1e}")
        for end, count in ((1, 1), (1024, 1), (1025, 1), (2500, 1), (2500, 2), (2500, 4), (2500, 7), (1100, 90), (2050, 1030)):
            if not torch.equal(attend(end, count), whole[end - count : end]):
                bad.append(f"{count} up to {end}")
        print(f"{name} dim {dim} group {group} window {window}: error {error:.1e}, tiles {[(t.rows, t.stages) for t in known]}, "
              f"{'SAME BITS' if not bad else 'OTHER BITS ' + str(bad)} [{time.time() - T0:.0f} s]", flush=True)


CHECKS = [("nvfp4", 128, 4), ("bf16", 128, 4), ("fp8_e4m3", 128, 4), ("nvfp4", 64, 4), ("mxfp4", 128, 4), ("nvfp4", 256, 2)]


def main():
    workers = [subprocess.Popen([sys.executable, __file__, "compile", str(i)]) for i in range(WORKERS)]
    checks = [subprocess.Popen([sys.executable, __file__, "check", str(i)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for i in range(len(CHECKS))]
    for process in workers:
        process.wait()
    for process in checks:
        print(process.communicate()[0].strip()[-1500:], flush=True)
    print(f"compiled [{time.time() - T0:.0f} s]", flush=True)
    work = Work(64, 8192, 1)
    try:
        expected = paged_attention(work.q, work.k, work.v, work.batch, PARAMS).float()
        found = fixed_attention(work.q, work.k, work.v, work.batch, PARAMS).float()
        print(f"64x8192 against the normal kernel: {float((found - expected).norm() / expected.norm()):.1e}")
    except Exception:
        traceback.print_exc()
    table("decode 64 x 8192", work, DECODES, 8)
    few = {n: a for n, a in DECODES.items() if n in ("rows 8 stages 3 regs None", "rows 16 stages 3 regs None", "rows 8 size 512", "rows 8 size 2048", "rows 8 stages 4 regs None", "old fixed", "normal triton")}
    del work
    torch.cuda.empty_cache()
    table("decode 8 x 1024", Work(8, 1024, 1), few, 16)
    table("decode 1 x 8192", Work(1, 8192, 1), few, 16)
    prompt = Work(1, 8192, 8192)
    table("prompt 8192", prompt, PROMPTS, 3)
    try:  # rows of that prompt as decode steps
        whole = prompt.run(fixed(64, spread=False))
        for end in (8192, 5000, 1024, 77):
            batch = AttentionBatch.from_lens(Phase.DECODE, 0, (1,), (end,), prompt.batch.page_table_BN)
            for rows in (8, 16):
                step = fixed(rows)(prompt.q[end - 1 : end], prompt.k, prompt.v, batch)
                print(f"token {end} as a step of {rows} rows:", "same bits" if torch.equal(step, whole[end - 1 : end]) else "OTHER BITS")
    except Exception:
        traceback.print_exc()
    print(f"[{time.time() - T0:.0f} s]")


if __name__ == "__main__":
    if sys.argv[1:2] == ["compile"]:
        compile_some(int(sys.argv[2]))
    elif sys.argv[1:2] == ["check"]:
        try:
            same_bits(*CHECKS[int(sys.argv[2])])
        except Exception:
            traceback.print_exc()
    else:
        main()
