"""Which experts the routers of a model choose: recorded in one run, and forced upon another."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Choices:
    """The choices of all routers of a model whose code runs as it is written, one request at a time."""

    model: nn.Module
    recorded: dict[str, list[Tensor]] = field(default_factory=dict)
    """By router, the experts [T, K] of each run's tokens."""
    forced: dict[str, Tensor] = field(default_factory=dict)
    """By router, the experts of the tokens of the next run; none: its own."""

    def __post_init__(self) -> None:
        for name, module in self.model.named_modules():
            if type(module).__name__.endswith("TopKRouter"):
                module.register_forward_hook(self._hook(name))

    def take(self, first: int) -> dict[str, Tensor]:
        """Return the choices since the last call, of a prompt of `first` tokens and of decode steps.

        A decode step has rows of padding behind its token.
        """
        taken = {
            name: torch.cat([rows[: first if at == 0 else 1] for at, rows in enumerate(runs)])
            for name, runs in self.recorded.items()
        }
        self.recorded.clear()
        return taken

    def _hook(self, name: str) -> Any:
        def choose(router: Any, _: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
            logits_TE, weights_TK, experts_TK = output
            self.recorded.setdefault(name, []).append(experts_TK.clone())
            if name not in self.forced:
                return output
            ahead_TK = self.forced[name]
            forced_TK = torch.cat((ahead_TK, experts_TK[len(ahead_TK) :]))[: len(experts_TK)]
            # As the families of these tests weigh experts.
            forced_weights_TK = logits_TE.float().softmax(-1).gather(1, forced_TK)
            forced_weights_TK /= forced_weights_TK.sum(-1, keepdim=True)
            return logits_TE, forced_weights_TK.to(weights_TK.dtype), forced_TK

        return choose


def num_flips(some: dict[str, Tensor], others: dict[str, Tensor]) -> int:
    """Count the tokens for which a router chose other experts, over all routers."""
    flips = 0
    for name, one_TK in some.items():
        length = min(len(one_TK), len(others[name]))
        pair = (x[:length].sort(-1).values for x in (one_TK, others[name]))
        flips += int(torch.ne(*pair).any(-1).sum())
    return flips
