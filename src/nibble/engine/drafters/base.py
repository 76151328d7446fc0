"""What a drafter is told, and what it proposes.

A drafter may guess as it likes: tokens are sampled from the model's own distribution at each position, and a draft
counts only where it is the very token that was sampled (engine/speculative.py). So a bad drafter costs time, and never
an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from nibble.engine.page_tables import PageTables
    from nibble.engine.request import Batch, Request


@dataclass(slots=True)
class DraftTask:
    """A request that may be drafted for."""

    request: Request
    """Its token_ids have only grown since the last task of the same request. All are known, but in propose_ahead()."""
    limit: int
    """Most tokens to propose, at least 1."""
    token_seconds: float | None = None
    """Seconds that a token is worth: what the engine takes for one now; None where that is not known."""
    verify_seconds: float = 0.0
    """Seconds by which a step takes longer with one more draft."""


class Drafter(Protocol):
    """Proposes tokens. One serves all requests of an engine, and keeps what it likes about each of them.

    It learns what became of its drafts from the next task: those that were accepted are part of token_ids then. A
    request that has ended is let go of by everybody, so what is kept about it belongs into a WeakKeyDictionary.

    It may have a method `may_propose(request) -> bool`: whether it may have anything to say once one more token of the
    request is known. Where none has, steps on a GPU do not wait for that token.
    """

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Sequence[int]]:
        """Return for each task the tokens that may follow, at most its limit; none where there is nothing to say."""
        ...


def can_follow(request: Request, drafts: Sequence[int]) -> bool:
    """Return whether the grammar of a request, if any, allows these drafts and one more behind them.

    A drafter that draws tokens by a Sampler asks before it draws the next one: a grammar that was given a token that
    it does not allow would be broken for the answer too. Where it allows none that the drafter can say, any is drawn.
    """
    matcher = request.matcher
    return matcher is None or matcher.num_valid(request.output_token_ids, drafts) == len(drafts)


class HeadDrafter(Drafter, Protocol):
    """A drafter that reads the hidden states of the model.

    What it proposes may be negative: ids that stand for tokens which only the device knows (PageTables.unread). Their
    values are read once they were verified.
    """

    tables: PageTables | None
    """Of the model, where it may leave them unread."""

    def prepare(self, tasks: Sequence[DraftTask]) -> None:
        """Do what can be done before the step in flight is read, behind which it is asked to propose.

        Args:
            tasks: of requests of that step, which verifies no drafts.
        """
        ...

    def propose_ahead(self, tasks: Sequence[DraftTask], batch: Batch) -> Sequence[Sequence[int]] | None:
        """Propose for some requests of the step in flight before the host knows what that brings; None: it cannot."""
        ...

    def read(self, request: Request, drafts: Sequence[int]) -> Sequence[int]:
        """Return the values of drafts that only the device knew; the step that verified them has ended."""
        ...

    def note_read(self, request: Request, drafts: Sequence[int]) -> float:
        """Learn from drafts that were read; return the seconds that drawing all of the step took."""
        ...

    def observe(self, batch: Batch, states_TX: Any) -> None:
        """Take the hidden states [T, X] of a step, in its order."""
        ...

    def reusable(self, request: Request) -> int:
        """Return how many tokens of the prefix cache may be used for a request."""
        ...


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """The facts of a drafter."""

    name: str
    summary: str
    drafter: str | Callable[..., Drafter]
    """A class, or its name as `module:Class`; called with the engine's parts that `arguments` names."""
    max_tokens: int
    """Most tokens that it proposes where the user names no number."""
    takes_path: bool = False
    """Whether it has a checkpoint: `name:PATH`."""
    needs_model: bool = False
    """Whether drafting takes steps of a model, which cost time whether drafts are accepted or not."""
    is_head: bool = False
    """Whether it is a head, which reads the model's hidden states and has the methods of a HeadDrafter."""
