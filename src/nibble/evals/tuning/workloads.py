"""What attention backends are timed on: requests of a phase, as `64x8K` or `2K+32K`.

64x8K    64 requests of 8K stored tokens: prompts in PREFILL, one new token each in DECODE, a few in VERIFY
2K+32K   one request: 2K new tokens over 32K stored ones (EXTEND)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from nibble.attention.planner.support import Phase
from nibble.errors import ConfigError

DRAFTS = 4
"""Tokens of a request in VERIFY."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one phase."""

    phase: Phase
    name: str
    requests: int
    new: int
    """New tokens of each request."""
    stored: int
    """Tokens of each request, the new ones included."""

    @property
    def tokens(self) -> int:
        """Tokens in the cache."""
        return self.requests * self.stored

    def __str__(self) -> str:
        return f"{self.phase} {self.name}"


ON_GPU: Mapping[Phase, tuple[str, ...]] = {
    Phase.PREFILL: ("1x8K",),
    Phase.EXTEND: ("2K+32K", "8K+32K"),
    Phase.DECODE: ("64x8K", "16x8K", "1x32K", "128x1K"),
    Phase.VERIFY: ("16x8K",),
}
ON_CPU: Mapping[Phase, tuple[str, ...]] = {
    Phase.PREFILL: ("1x256",),
    Phase.EXTEND: ("64+256",),
    Phase.DECODE: ("8x256", "1x512"),
    Phase.VERIFY: ("2x256",),
}


def parse(phase: Phase, text: str) -> Workload:
    """Return a workload of `phase`; raises ConfigError where the text is none."""
    if phase is Phase.EXTEND:
        new, plus, before = text.strip().partition("+")
        if plus:
            return Workload(phase, text.strip(), 1, tokens(new), tokens(new) + tokens(before))
        raise ConfigError(
            f"cannot read {text!r} as a workload of {phase}; write new+stored tokens, as 2K+32K"
        )
    count, times, length = text.strip().partition("x")
    if not times or not count.isdecimal() or not int(count):
        raise ConfigError(f"cannot read {text!r} as a workload of {phase}; write requests x tokens, as 64x8K")
    stored = tokens(length)
    new_tokens = {Phase.PREFILL: stored, Phase.DECODE: 1, Phase.VERIFY: min(DRAFTS, stored)}[phase]
    return Workload(phase, text.strip(), int(count), new_tokens, stored)


def tokens(text: str) -> int:
    """Return 8192 for `8K`; raises ConfigError."""
    match = re.fullmatch(r"([1-9]\d*)(K?)", text.strip(), re.IGNORECASE)
    if not match:
        raise ConfigError(f"cannot read {text!r} as a number of tokens; write it as 512 or 8K")
    return int(match[1]) * (1024 if match[2] else 1)


def usual(on_cpu: bool) -> tuple[Workload, ...]:
    """Return the workloads that stand for their phases on such a machine."""
    table = ON_CPU if on_cpu else ON_GPU
    return tuple(parse(phase, text) for phase, texts in table.items() for text in texts)


def within(workloads: Iterable[Workload], context: int, tokens: int) -> tuple[Workload, ...]:
    """Workloads cut down to requests of at most `context` tokens, and to `tokens` tokens in all; each once."""
    unique: dict[tuple[Phase, str], Workload] = {}
    for workload in workloads:
        cut = _cut(workload, min(context, tokens))
        cut = cut if cut.tokens <= tokens else _renamed(cut, requests=max(tokens // cut.stored, 1))
        unique.setdefault((cut.phase, cut.name), cut)
    return tuple(unique.values())


def _cut(workload: Workload, most: int) -> Workload:
    """A workload whose requests have at most `most` tokens, new ones in proportion."""
    if workload.stored <= most:
        return workload
    new = {Phase.PREFILL: most, Phase.EXTEND: max(workload.new * most // workload.stored, 1)}.get(
        workload.phase, workload.new
    )
    return _renamed(workload, stored=most, new=min(new, most))


def _renamed(workload: Workload, **changed: int) -> Workload:
    result = replace(workload, **changed)  # type: ignore[arg-type]
    name = f"{result.requests}x{_short(result.stored)}"
    if result.phase is Phase.EXTEND:
        name = f"{_short(result.new)}+{_short(result.stored - result.new)}"
    return replace(result, name=name)


def _short(count: int) -> str:
    """Return `8K` for 8192."""
    return str(count) if count % 1024 else f"{count // 1024}K"
