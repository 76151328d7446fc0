"""Flags of other servers that mean what one of Nibble's means: `nibble serve` takes them too.

Owns the table; docs/migrating.md shows it. A flag is here only if it means the same, not nearly so.
"""

from __future__ import annotations

from collections.abc import Sequence

FLAGS = {
    "--kv-cache-dtype": "--kv-format",  # vLLM, SGLang
    "--max-model-len": "--max-context",  # vLLM
    "--context-length": "--max-context",  # SGLang
    "--max-num-seqs": "--max-running",  # vLLM
    "--max-running-requests": "--max-running",  # SGLang
    "--max-num-batched-tokens": "--token-budget",  # vLLM
    "--chunked-prefill-size": "--token-budget",  # SGLang
    "--block-size": "--page-size",  # vLLM
    "--enable-prefix-caching": "--prefix-cache",  # vLLM
    "--no-enable-prefix-caching": "--no-prefix-cache",  # vLLM
    "--disable-radix-cache": "--no-prefix-cache",  # SGLang
    "--enforce-eager": "--no-compile --no-graphs",  # vLLM
    "--disable-cuda-graph": "--no-graphs",  # SGLang
    "--random-seed": "--seed",  # SGLang
    "--tool-call-parser": "--tool-format",  # vLLM, SGLang
    "--enable-auto-tool-choice": "",  # vLLM; always so
    "--scheduling-policy": "--scheduling",  # vLLM
    "--enable-log-requests": "--log-requests",  # vLLM
    "--disable-log-requests": "--no-log-requests",  # vLLM
}
VALUES = {
    "--dtype": {"half": "float16", "float": "float32"},
    "--tool-format": {
        "llama3_json": "llama3", "llama4_json": "llama3", "llama4_pythonic": "pythonic", "qwen": "hermes",
        "qwen25": "hermes", "qwen3_xml": "qwen3_coder", "glm": "glm45", "deepseekv3": "deepseek_v3",
        "deepseekv31": "deepseek_v31", "deepseekv32": "deepseek_v32", "minimax-m2": "minimax_m2",
    },
    "--reasoning-parser": {
        "deepseek-r1": "deepseek_r1", "deepseek-v3": "deepseek_v31", "deepseek_v3": "deepseek_v31",
        "qwen3-thinking": "qwen3", "glm45": "qwen3", "mistral": "magistral",
    },
}  # fmt: skip
"""Values that are written otherwise. Other names of cache formats are known to the schemes themselves."""
MODEL = ("--model", "--model-path")


def translated(words: Sequence[str]) -> list[str]:
    """A command line in Nibble's own words. A model may be named by a flag, as SGLang does."""
    found: list[str] = []
    for word in words:
        flag, equals, value = word.partition("=")
        own = FLAGS.get(flag, flag).split()
        if equals and own:
            found += [*own[:-1], f"{own[-1]}={VALUES.get(own[-1], {}).get(value, value)}"]
        elif found and found[-1] in VALUES:
            found.append(VALUES[found[-1]].get(word, word))
        else:
            found += own
    return _model_first(found)


def _model_first(words: list[str]) -> list[str]:
    for i, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag in MODEL:
            taken = [value] if equals else words[i + 1 : i + 2]
            return [*taken, *words[:i], *words[i + (1 if equals else 2) :]]
    return words
