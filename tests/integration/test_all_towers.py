"""Every class that Transformers generates text with from text and more is served for text, or refused for a true reason.

What becomes of each stands in towers.py; a class that it does not mention must be served.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from families import TOLERANCE
from survey import examine, refusal_by_config
from towers import NAMES, NOT_BUILT, REFUSED, TOWERS

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # foreign code warns of itself


@pytest.mark.sample(24)
@pytest.mark.parametrize("name", [name for name in NAMES if name not in NOT_BUILT])
def test_a_class_is_served_right_or_refused_for_a_true_reason(name: str, tmp_path: Path) -> None:
    result = examine(name, tmp_path)
    if name in REFUSED:
        assert result.outcome == "refused", result
        assert re.search(REFUSED[name], result.reason), result.reason
    else:
        assert result.outcome == "served", result
        assert result.largest is not None and result.largest > 0.5, "logits too small to show an error"
        assert result.planted is not None and result.planted > TOLERANCE, "an error in keys does not show"


@pytest.mark.parametrize("name", NOT_BUILT)
def test_classes_that_cannot_be_built_get_no_reason_that_is_an_accident(name: str, tmp_path: Path) -> None:
    reason = refusal_by_config(name, tmp_path)
    is_theirs = "Transformers cannot make a model of this config" in reason
    assert is_theirs or not re.search("NoneType|unsupported operand", reason), reason


def test_the_table_names_classes_that_exist() -> None:
    assert {*REFUSED, *NOT_BUILT} <= {*TOWERS} and not REFUSED.keys() & NOT_BUILT.keys()
