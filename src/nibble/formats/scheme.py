"""Schemes: a format for each stream, by name, with its encoder and transforms. What `--kv-format` takes.

Every format is a scheme of its own name.

    nvfp4            both streams in nvfp4
    k8v4             a name of MIXED
    nvfp4_amax       with another encoder than the default (formats/base.py)
    nvfp4+kmean+rot  with transforms of K (formats/transforms.py)
    nvfp4+none       with none, whatever the default
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from nibble import formats
from nibble.errors import ConfigError, unknown
from nibble.formats import KVFormat
from nibble.formats import transforms as transform
from nibble.model_spec import INDEX, Stream

AUTO = "auto"
"""The encoder of schemes that leave it to their formats."""
NO_TRANSFORMS = "none"
"""In place of transforms: none, whatever is the default."""

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
    encoder: str = AUTO
    """Of the formats that have it; the others, and AUTO, go by their default."""

    @property
    def formats(self) -> tuple[KVFormat, ...]:
        """Return the formats of what attention reads, each once."""
        names = MIXED[self.base].values() if self.base in MIXED else (self.base,)
        return tuple(formats.get(name).encoded_by(self.encoder) for name in dict.fromkeys(names))

    @property
    def encoders(self) -> tuple[str, ...]:
        """Return the encoders that the formats go by, each once; none where no format has a choice."""
        return tuple(dict.fromkeys(fmt.encoder for fmt in self.formats if fmt.encoder))

    def encoded_by(self, encoder: str) -> Scheme:
        """Return the scheme with an encoder, unless its text names one."""
        return self if self.encoder != AUTO else replace(self, encoder=encoder)

    def transformed_by(self, transforms: tuple[str, ...] | None) -> Scheme:
        """Return the scheme with transforms, unless they are None or its text names some, or NO_TRANSFORMS."""
        if not transforms or "+" in self.name:
            return self
        return replace(self, name="+".join((self.name, *transforms)), transforms=transforms)

    def format_of(self, stream: Stream) -> KVFormat:
        """Return the format of `stream`."""
        name = MIXED[self.base][stream.name] if self.base in MIXED else self.base
        # An unquantised scheme keeps index keys unquantised too.
        if stream.name in COMPANIONS and formats.get(name).plain is None:
            name = COMPANIONS[stream.name]
        return formats.get(name).encoded_by(self.encoder).bound(stream)

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


def encoders() -> dict[str, tuple[str, ...]]:
    """Return all encoders, each with the formats that have it."""
    named = [(encoder, name) for name in formats.names() for encoder in formats.get(name).encoders if encoder]
    return {encoder: tuple(name for other, name in named if other == encoder) for encoder, _ in named}


def has_encoder(encoder: str, schemes: Iterable[Scheme]) -> bool:
    """Return whether any format of these schemes has an encoder, or it is left to them."""
    return encoder == AUTO or any(encoder in fmt.encoders for scheme in schemes for fmt in scheme.formats)


def check_encoder(encoder: str, schemes: tuple[Scheme, ...]) -> None:
    """Raise ConfigError for an encoder that there is not, or that no format of these schemes has."""
    by_encoder = encoders()
    if encoder != AUTO and encoder not in by_encoder:
        raise ConfigError(unknown("KV encoder", encoder, (AUTO, *by_encoder)))
    if not has_encoder(encoder, schemes):
        used = dict.fromkeys(fmt.name for scheme in schemes for fmt in scheme.formats)
        raise ConfigError(
            f"the KV encoder {encoder} is for {', '.join(by_encoder[encoder])}, and this cache is in "
            f"{', '.join(used)}; use another --kv-format, or leave --kv-encoder out"
        )


def parse_transforms(text: str) -> tuple[str, ...] | None:
    """Return the transforms that `kmean+rot` or `none` names, in the order of application; None for `auto`.

    Raises:
        ConfigError: A name is unknown, or there twice.
    """
    if (text := text.strip().lower()) == AUTO:
        return None
    names = text.removeprefix("+").split("+")
    if names == [NO_TRANSFORMS]:
        return ()
    for name in names:
        # Only for its error: an unknown transform is refused before any other check.
        transform.get(name)
    if len(set(names)) != len(names):
        raise ConfigError(f"{text!r} names a transform twice")
    # Whatever the order of the text: one meaning has one name.
    return tuple(sorted(names, key=transform.names().index))


def parse(text: str) -> Scheme:
    """Return the scheme that `nvfp4`, `k8v4`, `nvfp4+rot`... names, or raise ConfigError with the nearest name."""
    name, plus, rest = text.strip().lower().partition("+")
    name = ALIASES.get(name, name)
    if name in UNSERVED:
        raise ConfigError(f"KV format {name!r} is not served: {UNSERVED[name]}")
    base, encoder = _split_encoder(name)
    if base not in names():
        raise ConfigError(unknown("KV format", name, names()))
    transforms = parse_transforms(rest) if plus else ()
    if transforms is None:
        raise ConfigError(unknown("transform", AUTO, transform.names()))
    named = transforms or (NO_TRANSFORMS,) if plus else ()
    return Scheme("+".join((name, *named)), base, transforms, encoder)


def _split_encoder(name: str) -> tuple[str, str]:
    """Return the scheme and the encoder of `nvfp4_amax`; AUTO where it names none that the scheme has."""
    base, _, encoder = name.rpartition("_")
    base = ALIASES.get(base, base)
    if base in names() and any(encoder in fmt.encoders for fmt in Scheme(base, base).formats):
        return base, encoder
    return name, AUTO
