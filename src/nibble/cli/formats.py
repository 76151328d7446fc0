"""`nibble formats`: the schemes that --kv-format takes, with their bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nibble.cli.exits import JsonOption
from nibble.cli.terminal import print_json

if TYPE_CHECKING:
    from nibble.formats import KVFormat
    from nibble.model_spec import Stream

HEAD_DIM = 128


def formats(as_json: JsonOption = False) -> None:
    """List the cache schemes, with bytes per token, what they save, and whose bytes they agree with."""
    table = {"head_dim": HEAD_DIM, "schemes": list(_schemes()), "transforms": list(_transforms())}
    if as_json:
        print_json(table)
    else:
        _show(table)


EXAMPLES = """
nibble formats
nibble formats --json
"""


def _schemes() -> Iterator[dict[str, Any]]:
    """Of one KV head, then of a latent."""
    from nibble.formats import scheme as schemes
    from nibble.model_spec import HEADS, LATENTS

    for of, streams in (("kv", HEADS), ("latent", LATENTS[:1])):
        for name in schemes.fitting(*streams):
            yield {"of": of, "name": name, **_facts(name, streams)}


def _facts(name: str, streams: Sequence[Stream]) -> dict[str, Any]:
    from nibble.formats import scheme as schemes

    codecs = {stream.name: schemes.parse(name).format_of(stream) for stream in streams}
    size = schemes.bytes_per_token(name, streams)
    distinct = {codec.name: codec for codec in codecs.values()}
    return {
        "formats": {stream: codec.name for stream, codec in codecs.items()},
        "bytes_per_token": size,
        # 2 bytes a value: the same streams in 16 bits.
        "ratio": round(2 * sum(stream.values for stream in streams) / size, 2),
        "needs_scales": any(codec.needs_scale for codec in distinct.values()),
        "head_dim_multiple": max(codec.block for codec in distinct.values()),
        "summary": _summary(codecs),
        "source": "; ".join(dict.fromkeys(codec.source for codec in distinct.values())),
    }


def _summary(codecs: Mapping[str, KVFormat]) -> str:
    """What a scheme is, in one line."""
    distinct = {codec.name: codec.summary for codec in codecs.values()}
    if len(distinct) == 1:
        return next(iter(distinct.values()))
    return ", ".join(f"{stream.upper()} in {codec.name}" for stream, codec in codecs.items())


def _transforms() -> Iterator[dict[str, str]]:
    from nibble.formats import transforms as transform

    for name in transform.names():
        yield {"name": name, "summary": transform.get(name).summary}


def _show(facts: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    for of, what in (
        ("kv", f"K and V of one KV head of {HEAD_DIM} values"),
        ("latent", "a latent of MLA, 512 + 64"),
    ):
        table = Table("scheme", box=box.SIMPLE_HEAD)
        for title in ("bytes", "x fewer"):
            table.add_column(title, justify="right")
        for title in ("scales", "what it is"):
            table.add_column(title)
        for row in facts["schemes"]:
            if row["of"] == of:
                scales = "needed" if row["needs_scales"] else "none"
                size, ratio = str(row["bytes_per_token"]), f"{row['ratio']:.2f}"
                table.add_row(row["name"], size, ratio, scales, row["summary"])
        console.print(table)
        console.print(f"Bytes per token of {what}.")
    console.print("Written behind a scheme, for K and V:")
    for row in facts["transforms"]:
        console.print(f"  +{row['name']:<6} {row['summary']}")
