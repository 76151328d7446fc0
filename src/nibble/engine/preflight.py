"""What can be refused before weights load: a cache that cannot be had, a prompt or a grammar that cannot be served.

For who would wait for a model, or for several, only to hear of it. Every refusal is made where it is always made;
nothing is decided here. Owns check(). Must not know of the terminal.
"""

from __future__ import annotations

from collections.abc import Sequence

from nibble.config import Config, SamplingParams
from nibble.engine.build import plan_parts
from nibble.engine.engine import check_request
from nibble.engine.structured_output import Grammars
from nibble.engine.tokenizer import required


def preflight(configs: Sequence[Config], prompts: Sequence[str], params: SamplingParams) -> None:
    """Raises what LLM() of any of these configs of one model, or its generate(), would raise at once.

    Except where a prompt is too long, which depends on how many pages there are once the weights are loaded.
    """
    found = [plan_parts(config) for config in configs]
    vocabulary, tokenizer = found[0].plan.model_spec.vocab_size, required(found[0].tokenizer)
    for prompt in prompts:
        check_request(tokenizer.encode(prompt), params, vocabulary, tokenizer)
    if params.grammar is not None:
        Grammars(tokenizer, vocabulary, tokenizer.eos_ids).matcher(params.grammar)
