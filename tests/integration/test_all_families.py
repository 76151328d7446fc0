"""Every type that Transformers has a causal language model for is served right, or refused for a true reason.

What becomes of each stands in families.py; a type that it does not mention must be served. New types of a later Transformers
are served or fail here. tests/support/survey.py prints the same as a table.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from families import FALSE_REASONS, FAMILIES, NOT_BUILT, REFUSED, VARIANTS, WRONG
from survey import TYPES, examine

pytestmark = pytest.mark.slow


def case(name: str) -> Any:
    """A type; those known to be answered wrong, or refused for an untrue reason, must fail until they are mended."""
    cause = WRONG.get(name) or FALSE_REASONS.get(name)
    return pytest.param(name, marks=pytest.mark.xfail(strict=True, reason=cause) if cause else ())


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", [case(name) for name in TYPES if name not in NOT_BUILT])
def test_a_type_is_served_right_or_refused(name: str, tmp_path: Path) -> None:
    result = examine(name, tmp_path)
    if name in REFUSED:
        assert result.outcome == "refused", result
        assert re.search(REFUSED[name], result.reason), result.reason
        return
    assert result.outcome == "served", result
    assert result.largest is not None and result.largest > 0.5, "logits so small that an error would not show"


def test_the_table_names_types_that_exist() -> None:
    types = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS}
    assert {*REFUSED, *WRONG, *FALSE_REASONS, *NOT_BUILT} <= types
    assert FAMILIES.keys() - {"mistral4"} <= types
    assert not REFUSED.keys() & FAMILIES.keys()
