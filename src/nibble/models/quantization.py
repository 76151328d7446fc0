"""Quantised weights of a checkpoint: how they are stored, and what serving does with them. No torch.

A checkpoint says in config.json (`quantization_config`), or in ModelOpt's own file, how each of its matrices is stored.
The bytes that follow from that are counted in weight_bytes.py.

Sources of the layouts: Transformers' `quantizers/`, compressed-tensors' `config/`, ModelOpt's `hf_quant_config.json`,
the AWQ and GPTQ papers' checkpoints (packed int32 words, scales of 16 bits, zeros of as many bits as the weights), and
OCP's MX formats (a byte of scale for 32 values).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from math import ceil
from typing import Any

from nibble.config import Config
from nibble.errors import ConfigError
from nibble.formats.scheme_file import MIXED_PRECISION, modelopt_layers
from nibble.hardware import Hardware, format_bytes
from nibble.kernels import import_problem
from nibble.kernels.weight_formats import (
    ARCHS,
    BITS,
    DISTRIBUTION,
    FULL_DTYPE,
    PACKAGE,
    Activations,
    WeightFormat,
)
from nibble.model_spec import ONLINE, StoredWeights
from nibble.models import activations as inputs

MODELOPT = "modelopt"
W4AFP8 = "w4afp8"
"""SGLang's name: experts in integers of 4 bits, other layers in blocks of FP8, activations in FP8."""
NO_ALGORITHM = (None, "", "NONE", "none")
"""ModelOpt's names for the weights' algorithm when only the KV cache is quantised."""
FULL = 2
"""Bytes of a value that is not quantised: BF16 or FP16."""


@dataclass(frozen=True, slots=True)
class MatrixFormat:
    """How a matrix of `rows` outputs and `columns` inputs is stored."""

    name: str
    bits: float
    """Of a value."""
    group: int = 0
    """Values of a row that share a scale; 0 for the whole row."""
    scale_bytes: float = 0
    """Of a group's scale and its zero."""
    block_rows: int = 1
    """Rows that share a group's scale."""
    matrix_bytes: int = 0
    """Of a scale for the whole matrix."""
    column_bytes: int = 0
    """Of an index for each column (GPTQ's `g_idx`)."""
    packed: WeightFormat | None = None
    """How it is kept on a device; None where it is always unpacked."""
    activations: Activations = Activations.NONE
    """How the checkpoint asks for its inputs."""

    def size(self, rows: int, columns: int) -> int:
        """Return the bytes of a matrix with its scales."""
        groups = ceil(columns / self.group) if self.group else 1
        scales = ceil(rows / self.block_rows) * groups * self.scale_bytes
        return ceil(rows * columns * self.bits / 8 + scales) + self.matrix_bytes + columns * self.column_bytes


def _fp8(group: int = 0, block_rows: int = 1) -> MatrixFormat:
    return MatrixFormat("fp8", 8, group, 4, block_rows, packed=WeightFormat("e4m3", group))


MXFP4 = MatrixFormat("mxfp4", 4, 32, 1, packed=WeightFormat("e2m1", 32, "e8m0"))
NVFP4 = MatrixFormat(
    "nvfp4", 4, 16, 1, matrix_bytes=8, packed=WeightFormat("e2m1", 16, "e4m3", has_global=True)
)
FP8_TENSOR = MatrixFormat("fp8", 8, matrix_bytes=8, packed=WeightFormat("e4m3"))
FP8_BLOCK = _fp8(128, 128)


@dataclass(frozen=True, slots=True)
class Rule:
    """The format of the matrices whose names a target matches."""

    targets: tuple[str, ...]
    """Names, patterns, or `Linear` for all; none for all."""
    format: MatrixFormat

    def covers(self, name: str) -> bool:
        """Whether the rule is about a module."""
        return not self.targets or "Linear" in self.targets or _matches(name, self.targets)


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a checkpoint stores its matrices."""

    method: str
    """Transformers' name of the method."""
    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = ()
    """Names and patterns of modules that are not quantised."""
    algorithm: str = ""
    """ModelOpt's name of what it did."""

    def format_of(self, name: str) -> MatrixFormat | None:
        """Return how a module's matrix is stored, None where it is not quantised."""
        if _matches(name, self.ignored):
            return None
        return next((rule.format for rule in self.rules if rule.covers(name)), None)

    @property
    def kind(self) -> str:
        """What the weights are, for people: `nvfp4`, `4 bits`."""
        return self.algorithm or ", ".join(dict.fromkeys(rule.format.name for rule in self.rules))


HEADS = ("lm_head", "embed_out", "output_layer")
"""Output layers, which most methods leave as they are, whether they say so or not."""


def parse(config: Mapping[str, Any]) -> Quantization | None:
    """Return how weights are quantised, by a `quantization_config`; None where they are not, or by another method."""
    reader = _READERS.get(str(config.get("quant_method") or ""))
    return reader(config) if reader else None


def _names(*values: Any) -> tuple[str, ...]:
    return tuple(str(name) for value in values for name in value or ())


def _plain(method: str, format: MatrixFormat, config: Mapping[str, Any], *keys: str) -> Quantization:
    return Quantization(method, (Rule((), format),), (*_names(*(config.get(key) for key in keys)), *HEADS))


def _read_fp8(config: Mapping[str, Any]) -> Quantization:
    block = config.get("weight_block_size")
    format = replace(_fp8(block[1], block[0]) if block else FP8_TENSOR, activations=inputs.of_scheme(config))
    return _plain("fp8", format, config, "modules_to_not_convert", "ignored_layers")


def _read_w4afp8(config: Mapping[str, Any]) -> Quantization:
    format, group = replace(FP8_BLOCK, activations=Activations.GROUP), int(config.get("group_size") or 128)
    others = _plain(W4AFP8, format, config, "modules_to_not_convert", "ignored_layers", "ignore")
    experts = MatrixFormat("4 bits", 4, group, 4, packed=WeightFormat("uint4", group))
    return replace(others, rules=(Rule((r"re:.*\.experts\..*",), experts), *others.rules))


def _read_mxfp4(config: Mapping[str, Any]) -> Quantization:
    quantization = _plain("mxfp4", MXFP4, config, "modules_to_not_convert")
    # gpt-oss' list of what is left alone names all but the experts, which are all that there is of it.
    return Quantization("mxfp4", (Rule(("re:.*experts.*",), MXFP4),), quantization.ignored)


def _read_integers(config: Mapping[str, Any]) -> Quantization:
    """AWQ and GPTQ: groups of a row with a scale of 16 bits and a zero of as many bits as the weights."""
    method = str(config["quant_method"])
    bits, group = int(config.get("bits") or config.get("w_bit") or 4), int(config.get("group_size") or 128)
    index = 4 if method == "gptq" else 0
    # GPTQ writes zero points of symmetric weights too.
    has_zero = not config.get("sym") if method == "gptq" else config.get("zero_point", True)
    packed = None if config.get("desc_act") else _integers(bits, max(group, 0), has_zero=bool(has_zero))
    format = MatrixFormat(
        f"{bits} bits", bits, max(group, 0), 2 + bits / 8, column_bytes=index, packed=packed
    )
    return _plain(method, format, config, "modules_to_not_convert")


def _integers(bits: int, group: int, *, has_zero: bool) -> WeightFormat | None:
    kind = f"uint{bits}"
    return WeightFormat(kind, group, has_zero=has_zero) if kind in BITS else None


def _read_bitsandbytes(config: Mapping[str, Any]) -> Quantization:
    """NF4 and FP4 in blocks of 64 with a scale of 32 bits, or of 8 bits; LLM.int8 with a scale a row."""
    if config.get("load_in_8bit"):
        format = MatrixFormat("8 bits", 8, 0, 4)
    else:
        double = config.get("bnb_4bit_use_double_quant")
        format = MatrixFormat("4 bits", 4, 64, 1 + 4 / 256 if double else 4)
    return _plain("bitsandbytes", format, config, "llm_int8_skip_modules")


def _read_compressed_tensors(config: Mapping[str, Any]) -> Quantization | None:
    rules = tuple(_rules(config.get("config_groups") or {}))
    return Quantization("compressed-tensors", rules, _names(config.get("ignore"))) if rules else None


def _rules(groups: Mapping[str, Any]) -> Iterator[Rule]:
    """Yield the rules of compressed-tensors' `config_groups`; of ModelOpt's too, which have the same form."""
    for group in groups.values():
        if weights := group.get("weights"):
            activations = inputs.of_group(group.get("input_activations"))
            format = replace(_group_format(weights), activations=activations)
            yield Rule(_names(group.get("targets")), format)


def _group_format(weights: Mapping[str, Any]) -> MatrixFormat:
    bits, group = int(weights.get("num_bits") or 8), int(weights.get("group_size") or 0)
    strategy, floats = weights.get("strategy"), weights.get("type") == "float"
    if floats and bits == 4:
        return MXFP4 if group == 32 else NVFP4
    name = f"fp{bits}" if floats else f"{bits} bits"
    symmetric, ordered = weights.get("symmetric", True), weights.get("actorder") in (None, "weight", "static")
    packed = _integers(bits, max(group, 0), has_zero=not symmetric) if ordered else None
    if floats:
        packed = WeightFormat("e4m3", group, "e8m0" if group == MXFP4.group else "") if bits == 8 else None
    if strategy == "block" and (block := weights.get("block_structure")):
        return MatrixFormat(
            name, bits, block[1], 4, block[0], packed=packed and replace(packed, group=block[1])
        )
    if strategy == "tensor":
        return MatrixFormat(name, bits, matrix_bytes=4, packed=packed)
    zero = 0 if symmetric else bits / 8
    return MatrixFormat(name, bits, max(group, 0), 2 + zero, packed=packed)


_ALGORITHMS = {
    "FP8": replace(FP8_TENSOR, activations=Activations.TENSOR),
    "FP8_PER_CHANNEL_PER_TOKEN": replace(_fp8(), activations=Activations.TOKEN),
    "FP8_PB_WO": FP8_BLOCK,
    "FP8_PB_REAL": FP8_BLOCK,
    "NVFP4": NVFP4,
    "W4A8_NVFP4_FP8": NVFP4,
    "W4A16_NVFP4": NVFP4,
    "NVFP4_AWQ": replace(NVFP4, packed=None),  # its inputs are smoothed
    "W4A16_AWQ": MatrixFormat("4 bits", 4, 128, 2),
    "W4A8_AWQ": MatrixFormat("4 bits", 4, 128, 2),
    "W8A16": MatrixFormat("8 bits", 8, 0, 2),
    "MXFP8": MatrixFormat("mxfp8", 8, 32, 1),
    "MXFP4": MXFP4,
    "W4A8_MXFP4_FP8": MXFP4,
}
"""ModelOpt's names of algorithms."""


def modelopt_algorithm(entry: Mapping[str, Any]) -> Any:
    """Return the weights' algorithm that ModelOpt declares, None where it names KV formats by layer and no weights."""
    algorithm = entry.get("quant_algo")
    by_layer = entry.get("quantized_layers") or entry.get("config_groups")
    # Such an entry says MIXED_PRECISION so that engines look for the map of layers.
    return None if algorithm == MIXED_PRECISION and modelopt_layers(entry) and not by_layer else algorithm


def _read_modelopt(config: Mapping[str, Any]) -> Quantization | None:
    """Return what ModelOpt says, in config.json or its own file; in its older form nested."""
    entry = {**config, **(config.get("quantization") or {})}
    algorithm = modelopt_algorithm(entry)
    if algorithm in NO_ALGORITHM:
        return None
    ignored = _names(entry.get("exclude_modules"), entry.get("ignore"))
    layers = entry.get("quantized_layers") or {}
    rules = [
        Rule((name,), _ALGORITHMS.get(str(x.get("quant_algo")), FP8_TENSOR)) for name, x in layers.items()
    ]
    rules = rules or [*_rules(entry.get("config_groups") or {})]
    rules = rules or [Rule((), _ALGORITHMS.get(str(algorithm), FP8_TENSOR))]
    return Quantization(MODELOPT, tuple(rules), (*ignored, *HEADS), str(algorithm))


_READERS = {
    "fp8": _read_fp8,
    "mxfp4": _read_mxfp4,
    W4AFP8: _read_w4afp8,
    "awq": _read_integers,
    "gptq": _read_integers,
    "bitsandbytes": _read_bitsandbytes,
    "compressed-tensors": _read_compressed_tensors,
    MODELOPT: _read_modelopt,
}


def _matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns means a module: a regular expression after `re:`, a glob, or a part of its path."""
    # Checkpoints of multimodal models have their text model's layers under another prefix.
    name = name.replace("language_model.", "")
    return any(_is_match(name, pattern.replace("language_model.", "")) for pattern in patterns)


def _is_match(name: str, pattern: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    if "*" in pattern:
        # A glob for a module is also one for what is in it.
        return (
            fnmatchcase(name, pattern)
            or fnmatchcase(name, f"{pattern}.*")
            or fnmatchcase(name, f"*.{pattern}")
        )
    return f".{pattern}." in f".{name}."


# What serving does with them

EXPERTS_ARCH = 80
"""The first compute capability that multiplies bfloat16, as kernels/experts does."""
_PACKAGES = {
    "fp8": ("accelerate", "kernels"),
    "mxfp4": ("accelerate", "kernels"),
    "awq": ("accelerate", "gptqmodel"),
    "gptq": ("optimum", "gptqmodel"),
    "bitsandbytes": ("accelerate", "bitsandbytes"),
}
"""Packages with which Transformers loads a method's weights, besides its own."""
READABLE = frozenset({"fp8", "mxfp4", "awq", "gptq", "compressed-tensors", MODELOPT, W4AFP8, ONLINE})
"""Methods whose weights Nibble unpacks itself (models/unpack.py)."""
_ALWAYS_UNPACKED = frozenset({"compressed-tensors", MODELOPT, W4AFP8, ONLINE})
"""Those that Transformers does not keep as they are, whatever the machine."""
READABLE_ALGORITHMS = frozenset({
    "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "FP8_PB_REAL", "NVFP4", "W4A8_NVFP4_FP8", "W4A16_NVFP4",
    "NVFP4_AWQ", MIXED_PRECISION,
})  # fmt: skip
"""ModelOpt's names of algorithms whose weights are read."""
LARGER = 1.25
"""Times what is stored, from which on packed weights, some of which are unpacked, are left to Transformers."""
_CT_FORMATS = frozenset({
    "dense", "naive-quantized", "float-quantized", "int-quantized", "pack-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision",
})  # fmt: skip
"""Names by compressed-tensors of how matrices are stored."""
_WORD_BITS = (2, 4, 8)
"""Of integers that fill words without a rest."""


def unreadable(entry: Mapping[str, Any]) -> str:
    """Return what of a quantisation cannot be read, in words; empty if nothing.

    Args:
        entry: A `quantization_config` whose method is READABLE, ModelOpt's with what its own file says.
    """
    method, bits = entry.get("quant_method"), int(entry.get("bits") or entry.get("w_bit") or 4)
    if method == MODELOPT:
        entry = {**entry, **(entry.get("quantization") or {})}
        layers = (entry.get("quantized_layers") or {}).values()
        algorithms = {modelopt_algorithm(entry), *(layer.get("quant_algo") for layer in layers)}
        return ", ".join(sorted(str(x) for x in algorithms if x not in {*NO_ALGORITHM, *READABLE_ALGORITHMS}))
    if method == "compressed-tensors":
        formats = {
            entry.get("format"),
            *(x.get("format") for x in (entry.get("config_groups") or {}).values()),
        }
        unknown = {str(x) for x in formats if x and x not in _CT_FORMATS}
        sparsity = (entry.get("sparsity_config") or {}).get("format")
        return ", ".join(sorted({*unknown, *({str(sparsity)} if sparsity not in (None, "dense") else ())}))
    if method == "awq":
        version = str(entry.get("version") or "gemm").lower()
        return "" if (bits, version) == (4, "gemm") else f"{bits} bits in the layout {version!r}"
    return f"{bits} bits" if method == "gptq" and bits not in _WORD_BITS else ""


def require_readable(stored: StoredWeights | None) -> None:
    """Raise ConfigError for weights in a form that cannot be read."""
    if stored and stored.unreadable:
        raise ConfigError(
            f"this checkpoint holds weights of {stored.method} that cannot be read: {stored.unreadable}; use another "
            "quantisation of the model, or its BF16 checkpoint (its KV scales may be given with --kv-scales FILE)"
        )


def quantization_entry(config: Any) -> dict[str, Any]:
    """Return what a model's config says of its quantisation, as a dict that may be empty."""
    entry = getattr(config, "quantization_config", None) or {}
    return dict(entry if isinstance(entry, dict) else entry.to_dict())


class Handling(StrEnum):
    """What becomes of quantised weights in memory."""

    PACKED = "packed"  # matrices as they are stored
    EXPERTS = "experts"  # experts as they are stored, linear layers unpacked
    UNPACKED = "unpacked"  # to the compute dtype
    TRANSFORMERS = "transformers"  # what Transformers makes of them, with packages for the method


@dataclass(frozen=True, slots=True)
class Weights:
    """Quantised weights in memory."""

    stored: StoredWeights
    full: int
    """Bytes in the compute dtype."""
    handling: Handling
    why: str = ""
    """Why they are not packed, where that is not how things are on a CPU."""

    @property
    def bytes(self) -> int:
        """Bytes in memory."""
        sizes = {
            Handling.PACKED: self.stored.packed,
            Handling.EXPERTS: self.stored.packed_experts,
            Handling.UNPACKED: self.full,
        }
        return sizes.get(self.handling, self.stored.bytes)


def plan_weights(
    config: Config, stored: StoredWeights, full: int, dtype: str, hardware: Hardware, *, here: bool
) -> Weights:
    """Decide what becomes of quantised weights.

    Args:
        config: What is requested.
        stored: As the checkpoint has them.
        full: Bytes in the compute dtype.
        dtype: The compute dtype.
        hardware: The machine.
        here: Whether it is this machine, with the packages that are installed; another is taken to have all of them.

    Raises:
        ConfigError: They are to be packed, and cannot be.
    """
    packed, why = (
        config.quantized_weights == Handling.PACKED,
        _packed_blocker(config, stored, full, dtype, hardware),
    )
    has_linears, has_experts = stored.packed < stored.packed_experts, stored.packed_experts < full
    if has_experts and not hardware.is_cpu:
        why = why or _experts_blocker(hardware, here=here)
    missing = import_problem(PACKAGE) if here and has_linears and not hardware.is_cpu else None
    if missing:
        missing = f"{DISTRIBUTION} {missing} here, with which they would take {format_bytes(stored.packed)}"
    if packed and (why or missing):
        raise ConfigError(f"--quantized-weights packed cannot be served: {why or missing}; leave it out")
    if stored.method not in READABLE:
        return Weights(stored, full, Handling.TRANSFORMERS)
    if config.quantized_weights == Handling.UNPACKED or (hardware.is_cpu and not packed):
        return Weights(stored, full, Handling.UNPACKED)
    handling = Handling.UNPACKED
    if not why and not missing:
        handling = Handling.PACKED
    elif not why and has_experts:
        handling = Handling.EXPERTS
    others = stored.method not in _ALWAYS_UNPACKED and not (
        here and any(map(import_problem, _PACKAGES[stored.method]))
    )
    weights = Weights(stored, full, handling, why or missing or "")
    # Transformers keeps more packed, where it has the packages.
    is_large = handling is Handling.UNPACKED or weights.bytes > LARGER * stored.bytes
    return replace(weights, handling=Handling.TRANSFORMERS) if others and is_large and not packed else weights


def _packed_blocker(config: Config, stored: StoredWeights, full: int, dtype: str, hardware: Hardware) -> str:
    """Return why weights cannot be kept packed on a machine, whatever is installed; empty if they can."""
    if stored.method not in READABLE:
        return f"weights of {stored.method} are loaded by Transformers"
    if stored.packed >= full:
        return f"no kernels multiply {stored.title} weights of these shapes in {dtype}"
    if hardware.is_cpu:
        return ""
    if config.deterministic:
        return "with --deterministic their kernels would sum in another order for other batches"
    if dtype == FULL_DTYPE or hardware.arch not in ARCHS:
        return f"{DISTRIBUTION} has no kernels for {dtype} on SM{hardware.arch}"
    return ""


def _experts_blocker(hardware: Hardware, *, here: bool) -> str:
    """Return why experts cannot be kept packed on a GPU; empty if they can."""
    if hardware.arch < EXPERTS_ARCH:
        return f"kernels of packed experts need SM{EXPERTS_ARCH}"
    problem = import_problem("triton") if here else None
    return f"triton {problem} here" if problem else ""


def notes(weights: Weights, dtype: str, hardware: Hardware, *, here: bool) -> Iterator[str]:
    """Yield what is to be known of quantised weights: their bytes, and what serving does with them.

    Args:
        weights: From plan_weights().
        dtype: The compute dtype.
        hardware: The machine.
        here: Whether it is this machine.
    """
    stored = weights.stored
    title, other = f"weights in {stored.title}", f"{format_bytes(weights.full)} in {dtype}"
    if weights.handling is Handling.PACKED:
        yield (
            f"{title}: {format_bytes(weights.bytes)}, multiplied as they are packed {multiplier(weights, hardware)}; "
            f"{format_bytes(stored.bytes)} as stored, {other}"
        )
    elif weights.handling is Handling.EXPERTS:
        yield (
            f"{title}: {format_bytes(weights.bytes)}, experts multiplied as they are packed, and others unpacked "
            f"({weights.why}); {format_bytes(stored.bytes)} as stored, {other}"
        )
    elif weights.handling is Handling.TRANSFORMERS:
        yield f"{title}: {format_bytes(stored.bytes)} as stored, {other}"
    else:
        why = f" ({weights.why})" if weights.why else ""
        yield f"{title}: {other}, as they are unpacked here{why}; {format_bytes(stored.bytes)} as stored"
    if stored.unreadable:
        yield f"{title} are not served: {stored.unreadable} cannot be read"
    elif weights.handling is Handling.TRANSFORMERS:
        packages = _PACKAGES.get(stored.method, ())
        missing = [name for name in packages if import_problem(name)] if here else packages
        needs = f", and needs {_listing(missing)}" if missing else ""
        yield f"serving {title}: Transformers loads them{needs}; not tested with Nibble"


def multiplier(weights: Weights, hardware: Hardware) -> str:
    """Return by what packed matrices are multiplied."""
    if hardware.is_cpu:
        return "by their definition, slowly"
    stored = weights.stored
    has_linears, has_experts = stored.packed < stored.packed_experts, stored.packed_experts < weights.full
    experts = "by Nibble's own kernels" if has_experts else ""
    linears = f"by {DISTRIBUTION}" if has_linears else ""
    return f"{linears}, experts {experts}" if linears and experts else linears or experts


def _listing(names: Sequence[str]) -> str:
    return " and ".join(name.replace("_", "-") for name in names)
