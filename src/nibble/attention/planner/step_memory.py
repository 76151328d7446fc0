"""What a step of a model takes of a device's memory, whichever backends serve it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from nibble import formats
from nibble.attention.planner import state_memory
from nibble.attention.planner.plan import PIECE_SIZES, graph_sizes
from nibble.attention.planner.support import MAX_STAGED_TOKENS, Support
from nibble.cache.layout import LayerLayout
from nibble.drafts import verify_tokens
from nibble.hardware import GIB, Hardware
from nibble.kernels import cdiv
from nibble.model_spec import LayerGroup, ModelSpec
from nibble.spec import CacheSpec

RESERVE = 0.05
"""Part of the memory that nothing is planned into: what allocators waste, and what the formulas here miss."""
LIBRARY_BYTES = GIB
"""On a GPU: the driver's context, the workspaces of matrix products, and the code of kernels."""
CPU_STEP_TOKENS, GPU_STEP_TOKENS = 512, 8192
"""Default for the most tokens of a step. A GPU reaches its arithmetic rate with some thousands."""
ACTIVATION_WIDTHS = 24
"""Activations alive at once in one layer, in hidden sizes a token: residual, q, k, v, attention's output, and
the MLP's two or three of four widths each, with room for an MLP of eight."""
LOGIT_COPIES = 3
"""float32 copies of the logits while sampling: as computed, sorted, and their probabilities."""
GRAPH_BYTES = 16 << 20
"""What a recorded decode step takes beside its buffers."""


@dataclass(frozen=True)
class StepMemory:
    """What a step of a model takes, whichever backends serve it."""

    spec: CacheSpec
    model: ModelSpec
    device: Hardware
    dtype: str

    @cached_property
    def step_tokens(self) -> int:
        """Most tokens that one step computes."""
        return self.spec.token_budget or (CPU_STEP_TOKENS if self.device.is_cpu else GPU_STEP_TOKENS)

    @cached_property
    def max_decodes(self) -> int:
        """Most requests that one step decodes."""
        return min(self.spec.max_running, self.step_tokens)

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """Requests of the decode steps that run over stable buffers, where any can."""
        return graph_sizes(self.max_decodes, has_experts=self.model.has_experts)

    @cached_property
    def piece_sizes(self) -> tuple[int, ...]:
        """Tokens of the steps with prompts that are recorded piecewise, where any can be."""
        return tuple(size for size in PIECE_SIZES if size <= self.step_tokens)

    @property
    def piece_bytes(self) -> int:
        """What these take: the activations of the largest, and the graphs of each."""
        activations = self.activation_bytes * max(self.piece_sizes, default=0) // self.step_tokens
        return activations + len(self.piece_sizes) * GRAPH_BYTES

    @property
    def max_sampled(self) -> int:
        """Most tokens that one step samples."""
        with_drafts = min(verify_tokens(self.device.is_cpu), self.step_tokens) if self.spec.max_drafts else 0
        return max(self.max_decodes, with_drafts)

    @cached_property
    def context(self) -> int:
        """Tokens of the longest request."""
        return min(self.spec.max_context or self.model.max_context, self.model.max_context)

    @property
    def reserve(self) -> int:
        """Bytes that nothing is planned into."""
        return int(self.device.memory * RESERVE)

    @property
    def value_bytes(self) -> int:
        """Bytes of a value in the compute dtype."""
        return 4 if self.dtype == "float32" else 2

    @cached_property
    def activation_bytes(self) -> int:
        """What one step computes: ACTIVATION_WIDTHS hidden sizes a token, and float32 logits of sampled rows."""
        hidden = self.step_tokens * self.model.hidden_size * self.value_bytes * ACTIVATION_WIDTHS
        # Layers run one after the other, so the memory of the largest serves all.
        hidden = max(hidden, state_memory.step_bytes(self.model, self.step_tokens, self.value_bytes))
        return hidden + self.max_sampled * self.model.vocab_size * 4 * LOGIT_COPIES

    @property
    def free_for_pages(self) -> int:
        """About what pages can have; less a pool of a given size, which is theirs already."""
        # An estimate: what backends and tables take is known only once there is a plan.
        libraries = 0 if self.device.is_cpu else LIBRARY_BYTES
        used = self.activation_bytes + self.model.weight_bytes + self.reserve + libraries
        return self.device.memory - used - (self.spec.kv_memory or 0)

    def dequantized_bytes(self, layer: LayerLayout, page_size: int = 1) -> int:
        """Return the workspace that dequantised pages of `layer` take.

        tokens x (bytes of all streams in the plain format + 4 bytes x values of the widest stream, while it is
        decoded). tokens: MAX_STAGED_TOKENS, or one request if that is longer, but no more than all requests
        together.
        """
        longest = page_size * cdiv(self.context, page_size)
        # cut_parts() in attention/staging.py cuts a batch into parts, but never a request.
        tokens = min(self.spec.max_running * longest, max(MAX_STAGED_TOKENS, longest))
        widest = max(entry.stream.values for entry in layer.streams)
        return tokens * (layer.bytes_in(formats.plain(self.dtype).name) + 4 * widest)

    def workspace_bytes(self, row: Support, group: LayerGroup, width: int) -> int:
        """Return what a kernel takes that dequantises prompts piece by piece; 0 where `row` has none.

        Tokens of `width` bytes in the compute dtype, and float32 results of two parts of a step.
        """
        results = 2 * 4 * self.step_tokens * group.q_heads * group.head_dim
        return row.workspace * width + results if row.workspace else 0
