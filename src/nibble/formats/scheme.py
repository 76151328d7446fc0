"""Schemes: a format for each stream, by name, with transforms. What `--kv-format` takes.

Every format is a scheme of its own name.

    nvfp4            both streams in nvfp4
    k8v4             a name of MIXED
    nvfp4+kmean+rot  with transforms of K (formats/transforms.py)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nibble import formats
from nibble.errors import ConfigError, unknown
from nibble.formats import KVFormat
from nibble.formats import transforms as transform
from nibble.model_spec import INDEX, Stream

MIXED = {"k8v4": {"k": "fp8_e4m3", "v": "nvfp4"}}
"""Schemes that give streams different formats: scheme -> stream -> format."""

COMPANIONS = {INDEX: "index_fp8"}
"""Streams that every quantised scheme stores in a format of their own."""

ALIASES = {
    "auto": "bf16", "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "fp8": "fp8_e4m3",
    "fp4_mx_block16": "fp4_mx16", "fp4_e2m1": "fp4_mx16",
}  # fmt: skip
"""What other engines call our schemes."""

UNSERVED = {
    "nvfp4_4over6": "it is vLLM's way to write NVFP4, with 4 or 6 as the largest value of a block, whichever fits; "
    "the layout is that of nvfp4, which takes 6: --kv-format nvfp4",
    "fp8_per_token_head": "its scales are of a token and a head; --kv-format fp8_e4m3 has one of a layer or a head, "
    "measured by --kv-scales calibrate",
    "int8_per_token_head": "of 8 bits there is --kv-format fp8_e4m3",
    "int4_per_token_head": "of 4 bits there are --kv-format nvfp4, mxfp4 and fp4_mx16",
    "int8": "of 8 bits there is --kv-format fp8_e4m3",
    "mxfp8": "of 8 bits there is --kv-format fp8_e4m3",
}
"""Formats of other engines without a counterpart -> what comes near."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """A format for each stream, and transforms of K."""

    name: str
    """As written, aliases resolved."""
    base: str
    """The name without transforms."""
    transforms: tuple[str, ...] = ()
    """In the order in which they are applied."""

    @property
    def is_plain(self) -> bool:
        """Return whether it stores all streams unquantised."""
        return self.base not in MIXED and formats.get(self.base).plain is not None

    def format_of(self, stream: Stream) -> KVFormat:
        """Return the format of `stream`."""
        name = MIXED[self.base][stream.name] if self.base in MIXED else self.base
        # An unquantised scheme keeps index keys unquantised too.
        if stream.name in COMPANIONS and formats.get(name).plain is None:
            name = COMPANIONS[stream.name]
        return formats.get(name).bound(stream)

    def refuses(self, stream: Stream) -> str | None:
        """Return why `stream` cannot be stored in this scheme, or None."""
        if self.base in MIXED and stream.name not in MIXED[self.base]:
            return f"{self.base} has no format for the stream {stream.name!r}"
        return self.format_of(stream).refuses(stream)


def names() -> tuple[str, ...]:
    """Return the names of all schemes without transforms: the formats, then the mixed ones."""
    return (*(name for name in formats.names() if name not in COMPANIONS.values()), *MIXED)


def fitting(*streams: Stream) -> tuple[str, ...]:
    """Return the schemes that can store all of these streams."""
    return tuple(name for name in names() if not any(parse(name).refuses(stream) for stream in streams))


def bytes_per_token(name: str, streams: Iterable[Stream]) -> int:
    """Return the bytes that a scheme takes for a token of these streams."""
    return sum(parse(name).format_of(stream).bytes_per_token(stream) for stream in streams)


def parse(text: str) -> Scheme:
    """Return the scheme that `nvfp4`, `k8v4`, `nvfp4+rot`... names, or raise ConfigError with the nearest name."""
    base, *transforms = text.strip().lower().split("+")
    base = ALIASES.get(base, base)
    if base in UNSERVED:
        raise ConfigError(f"KV format {base!r} is not served: {UNSERVED[base]}")
    if base not in names():
        raise ConfigError(unknown("KV format", base, names()))
    for name in transforms:
        # Only for its error: an unknown transform is refused before any other check.
        transform.get(name)
    if len(set(transforms)) != len(transforms):
        raise ConfigError(f"{text!r} names a transform twice")
    # In the order of application, whatever the order of the text: one meaning has one name.
    ordered = tuple(sorted(transforms, key=transform.names().index))
    return Scheme("+".join((base, *ordered)), base, ordered)
