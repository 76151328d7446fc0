"""Who drafts tokens and how many, as `--speculative` and `--speculative-tokens` say it."""

from __future__ import annotations

from dataclasses import dataclass

from nibble.errors import ConfigError

MAX_DRAFTS = 15
"""Most draft tokens of a request in a step: with the token before them, as many as a recurrent state has in a block."""

BUNDLED_HEADS = {"demo": "demo-eagle3"}
"""Bundled models that come with a head that drafts -> its name."""

GPU_DRAFTS = 7
"""Most draft tokens on a GPU where the user names no number: with the token before them, as many as kernels verify in
one reading of the cache."""

CPU_VERIFY_TOKENS, GPU_VERIFY_TOKENS = 64, 256
"""Most tokens of a step that has drafts. A step of few tokens takes as long as its weights take to be read, and one of
more takes longer with each: on a CPU the model `demo` needs 1.4 times as long for 16 tokens as for one."""


KEPT_STATES = 16
"""Most hidden states of a request that wait for a step of its head, which computes rows of its cache of them."""

WAITING_STATES = 2 * KEPT_STATES
"""Hidden states of a request that there is room for, with those of a step beside them."""

SHORTEST_VERIFY = 2
"""The fewest tokens of a request in a recorded step with drafts."""


def recorded_lengths(tokens: int) -> tuple[int, ...]:
    """Return the tokens of a request in recorded steps with drafts: the most, and halves of those before."""
    lengths = [tokens]
    while lengths[-1] > SHORTEST_VERIFY:
        lengths.append((lengths[-1] + 1) // 2)
    return tuple(lengths)


def verify_tokens(is_cpu: bool) -> int:
    """Return the most tokens of a step that has drafts."""
    return CPU_VERIFY_TOKENS if is_cpu else GPU_VERIFY_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeSpec:
    """What `speculative` and `speculative_tokens` say."""

    drafter: str
    """Its name; engine/drafters has them."""
    path: str = ""
    """Of its checkpoint, where it has one."""
    kv_format: str = ""
    """The scheme of its cache, BF16 where none is named."""
    tokens: int | None = None
    """Most draft tokens of a request and step; None: the drafter's own limit, and fewer where they are rejected."""

    @classmethod
    def parse(cls, text: str, tokens: str = "auto") -> SpeculativeSpec | None:
        """Parse `lookup`, `draft:PATH` or `draft:PATH,kv_format=nvfp4`, and `auto` or a number; raise ConfigError.

        None for the empty text.
        """
        if tokens != "auto" and not (tokens.isdecimal() and 1 <= int(tokens) <= MAX_DRAFTS):
            raise ConfigError(
                f"speculative_tokens must be auto, or a number from 1 to {MAX_DRAFTS}, not {tokens!r}"
            )
        if text in {"", "off", "none"}:
            if tokens != "auto":
                raise ConfigError("speculative_tokens needs a drafter: --speculative lookup, or draft:PATH")
            return None
        drafter, comma, setting = text.partition(",")
        name, colon, path = drafter.partition(":")
        if colon and not path:
            raise ConfigError(f"speculative {text!r} names no checkpoint; write it as {name}:PATH")
        key, _, kv_format = setting.partition("=")
        if comma and (key.strip() != "kv_format" or not kv_format):
            raise ConfigError(
                f"cannot read {setting!r} of speculative; write it as {drafter},kv_format=nvfp4"
            )
        count = None if tokens == "auto" else int(tokens)
        return cls(drafter=name, path=path, tokens=count, kv_format=kv_format.strip())
