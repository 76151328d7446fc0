"""Text from a 4-bit KV cache, in six lines."""

from nibble import LLM

llm = LLM("demo", kv_format="nvfp4")
output = llm.generate("def read_lines(path):\n    with open(path", max_tokens=48)
print(output.prompt + output.text)
print(f"{llm.plan.layout.bytes_per_token} bytes per token")
