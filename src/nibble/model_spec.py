"""What a model's layers cache and ask of attention, with no idea how it is stored."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

Kind = Literal["mha", "mla", "dsa"]
"""Attention kind: `mha` covers MHA, GQA and MQA; `mla` caches a latent; `dsa` is sparse attention over it."""

LATENT = "latent"
"""The stream of MLA: one vector for all heads, key and value in one; its last `rope` values are of the key alone."""
INDEX = "index_k"
"""The stream that an indexer of sparse attention scores; attention itself does not read it."""


class Phase(StrEnum):
    """What a step asks of attention for one request."""

    PREFILL = "prefill"  # new tokens, nothing cached before them
    EXTEND = "extend"  # new tokens over a cached prefix (chunked prefill included)
    DECODE = "decode"  # one new token
    VERIFY = "verify"  # a few draft tokens

    @property
    def decodes(self) -> bool:
        """Return whether `--decode-backend` (True) or `--prefill-backend` chooses the backend of this phase."""
        # A set of members hashes them in Python, which every step would do for every request.
        return self is Phase.DECODE or self is Phase.VERIFY


@dataclass(frozen=True, slots=True)
class Stream:
    """One vector that a layer caches per token: `heads` rows of `dim` values, the last `rope` of them rotary."""

    name: str
    heads: int
    dim: int
    rope: int = 0

    @property
    def values(self) -> int:
        """Values per token."""
        return self.heads * self.dim


HEADS = (Stream("k", heads=1, dim=128), Stream("v", heads=1, dim=128))
"""One KV head of a usual size: what formats are shown on."""
LATENTS = (Stream(LATENT, heads=1, dim=576, rope=64), Stream(INDEX, heads=1, dim=128, rope=64))
"""The latent of DeepSeek V3.2, and its index key."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that need the same of attention."""

    name: str
    kind: Kind
    streams: tuple[Stream, ...]
    layers: tuple[int, ...]
    """Indices of the attention layers, ascending."""
    q_heads: int
    """Query heads of each layer."""
    window: int | None = None
    """Sliding window in tokens, the present one included; None for full attention."""
    softcap: bool = False
    """Scores are capped by tanh."""
    sinks: bool = False
    """Learned sink logits join the softmax."""
    top_k: int = 0
    """Tokens that a query looks at in sparse attention, 0 where it looks at all."""
    chunk: int | None = None
    """Tokens of a chunk, where tokens see those of their own chunk only; None where the context is one chunk."""

    @property
    def reach(self) -> int | None:
        """Most tokens that a query sees, None for all."""
        return self.window or self.chunk

    @property
    def head_dim(self) -> int:
        """Width of the first stream's heads."""
        return self.streams[0].dim

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.q_heads // self.streams[0].heads


Recurrence = Literal["conv", "delta", "decay", "selective"]
"""How a recurrent state is updated (kernels/recurrence): not at all, as a convolution alone; a matrix by the (gated)
delta rule; a matrix that decays and gets products of values and keys; one whose entries each decay at their own pace
(Mamba 1)."""


@dataclass(frozen=True, slots=True)
class RecurrentGroup:
    """Layers that keep a state of fixed size for each request, whatever its length, and need the same of it."""

    name: str
    rule: Recurrence
    layers: tuple[int, ...]
    """Indices of the layers, ascending; a layer may attend, too."""
    heads: int = 0
    """Heads of the state; 0 where a convolution alone has one."""
    rows: int = 0
    """Rows of a head's matrix: its values; channels of Mamba 1, which has one head."""
    columns: int = 0
    """Columns of a head's matrix: its keys, the state size of Mamba."""
    key_heads: int = 0
    """Heads of keys and queries (groups of Mamba 2), each of which serves as many heads of the state."""
    key_decay: bool = False
    """Each column decays at its own pace, and not a head as a whole."""
    conv_channels: int = 0
    """Channels of the convolution before it; 0 without one."""
    conv_taps: int = 0
    """Inputs that the convolution sees, the present one included."""

    @property
    def values(self) -> int:
        """Values of a layer's matrices."""
        return self.heads * self.rows * self.columns


ONLINE = "online"
"""The method of weights that are quantised as they load."""


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """Quantised weights of a checkpoint, or as they would be in one."""

    method: str
    """Transformers' name of the method that quantised them, or ONLINE."""
    kind: str
    """What they are, for people: `nvfp4`, `4 bits`."""
    bytes: int
    """With scales, and with all that is not quantised."""
    packed: int
    """Of the same on a device that keeps matrices packed, where kernels multiply them so, and the others unpacked."""
    packed_experts: int
    """Of the same where experts alone are kept packed, for which no other library is needed."""
    unreadable: str = ""
    """What of them cannot be read, in words."""
    experts: int = 0
    """Of experts that are not quantised, where linear layers are as they load."""
    activations: str = ""
    """How the checkpoint asks for inputs of packed matrices in FP8, in words; empty: it does not."""
    has_fp8: bool = False
    """Whether any matrices are multiplied by inputs in FP8, where these are asked for."""

    @property
    def title(self) -> str:
        """The method and what the weights are: `compressed-tensors nvfp4`, `mxfp4`."""
        return self.kind if self.method in (self.kind, ONLINE) else f"{self.method} {self.kind}"


NO_LAYER = -1
"""The owner of a layer that does not attend."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """All that Nibble must know of a model to plan its cache."""

    model: str
    family: str
    groups: tuple[LayerGroup, ...]
    owner: tuple[int, ...]
    """For each layer the one whose pages it reads: itself, unless KV is shared across layers; NO_LAYER where it does
    not attend."""
    max_context: int
    vocab_size: int
    hidden_size: int
    weight_bytes: int
    """Size of the weights in the compute dtype; in a plan, of what is in memory."""
    stored_weights: StoredWeights | None = None
    """As the checkpoint has them, where they are quantised."""
    states: tuple[RecurrentGroup, ...] = ()
    """Of layers with recurrent states."""
    tp: int = 1
    """Ranks that the model is divided among; all that is above is then of one of them, but for the vocabulary."""
    kv_heads: tuple[int, ...] = ()
    """KV heads of each layer of the whole model, where it is divided; 0 where it does not attend."""
    replicated: tuple[str, ...] = ()
    """What every rank has all of, in words."""
    ways: tuple[str, ...] = ()
    """What is divided by numbers of experts or requests, in words (models/parallel_ways.py)."""
    has_experts: bool = False
    """Whether any layer has experts that kernels/experts may compute."""

    @property
    def layers(self) -> int:
        """Number of layers, those included that do not attend."""
        return len(self.owner)
