"""`nibble docs`: the generated pages of the documentation, written or checked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nibble.cli.exits import FAILED, JsonOption
from nibble.cli.terminal import print_json

if TYPE_CHECKING:
    from collections.abc import Mapping

CheckOption = Annotated[
    bool,
    typer.Option("--check", help="Write nothing; exit with 1 and name the pages that are not up to date."),
]
OutOption = Annotated[
    Path,
    typer.Option(help="The folder of the pages, which also holds the ledger and peers.json."),
]


def docs(check: CheckOption = False, out: OutOption = Path("docs"), as_json: JsonOption = False) -> None:
    """Write capabilities.md, formats.md, kv4.md and cli.md from the rows, the formats and these commands.

    The pages are the same on every machine. kv4.md needs peers.json beside it, what other engines say.
    """
    texts = pages(out)
    # Pages are compared as texts, so a check needs no clean checkout.
    stale = [name for name, text in texts.items() if _read(out / name) != text]
    if not check:
        out.mkdir(parents=True, exist_ok=True)
        for name in stale:
            (out / name).write_text(texts[name], encoding="utf-8")
    _report(out, tuple(texts), stale, check, as_json)
    if check and stale:
        raise typer.Exit(FAILED)


EXAMPLES = """
nibble docs
nibble docs --check
"""


def pages(folder: Path) -> Mapping[str, str]:
    """Return the text of each page by file name. `folder` holds the ledger, and what other engines say."""
    from nibble.cli import docs_peers as peers
    from nibble.cli import docs_tables as tables
    from nibble.cli.reference import reference

    other_engines = folder / peers.PEERS.name
    return {
        # A folder without peers.json gets the pages that need no such input.
        **({"kv4.md": peers.page(other_engines)} if other_engines.exists() else {}),
        "capabilities.md": tables.capability_table(path=folder / tables.LEDGER.name),
        "formats.md": tables.formats_table(),
        "cli.md": reference(),
    }


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


def _report(out: Path, names: tuple[str, ...], stale: list[str], check: bool, as_json: bool) -> None:
    if as_json:
        print_json({"folder": str(out), "pages": names, "stale" if check else "written": stale})
        return
    for name in stale:
        print(f"{out / name} is not up to date; run `nibble docs`" if check else f"wrote {out / name}")
    if not stale:
        print(f"{', '.join(names)}: up to date")
