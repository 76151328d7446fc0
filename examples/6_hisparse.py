"""Sparse attention with most of the cache in host memory: six look-ups, in contexts of which the device holds two."""

from nibble import LLM
from nibble.evals import recall

llm = LLM(
    "demo-mla", kv_format="fp8_ds_mla", hisparse="buffer=256,host_format=nvfp4_ds_mla",
    max_context=1200, max_running=6, kv_memory="9500KiB",
)  # fmt: skip
count = llm.tokenizer.encode
cases = recall.cases(seed=1, number=6, length_tokens=1100, count=lambda text: len(count(text)))
for case, output in zip(cases, llm.generate([case.prompt for case in cases], max_tokens=12), strict=True):
    print(f"...{case.prompt[-48:]!r}: {output.text[: len(case.answer)]!r}, expected {case.answer!r}")
if llm.tier:
    print(llm.tier.summary)
