"""A hybrid model: recurrent states in 8 bits beside K and V in 4; questions about a context go on from its snapshot."""

from nibble import LLM
from nibble.evals import recall

llm = LLM("demo-hybrid", kv_format="nvfp4", state_format="int8", kv_memory="64MiB")
count = llm.tokenizer.encode
cases = recall.cases(1, number=4, length_tokens=1100, count=lambda text: len(count(text)), per_context=4)
for case in cases:
    output = llm.generate(case.prompt, max_tokens=12)
    answer = output.text[: len(case.answer)]
    print(
        f"...{case.prompt[-48:]!r}: {answer!r}, expected {case.answer!r}; {output.cached_tokens} tokens cached"
    )
