"""The bytes of the cache: one pool for all formats, which allocates what the layout says, and a backend's view of it.

Shape suffixes: T tokens, B requests, N pages of a request, L tokens (N * page_size), H heads, D values of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from nibble.cache import layout as packings
from nibble.cache.layout import CacheLayout, LayerLayout, Packing, StreamLayout
from nibble.cache.scales import KVScales
from nibble.formats import KVFormat
from nibble.formats import transforms as transforms_of
from nibble.formats.base import raw
from nibble.formats.transforms import Transform
from nibble.kernels import append
from nibble.kernels.append import dequantize_pages
from nibble.kernels.linear import rotate
from nibble.kernels.types import Paged, Rope
from nibble.model_spec import INDEX, Stream


@dataclass(frozen=True, slots=True)
class StreamView:
    """One stored stream of one layer."""

    stream: Stream
    format: KVFormat
    packing: Packing
    planes: tuple[Tensor, ...]
    """The format's planes, as `packing` lays them out."""
    scale: Tensor
    """float32, () or [H, 1]."""
    paged: Paged = field(init=False)
    """The same as kernels take it."""

    def __post_init__(self) -> None:
        # Kernels address [page, head, slot] by strides, so a transposed view is enough and nothing is copied.
        planes_PHS = tuple(p if self.packing.heads_first else p.transpose(1, 2) for p in self.planes)
        interleave = self.packing.interleave if self.stream.name == "v" and len(self.planes) > 1 else 0
        paged = Paged(self.format, self.stream.dim, planes_PHS, self.scale, interleave)
        object.__setattr__(self, "paged", paged)

    def gather(self, page_table_BN: Tensor) -> tuple[Tensor, ...]:
        """Read whole pages as they are stored: integer page_table_BN -> [B, L, H, ...] of each plane."""
        return tuple(
            self.packing.gather(plane, page_table_BN, self.paged.interleave_of(i))
            for i, plane in enumerate(self.planes)
        )

    def gather_reference(self, page_table_BN: Tensor) -> Tensor:
        """Dequantise whole pages by the definition: integer page_table_BN -> float32 [B, L, H, D]."""
        return self.format.decode(self.gather(page_table_BN), self.scale)

    def dequantize(self, page_table_BN: Tensor, dtype: torch.dtype) -> Tensor:
        """Dequantise whole pages: int32 page_table_BN -> [B, L, H, D] in `dtype`, in one launch on a GPU."""
        if self.scale.is_cuda:
            return dequantize_pages(self.paged, page_table_BN, dtype)
        return self.gather_reference(page_table_BN).to(dtype)


@dataclass(frozen=True, slots=True)
class KVView:
    """The stored streams of one layer."""

    streams: Mapping[str, StreamView]
    page_size: int
    transforms: tuple[Transform, ...] = ()
    """Transforms of K before it was encoded."""
    k_mean_HD: Tensor | None = None
    """The mean that was subtracted from K."""
    joint_scale: Tensor | None = None
    """The scales of all streams as one tensor, if the streams are so alike that they are encoded together."""

    @property
    def keys(self) -> StreamView:
        """Return the stream that queries are scored with: the first."""
        return next(iter(self.streams.values()))

    @property
    def output_dim(self) -> int:
        """Return the values of a head of attention's output."""
        if "v" in self.streams:
            return self.streams["v"].stream.dim
        # A latent is key and value in one: its rotary part belongs to the key alone.
        return self.keys.stream.dim - self.keys.stream.rope

    def query(self, q_THD: Tensor) -> Tensor:
        """Return the query after the counterpart of the transforms of the stored keys."""
        # Only a rotation needs a counterpart: a subtracted mean shifts all scores of a query alike.
        return rotate(q_THD) if any(transform.rotates for transform in self.transforms) else q_THD

    def dequantize_heads(
        self, page_table_BN: Tensor, first: int, counts: Sequence[int], length: int
    ) -> tuple[Tensor, ...]:
        """Dequantise keys and values with heads in front -> float32 [B, H, length, D] each.

        Args:
            page_table_BN: int32 pages.
            first: slot of each request's first token in its first page.
            counts: tokens of each request; zeros follow them.
            length: tokens of the result.
        """
        # Heads are moved and zeros filled in before decoding: zero bytes decode to zeros in every format.
        views = tuple(entry for name, entry in self.streams.items() if name != INDEX)
        packed = [_heads(entry, page_table_BN, first, counts, length) for entry in views]
        if self.joint_scale is None:
            pairs = zip(views, packed, strict=True)
            streams = tuple(entry.format.decode(planes, _append_axis(entry.scale)) for entry, planes in pairs)
        else:
            joint = tuple(torch.stack(planes) for planes in zip(*packed, strict=True))
            streams = views[0].format.decode(joint, self.joint_scale.unsqueeze(-1)).unbind()
        return streams if len(streams) > 1 else (streams[0], streams[0][..., : self.output_dim])


def _append_axis(scale: Tensor) -> Tensor:
    """Return scales of heads with one more axis at the end; a single scale as it is."""
    return scale.unsqueeze(-1) if scale.dim() else scale


def _heads(
    entry: StreamView, page_table_BN: Tensor, first: int, counts: Sequence[int], length: int
) -> tuple[Tensor, ...]:
    longest = max(counts)
    planes = []
    for plane in entry.gather(page_table_BN):
        x_BLH = raw(plane)
        filled = x_BLH.new_empty(len(counts), x_BLH.shape[2], length, *x_BLH.shape[3:])
        filled[:, :, :longest] = x_BLH[:, first : first + longest].transpose(1, 2)
        # Slots after the last token may hold anything, NaN included, which a mask alone would not remove.
        for row, count in zip(filled, counts, strict=True):
            if count < length:
                row[:, count:] = 0
        planes.append(filled.view(plane.dtype))
    return tuple(planes)


POISON = 0xFF
"""A byte that makes NaN in every format that has one."""


class PagedPool:
    """Pages of every stored layer, and the writer of each.

    Args:
        layout: what each layer stores.
        pages: number of pages.
        scales: global scales and means of K.
        device: where the pages lie.
        frames: with a host tier, the pages of what attention reads that have room here; index keys have room for all.
        exact: with an exact window, the pages that `write` stores new tokens in too, as the model made them.
        poison: fill with bytes that decode to NaN wherever the format can, so that a read of an unwritten slot shows.

    Raises:
        ScaleError: a scale that the layout needs is missing.
    """

    def __init__(
        self,
        layout: CacheLayout,
        pages: int,
        scales: KVScales,
        device: torch.device | str = "cpu",
        *,
        frames: int | None = None,
        exact: PagedPool | None = None,
        poison: bool = False,
    ) -> None:
        self.layout = layout
        self.pages, self.frames = pages, frames or pages
        self.device = torch.device(device)
        self.views = {layer.layer: self._allocate(layer, scales) for layer in layout.layers}
        self._appends = {
            layer: tuple(_appends(view, exact.view(layer) if exact else None))
            for layer, view in self.views.items()
        }
        if poison:
            for plane in self._planes():
                raw(plane).fill_(POISON if plane.itemsize == 1 else -1)  # sets all bits in both cases

    def _allocate(self, layer: LayerLayout, scales: KVScales) -> KVView:
        mean = scales.mean(layer.layer, layer.transforms)
        streams = {entry.stream.name: self._stream(entry, layer, scales) for entry in layer.streams}
        return KVView(
            streams,
            self.layout.page_size,
            tuple(transforms_of.get(name) for name in layer.transforms),
            None if mean is None else torch.tensor(mean, device=self.device),
            _joint_scale(tuple(entry for name, entry in streams.items() if name != INDEX)),
        )

    def _stream(self, entry: StreamLayout, layer: LayerLayout, scales: KVScales) -> StreamView:
        scale = scales.scale(layer.layer, entry.stream.name, layer.transforms, entry.codec)
        is_index = entry.stream.name == INDEX
        packing = packings.get(packings.INDEX_PACKING if is_index else self.layout.packing)
        # Index keys are never offloaded, because every step scores all of them.
        pages = self.pages if is_index else self.frames
        planes = packing.allocate(entry.codec.planes(entry.stream), pages, self.layout.page_size, self.device)
        value = torch.tensor(scale, dtype=torch.float32, device=self.device)
        # A scale per head, [H], becomes [H, 1] and so broadcasts over the values of a head.
        return StreamView(entry.stream, entry.codec, packing, planes, _append_axis(value))

    def _planes(self) -> list[Tensor]:
        return [p for view in self.views.values() for stream in view.streams.values() for p in stream.planes]

    @property
    def nbytes(self) -> int:
        """Return the bytes allocated for pages."""
        return sum(plane.nbytes for plane in self._planes())

    @property
    def is_capturable(self) -> bool:
        """Return whether a CUDA graph may hold a write to any layer."""
        return all(write.is_capturable for writes in self._appends.values() for _, write in writes)

    def clear_page(self, page: int) -> None:
        """Set all bytes of a page to zero."""
        for plane in self._planes():
            raw(plane)[page] = 0

    def view(self, layer: int) -> KVView:
        """Return what a backend reads of stored layer `layer`."""
        return self.views[layer]

    def write(
        self,
        layer: int,
        streams: Mapping[str, Tensor],
        slot_mapping_T: Tensor,
        exact_slot_mapping_T: Tensor | None = None,
    ) -> None:
        """Encode and store new tokens.

        Streams that attention reads are passed together. An index key is needed earlier and may come alone.

        Args:
            layer: a stored layer.
            streams: stream name -> [T, H, D].
            slot_mapping_T: int64 slots; nothing is stored where negative.
            exact_slot_mapping_T: slots in exact pages likewise, to store the tokens there too.
        """
        for first, write in self._appends[layer]:
            if first in streams:
                together = {name: x for name, x in streams.items() if (name == INDEX) == (first == INDEX)}
                # Index keys have no exact pages: all tokens are scored as they are stored.
                write(together, slot_mapping_T, None if first == INDEX else exact_slot_mapping_T)

    def write_with_rope(
        self,
        layer: int,
        q_THD: Tensor,
        streams: Mapping[str, Tensor],
        slot_mapping_T: Tensor,
        exact_slot_mapping_T: Tensor | None,
        rope: Rope,
        *,
        keeps_keys: bool,
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Rotate queries and keys, encode and store new tokens, and return both as attention takes them.

        Args:
            layer: a stored layer.
            q_THD: queries, and maybe rows of padding.
            streams: `k` and `v`.
            slot_mapping_T: see write().
            exact_slot_mapping_T: see write().
            rope: of all rows of the queries.
            keeps_keys: whether anybody reads rotated keys but from the pages.
        """
        _, write = self._appends[layer][0]
        return write.append_with_rope(
            q_THD, streams, slot_mapping_T, exact_slot_mapping_T, rope, keeps_keys=keeps_keys
        )


def _appends(view: KVView, exact: KVView | None) -> Iterator[tuple[str, append.KVAppend]]:
    """Yield the writers of a layer, each with the first of the streams that it writes together."""
    targets = _targets(view, exact)
    # An index key has a writer of its own, because it comes before keys and values of its layer.
    index = targets.pop(INDEX, None)
    yield next(iter(targets)), append.prepare(targets, view.joint_scale)
    if index is not None:
        yield INDEX, append.prepare({INDEX: index})


def _targets(view: KVView, exact: KVView | None = None) -> dict[str, append.Target]:
    """Return what a writer needs of each stream. Only keys are transformed."""
    exact_pages = {name: entry.paged for name, entry in exact.streams.items()} if exact else {}
    targets = {
        name: append.Target(entry.paged, exact=exact_pages.get(name)) for name, entry in view.streams.items()
    }
    if view.transforms:
        targets["k"] = replace(targets["k"], transforms=view.transforms, mean_HD=view.k_mean_HD)
    return targets


def _joint_scale(streams: tuple[StreamView, ...]) -> Tensor | None:
    """Return float32 [streams, 1, 1, 1] if all streams are alike and have a single scale each, else None."""
    # Only streams of one format and shape can be stacked and encoded at once.
    kinds = {(entry.format.name, entry.stream.heads, entry.stream.dim) for entry in streams}
    if len(kinds) > 1 or any(entry.scale.dim() for entry in streams):
        return None
    return torch.stack([entry.scale for entry in streams]).view(-1, 1, 1, 1)
