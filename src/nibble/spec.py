"""CacheSpec: what a Config says about the cache, parsed once and typed.

Everything that plans, prices or refuses reads this value; only `from_config` reads the option strings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

from nibble.config import MAX_WINDOW, Config, OffloadSpec
from nibble.drafts import MAX_DRAFTS
from nibble.errors import ConfigError
from nibble.formats import scheme as schemes
from nibble.formats import scheme_file
from nibble.formats.scheme import Scheme
from nibble.formats.scheme_file import SchemeFile
from nibble.hardware import Hardware

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class LayerRule:
    """One rule of `kv_layers`: other layers, another scheme."""

    text: str
    """The rule as it was written, for commands that repeat it."""
    spans: tuple[tuple[int, int], ...]
    """First and last layer of each range; negative numbers count from the model's last layer."""
    scheme: Scheme

    @classmethod
    def parse(cls, text: str) -> LayerRule:
        """Parse `0,1,-1=fp8_e4m3` or `4-7=k8v4`; raise ConfigError."""
        where, equals, name = text.partition("=")
        if not equals:
            raise ConfigError(f"cannot read the layer rule {text.strip()!r}; write it as 0,1,-1=fp8_e4m3")
        # The scheme is checked here, layers only against a model (indices).
        scheme = schemes.parse(name)
        return cls(text, tuple(_parse_span(item.strip(), where) for item in where.split(",")), scheme)

    @classmethod
    def of(cls, layers: Iterable[int], scheme: Scheme) -> LayerRule:
        """Return the rule that gives `layers` the scheme."""
        spans = tuple((layer, layer) for layer in sorted(layers))
        return cls(f"{','.join(str(layer) for layer, _ in spans)}={scheme.name}", spans, scheme)

    def renamed(self, name: str) -> LayerRule:
        """Return the rule for the same layers with the scheme `name`."""
        return LayerRule(f"{self.text.partition('=')[0]}={name}", self.spans, schemes.parse(name))

    def indices(self, layers: int) -> Iterator[int]:
        """Yield the rule's layer indices in [0, layers); raise ConfigError for one out of range."""
        for layer in chain.from_iterable(range(first, last + 1) for first, last in self.spans):
            if not -layers <= layer < layers:
                raise ConfigError(f"layer {layer} is out of range: the model has layers 0 to {layers - 1}")
            yield layer % layers


def _parse_span(item: str, where: str) -> tuple[int, int]:
    """Parse `3`, `-1` or `4-7` to its first and last layer."""
    if not item:
        raise ConfigError(f"{where.strip()!r} has an empty item; write layers as 0,1,-1 or 4-7")
    first, dash, last = (item, "", "") if item.startswith("-") else item.partition("-")
    try:
        low, high = int(first), int(last if dash else first)
    except ValueError:
        raise ConfigError(f"cannot read {item!r} as a layer or a range of layers, as 3, -1 or 4-7") from None
    if low > high:
        raise ConfigError(
            f"the range of layers {item!r} runs backwards; write the lower number first, as 4-7"
        )
    return low, high


def _schemes(config: Config, file: SchemeFile | None) -> tuple[Scheme, tuple[LayerRule, ...]]:
    """Return the scheme and the rules, with what their texts leave to `kv_encoder` and `kv_transforms`.

    Of a file nothing is left to `auto`. A rule of `kv_layers` wins over it.
    """
    transforms = schemes.parse_transforms(config.kv_transforms)

    def complete(scheme: Scheme, in_file: bool = False) -> Scheme:
        scheme = scheme.encoded_by(config.kv_encoder).transformed_by(transforms)
        return scheme.without_transforms() if in_file and transforms is None else scheme

    parsed = map(LayerRule.parse, filter(str.strip, config.kv_layers.split(";")))
    rules = (
        *(replace(rule, scheme=complete(rule.scheme, True)) for rule in _rules_of(file)),
        *(replace(rule, scheme=complete(rule.scheme)) for rule in parsed),
    )
    scheme = complete(file.usual, True) if file else complete(schemes.parse(config.kv_format))
    schemes.check_encoder(config.kv_encoder, (scheme, *(rule.scheme for rule in rules)))
    return scheme, rules


def _window(config: Config, file: SchemeFile | None) -> int | None:
    """Return the exact window's tokens that are asked for; None where neither the option nor the file names any."""
    if config.kv_window is not None or file is None:
        return config.kv_window
    if file.window is not None and file.window > MAX_WINDOW:
        raise ConfigError(f"{file.path}: kv_window must lie in [0, {MAX_WINDOW}], not {file.window}")
    return file.window


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """What is requested of a cache and of attention over it."""

    scheme: Scheme
    """The scheme of all layers without a rule."""
    scheme_file: SchemeFile | None
    """The file that `scheme` and the first rules come from, if kv_format names one."""
    layer_rules: tuple[LayerRule, ...]
    """Other schemes for some layers; a later rule wins."""
    dtype: str | None
    """Compute dtype, None where the hardware decides."""
    page_size: int | None
    """Tokens per page, None where the plan decides."""
    packing: str | None
    """How planes lie in a page, None where the plan decides."""
    prefill_backend: str | None
    """Backend of PREFILL and EXTEND, None for any."""
    decode_backend: str | None
    """Backend of DECODE and VERIFY, None for any."""
    allow_staging: bool
    kv_memory: int | None
    """Bytes of the pool, None where the memory plan decides."""
    offload: OffloadSpec | None
    """The host tier, if one is requested."""
    max_running: int
    max_context: int | None
    token_budget: int | None
    prefix_cache: bool
    graphs: bool
    piecewise: bool
    """Whether steps with prompts are recorded, as far as they can be."""
    deterministic: bool
    watches_fidelity: bool
    window: int | None
    """Tokens that a query reads in the compute dtype: those nearer than this; None where the plan decides."""
    sinks: int
    """First tokens that all queries read in the compute dtype, before they are rounded up to pages."""
    state_format: str
    """Of recurrent states."""
    state_interval: int
    """Tokens of a prompt after which a snapshot of states is kept, 0 for none inside prompts."""
    max_drafts: int
    """Most draft tokens of a request in a step; 0 where nobody drafts."""
    fixed_drafts: int | None
    """Their number where the user names one."""
    chooses_transforms: bool
    """Whether the plan decides on the transforms of K of schemes that name none."""

    @classmethod
    def from_config(cls, config: Config) -> CacheSpec:
        """Parse the options of `config`; raise ConfigError for an unknown scheme or a malformed rule."""
        prefill, decode = config.backend_for(False), config.backend_for(True)
        file = scheme_file.load(config.kv_format) if scheme_file.is_file(config.kv_format) else None
        scheme, rules = _schemes(config, file)
        return cls(
            scheme=scheme,
            scheme_file=file,
            layer_rules=rules,
            dtype=None if config.dtype == AUTO else config.dtype,
            page_size=config.page_size,
            packing=config.packing,
            # `auto` and a missing option mean the same from here on.
            prefill_backend=None if prefill == AUTO else prefill,
            decode_backend=None if decode == AUTO else decode,
            allow_staging=config.allow_staging,
            kv_memory=config.kv_memory_bytes,
            offload=config.offload,
            max_running=config.max_running,
            max_context=config.max_context,
            token_budget=config.token_budget,
            prefix_cache=config.prefix_cache,
            graphs=config.graphs,
            # Ranks of a divided model compute them kernel by kernel, and one that runs as it is written calls no
            # operators (engine/piecewise.py).
            piecewise=config.graphs and config.compile and config.tp == 1,
            deterministic=config.deterministic,
            watches_fidelity=bool(config.watch_fidelity),
            window=_window(config, file),
            sinks=config.kv_sinks,
            state_format=config.state_format,
            state_interval=config.state_interval,
            max_drafts=config.drafts.tokens or MAX_DRAFTS if config.drafts else 0,
            fixed_drafts=config.drafts.tokens if config.drafts else None,
            chooses_transforms=schemes.parse_transforms(config.kv_transforms) is None,
        )

    @property
    def requires_window(self) -> bool:
        """Whether an exact window is not left to the plan: it is given, or first tokens are to be read exactly."""
        return self.window is not None or self.sinks > 0

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """All schemes that are in use, each once."""
        return tuple(dict.fromkeys((self.scheme, *(rule.scheme for rule in self.layer_rules))))

    def scheme_by_layer(self, layers: int) -> tuple[Scheme, ...]:
        """Return the scheme of each of `layers` layers; raise ConfigError for a rule or a file about others."""
        if self.scheme_file:
            self.scheme_file.check(layers)
        result = [self.scheme] * layers
        for rule in self.layer_rules:
            for layer in rule.indices(layers):
                result[layer] = rule.scheme
        return tuple(result)

    def compute_dtype(self, hardware: Hardware) -> str:
        """Return the requested dtype, or the usual one of `hardware`."""
        # float32 is exact and fastest on a CPU
        return self.dtype or ("float32" if hardware.is_cpu else "bfloat16")

    def backend_for(self, decode: bool) -> str | None:
        """Return the backend requested for DECODE and VERIFY, or for PREFILL and EXTEND; None for any."""
        return self.decode_backend if decode else self.prefill_backend


def _rules_of(file: SchemeFile | None) -> Iterator[LayerRule]:
    """Yield the rules that a file amounts to, one for each scheme but the usual one."""
    by_scheme: dict[Scheme, list[int]] = {}
    for layer, scheme in file.layers.items() if file else ():
        if file and scheme != file.usual:
            by_scheme.setdefault(scheme, []).append(layer)
    yield from (LayerRule.of(layers, scheme) for scheme, layers in by_scheme.items())
