"""The options of Python calls as type checkers see them: the fields of Config and SamplingParams, as keywords.

A field that is added there is added here too, with the types that callers may give; tests/unit/test_options.py holds
the two together.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TypedDict


class ConfigOptions(TypedDict, total=False):
    """Keywords of LLM(model, ...): the fields of Config but `model`."""

    revision: str | None
    download_dir: str | os.PathLike[str] | None
    trust_remote_code: bool
    chat_template: str | os.PathLike[str] | None
    kv_format: str
    kv_layers: str
    kv_window: int | None
    kv_sinks: int
    kv_encoder: str
    kv_transforms: str
    kv_scales: str | os.PathLike[str]
    state_format: str
    state_interval: int
    page_size: int | None
    packing: str | None
    attention_backend: str
    prefill_backend: str | None
    decode_backend: str | None
    tuned: bool
    allow_staging: bool
    dtype: str
    device: str
    weights: str | None
    quantized_weights: str
    activations: str
    tp: int
    expert_parallel: bool
    attention_dp: bool
    kv_memory: str | int | None
    gpu_memory_utilization: float | None
    threads: int | None
    max_context: int | None
    max_running: int
    token_budget: int | None
    index_topk: int | None
    hisparse: str
    speculative: str
    speculative_tokens: str | int
    prefix_cache: bool
    compile: bool
    compile_cache: bool
    graphs: bool
    deterministic: bool
    watch_fidelity: float
    fidelity_alert: float | None
    require_quality: str
    seed: int
    generation_config: str | os.PathLike[str]


class SamplingOptions(TypedDict, total=False):
    """Keywords of LLM.generate(prompt, ...) and the like: the fields of SamplingParams."""

    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | Mapping[str, float] | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    include_stop_str_in_output: bool
    bad_words: str | Sequence[str] | None
    ignore_eos: bool
    logprobs: int | None
    prompt_logprobs: int | None
    logprob_start_len: int
    grammar: str | None
    skip_special_tokens: bool
    shown_tokens: Sequence[int] | None
    mark_tokens: bool
    truncate_prompt_tokens: int | None
    n: int
