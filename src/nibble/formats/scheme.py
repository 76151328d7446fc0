"""Schemes: a format for each stream, by name, with its encoder and transforms. What `--kv-format` takes.

Every format is a scheme of its own name.

    nvfp4            both streams in nvfp4
    k8v4             a name of MIXED
    nvfp4:fp8_e4m3   K in nvfp4, V in fp8_e4m3
    nvfp4_amax       with another encoder than the default (formats/base.py)
    nvfp4+kmean+rot  with transforms of K (formats/transforms.py)
    nvfp4+none       with none, whatever the default
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
        names = mixed(self.base).values() or (self.base,)
        return tuple(formats.get(name).encoded_by(self.encoder) for name in dict.fromkeys(names))

    @property
    def encoders(self) -> tuple[str, ...]:
        """Return the encoders that the formats go by, each once; none where no format has a choice."""
        return tuple(dict.fromkeys(fmt.encoder for fmt in self.formats if fmt.encoder))

    def encoded_by(self, encoder: str) -> Scheme:
        """Return the scheme with an encoder, unless its text names one."""
        return self if self.encoder != AUTO else replace(self, encoder=encoder)

    @property
    def names_transforms(self) -> bool:
        """Return whether its text says which transforms it has, or that it has none."""
        return "+" in self.name

    def transformed_by(self, transforms: tuple[str, ...] | None) -> Scheme:
        """Return the scheme with transforms, unless they are None or its text names some, or NO_TRANSFORMS."""
        if not transforms or self.names_transforms:
            return self
        return replace(self, name="+".join((self.name, *transforms)), transforms=transforms)

    def without_transforms(self) -> Scheme:
        """Return the scheme with a text that says so, where K is in 4 bits and it names no transforms."""
        if self.names_transforms or not self.has_4bit_keys:
            return self
        return replace(self, name=f"{self.name}+{NO_TRANSFORMS}")

    @property
    def is_4bit(self) -> bool:
        """Return whether it stores any stream that attention reads in 4 bits, `k8v4` by its V: what an exact window is
        the default for."""
        return any(entry.is_4bit for entry in self.formats)

    @property
    def has_4bit_keys(self) -> bool:
        """Return whether it stores K, or a latent, in 4 bits: what transforms are the default for."""
        return formats.get(mixed(self.base).get("k", self.base)).is_4bit

    @property
    def is_plain(self) -> bool:
        """Return whether it stores all streams unquantised."""
        return all(entry.plain is not None for entry in self.formats)

    def format_of(self, stream: Stream) -> KVFormat:
        """Return the format of `stream`."""
        by_stream = mixed(self.base)
        name = by_stream[stream.name] if by_stream else self.base
        # An unquantised scheme keeps index keys unquantised too.
        if stream.name in COMPANIONS and formats.get(name).plain is None:
            name = COMPANIONS[stream.name]
        return formats.get(name).encoded_by(self.encoder).bound(stream)

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


def compose(by_stream: Mapping[str, str], transforms: Iterable[str] = (), encoder: str = AUTO) -> Scheme:
    """Return the scheme that stores streams so, whatever the default transforms; raise ConfigError if there is none.

    Args:
        by_stream: A format for `k` and one for `v`, or one for a latent.
        transforms: Of K.
        encoder: Of the formats that have it.
    """
    base = PAIR.join(by_stream[name] for name in sorted(by_stream))
    named = tuple(transforms)
    if not named and "k" in by_stream and formats.get(by_stream["k"]).plain is None:
        named = (NO_TRANSFORMS,)
    return parse("+".join((base if encoder == AUTO else f"{base}_{encoder}", *named)))


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
    if base is None:
        raise ConfigError(_unknown(name))
    transforms = parse_transforms(rest) if plus else ()
    if transforms is None:
        raise ConfigError(unknown("transform", AUTO, transform.names()))
    named = transforms or (NO_TRANSFORMS,) if plus else ()
    name = base if encoder == AUTO else f"{base}_{encoder}"
    return Scheme("+".join((name, *named)), base, transforms, encoder)


def _split_encoder(name: str) -> tuple[str | None, str]:
    """Return the base and the encoder of `nvfp4_amax`; AUTO where it names none that the scheme has."""
    text, _, encoder = name.rpartition("_")
    base = _base(text)
    if base and any(encoder in fmt.encoders for fmt in Scheme(base, base).formats):
        return base, encoder
    return _base(name), AUTO


def _base(text: str) -> str | None:
    """Return the base that `nvfp4` or `fp8:nvfp4` means, None for another text."""
    if PAIR not in text:
        base = ALIASES.get(text, text)
        return base if base in names() else None
    parts = [ALIASES.get(part.strip(), part.strip()) for part in text.split(PAIR)]
    if len(parts) != 2 or not all(part in names() and part not in MIXED for part in parts):
        return None
    k, v = parts
    # One meaning has one name.
    usual = {tuple(by_stream.values()): name for name, by_stream in MIXED.items()}
    return k if k == v else usual.get((k, v), PAIR.join((k, v)))


def _unknown(name: str) -> str:
    """Return the message for a name of no scheme."""
    if PAIR not in name:
        return unknown("KV format", name, names())
    usable = ", ".join(name for name in names() if name not in MIXED)
    return f"cannot read {name!r} as formats of K and of V; write it as K{PAIR}V, of {usable}"
