"""What is replaced in the graph of a compiled model before inductor makes code of it.

Families' own code stays as it is; only the operator that computes a node is another, with the same result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from nibble.kernels import topk

aten = torch.ops.aten


@dataclass(frozen=True)
class ReplaceTopk(CustomGraphPass):
    """Lets kernels/topk compute torch.topk of short rows, as routers of experts have them."""

    device: str = "cuda"

    def __call__(self, graph: fx.Graph) -> None:
        """Replace what is served, in place."""
        for node in graph.find_nodes(op="call_function", target=aten.topk.default):
            if _is_served(self.device, *node.args, **node.kwargs):
                node.target, node.args, node.kwargs = torch.ops.nibble.topk.default, node.args[:2], {}

    def uuid(self) -> tuple[str, bytes]:
        """Return what inductor's cache tells passes apart by."""
        return repr(self), get_hash_for_files((__file__, topk.__file__))


def _is_served(
    device: str, x: fx.Node, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True
) -> bool:
    """Return whether kernels/topk computes these arguments of torch.topk."""
    value = x.meta["val"]
    if value.device.type != device or not value.dim() or not largest:
        return False
    width, is_last = value.shape[-1], dim in (-1, value.dim() - 1)
    # A size that varies is no int.
    return is_last and isinstance(width, int) and isinstance(k, int) and topk.serves(value.dtype, width, k)


def options() -> dict[str, Any]:
    """Return the options of inductor that replace all of this."""
    return {"post_grad_custom_pre_pass": ReplaceTopk()}
