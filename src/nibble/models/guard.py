"""Checks that causal attention over pages gives a model's answers.

A model may keep meaning where an attention function cannot see it: in a mask, in positions that it counts itself, in
layers that mix tokens by other means. Such a model runs without complaint and answers wrong, so it is refused here, by
what it does and not by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nibble.errors import ConfigError

MaskRule = Callable[[Any, Any, Any, Any], Any]
"""(batch, head, query position, key position) -> whether the key is visible; Transformers builds masks from it."""

_LARGEST = frozenset({torch.max, torch.amax, Tensor.max, Tensor.amax})
_NONZERO = frozenset({torch.nonzero, Tensor.nonzero})
_CONVOLUTIONS = (nn.Conv1d, nn.ConvTranspose1d)


class PositionsWatch(TorchFunctionMode):
    """Records how a model uses the positions that it gets."""

    def __init__(self, positions: Tensor) -> None:
        super().__init__()
        self.positions = positions
        self.is_used = self.uses_largest = False

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self._contains_positions((*args, *(kwargs or {}).values())):
            # Reading an attribute such as .shape or .device does not use the values.
            self.is_used |= getattr(func, "__name__", "") != "__get__"
            self.uses_largest |= func in _LARGEST
        return func(*args, **(kwargs or {}))

    def _contains_positions(self, values: Iterable[Any]) -> bool:
        """Return whether the positions are among `values`, or in an index such as x[positions, :]."""
        return any(
            value is self.positions or (isinstance(value, (tuple, list)) and self._contains_positions(value))
            for value in values
        )

    def check(self, family: str) -> None:
        """Raise ConfigError if positions are ignored, or if a request's positions depend on another's."""
        if not self.is_used:
            raise ConfigError(
                f"{family} cannot be served: it counts positions by itself, and would count them wrong for "
                "a prompt that is computed in chunks or beside others"
            )
        if self.uses_largest:
            raise ConfigError(
                f"{family} cannot be served: it scales by the largest position of the batch, so that one "
                "request's answer would depend on the others"
            )


class EmptyRouting(TorchFunctionMode):
    """Lets experts that loop over the tokens routed to them run on the meta device: no token is."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _NONZERO and args[0].is_meta and not (kwargs or {}).get("as_tuple"):
            return args[0].new_empty(0, args[0].dim(), dtype=torch.int64)
        return func(*args, **(kwargs or {}))


def check_modules(decoder: nn.Module, family: str) -> None:
    """Raise ConfigError if tokens are mixed by other means than attention."""
    for name, module in decoder.named_modules():
        if isinstance(module, _CONVOLUTIONS):
            raise ConfigError(
                f"{family} cannot be served: its convolution {name} looks at neighbouring tokens, which "
                "would need a state besides keys and values"
            )


def check_masks(
    masks: Iterable[tuple[int, MaskRule | None, int | None]], family: str, max_context: int
) -> None:
    """Raise ConfigError if a mask is more than causal attention within a window.

    Args:
        masks: layer, the rule of its mask, and the window that it passes.
        family: for the message.
        max_context: longest context; a window or chunk that is never reached does no harm.
    """
    checked: set[tuple[int, int | None]] = set()
    for layer, rule, window in masks:
        # A few rules serve all layers, and each check takes time in proportion to the context.
        if rule is None or (id(rule), window) in checked:
            continue
        checked.add((id(rule), window))
        if not _is_causal(rule, window, max_context):
            within = "causal" if window is None else f"causal within {window} tokens"
            raise ConfigError(
                f"{family} cannot be served: the mask of layer {layer} is not simply {within}, and a cache "
                "of pages never builds masks"
            )


def _is_causal(rule: MaskRule, window: int | None, max_context: int) -> bool:
    """Return whether `rule` is causal attention within `window`, judged by the rows where it could differ."""
    last = max_context - 1
    edge = window or last
    # Only rows where a window or chunk could show: all rows would be max_context^2 comparisons.
    rows = {row for row in (0, 1, last // 2, last, edge - 1, edge, edge + 1) if 0 <= row <= last}
    keys = torch.arange(max_context)
    zero = torch.tensor(0)
    for row in sorted(rows):
        expected = keys <= row
        if window is not None:
            # A window includes the query's own token.
            expected &= keys > row - window
        try:
            visible = torch.as_tensor(rule(zero, zero, torch.tensor(row), keys)).expand_as(keys)
        except (RuntimeError, TypeError, IndexError):
            return False  # the rule reads tensors of the batch, not positions alone
        # A rule that captured a tensor of the skeleton yields no values, so it cannot be judged.
        if visible.is_meta or not torch.equal(visible.bool(), expected):
            return False
    return True
