"""Facts of drafts by an EAGLE-3 head; engine/draft_head.py has it."""

from __future__ import annotations

from nibble.engine.drafters.base import DrafterInfo

DRAFTER = DrafterInfo(
    name="eagle3",
    summary="a head that was trained for the model, over pages of its own",
    drafter="nibble.engine.draft_head:DraftHead",
    max_tokens=7,
    needs_model=True,
    takes_path=True,
    is_head=True,
)
