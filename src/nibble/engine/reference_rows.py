"""Rows in the model's own precision, kept of one request in a few layers, and what attention over them would answer.

The arithmetic is written out here, and is no backend's: it knows neither pages nor kernels, so that it cannot share a
fault with what it is compared with. Owns ReferenceRows. Which requests are looked at is engine/error_monitor.py's business.

Shape suffixes: L stored tokens of the request, n new ones, H query heads, G KV heads, R query heads of a KV head, K
chosen tokens, D values of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from nibble.attention.planner.plan import Plan
from nibble.cache.layout import LayerLayout
from nibble.formats import KVFormat
from nibble.formats import transforms as transform
from nibble.kernels.rotate import rotate
from nibble.kernels.types import AttentionParams
from nibble.model_spec import INDEX, LATENT, LayerGroup

LAYERS = 4
"""Layers of which rows are kept at a time."""
TOKENS = 4096
"""Of the longest request that is kept, where its rows fit into BYTES."""
BYTES = 64 << 20
"""Bound on the rows of all kept layers together."""
LEAST = 1e-30
"""A largest value below this needs no scale."""

Rows = Mapping[str, Tensor]
"""Streams by name: [L, G, D]."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One query: of the last stored token. topk_indices_K: the tokens that sparse attention looks at."""

    q_HD: Tensor
    spec: AttentionParams
    topk_indices_K: Tensor | None = None


class ReferenceRows:
    """Room for the rows of some layers, allocated once. tokens: of the longest request that fits."""

    def __init__(self, plan: Plan, longest: int, device: torch.device) -> None:
        self._groups = {layer: group.group for group in plan.groups for layer in group.layers}
        self._layouts = {
            layer: tuple(entry for store in plan.stores for entry in store.layers if entry.layer == owner)
            for layer, owner in enumerate(plan.owner)
        }
        self.schemes = {layer: group.scheme for group in plan.groups for layer in group.layers}
        self.dtype = plan.dtype
        kept, dtype = min(LAYERS, len(self._groups)), getattr(torch, plan.dtype)
        widest = max(sum(prod(shape) for shape in _shapes(group).values()) for group in self._groups.values())
        self.tokens = min(TOKENS, longest, BYTES // (kept * widest * dtype.itemsize))
        self._room = torch.empty(kept, self.tokens * widest, dtype=dtype, device=device)

    @property
    def device(self) -> torch.device:
        return self._room.device

    @property
    def nbytes(self) -> int:
        return self._room.nbytes

    def turn(self, number: int) -> tuple[int, ...]:
        """The layers whose turn it is: after a few turns all of them have had one."""
        layers = sorted(self._groups)
        return tuple(layers[(number * len(self._room) + i) % len(layers)] for i in range(len(self._room)))

    def keep(self, place: int, layer: int, streams: Rows, start: int) -> None:
        """Keeps the rows [n, G, D] of the tokens from `start` on. place: among the layers of this turn."""
        for name, rows in self._rows(place, layer).items():
            rows[start : start + len(streams[name])] = streams[name]

    def compare(self, place: int, layer: int, end: int, asked: Asked, out_HD: Tensor) -> Tensor:
        """What the last of `end` tokens was answered, against what its rows say -> float64 [3], squares of norms:
        of the error; of the error that the layer's formats make of these rows at best; and of the right answer.
        """
        kept, rope = {name: rows[:end] for name, rows in self._rows(place, layer).items()}, self._rope(layer)
        right_HD = _attended(asked, kept, rope)
        best_HD = _attended(*self._at_best(layer, asked, kept), rope)
        parts = (out_HD.float() - right_HD, best_HD - right_HD, right_HD)
        return torch.stack([part.double().square().sum() for part in parts])

    def _at_best(self, layer: int, asked: Asked, rows: Rows) -> tuple[Asked, Rows]:
        """The rows as the layer's formats give them back, with scales made for these very rows; and the query that goes
        with them. No mean is taken off the keys: it is there to make the error smaller, so what comes without it is a
        bound that a wrong mean does not move. With a host tier all rows are taken to have been on the host, whose
        format may be a smaller one.
        """
        layouts = self._layouts[layer]
        transforms = [entry for entry in map(transform.get, layouts[0].transforms) if not entry.needs_mean]
        found = {name: x_LGD.float() for name, x_LGD in rows.items()}
        for entry in transforms:
            found["k"] = entry.key(found["k"], None)
        for layout in layouts:
            found = {name: _round_trip(_codec(layout, name), x_LGD) for name, x_LGD in found.items()}
        turned = any(entry.rotates for entry in transforms)
        return replace(asked, q_HD=rotate(asked.q_HD[None])[0]) if turned else asked, found

    def _rows(self, place: int, layer: int) -> dict[str, Tensor]:
        """All the room of a kept layer, stream by stream."""
        found, first = dict[str, Tensor](), 0
        for name, shape in _shapes(self._groups[layer]).items():
            last = first + self.tokens * prod(shape)
            found[name] = self._room[place, first:last].view(self.tokens, *shape)
            first = last
        return found

    def _rope(self, layer: int) -> int:
        return self._groups[layer].streams[0].rope


def _shapes(group: LayerGroup) -> dict[str, tuple[int, int]]:
    """What attention reads of a token, by stream. Index keys are an indexer's."""
    return {stream.name: (stream.heads, stream.dim) for stream in group.streams if stream.name != INDEX}


def _codec(layout: LayerLayout, name: str) -> KVFormat:
    return next(entry.codec for entry in layout.streams if entry.stream.name == name)


def _round_trip(codec: KVFormat, x_LGD: Tensor) -> Tensor:
    """Stored and read back, with a scale that fits."""
    scale = torch.ones((), device=x_LGD.device)
    if codec.max_value is not None:
        scale = x_LGD.abs().amax().clamp(min=LEAST) / codec.max_value
    return codec.decode(codec.encode(x_LGD, scale), scale)


def _attended(asked: Asked, rows: Rows, rope: int) -> Tensor:
    """softmax(scale * q . k) @ v -> float32 [H, D]."""
    spec, topk_indices_K = asked.spec, asked.topk_indices_K
    k_LGD = rows[LATENT] if LATENT in rows else rows["k"]
    v_LGD = k_LGD[..., : k_LGD.shape[-1] - rope] if LATENT in rows else rows["v"]
    hidden_L: Tensor | None = None
    if (
        topk_indices_K is not None
    ):  # as kernels/indexer/__init__.py gives them: positions, and negative ones for nobody
        k_LGD, v_LGD = (x[topk_indices_K.clamp(min=0).long()] for x in (k_LGD, v_LGD))
        hidden_L = topk_indices_K < 0
    elif spec.window is not None:
        k_LGD, v_LGD = k_LGD[-spec.window :], v_LGD[-spec.window :]
    length, heads, _ = k_LGD.shape
    q_GRD = asked.q_HD.float().unflatten(0, (heads, -1))
    scores_GRL = q_GRD @ k_LGD.float().permute(1, 2, 0) * spec.scale
    if spec.softcap:
        scores_GRL = spec.softcap * torch.tanh(scores_GRL / spec.softcap)
    if hidden_L is not None:
        scores_GRL = scores_GRL.masked_fill(hidden_L, float("-inf"))
    if spec.sinks_H is not None:
        scores_GRL = torch.cat((scores_GRL, spec.sinks_H.float().view(heads, -1, 1)), -1)
    weights_GRL = scores_GRL.softmax(-1)[..., :length]
    return (weights_GRL @ v_LGD.float().transpose(0, 1)).flatten(0, 1)
