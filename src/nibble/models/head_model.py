"""A head that drafts as a model: the family's own decoder layer between the head's norms and its output.

    MTP         x = fc(enorm(embedding of token i + 1), hnorm(hidden state i)); y = layer(x)
                its hidden state, for the next draft, is norm(y)
    EAGLE-3     x = the embedding of token i + 1 beside fc(hidden states i of three layers); y = layer(x), whose
                attention reads the norms of both and adds to the second; its hidden state is y itself

and the logits of token i + 2 are those of norm(y). Row i of a head's cache belongs to hidden state i and token i + 1,
at position i. The hidden state of MTP is what the model's own output reads, behind its last norm.

Sources: DeepSeek-V3 (arXiv 2412.19437, section 2.2) and the weights' README; EAGLE-3 (arXiv 2503.01840) and its code;
Qwen3-Next and MiMo as vLLM and SGLang serve them; `speculators`.

Shape suffixes: T tokens of a step, S rows whose logits are computed, H hidden size, X values of the model's hidden
states, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from nibble.errors import ConfigError, WeightError
from nibble.models.heads import HeadFacts
from nibble.models.hub import EAGLE3
from nibble.models.parallel_experts import class_of_rank
from nibble.models.towers import model_class

Shared = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]
"""The table of tokens and the output of the model that is drafted for."""


def class_of(config: PretrainedConfig) -> Any:
    """Return the class of the model or head of a config; raise ConfigError where Transformers has no such decoder."""
    if HeadFacts.of(config) is None:
        return class_of_rank(model_class(config), config)
    family = type(config)
    decoder = MODEL_MAPPING.get(family, None)
    if decoder is None:
        raise ConfigError(
            f"a head of {config.model_type} cannot be served: Transformers has no decoder of its kind"
        )
    return _head_class(decoder)


@cache
def _head_class(decoder: Any) -> Any:
    # The family's own base knows how its weights are converted, and which attention functions it takes.
    base = next(
        cls
        for cls in decoder.__mro__
        if cls.__name__.endswith("PreTrainedModel") and cls is not PreTrainedModel
    )
    values = {
        "__module__": decoder.__module__,
        "decoder_class": decoder,
        "_keys_to_ignore_on_load_unexpected": None,
        "_tied_weights_keys": None,
    }
    return type(f"{decoder.__name__}Head", (Head, base), values)


class Head:
    """What a head has beside its family's base. `share()` comes before it serves."""

    decoder_class: Any
    model: Any
    lm_head: Any
    embed_tokens: Any
    config: Any

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        facts = HeadFacts.of(config)
        assert facts is not None
        self.facts = facts
        self.is_eagle = facts.kind == EAGLE3
        size, vocab = config.hidden_size, config.vocab_size
        self.model = self.decoder_class(config)
        # Tokens come embedded and joined with hidden states, and the norm behind the layer is the head's.
        self.norm, self.model.norm, self.model.embed_tokens = self.model.norm, nn.Identity(), None
        norm = type(self.norm)
        if self.is_eagle:
            self.model.layers[0] = Eagle3Layer(self.model.layers[0], config, norm, facts.norm_before_residual)
            self.input_norm = norm(self.state_size, eps=config.rms_norm_eps) if facts.norm_before_fc else None
            self.fc = nn.Linear(self.state_size, size, bias=False)
        else:
            self.enorm, self.hnorm = (norm(size, eps=config.rms_norm_eps) for _ in range(2))
            self.fc = nn.Linear(2 * size, size, bias=False)
        self.embed_tokens = nn.Embedding(vocab, size) if facts.own_embedding else None
        self.lm_head = (
            nn.Linear(size, facts.draft_vocab_size or vocab, bias=False) if facts.own_output else None
        )
        if facts.draft_vocab_size:
            self.register_buffer("d2t", torch.zeros(facts.draft_vocab_size, dtype=torch.int64))  # type: ignore[attr-defined]
        # In a list, so that they do not become modules of this one.
        self._shared: list[Shared] = []
        self.example_states: Tensor | None = None
        """[T, H], hidden states by position where a pass is given none: to measure a cache's scales."""
        self.post_init()  # type: ignore[attr-defined]

    def get_input_embeddings(self) -> Any:
        """Return the head's own table of tokens, if any."""
        return self.embed_tokens

    def get_output_embeddings(self) -> Any:
        """Return the head's own output, if any."""
        return self.lm_head

    def share(self, model: Any) -> None:
        """Take what the head has not of its own from the model that it drafts for."""
        self._shared = [(model.get_input_embeddings(), model.get_output_embeddings())]

    @property
    def state_size(self) -> int:
        """Return the values of a hidden state that the model leaves, X of combine()."""
        if self.is_eagle:
            return self.facts.num_states * self.facts.target_hidden_size
        return self.config.hidden_size

    def combine(self, states_TX: Tensor) -> Tensor:
        """Return the hidden states [T, H] that the head reads, of those that the model leaves."""
        if not self.is_eagle:
            return states_TX
        states_TX = states_TX if self.input_norm is None else self.input_norm(states_TX)
        return self.fc(states_TX)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        hidden_states: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits of chosen rows, and their hidden states for the next draft.

        Args:
            input_ids: [1, T], the tokens after the hidden states.
            position_ids: [1, T], of the hidden states.
            attention_mask: as the family takes it.
            hidden_states: [1, T, H], from combine() or from the draft before; None: example_states.
            logits_to_keep: rows, or how many of the last ones; 0: all.
            use_cache: Transformers' own cache is never used.
            kwargs: for the decoder.
        """
        embeds = self._embed(input_ids)
        if hidden_states is None:
            hidden_states = self._example(embeds, position_ids)
        x = self._join(embeds, hidden_states.to(embeds.dtype))
        y = self.model(
            inputs_embeds=x,
            position_ids=position_ids,
            attention_mask=attention_mask,
            use_cache=False,
            **kwargs,
        ).last_hidden_state
        rows = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        y = y[:, rows]
        normed = self.norm(y)
        output = self.lm_head if self.lm_head is not None else self._shared[0][1] if self._shared else None
        # Without weights nobody reads the logits.
        logits = normed.new_zeros(*normed.shape[:2], 1) if output is None else output(normed)
        return CausalLMOutputWithPast(logits=logits, hidden_states=(y if self.is_eagle else normed,))

    def _embed(self, ids: Tensor) -> Tensor:
        if self.embed_tokens is not None:
            return self.embed_tokens(ids)
        if self._shared:
            return self._shared[0][0](ids)
        weight = self.fc.weight
        return torch.ones(*ids.shape, self.config.hidden_size, dtype=weight.dtype, device=ids.device)

    def _example(self, embeds: Tensor, position_ids: Tensor | None) -> Tensor:
        if self.example_states is None or position_ids is None:
            return embeds.flip(-1)
        return self.example_states[position_ids]

    def _join(self, embeds: Tensor, states: Tensor) -> Tensor:
        """Return what the decoder layer reads."""
        if self.is_eagle:
            return torch.cat([embeds, states], dim=-1)
        parts = [self.enorm(embeds), self.hnorm(states)]
        return self.fc(torch.cat(parts[::-1] if self.facts.hidden_first else parts, dim=-1))


class Eagle3Layer(nn.Module):
    """The decoder layer of an EAGLE-3 head: attention over the norms of an embedding and a hidden state, side by side.

    Args:
        layer: the family's own, for one hidden state.
        config: of the head.
        norm: the family's class of norms.
        norm_before_residual: the normed hidden state is what attention adds to.
    """

    def __init__(self, layer: Any, config: Any, norm: Any, norm_before_residual: bool) -> None:
        super().__init__()
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.input_layernorm, self.post_attention_layernorm = (
            layer.input_layernorm,
            layer.post_attention_layernorm,
        )
        self.hidden_norm = norm(config.hidden_size, eps=config.rms_norm_eps)
        self.norm_before_residual = norm_before_residual
        for name in ("q_proj", "k_proj", "v_proj"):
            own = getattr(self.self_attn, name)
            wide = nn.Linear(2 * config.hidden_size, own.out_features, bias=own.bias is not None)
            setattr(self.self_attn, name, wide)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return hidden states [1, T, H] of joined ones [1, T, 2 H]."""
        embeds, states = hidden_states.chunk(2, dim=-1)
        normed = self.hidden_norm(states)
        residual = normed if self.norm_before_residual else states
        x = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
        x = residual + self.self_attn(x, *args, **kwargs)[0]
        return x + self.mlp(self.post_attention_layernorm(x))


def draft_ids(head: Any, vocab_size: int) -> Tensor | None:
    """Return the token that each of a head's drafts is [V of drafts], None where it drafts all; raise WeightError."""
    if not head.facts.draft_vocab_size:
        return None
    ids: Tensor = torch.arange(len(head.d2t), device=head.d2t.device) + head.d2t
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(ids.unique()) != len(ids):
        raise WeightError(
            f"the head's d2t does not map its {len(ids)} drafts to as many of {vocab_size} tokens: the checkpoint is "
            "broken, or belongs to a model with another vocabulary"
        )
    return ids
