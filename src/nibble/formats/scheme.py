"""Schemes: a format for each stream, by name, with transforms. What `--kv-format` takes.

Every format is a scheme of its own name.

    nvfp4            both streams in nvfp4
    k8v4             a name of MIXED
    nvfp4:fp8_e4m3   K in nvfp4, V in fp8_e4m3
    nvfp4+kmean+rot  with transforms of K (formats/transforms.py)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nibble import formats
from nibble.errors import ConfigError, unknown
from nibble.formats import KVFormat
from nibble.formats import transforms as transform
from nibble.model_spec import INDEX, Stream

MIXED = {"k8v4": {"k": "fp8_e4m3", "v": "nvfp4"}}
"""Schemes that give streams different formats: scheme -> stream -> format."""

PAIR = ":"
"""Between the formats of K and of V, in the name of a scheme that MIXED has no name for."""

COMPANIONS = {INDEX: "index_fp8"}
"""Streams that every quantised scheme stores in a format of their own."""

TUNED = ("bf16", "fp8_e4m3", "fp8_ds_mla", "nvfp4", "nvfp4_ds_mla", "nvfp4_ds_mla_fp8rope")
"""Formats that `nibble tune-precision` tries if none are named."""

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

    def format_of(self, stream: Stream) -> KVFormat:
        """Return the format of `stream`."""
        by_stream = mixed(self.base)
        name = by_stream[stream.name] if by_stream else self.base
        # An unquantised scheme keeps index keys unquantised too.
        if stream.name in COMPANIONS and formats.get(name).plain is None:
            name = COMPANIONS[stream.name]
        return formats.get(name).bound(stream)

    def refuses(self, stream: Stream) -> str | None:
        """Return why `stream` cannot be stored in this scheme, or None."""
        by_stream = mixed(self.base)
        if by_stream and stream.name not in by_stream:
            return f"{self.base} has no format for the stream {stream.name!r}"
        return self.format_of(stream).refuses(stream)


def names() -> tuple[str, ...]:
    """Return the names of all schemes without transforms: the formats, then the mixed ones."""
    return (*(name for name in formats.names() if name not in COMPANIONS.values()), *MIXED)


def mixed(base: str) -> Mapping[str, str]:
    """Return the formats by stream of a scheme that gives streams different ones; nothing for the others."""
    if PAIR in base:
        return dict(zip(("k", "v"), base.split(PAIR), strict=True))
    return MIXED.get(base, {})


def compose(by_stream: Mapping[str, str], transforms: Iterable[str] = ()) -> Scheme:
    """Return the scheme that stores streams in these formats; raise ConfigError where there is none.

    Args:
        by_stream: A format for `k` and one for `v`, or one for a latent.
        transforms: Of K.
    """
    base = PAIR.join(by_stream[name] for name in sorted(by_stream))
    return parse("+".join((base, *transforms)))


def fitting(*streams: Stream) -> tuple[str, ...]:
    """Return the schemes that can store all of these streams."""
    return tuple(name for name in names() if not any(parse(name).refuses(stream) for stream in streams))


def bytes_per_token(name: str, streams: Iterable[Stream]) -> int:
    """Return the bytes that a scheme takes for a token of these streams."""
    return sum(parse(name).format_of(stream).bytes_per_token(stream) for stream in streams)


def parse(text: str) -> Scheme:
    """Return the scheme that `nvfp4`, `k8v4`, `nvfp4+rot`... names, or raise ConfigError with the nearest name."""
    base, *transforms = text.strip().lower().split("+")
    base = _base(base)
    for name in transforms:
        # Only for its error: an unknown transform is refused before any other check.
        transform.get(name)
    if len(set(transforms)) != len(transforms):
        raise ConfigError(f"{text!r} names a transform twice")
    # In the order of application, whatever the order of the text: one meaning has one name.
    ordered = tuple(sorted(transforms, key=transform.names().index))
    return Scheme("+".join((base, *ordered)), base, ordered)


def _base(text: str) -> str:
    """Return the base that `nvfp4` or `nvfp4:fp8_e4m3` means, or raise ConfigError."""
    if PAIR not in text:
        base = ALIASES.get(text, text)
        if base in UNSERVED:
            raise ConfigError(f"KV format {base!r} is not served: {UNSERVED[base]}")
        if base not in names():
            raise ConfigError(unknown("KV format", base, names()))
        return base
    pair = [_base(part.strip()) for part in text.split(PAIR)]
    if len(pair) != 2 or any(part in MIXED for part in pair):
        raise ConfigError(f"cannot read {text!r} as formats of K and of V; write it as nvfp4{PAIR}fp8_e4m3")
    if pair[0] == pair[1]:
        return pair[0]
    # One meaning has one name.
    usual = {tuple(by_stream.values()): name for name, by_stream in MIXED.items()}
    return usual.get((pair[0], pair[1]), PAIR.join(pair))
