"""Naive 4-bit loses most in the first and last layers: keep those in FP8, rotate K, and measure your own scales."""

from nibble import LLM

text = "\n".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(60))
llm = LLM("demo", kv_format="nvfp4+rot", kv_layers="0,-1=fp8_e4m3", calibrate=[text])
print(llm.generate(text[:600], max_tokens=24).text)
for layer in llm.plan.layout.layers:
    print(layer.layer, layer.format_key, layer.bytes_per_token, "bytes per token")
