"""What an evaluation measures and finds: its sizes, the schemes it compares, and the report as data, text and plot.

A field's doc is its command-line help, as in config.py. Only the plot needs matplotlib, which is optional.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from nibble.attention.planner.window_memory import LONG_REQUEST
from nibble.config import EXACT_STATES, Config, default_of, option, parse_settings
from nibble.engine.certificate import format_length
from nibble.errors import ConfigError

RECALL_LENGTHS = (1024, 2048, 4096, 8192)
LAYERS_MARK, OPTIONS_MARK = "@", ":"
OPTIONS_BEGIN = re.compile(rf"{OPTIONS_MARK}(?=\s*[a-z][a-z_-]*=)")
"""A scheme may have a colon too, between two formats."""
YARDSTICK = Config(model="").kv_format
"""What quality is compared with, unless another scheme is asked for: what Config takes by default."""
LEAST = {
    "tokens": 2, "skip": 0, "window": 2, "stride": 1, "recall_cases": 0, "recall_per_context": 1,
    "attention_tokens": 0, "request_tokens": 1, "limit": 1, "num_fewshot": 0,
}  # fmt: skip
"""The smallest values of sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What to measure, and on how much. Everything that is drawn follows from `seed`."""

    tokens: int = option(8192, "Tokens of the text that are scored.")
    skip: int = option(0, "Tokens of the text before those that are scored.")
    window: int | None = option(
        None, "Tokens of a window; the model's context, or as much as 1 GiB of logits."
    )
    stride: int | None = option(
        None, "Tokens scored in each window after the first; window - 1, if left out."
    )
    recall_cases: int = option(8, "Recall questions at each context length; 0 for none.")
    recall_lengths: tuple[int, ...] = option(
        (), "Context lengths of recall; 1024 to 8192 as the model allows."
    )
    recall_per_context: int = option(
        1,
        "Recall questions about each context, which is then computed once and read from the prefix cache; 1: a context "
        "for each question.",
    )
    attention_tokens: int = option(
        1024, "Tokens over which the attention error of each layer is taken; 0: none."
    )
    request_tokens: int = option(
        LONG_REQUEST, "Tokens of a request whose bytes are reported; no more than the model's context."
    )
    yardstick: str = option(YARDSTICK, "The scheme that all others are compared with.")
    seed: int = option(0, "Seed of the recall questions.")
    tasks: tuple[str, ...] = option(
        (), "Tasks of lm-eval, as gsm8k,arc_easy; names, YAML files, or folders of these."
    )
    limit: int | None = option(None, "Most questions of each task; all, if left out.")
    num_fewshot: int | None = option(None, "Examples before each question; what the task says, if left out.")
    apply_chat_template: bool = option(False, "Put questions of tasks into the model's chat template.")
    gen_kwargs: str = option(
        "", "How tasks' answers are generated, as temperature=0.6,top_p=0.95,do_sample=true; what tasks say."
    )
    metadata: str = option(
        "",
        'What tasks need to know, in JSON, as RULER\'s {"max_seq_lengths": [32768]}; the tokenizer they get.',
    )

    def __post_init__(self) -> None:
        # Callers may give a list, and a frozen dataclass is to be hashable.
        object.__setattr__(self, "recall_lengths", tuple(self.recall_lengths))
        if not isinstance(self.task_metadata, dict):
            raise ConfigError(f"metadata must be a JSON object, not {self.metadata!r}")
        tasks = (name.strip() for names in self.tasks for name in names.split(","))
        object.__setattr__(self, "tasks", tuple(dict.fromkeys(filter(None, tasks))))
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} must be at least {least}, not {value}")
        if self.window and self.stride and self.stride >= self.window:
            raise ConfigError(f"stride {self.stride} must be smaller than the window of {self.window} tokens")

    @property
    def task_metadata(self) -> Any:
        """Return `metadata` as data; raise ConfigError where it is no JSON."""
        try:
            return json.loads(self.metadata or "{}")
        except ValueError as error:
            raise ConfigError(f"metadata is no JSON ({error}): {self.metadata!r}") from error

    def lengths(self, max_context: int) -> tuple[int, ...]:
        """Return context lengths of recall; raise ConfigError where one that was asked for does not fit."""
        for length in self.recall_lengths:
            if length > max_context:
                raise ConfigError(
                    f"recall length {length} is more than the model's context of {max_context} tokens"
                )
        return self.recall_lengths or tuple(length for length in RECALL_LENGTHS if length <= max_context)


QUICK = Sizes(tokens=2048, recall_cases=4, recall_lengths=(1024,), attention_tokens=256)
"""A first impression, in about an eighth of the time."""
CERTIFIED = Sizes(tokens=16384, recall_cases=32)
"""What a certificate takes: more, since others rely on it."""


OF_ALL_SCHEMES = {"model", "revision", "download_dir", "kv_format", "kv_layers", "require_quality"}
"""Fields of Config that no entry has for itself."""
STATES = "state_format"
"""The field of Config that says how recurrent states are kept."""
_USUAL = {entry.name: default_of(entry) for entry in fields(Config)}


@dataclass(frozen=True, slots=True)
class Entry:
    """One scheme to measure: SCHEME, with layers as SCHEME@LAYERS, and options of its own as SCHEME:NAME=VALUE,...

    `nvfp4+rot`, `nvfp4@0,-1=fp8_e4m3`, `nvfp4:kv_scales=one,page_size=32`.
    """

    kv_format: str
    kv_layers: str = ""
    options: str = ""
    """Other fields of Config for this scheme alone."""

    def __post_init__(self) -> None:
        for name in parse_settings(self.options) if self.options else ():
            if name in OF_ALL_SCHEMES:
                raise ConfigError(
                    f"{name} is no option of a single scheme; {self.kv_format!r} may have others of the cache"
                )

    @classmethod
    def parse(cls, text: str) -> Entry:
        """Parse an entry's name; the layers follow --kv-layers."""
        head, *options = OPTIONS_BEGIN.split(text, maxsplit=1)
        scheme, mark, layers = head.partition(LAYERS_MARK)
        if not scheme.strip() or (mark and not layers.strip()) or head.endswith(OPTIONS_MARK):
            raise ConfigError(
                f"cannot read {text!r} as a scheme; write it as nvfp4, nvfp4{LAYERS_MARK}0,-1=fp8_e4m3 or "
                f"nvfp4{OPTIONS_MARK}kv_scales=one"
            )
        return cls(scheme.strip(), layers.strip(), "".join(options).strip())

    @classmethod
    def of(cls, config: Config) -> Entry:
        """Return what a config serves."""
        return cls(config.kv_format, config.kv_layers).with_states(config)

    @property
    def name(self) -> str:
        """Return the entry as it is written on the command line."""
        layers = f"{LAYERS_MARK}{self.kv_layers}" if self.kv_layers else ""
        return f"{self.kv_format}{layers}" + (f"{OPTIONS_MARK}{self.options}" if self.options else "")

    def config(self, base: Config) -> Config:
        """Return `base` with this scheme and its options."""
        options = parse_settings(self.options) if self.options else {}
        return replace(base, kv_format=self.kv_format, kv_layers=self.kv_layers, **options)

    def with_states(self, base: Config) -> Entry:
        """Return this entry with the format that `base` has for recurrent states, where that is not the usual one."""
        options = parse_settings(self.options) if self.options else {}
        if base.state_format == EXACT_STATES or STATES in options:
            return self
        return replace(self, options=",".join(filter(None, (self.options, f"{STATES}={base.state_format}"))))

    def alone(self, base: Config) -> Config:
        """Return `base` with this scheme and its options, and nothing else that `base` says of what is stored."""
        usual = {
            name: value
            for name, value in _USUAL.items()
            if name == STATES or (name.startswith("kv_") and name not in {"kv_memory", "kv_scales"})
        }
        # A host tier may store other bytes than the device.
        host_format = base.offload and base.offload.host_format
        return self.config(replace(base, hisparse="on" if host_format else base.hisparse, **usual))


COMBINATIONS = (
    "nvfp4_amax:kv_transforms=none,kv_window=0",
    "nvfp4:kv_transforms=none,kv_window=0",
    "nvfp4+kmean:kv_window=0",
    "nvfp4+rot:kv_window=0",
    "nvfp4+kmean+rot:kv_window=0",
    "nvfp4_amax+kmean+rot:kv_window=0",
    "nvfp4_amax:kv_transforms=none,kv_window=64",
    "nvfp4:kv_transforms=none,kv_window=64",
    "nvfp4@0,-1=fp8_e4m3:kv_transforms=none,kv_window=0",
)
"""Remedies for what naive 4-bit loses, alone and together; measured unless schemes are named. Few cost bytes."""
COMBINATIONS_OF_LATENTS = (
    "nvfp4_amax:kv_window=0",
    "nvfp4:kv_window=0",
    "nvfp4_amax:kv_window=64",
    "nvfp4:kv_window=64",
    "nvfp4_ds_mla_amax:kv_window=0",
    "nvfp4_ds_mla:kv_window=0",
    "nvfp4_ds_mla_amax:kv_window=64",
    "nvfp4_ds_mla:kv_window=64",
)
"""As COMBINATIONS; no transform is for latents."""


def parse_entries(names: Iterable[str]) -> tuple[Entry, ...]:
    """Return entries by name, each once, in the order given."""
    return tuple(dict.fromkeys(map(Entry.parse, names)))


SCHEMA = "nibble-eval-2"


@dataclass(frozen=True, slots=True)
class TaskScore:
    """What one metric of a task came to."""

    task: str
    metric: str
    """With its filter, where it has one: `exact_match strict-match`."""
    value: float
    stderr: float | None = None
    """Standard error of the value, over questions."""
    questions: int = 0
    difference: float | None = None
    """From the yardstick, over the same questions."""
    difference_stderr: float | None = None
    """Standard error of the difference: smaller than that of the value, since questions are the same."""

    @property
    def title(self) -> str:
        """Return the task and the metric."""
        return f"{self.task} {self.metric}"

    def __str__(self) -> str:
        return _with_error(self.value, self.stderr)


@dataclass(frozen=True, slots=True)
class SchemeResult:
    """What was measured of one scheme. Shares lie in [0, 1]."""

    name: str
    kv_format: str
    kv_layers: str
    bytes_per_token: int
    ratio: float
    """Bytes of the yardstick over those of the scheme."""
    scales: str
    perplexity: float
    bits_per_byte: float
    top1: float
    kl: float
    """KL(yardstick || scheme), in nats."""
    kl_p99: float
    recall: Mapping[int, float] = field(default_factory=dict)
    """Share of exact answers, by context length."""
    attention_error: tuple[float, ...] = ()
    """Relative, by layer."""
    tasks: tuple[TaskScore, ...] = ()
    options: str = ""
    """Options of this scheme alone."""
    scale_version: str = ""
    """Which KV scales it had."""
    sinks: tuple[str, ...] = ()
    """What calibration said of values beyond the scales: attention sinks that are clipped."""
    seconds: float = 0.0
    """What measuring took."""
    request_bytes: int = 0
    """Of a running request of `request_tokens` (Report.measured), the exact window and states included."""
    encoder: str = ""
    """How the block scales of its 4-bit formats are chosen."""
    transforms: str = ""
    """Of K, as kmean+rot."""
    exact_window: int = 0
    """Newest tokens that are read in the compute dtype."""
    state_format: str = ""
    """Of recurrent states; empty where the model has none."""

    @property
    def mean_recall(self) -> float | None:
        """Return the mean over lengths; None where it was not measured."""
        return sum(self.recall.values()) / len(self.recall) if self.recall else None

    @property
    def mean_attention_error(self) -> float | None:
        """Return the mean over layers; None where it was not measured."""
        return sum(self.attention_error) / len(self.attention_error) if self.attention_error else None


def _read_result(entry: Mapping[str, Any]) -> SchemeResult:
    names = {entry.name for entry in fields(SchemeResult)}
    values = {name: value for name, value in entry.items() if name in names}
    # JSON has lists only, and keys are text.
    values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    values["recall"] = {int(length): share for length, share in values.get("recall", {}).items()}
    values["tasks"] = tuple(TaskScore(**score) for score in values.get("tasks", ()))
    return SchemeResult(**values)


@dataclass(frozen=True, slots=True)
class Report:
    """An evaluation."""

    model: str
    yardstick: str
    results: tuple[SchemeResult, ...]
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Schemes that the model cannot take, with the reason."""
    measured: Mapping[str, Any] = field(default_factory=dict)
    """How much, and on what."""
    environment: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Report:
        """Return the report that as_dict() gave; fields of other versions are left out.

        Raises:
            KeyError, TypeError: It is none.
        """
        parts = {name: data.get(name, {}) for name in ("skipped", "measured", "environment")}
        return cls(data["model"], data["yardstick"], tuple(map(_read_result, data["results"])), **parts)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return context lengths at which recall was measured."""
        return tuple(sorted({length for result in self.results for length in result.recall}))

    def as_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        return {"schema": SCHEMA, **asdict(self)}

    def header(self) -> tuple[str, ...]:
        """Return the columns of the table."""
        recall = tuple(f"recall {format_length(length)}" for length in self.lengths)
        fixed = ("scheme", "bytes/token", "x fewer", "perplexity", "top-1", "KL")
        return (*fixed, *recall, "attention error", *self.task_titles)

    @property
    def task_titles(self) -> tuple[str, ...]:
        """Return the tasks that were run, each with its metric."""
        return tuple(dict.fromkeys(score.title for result in self.results for score in result.tasks))

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Yield the table's rows as text, the yardstick first."""
        for result in self.results:
            error = result.mean_attention_error
            # Lengths may differ where the model's context is short.
            recall = (f"{result.recall[n]:.0%}" if n in result.recall else "" for n in self.lengths)
            cost = (result.name, f"{result.bytes_per_token:,}", f"{result.ratio:.2f}")
            quality = (f"{result.perplexity:.4g}", f"{result.top1:.1%}", f"{result.kl:.2g}")
            scores = {score.title: str(score) for score in result.tasks}
            tasks = (scores.get(title, "") for title in self.task_titles)
            yield (*cost, *quality, *recall, "" if error is None else f"{error:.2%}", *tasks)

    def as_markdown(self) -> str:
        """Return the table, how it was measured, the attention error by layer, and what was skipped."""
        table = markdown_table(self.header(), self.rows())
        return "\n".join(
            (*table, "", self.caption(), *self._differences(), *self._layers(), *self._skipped())
        )

    def caption(self) -> str:
        """Return how to read the table."""
        text = self.measured
        where = ", ".join(f"{key} {value}" for key, value in self.environment.items())
        return (
            f"Model `{self.model}`; top-1, KL (nats) and attention error are against {self.yardstick}. "
            f"Perplexity over {text.get('scored', 0):,} tokens in windows of {text.get('window', 0):,}; "
            f"recall is the share of exact greedy answers, {text.get('recall_cases', 0)} questions a length"
            f"{_contexts(text)}; "
            f"attention error is the mean over layers, on {text.get('attention_tokens', 0):,} tokens. "
            f"{self._task_caption()}Measured with {where}."
        )

    def _task_caption(self) -> str:
        if not self.task_titles:
            return ""
        questions = {score.task: score.questions for result in self.results for score in result.tasks}
        counts = ", ".join(f"{task} {count:,}" for task, count in questions.items())
        return f"Tasks are lm-eval's ({counts} questions), ± one standard error. "

    def differences(self) -> Iterator[tuple[str, ...]]:
        """Yield, for each scheme and task, the difference from the yardstick, and how many standard errors it is."""
        for result in self.results[1:]:
            for score in result.tasks:
                if score.difference is not None:
                    error = score.difference_stderr
                    sigmas = f"{score.difference / error:+.1f}" if error else ""
                    yield (result.name, score.title, _with_error(score.difference, error, "+"), sigmas)

    def _differences(self) -> Iterator[str]:
        rows = tuple(self.differences())
        if rows:
            yield f"\nDifference from {self.yardstick} over the same questions:\n"
            yield from markdown_table(("scheme", "task", "difference", "standard errors"), iter(rows))

    def _layers(self) -> Iterator[str]:
        results = [result for result in self.results if result.attention_error]
        if results:
            yield "\nAttention error by layer:\n"
            header = ("scheme", *(f"layer {layer}" for layer in range(len(results[0].attention_error))))
            rows = ((r.name, *(f"{error:.2%}" for error in r.attention_error)) for r in results)
            yield from markdown_table(header, rows)

    def _skipped(self) -> Iterator[str]:
        if self.skipped:
            yield "\nSkipped:\n"
            # The first line says what is refused; the reasons of every backend follow it.
            yield from (f"- {name}: {reason.splitlines()[0]}" for name, reason in self.skipped.items())


def _contexts(measured: Mapping[str, Any]) -> str:
    """Return how many questions share a context, and the seed."""
    shared = measured.get("recall_per_context", 1)
    return (f", {shared} to a context" if shared > 1 else "") + f" (seed {measured.get('seed', 0)})"


def _with_error(value: float, stderr: float | None, sign: str = "") -> str:
    error = "" if stderr is None else f" ± {stderr:.2g}"
    return f"{value:{sign}.4g}{error}"


def markdown_table(header: tuple[str, ...], rows: Iterator[tuple[str, ...]], texts: int = 1) -> Iterator[str]:
    """Yield the lines of a table.

    Args:
        header: The titles of its columns.
        rows: The cells.
        texts: Columns of words, the first and the last ones; those between are figures.
    """
    yield f"| {' | '.join(header)} |"
    # Figures stand on the right, words on the left.
    yield "|---|" + "---:|" * (len(header) - texts) + "---|" * (texts - 1)
    yield from (f"| {' | '.join(row)} |" for row in rows)


MARKS = "os^vD<>pP*X"
INSTALL = "pip install matplotlib"


def require_matplotlib() -> None:
    """Raise ConfigError where matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"a plot needs matplotlib, which is not installed: {INSTALL}") from error


def write_plot(report: Report, path: Path) -> None:
    """Write a picture (its kind by the file's suffix: png, svg, pdf): KL and recall over bytes per token."""
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    panels = 2 if report.lengths else 1
    # Not pyplot, which would keep the figure and may open a window.
    figure = Figure(figsize=(4.6 * panels + 2.4, 4.2), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    _plot_kl(axes[0], report)
    if report.lengths:
        _plot_recall(axes[1], report)
    figure.legend(*axes[-1].get_legend_handles_labels(), loc="outside right upper", fontsize=8, frameon=False)
    # Without a date and random ids the same report gives the same file.
    stable = {"Date": None} if path.suffix == ".svg" else {}
    with matplotlib.rc_context({"svg.hashsalt": report.model}):
        try:
            figure.savefig(path, dpi=150, metadata=stable)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot write the plot {path}: {error}") from error


def _plot_kl(axes: Any, report: Report) -> None:
    """Draw the distance from the yardstick. The yardstick itself, at 0, is drawn on the axis below all others."""
    divergences = [result.kl for result in report.results if result.kl > 0]
    floor = min(divergences, default=1e-6) / 2
    _plot_points(axes, report, [max(result.kl, floor) for result in report.results])
    # The divergences of 8 and 4 bits differ by orders of magnitude.
    axes.set_yscale("log")
    axes.set_ylim(bottom=floor)
    label = f"KL from {report.yardstick}, nats per token"
    _label_axes(axes, label, "Next-token predictions: lower is better")


def _plot_recall(axes: Any, report: Report) -> None:
    shares = (result.recall.values() for result in report.results)
    _plot_points(axes, report, [100 * sum(values) / len(values) for values in shares])
    first, last = report.lengths[0], report.lengths[-1]
    span = f"{first:,} to {last:,}" if first != last else f"{first:,}"
    # A little beyond 0 and 100, so that marks there are not cut.
    axes.set_ylim(-3, 103)
    _label_axes(axes, "exact answers, %", f"Recall over {span} tokens: higher is better")


def _plot_points(axes: Any, report: Report, heights: Sequence[float]) -> None:
    """Draw one mark for each scheme, of its own colour and shape: schemes of the same bytes lie close together."""
    for index, (result, height) in enumerate(zip(report.results, heights, strict=True)):
        mark = MARKS[index % len(MARKS)]
        axes.plot(
            [result.bytes_per_token], [height], mark, label=result.name, color=f"C{index % 10}", markersize=7,
            alpha=0.8, clip_on=False, linestyle="none",
        )  # fmt: skip


def _label_axes(axes: Any, y: str, title: str) -> None:
    axes.set_xlabel("KV cache, bytes per token")
    axes.set_ylabel(y)
    axes.set_title(title, fontsize=10)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
