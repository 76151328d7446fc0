"""Which kernels are compiled after the start, in a workload of 8K/512@64; and its time twice."""
import sys, time; sys.path[:0] = ["benchmarks"]
import torch, triton, argparse
import engine_load as load
from engine_load import Workload
from random_models import served
import exact_window as ew
log = []
from triton.runtime import jit
_real = jit.JITFunction._do_compile
def _do(self, key, signature, *a, **k):
    t = time.time(); r = _real(self, key, signature, *a, **k)
    log.append((t, f"{time.time() - t:.2f} s {signature} {a[1:]}", self.__name__ if hasattr(self, "__name__") else str(self.fn))); return r
jit.JITFunction._do_compile = _do
window = int(sys.argv[1])
with served("llama-3.1-8b", kv_format="nvfp4", kv_window=window, max_running=64, max_context=8192+640, token_budget=8192, device="cuda") as made:
    llm = made.llm
    n = len(log); print("at start", n, flush=True)
    for text in ("8K/512@64", "8K/512@64"):
        w, _, c = text.partition("@")
        t0 = time.time(); r = ew.run(llm, Workload.parse(w), int(c)); print(window, text, f"{r:.0f} tokens/s", f"{time.time()-t0:.1f} s", flush=True)
        for t, rep, name in log[n:]: print("   compiled", f"{t-t0:.1f}", name, rep[:1500], flush=True)
        n = len(log)
    # where mixed steps spend their time on the host
    from torch.profiler import profile, ProfilerActivity
    llm.engine.scheduler.manager.clear()
    from nibble import SamplingParams
    prompts = [load.random_prompt(8192, llm.engine.vocab_size, 1000 + s) for s in range(20)]
    for p in prompts: llm.engine.submit(p, SamplingParams(max_tokens=300, ignore_eos=True, temperature=0), lambda piece: None)
    for _ in range(6): llm.engine.step()
    torch.cuda.synchronize(); t0 = time.time()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as p:
        for _ in range(4): llm.engine.step()
        torch.cuda.synchronize()
    print(f"4 mixed steps {time.time()-t0:.3f} s (profiled)")
    print(p.key_averages().table(sort_by="cuda_time_total", row_limit=30, max_name_column_width=60)[:9000])
    print(p.key_averages().table(sort_by="self_cpu_time_total", row_limit=16, max_name_column_width=60)[:5000])
