"""docs/kv4.md: each cell of other engines' tables is so here too, or says why not; and says nothing where it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nibble.cli.docs_peers import GPUS, PEERS, Cell, page, tables
from nibble.errors import ConfigError

ROOT = Path(__file__).parents[2]
CELLS = [(title, cell) for title, _, cells in tables(ROOT / PEERS) for cell in cells]


@pytest.mark.parametrize(("title", "cell"), CELLS, ids=[f"{title}: {cell.name}" for title, cell in CELLS])
def test_a_cell_that_differs_says_why_and_one_that_agrees_does_not(title: str, cell: Cell) -> None:
    if cell.agrees:
        assert not cell.why, f"{cell.name} agrees now ({cell.ours}); take its reason out of {PEERS}"
    else:
        assert cell.why, f"{cell.name}: theirs {cell.theirs}, ours {cell.ours}; say why in {PEERS}"


def test_all_of_the_published_table_is_there() -> None:
    """Seven backends of heads and seven of latents, each with FP8 and FP4."""
    published = [cell for title, cell in CELLS if "published" in title]
    assert len(published) == 28
    assert sum(cell.theirs for cell in published) == 17


def test_the_page_is_up_to_date() -> None:
    assert (ROOT / "docs/kv4.md").read_text() == page(ROOT / PEERS), "run `nibble docs`"


def one(path: Path, **changes: object) -> Cell:
    entry = {"name": "a cell", "kind": "mha", "format": "nvfp4", "decode": "triton", "theirs": "y", **changes}
    path.write_text(json.dumps({"tables": [{"title": "t", "source": "s", "cells": [entry]}]}))
    ((_, _, (cell,)),) = tables(path)
    return cell


def test_what_agrees(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    assert one(path).agrees and one(path).ours == "y"
    assert not one(path, theirs="n").agrees
    only_hopper = one(path, format="bf16", decode="fa3")
    assert only_hopper.agrees and only_hopper.ours == "y on SM90"
    assert not one(path, format="bf16", decode="fa3", on=["h200", "b200"]).agrees


def test_prompts_are_said_to_be_staged_where_they_must_be(tmp_path: Path) -> None:
    """And not where `auto` stages them for speed, on one GPU of many."""
    assert one(tmp_path / "peers.json", kind="mla").ours == "y"
    assert one(tmp_path / "peers.json", prefill="fa4").ours == "y on SM90, SM100, prompts staged"


def test_what_staging_would_cost_is_in_the_cell(tmp_path: Path) -> None:
    cell = one(tmp_path / "peers.json", decode="sdpa", theirs="n")
    assert cell.agrees and cell.ours == "asked (8.1 x)"
    assert tuple(cell.staged) == GPUS
    assert one(tmp_path / "peers.json", decode="flashmla", theirs="n").ours.startswith(
        "n: kind mha is not in {"
    )


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    path.write_text('{"tables": [{"title": "t"}]}')
    with pytest.raises(ConfigError, match=r"cannot read .*peers\.json: KeyError"):
        page(path)
