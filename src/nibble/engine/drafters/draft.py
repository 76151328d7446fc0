"""Facts of drafts by a smaller model; engine/draft_model.py has it."""

from __future__ import annotations

from nibble.engine.drafters.base import DrafterInfo

DRAFTER = DrafterInfo(
    name="draft",
    summary="a smaller model with the same tokenizer, over pages of its own",
    drafter="nibble.engine.draft_model:DraftModel",
    max_tokens=7,
    needs_model=True,
    takes_path=True,
)
