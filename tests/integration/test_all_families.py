"""Every type that Transformers has a causal language model for is served right, or refused for a true reason.

What becomes of each stands in families.py; a type that it does not mention must be served. New types of a later Transformers
are served or fail here. tests/support/survey.py prints the same as a table.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import towers
from families import FAMILIES, NOT_BUILT, OTHER_TYPES, REFUSED, TOLERANCE, VARYING, WRONG
from survey import PAGE, TYPES, examine, refusal_by_config

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # foreign code warns of itself


def case(name: str) -> Any:
    """A type; one that is answered wrong must fail until that is mended."""
    cause = WRONG.get(name)
    return pytest.param(name, marks=pytest.mark.xfail(strict=True, reason=cause) if cause else ())


@pytest.mark.sample(60)
@pytest.mark.parametrize("name", [case(name) for name in TYPES if name not in NOT_BUILT])
def test_a_type_is_served_right_or_refused_for_a_true_reason(name: str, tmp_path: Path) -> None:
    result = examine(name, tmp_path)
    if name in REFUSED:
        assert result.outcome == "refused", result
        assert re.search(REFUSED[name], result.reason), result.reason
    elif name not in WRONG or result.outcome != "refused":
        assert result.outcome == "served", result
        assert result.largest is not None and result.largest > 0.5, "logits too small to show an error"
        assert result.planted is not None and result.planted > TOLERANCE, "an error in keys does not show"
        assert result.is_invariant or name in VARYING, "the last bits depend on the chunks"


@pytest.mark.parametrize("name", NOT_BUILT)
def test_types_that_cannot_be_built_are_refused_too(name: str, tmp_path: Path) -> None:
    reason = refusal_by_config(name, tmp_path)
    assert reason, "it would be served, and nothing has been compared"
    assert not re.search("Error|NoneType|unsupported operand", reason), reason


def test_the_table_names_types_that_exist() -> None:
    outcomes = [*REFUSED, *WRONG, *NOT_BUILT]
    assert {*outcomes} <= {*TYPES}
    assert len(outcomes) == len({*outcomes}), "a type has two outcomes"
    assert FAMILIES.keys() <= {*TYPES}
    assert {*OTHER_TYPES} <= {*TYPES} and not OTHER_TYPES.keys() & FAMILIES.keys()


def test_the_page_says_what_becomes_of_every_type() -> None:
    """docs/families.md, which survey.py writes."""
    names = [*TYPES, *towers.NAMES]
    rows = re.findall(
        r"^\| ([^|]+) \| (served|refused|wrong|not built) \| [^|]* \| (.*) \|$", PAGE.read_text(), re.M
    )
    outcomes = {name: outcome for name, outcome, _ in rows}
    assert [*outcomes] == names and len(rows) == len(names)
    refused = {**REFUSED, **towers.REFUSED}
    tables: dict[str, dict[str, str]] = {
        "refused": refused,
        "wrong": WRONG,
        "not built": {**NOT_BUILT, **towers.NOT_BUILT},
    }
    expected = {name: outcome for outcome, names in tables.items() for name in names}
    assert outcomes == {name: expected.get(name, "served") for name in names}
    assert all(re.search(refused[name], text) for name, outcome, text in rows if outcome == "refused")
