"""Times of near_prompt_kernel's variants: chunk of 8192 tokens at 8192 of Llama 8B, with a far part."""
import sys; sys.path.insert(0, ".gpu")
import itertools, torch
from nibble import formats
from nibble.kernels.attention.naive import PartialAttention
from nibble.kernels.near.triton import near_prompt_attention, near_kernel
from nibble.kernels.types import AttentionBatch, AttentionParams, Paged
from nibble.model_spec import Phase
from dataclasses import replace
import near_v2
torch.manual_seed(0)
plain = formats.plain("bfloat16")
def pages(n):
    return Paged(plain, 128, (torch.randn(n, 8, 64, 128, device="cuda", dtype=torch.bfloat16),), torch.ones((), device="cuda"))
def timed(f):
    f(); torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        for _ in range(10): f()
    s, e = (torch.cuda.Event(enable_timing=True) for _ in "ab")
    g.replay(); s.record(); g.replay(); g.replay(); e.record(); torch.cuda.synchronize()
    return s.elapsed_time(e) / 20 * 1e3
k, v = pages(512), pages(512)
news, lens = (8192,), (16384,)
T = sum(news)
table = torch.arange(512, device="cuda", dtype=torch.int32)[None, :256].contiguous()
batch = replace(AttentionBatch.from_lens(Phase.EXTEND, 0, news, lens, table), exact_table_BN=table)
qkv = torch.randn(T, 48, 128, device="cuda", dtype=torch.bfloat16)
q = qkv[:, :32].contiguous()
streams = {"k": torch.randn(T, 8, 128, device="cuda", dtype=torch.bfloat16), "v": qkv[:, 40:]}
far = PartialAttention(torch.randn(T, 32, 128, device="cuda", dtype=torch.bfloat16), torch.randn(32, T, device="cuda") + 3)
params = AttentionParams(128 ** -0.5, 64, None, None)
mean = torch.randn(8, 128, device="cuda")
ref = near_prompt_attention(q, streams, k, v, batch, params, mean, far)
print("now", f"{timed(lambda: near_prompt_attention(q, streams, k, v, batch, params, None, far)):.1f} {timed(lambda: near_prompt_attention(q, streams, k, v, batch, params, mean, far)):.1f}")
res = []
for early, fast in ((1, 1), (0, 1), (1, 0), (0, 0)):
    for tile in ((64,64,4,1),(64,32,4,2),(64,32,4,3),(128,32,4,2),(32,32,2,2),(32,64,4,1),(64,16,4,3)):
        if early + fast < 2 and tile not in ((64,64,4,1),(64,32,4,3),(32,32,2,2)): continue
        try:
            a = (*tile, bool(early), bool(fast), True)
            f = lambda m: near_v2.run(q, streams, k, v, batch, params, m, far, *a)
            err = (f(mean).float() - ref.float()).abs().max().item()
            print("prompt", a, f"{timed(lambda: f(mean)):.1f} us, err {err:.1e}", flush=True)
        except Exception as x:
            print(tile, early, fast, repr(x)[:150])

# ---- decode: the near kernel by tile
from nibble.kernels import next_power_of_2
for B in (8, 64, 128):
    k, v = pages(3 * B + 1), pages(3 * B + 1)
    seq = [1500 + 7 * i for i in range(B)]
    tb = torch.zeros(B, 64, dtype=torch.int32)
    for i, n in enumerate(seq):
        for j in range(3): tb[i, max((n - 1) // 64 - j, 0)] = 3 * i + j
    tb = tb.cuda()
    b = AttentionBatch.from_lens(Phase.DECODE, 0, [1] * B, seq, tb)
    q = torch.randn(B, 32, 128, device="cuda", dtype=torch.bfloat16)
    values = torch.empty(B, 32, 128, device="cuda"); lse = torch.empty(B, 32, device="cuda")
    (kp,), (vp,) = k.planes_PHS, v.planes_PHS
    out = []
    for N, warps, stages in itertools.product((16, 32, 64), (1, 2, 4), (1, 3)):
        def f():
            near_kernel[B, 8](q, kp, vp, tb, b.seq_lens_B, None, mean, values, lse, 0.1, 0.0, *q.stride()[:2], *kp.stride()[:3],
                *vp.stride()[:3], tb.stride(0), lse.stride(0), WINDOW=64, SOFTCAP=False, GROUP=4, K_DIM=128, V_DIM=128, PAGE=64,
                M=16, K_WIDTH=128, V_WIDTH=128, N=N, num_warps=warps, num_stages=stages)
        try: out.append((timed(f), N, warps, stages))
        except Exception as x: print(N, warps, stages, repr(x)[:100])
    print("decode", B, [f"{t:.1f}:{n}/{w}/{s}" for t, n, w, s in sorted(out)[:10]], [f"{t:.1f}" for t, *a in out if a == [64, 4, 3]])
