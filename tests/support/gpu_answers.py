"""Answers of engines on GPUs, held against logits of whole prompts; and tiny models that are wide enough for kernels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from families import make, tiny_config
from nibble import LLM
from nibble.models.hub import quiet

NEAR = 0.1
"""Deviations of the logits below the likeliest token that a token may be and count as nearly as likely."""
WIDE = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128}


def save_wide(name: str, folder: Path) -> Path:
    """Save a tiny model of a family in BF16."""
    config = tiny_config(name)
    for field, value in WIDE.items():
        if hasattr(config, field):
            setattr(config, field, value)
    with quiet():
        make(name, config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def divergence(one_TV: torch.Tensor, other_TV: torch.Tensor) -> float:
    p, q = (logits_TV.float().cpu().log_softmax(-1) for logits_TV in (one_TV, other_TV))
    return float((p.exp() * (p - q)).sum(-1).mean())


def near_share(llm: LLM, prompts: Sequence[Sequence[int]], tokens: int = 24) -> float:
    """How often a token of an answer is the likeliest, or nearly, of a whole prompt's logits.

    No step that is recorded piecewise computes those.
    """
    outputs = llm.generate(prompts, max_tokens=tokens, temperature=0.0, ignore_eos=True, progress=False)
    pieces, llm.engine.runner.pieces, hits = llm.engine.runner.pieces, None, list[torch.Tensor]()
    for prompt, output in zip(prompts, outputs, strict=True):
        answer = list(output.completions[0].token_ids)
        logits_TV = llm.logits([*prompt, *answer]).float()[len(prompt) - 1 : -1]
        chosen_T = logits_TV.gather(1, torch.tensor(answer, device=logits_TV.device)[:, None])[:, 0]
        hits.append(chosen_T >= logits_TV.max(-1).values - NEAR * logits_TV.std(-1))
    llm.engine.runner.pieces = pieces
    return float(torch.cat(hits).float().mean())
