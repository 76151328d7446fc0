"""Facts of drafts by a checkpoint's own layer for multi-token prediction; engine/draft_head.py has it."""

from __future__ import annotations

from nibble.engine.drafters.base import DrafterInfo

DRAFTER = DrafterInfo(
    name="mtp",
    summary="the checkpoint's own layer for multi-token prediction, over pages of its own",
    drafter="nibble.engine.draft_head:DraftHead",
    max_tokens=7,
    needs_model=True,
    is_head=True,
)
