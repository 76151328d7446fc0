"""Tables of measured quality in pages by hand: filled in from a report, and from no other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from nibble.cli import docs_quality
from nibble.errors import ConfigError
from nibble.evals.report import Report, SchemeResult

WINDOWED = SchemeResult(
    "nvfp4+kmean+rot:kv_window=64", "nvfp4+kmean+rot", "", 864, 3.5556, "auto", 4.32, 0.6, 0.98, 0.0031, 0.1,
    {1024: 0.75, 8192: 0.5}, options="kv_window=64", request_bytes=7_471_104, encoder="sweep",
    transforms="kmean+rot", exact_window=64,
)  # fmt: skip
BASE = SchemeResult(
    "bf16",
    "bf16",
    "",
    3072,
    1.0,
    "auto",
    4.3,
    0.6,
    1.0,
    0.0,
    0.0,
    {1024: 1.0, 8192: 0.5},
    request_bytes=25_165_824,
)
REPORT = Report("demo", "bf16", (BASE, WINDOWED), measured={"recall_cases": 4, "request_tokens": 8192})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "quality.json").write_text(json.dumps(REPORT.as_dict()))
    return tmp_path


def block(what: str, body: str = "old\n", name: str = "quality.json") -> str:
    return f"Before.\n<!-- {name}: {what} -->\n{body}<!-- end -->\nAfter.\n"


def test_a_report_is_read_as_it_was_written() -> None:
    assert Report.of(json.loads(json.dumps(REPORT.as_dict()))) == REPORT
    older = json.loads(json.dumps(REPORT.as_dict()))
    del older["results"][1]["encoder"]
    older["results"][1]["gone"] = 1
    assert Report.of(older).results[1].kl == WINDOWED.kl


def test_ingredients(folder: Path) -> None:
    text = docs_quality.fill(block("ingredients"), folder)
    assert text.startswith("Before.\n<!-- quality.json: ingredients -->\n| format |")
    assert text.endswith("<!-- end -->\nAfter.\n") and "old" not in text
    (row,) = [line for line in text.splitlines() if line.startswith("| `nvfp4`")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:5] == ["`nvfp4`", "sweep", "kmean+rot", "64", "7,471,104"]
    # Recall is of BF16's own: 62.5 of 75 % on average, 75 % and 100 % at each length.
    assert cells[5:] == ["4.32", "+0.47%", "0.0031", "98.0%", "83.3%", "75.0%", "100.0%"]
    assert docs_quality.fill(text, folder) == text


def test_states_have_a_column_where_there_are_any(folder: Path) -> None:
    results = (replace(BASE, state_format="fp32"), replace(WINDOWED, state_format="int8"))
    (folder / "quality.json").write_text(json.dumps(replace(REPORT, results=results).as_dict()))
    lines = docs_quality.fill(block("ingredients"), folder).splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert rows[0][4] == "states" and [row[4] for row in rows[2:]] == ["fp32", "int8"]
    assert rows[3][5] == "7,471,104" and len(rows[3]) == len(rows[0])


def test_cells_by_hand_stay(folder: Path) -> None:
    body = (
        "| KV cache | perplexity | bytes/token | recall 1K / 8K | speed |\n|---|---:|---:|---:|---:|\n"
        "| `bf16` | 9 | 9 | 9 | 1.92 ms |\n| `mxfp4` | 9 | 9 | 9 | 0.5 ms |\n"
        "| `nvfp4`, exact <!-- nvfp4+kmean+rot:kv_window=64 --> | | | | |\n"
    )
    lines = docs_quality.fill(block("cells", body), folder).splitlines()[4:7]
    assert lines[0] == "| `bf16` | 4.3 | 3,072 (1x) | 100 / 50 % | 1.92 ms |"
    assert lines[1] == "| `mxfp4` | 9 | 9 | 9 | 0.5 ms |"
    assert lines[2].endswith("<!-- nvfp4+kmean+rot:kv_window=64 --> | 4.32 | 864 (3.56x) | 75 / 50 % |  |")


def test_what_is_not_there(folder: Path) -> None:
    unmeasured = block("all", name="none.json")
    assert docs_quality.fill(unmeasured, folder) == unmeasured
    with pytest.raises(ConfigError, match=r"cannot show 'colours' of quality\.json; what works: all"):
        docs_quality.fill(block("colours"), folder)
    (folder / "quality.json").write_text("{}")
    with pytest.raises(ConfigError, match="as a report of nibble eval"):
        docs_quality.fill(block("all"), folder)


def test_pages_with_tables_only(folder: Path) -> None:
    assert not docs_quality.pages(folder)
    (folder / "quality.md").write_text("Nothing to fill in.\n")
    assert not docs_quality.pages(folder)
    (folder / "quality.md").write_text(block("all"))
    assert "| bf16 | 3,072 |" in docs_quality.pages(folder)["quality.md"]
