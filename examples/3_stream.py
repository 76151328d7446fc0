"""Text as it is made. Leaving the loop early aborts the request and frees its pages."""

from nibble import LLM

llm = LLM("demo", kv_format="fp8_e4m3")
for piece in llm.stream("def copy_file(src, dst):\n    ", max_tokens=64):
    print(piece.text, end="", flush=True)
    if "return" in piece.text:
        break
print()
