"""Many prompts at once, sampled with seeds, two answers each. The answers share their prompt's pages."""

from nibble import LLM, SamplingParams

llm = LLM("demo", kv_format="k8v4")
params = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.95, seed=7, n=2, stop=("\n\n",))
for output in llm.generate(["import os\n", "class Stack:\n"], params):
    for answer in output.completions:
        print(f"--- {output.prompt!r} #{answer.index} ({answer.finish_reason})\n{answer.text}")
