"""What must hold of a model so that causal attention over pages gives its answers.

Models may keep meaning where an attention function cannot see it: in a mask, in positions that they count
themselves, in layers that mix tokens by other means. Such a model runs without complaint and answers wrong,
so it is refused here, by what it does and not by its name. Owns Positions, Unrouted and the checks of masks and
modules. Must not know of any family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nibble.errors import ConfigError

MaskRule = Callable[[Any, Any, Any, Any], Any]
"""(batch, head, query position, key position) -> whether it is seen; what Transformers builds masks from."""

_LARGEST = frozenset({torch.max, torch.amax, Tensor.max, Tensor.amax})
_NONZERO = frozenset({torch.nonzero, Tensor.nonzero})
_CONVOLUTIONS = (nn.Conv1d, nn.ConvTranspose1d)


class Positions(TorchFunctionMode):
    """Watches what a model does with the positions that it is given."""

    def __init__(self, positions: Tensor) -> None:
        super().__init__()
        self.positions = positions
        self.used = self.largest = False

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self._among((*args, *(kwargs or {}).values())):
            # reading an attribute as .shape or .device is no use of the values
            self.used |= getattr(func, "__name__", "") != "__get__"
            self.largest |= func in _LARGEST
        return func(*args, **(kwargs or {}))

    def _among(self, values: Iterable[Any]) -> bool:
        """Whether the positions are among `values`, or in an index as x[positions, :]."""
        return any(
            value is self.positions or (isinstance(value, (tuple, list)) and self._among(value))
            for value in values
        )

    def check(self, family: str) -> None:
        """Raises ConfigError where positions are ignored, or where one request's depend on another's."""
        if not self.used:
            raise ConfigError(
                f"{family} cannot be served: it counts positions by itself, and would count them wrong for "
                "a prompt that is computed in chunks or beside others"
            )
        if self.largest:
            raise ConfigError(
                f"{family} cannot be served: it scales by the largest position of the batch, so that one "
                "request's answer would depend on the others"
            )


class Unrouted(TorchFunctionMode):
    """Lets experts that loop over what was routed to them run without values: nothing was."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _NONZERO and args[0].is_meta and not (kwargs or {}).get("as_tuple"):
            return args[0].new_empty(0, args[0].dim(), dtype=torch.int64)
        return func(*args, **(kwargs or {}))


def check_modules(decoder: nn.Module, family: str) -> None:
    """Raises ConfigError where tokens are mixed by other means than attention."""
    for name, module in decoder.named_modules():
        if isinstance(module, _CONVOLUTIONS):
            raise ConfigError(
                f"{family} cannot be served: its convolution {name} looks at neighbouring tokens, which "
                "would need a state besides keys and values"
            )


def check_masks(
    masks: Iterable[tuple[int, MaskRule | None, int | None]], family: str, max_context: int
) -> None:
    """masks: (layer, the rule of its mask, the window it passes). Raises ConfigError where the rule says
    more.

    Compared up to max_context, so that a window or a chunk which is never reached does no harm.
    """
    seen: set[tuple[int, int | None]] = set()
    for layer, rule, window in masks:
        if rule is None or (id(rule), window) in seen:
            continue
        seen.add((id(rule), window))
        if not _plain(rule, window, max_context):
            within = "causal" if window is None else f"causal within {window} tokens"
            raise ConfigError(
                f"{family} cannot be served: the mask of layer {layer} is not simply {within}, and a cache "
                "of pages never builds masks"
            )


def _plain(rule: MaskRule, window: int | None, max_context: int) -> bool:
    """Whether `rule` is causal attention within `window`, judged by the rows where it could differ."""
    last = max_context - 1
    edge = window or last
    rows = {row for row in (0, 1, last // 2, last, edge - 1, edge, edge + 1) if 0 <= row <= last}
    keys = torch.arange(max_context)
    zero = torch.tensor(0)
    for row in sorted(rows):
        expected = keys <= row
        if window is not None:
            expected &= keys > row - window
        try:
            found = torch.as_tensor(rule(zero, zero, torch.tensor(row), keys)).expand_as(keys)
        except (
            RuntimeError,
            TypeError,
            IndexError,
        ):  # it reads tensors of the batch: no rule of positions alone
            return False
        if found.is_meta or not torch.equal(found.bool(), expected):
            return False
    return True
