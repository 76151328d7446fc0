"""`nibble formats`: the schemes that --kv-format takes, with their bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from nibble.cli.exits import JsonOption
from nibble.cli.terminal import print_json

if TYPE_CHECKING:
    from nibble.formats import KVFormat

HEAD_DIM = 128


def formats(as_json: JsonOption = False) -> None:
    """List the cache schemes, with bytes per token, what they save, and whose bytes they agree with."""
    found = {"head_dim": HEAD_DIM, "schemes": list(_schemes()), "transforms": list(_transforms())}
    if as_json:
        print_json(found)
    else:
        _show(found)


EXAMPLES = """
nibble formats
nibble formats --json
"""


def _schemes() -> Iterator[dict[str, Any]]:
    from nibble.formats import scheme as schemes
    from nibble.geometry import Stream

    streams = [Stream(name, heads=1, dim=HEAD_DIM) for name in ("k", "v")]
    whole = 2 * HEAD_DIM * 2  # K and V in 16 bits
    for name in schemes.names():
        codecs = {stream.name: schemes.parse(name).format_of(stream) for stream in streams}
        size = sum(codecs[stream.name].bytes_per_token(stream) for stream in streams)
        distinct = dict.fromkeys(codecs.values())
        yield {
            "name": name,
            "formats": {stream: codec.name for stream, codec in codecs.items()},
            "bytes_per_token": size,
            "ratio": round(whole / size, 2),
            "needs_scales": any(codec.needs_scale for codec in distinct),
            "head_dim_multiple": max(codec.block for codec in distinct),
            "summary": _summary(codecs),
            "source": "; ".join(dict.fromkeys(codec.source for codec in distinct)),
        }


def _summary(codecs: Mapping[str, KVFormat]) -> str:
    """What a scheme is, in one line."""
    if len(set(codecs.values())) == 1:
        return codecs["k"].summary
    return ", ".join(f"{stream.upper()} in {codec.name}" for stream, codec in codecs.items())


def _transforms() -> Iterator[dict[str, str]]:
    from nibble.formats import transform

    for name in transform.names():
        yield {"name": name, "summary": transform.get(name).summary}


def _show(found: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table("scheme", box=box.SIMPLE_HEAD)
    for title in ("bytes", "x fewer"):
        table.add_column(title, justify="right")
    for title in ("scales", "what it is"):
        table.add_column(title)
    for row in found["schemes"]:
        scales = "needed" if row["needs_scales"] else "none"
        table.add_row(row["name"], str(row["bytes_per_token"]), f"{row['ratio']:.2f}", scales, row["summary"])
    console = Console(highlight=False)
    console.print(table)
    console.print(f"Bytes per token of K and V of one KV head of {HEAD_DIM} values. Written behind a scheme:")
    for row in found["transforms"]:
        console.print(f"  +{row['name']:<6} {row['summary']}")
