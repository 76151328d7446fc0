"""Tables of measured quality in pages that are otherwise written by hand, filled in by `nibble docs`.

A table stands between two comments, which name a report of `nibble eval --output` beside the page's folder of
documentation, and what is shown of it:

    <!-- quality.json: all -->           everything that was measured, and how
    <!-- quality.json: ingredients -->   what each scheme is made of, and how far it is from the yardstick
    <!-- quality.json: cells -->         a table by hand: cells under known titles, in rows whose first cell has a
                                         scheme's name in backticks, are filled in, and all others stay; a comment
                                         in the cell, <!-- NAME -->, goes before the backticks
    <!-- end -->
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from nibble.engine.certificate import format_length
from nibble.errors import ConfigError
from nibble.evals.report import Report, SchemeResult, markdown_table

PAGES = ("quality.md", "../README.md")
"""Pages that may have such tables, from the folder of documentation."""
BLOCK = re.compile(r"(<!-- (\S+\.json): (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
NAME = re.compile(r"<!-- (\S+) -->|`([^`]+)`")
ENCODER_SUFFIX = re.compile(r"_(amax|sweep|4over6)$")


def pages(folder: Path) -> Mapping[str, str]:
    """Return the text of each page that has such tables, with these as the reports in `folder` say.

    Raises:
        ConfigError: A report cannot be read, or a comment names what is not there.
    """
    texts = {name: (folder / name).read_text(encoding="utf-8") for name in PAGES if (folder / name).exists()}
    return {name: fill(text, folder) for name, text in texts.items() if BLOCK.search(text)}


def fill(text: str, folder: Path) -> str:
    """Return a page with its tables filled in. One whose report is not in `folder` stays as it is."""

    def replaced(match: re.Match[str]) -> str:
        begin, name, what, body, end = match.groups()
        if what not in TABLES:
            raise ConfigError(f"cannot show {what!r} of {name}; what works: {', '.join(TABLES)}")
        if not (folder / name).exists():
            return match[0]
        lines = TABLES[what](read(folder / name), body)
        return begin + "\n".join(lines).strip("\n") + "\n" + end

    return BLOCK.sub(replaced, text)


def read(path: Path) -> Report:
    """Return a report; raise ConfigError where the file holds none."""
    try:
        return Report.of(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"cannot read {path} as a report of nibble eval: {type(error).__name__}: {error}"
        ) from error


def _all(report: Report, _: str) -> Iterator[str]:
    yield report.as_markdown()


def _ingredients(report: Report, _: str) -> Iterator[str]:
    """Yield a table of what schemes are made of, a line on how it was measured under it."""
    lengths = tuple(format_length(length) for length in report.lengths)
    request = format_length(report.measured.get("request_tokens", 0))
    base = report.results[0]
    states = ("states",) if _has_states(report) else ()
    header = (
        "format", "encoder", "transforms", "window", *states, f"bytes of {request}", "perplexity", f"over {base.name}",
        "KL", "top-1", f"recall, of {base.name}'s", *lengths,
    )  # fmt: skip
    yield from markdown_table(header, (_ingredient_row(result, report) for result in report.results))
    yield from ("", report.caption())


def _has_states(report: Report) -> bool:
    return any(result.state_format for result in report.results)


def _ingredient_row(result: SchemeResult, report: Report) -> tuple[str, ...]:
    base = report.results[0]
    name = ENCODER_SUFFIX.sub("", result.kv_format.partition("+")[0])
    layers = f", {result.kv_layers}" if result.kv_layers else ""
    shares = [_share(result.recall.get(n, 0.0), base.recall.get(n, 0.0)) for n in report.lengths]
    states = (result.state_format,) if _has_states(report) else ()
    return (
        f"`{name}{layers}`", result.encoder, result.transforms, str(result.exact_window or ""), *states,
        f"{result.request_bytes:,}", f"{result.perplexity:.4g}", f"{result.perplexity / base.perplexity - 1:+.2%}",
        f"{result.kl:.2g}", f"{result.top1:.1%}", _share(result.mean_recall or 0.0, base.mean_recall or 0.0), *shares,
    )  # fmt: skip


def _share(value: float, whole: float) -> str:
    return f"{value / whole:.1%}" if whole else ""


def _cells(report: Report, body: str) -> Iterator[str]:
    """Yield the lines of a table by hand, with the cells that the report knows."""
    results = {result.name: result for result in report.results}
    titles: list[str] = []
    for line in body.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        # A comment stands behind the words that it makes exact, so the last match counts.
        names = [comment or code for comment, code in NAME.findall(cells[0])]
        result = results.get(names[-1]) if names else None
        if not titles or not result:
            titles = titles or cells
            yield line
            continue
        values = _cells_of(result, report)
        cells = [values.get(title, cell) for title, cell in zip(titles, cells, strict=True)]
        yield f"| {' | '.join(cells)} |"


def _cells_of(result: SchemeResult, report: Report) -> dict[str, str]:
    """Return a scheme's cells by the title of their column."""
    lengths = " / ".join(format_length(length) for length in report.lengths)
    recall = " / ".join(f"{100 * result.recall.get(length, 0.0):.0f}" for length in report.lengths)
    fewer = f"{result.ratio:.2f}".rstrip("0").rstrip(".")
    return {
        "bytes/token": f"{result.bytes_per_token:,} ({fewer}x)",
        "perplexity": f"{result.perplexity:.4g}",
        "KL": f"{result.kl:.2g}",
        "top-1 as BF16": f"{100 * result.top1:.1f} %",
        f"recall {lengths}": f"{recall} %",
    }


TABLES: Mapping[str, Callable[[Report, str], Iterator[str]]] = {
    "all": _all,
    "ingredients": _ingredients,
    "cells": _cells,
}
