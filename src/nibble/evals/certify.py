"""Certifying: an evaluation of one scheme as it would be served, written down with all that it is true of.

What a certificate is, and when it counts, is in engine/certificate.py and engine/certificate_lookup.py.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from nibble import files, formats
from nibble.attention import backends
from nibble.attention.planner.evidence import versions
from nibble.config import Config
from nibble.engine import certificate_lookup
from nibble.engine.certificate import Certificate, Figures, format_length, percent
from nibble.engine.plan import EnginePlan, plan_engine
from nibble.errors import ConfigError
from nibble.evals.perplexity import BUILTIN
from nibble.evals.report import CERTIFIED, Entry, Report, SchemeResult, Sizes, markdown_table
from nibble.evals.run import MEASURED, Progress, evaluate
from nibble.formats import scheme as schemes

BYTES = 1 << 16
"""Of a certificate, at most: room is made sure of before the work."""
FEW_TOKENS, FEW_CASES = 4096, 32
"""Fewer scored tokens, or questions a length, get a note."""


def certify(
    config: Config,
    sizes: Sizes = CERTIFIED,
    text: Path | None = None,
    out: Path | None = None,
    progress: Progress | None = None,
) -> Certificate:
    """Measure what the cache of `config` costs in quality, and write the certificate.

    Args:
        config: What is to be served.
        sizes: What is measured.
        text: The text to score.
        out: The folder to write to; None: beside the model, or in the user's folder.
        progress: Is called as tokens are done.

    Raises:
        ConfigError: There is nothing to certify, nowhere to write it, or what is served cannot be had.
        WeightError: The checkpoint is missing or broken.
        CapacityError: The memory does not suffice.
    """
    plan = plan_engine(replace(config, require_quality=""))
    if certificate_lookup.is_unquantised(plan):
        raise ConfigError(
            f"a cache in {config.kv_format} is not quantised, so there is nothing to certify; "
            "name a scheme as nvfp4 or fp8_e4m3 (`nibble formats` lists them)"
        )
    if formats.get(schemes.parse(sizes.yardstick).base).plain is None:
        raise ConfigError(f"a certificate compares with an unquantised cache, and {sizes.yardstick} is none")
    folder = _writable_folder(out or certificate_lookup.folder_to_write(config.model))
    # The scheme is the config itself, with all that it says of a cache.
    report = evaluate(config, [Entry.of(config).name], sizes, text, progress, as_started=True)
    certificate = certificate_of(plan, report, _command(config, sizes, text))
    path = folder / f"{certificate_lookup.file_name(certificate.subject)}.json"
    files.write_atomic(path, certificate.as_json())
    files.write_atomic(path.with_suffix(".md"), as_markdown(certificate))
    return Certificate.read(path)


def _command(config: Config, sizes: Sizes, text: Path | None) -> str:
    """Return how to measure the same again."""
    arguments = [certificate_lookup.command_for(config)]
    for entry in fields(Sizes):
        value, name = getattr(sizes, entry.name), entry.name.replace("_", "-")
        if value == getattr(CERTIFIED, entry.name):
            continue
        values = value if isinstance(value, tuple) else (value,)
        arguments += (
            [f"--{name}"] if value is True else [f"--{name}={shlex.quote(str(one))}" for one in values]
        )
    return " ".join((*arguments, *([f"--text={shlex.quote(str(text))}"] if text else [])))


def _writable_folder(folder: Path) -> Path:
    """Return a folder that can be written; raise ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot write the certificate to {folder} ({error.strerror}); name another folder with --out"
        ) from error
    files.check_writable(folder / "certificate.json", "the certificate", BYTES)
    return folder


def certificate_of(plan: EnginePlan, report: Report, command: str) -> Certificate:
    """Return the certificate of a plan.

    Args:
        plan: Of the scheme.
        report: On the yardstick and the scheme.
        command: How to measure the same again.
    """
    yardstick, result = report.results
    subject = certificate_lookup.subject_of(plan, None)
    if subject.scales:
        subject = replace(subject, scales=result.scale_version)
    return Certificate(
        subject=subject,
        figures=_figures(yardstick, result),
        measured=dict(report.measured),
        environment=dict(report.environment) | _environment(plan),
        command=command,
        notes=tuple(_notes(yardstick, result, report.measured)),
    )


def _figures(yardstick: SchemeResult, result: SchemeResult) -> Figures:
    return Figures(
        kl=result.kl,
        kl_p99=result.kl_p99,
        perplexity=result.perplexity,
        yardstick_perplexity=yardstick.perplexity,
        top1=result.top1,
        recall=dict(result.recall),
        yardstick_recall=dict(yardstick.recall),
        attention_error=result.attention_error,
        bytes_per_token=result.bytes_per_token,
        yardstick_bytes=yardstick.bytes_per_token,
        sinks=result.sinks,
        tasks=tuple(asdict(score) for score in result.tasks),
    )


def _environment(plan: EnginePlan) -> dict[str, str]:
    """Return what the figures rest on, beside what a report says: when, who attended, and versions of all packages."""
    routes = dict.fromkeys(route.backend for route in plan.plan.routes)
    table = backends.available_backends()
    packages = versions(table[name] for name in routes if name in table)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "backends": ", ".join(routes),
        "packages": ", ".join(f"{name} {version}" for name, version in packages.items()),
    }


def _notes(yardstick: SchemeResult, result: SchemeResult, measured: Mapping[str, Any]) -> Iterator[str]:
    """Yield what weakens the figures."""
    if measured["text"] == BUILTIN:
        yield (
            "The text is the short one that comes with Nibble, on which a start measures KV scales too: name one of "
            "yours with --text FILE for figures that say more."
        )
    if measured["scored"] < FEW_TOKENS:
        yield f"Only {measured['scored']:,} tokens were scored: KL and perplexity of other text may differ."
    if result.recall and measured["recall_cases"] < FEW_CASES:
        share = percent(1 / measured["recall_cases"])
        yield f"Recall is of {measured['recall_cases']} questions a length, so one answer is {share}."
    if not result.recall:
        yield "Recall was not measured."
    if silent := [format_length(length) for length, share in yardstick.recall.items() if not share]:
        yield f"{yardstick.name} itself answers no recall question at {', '.join(silent)}: recall there says nothing."
    if result.scales == MEASURED:
        yield (
            "KV scales were measured as a start does it. Where a start measures others (on another machine, by another "
            "version), this certificate does not count: `nibble calibrate` keeps them in a file."
        )


# --- for people -------------------------------------------------------------------------------------------------------


def rows(certificate: Certificate) -> Iterator[tuple[str, str, str, str]]:
    """Yield the short table: a figure, the scheme's, the yardstick's, and what it says."""
    f, base = certificate.figures, certificate.yardstick
    yield "KL, mean", f"{f.kl:.3g}", "0", f"nats from {base}'s predictions, per token; 0.01 is hard to notice"
    yield "KL, 99th percentile", f"{f.kl_p99:.3g}", "0", "one token in a hundred is further off than this"
    ratio = percent(f.perplexity_ratio - 1, "+")
    yield "perplexity", f"{f.perplexity:.4g} ({ratio})", f"{f.yardstick_perplexity:.4g}", "lower is better"
    yield "same top token", percent(f.top1), "100 %", f"how often the likeliest next token is {base}'s"
    for length, share in sorted(f.recall.items()):
        best = percent(f.yardstick_recall.get(length, 0.0))
        what = "exact answers to look-ups among near-identical keys"
        yield f"recall at {format_length(length)}", percent(share), best, what
    if f.attention_error:
        mean = sum(f.attention_error) / len(f.attention_error)
        yield "attention error", percent(mean), "0 %", "of a layer's output, mean over layers"
    fewer = f"{f.yardstick_bytes / f.bytes_per_token:.2f} times fewer"
    yield "cache, bytes/token", f"{f.bytes_per_token:,}", f"{f.yardstick_bytes:,}", fewer
    for score in f.tasks:
        before = score["value"] - (score["difference"] or 0.0)
        yield (
            f"{score['task']} {score['metric']}",
            f"{score['value']:.4g}",
            f"{before:.4g}",
            "a task of lm-eval",
        )


def header(certificate: Certificate) -> tuple[str, str, str, str]:
    """Return the titles of the short table."""
    return "figure", certificate.subject.scheme, certificate.yardstick, "what it says"


def as_markdown(certificate: Certificate) -> str:
    """Return the certificate for people: the short table, what it is true of, layers, and how it was measured."""
    subject, measured, where = certificate.subject, certificate.measured, certificate.environment
    notes = "\n".join(f"- {note}" for note in (*certificate.figures.sinks, *certificate.notes))
    parts = [
        f"# {subject.model} with a KV cache in {subject.scheme}",
        f"{certificate.line[0].upper()}{certificate.line[1:]}.",
        "\n".join(markdown_table(header(certificate), rows(certificate), texts=2)),
        *([f"What to know:\n\n{notes}"] if notes else []),
        "## When it counts\n\nOnly while all of these are the same:",
        "\n".join(markdown_table(("what", "value"), _subject_rows(certificate), texts=2)),
        *_layers(certificate.figures.attention_error),
        "## How it was measured\n\n"
        f"{measured['scored']:,} tokens of {measured['text']} (SHA-256 {measured['text_sha256']}...) in windows of "
        f"{measured['window']:,}; {measured['recall_cases']} recall questions a length, seed {measured['seed']}; "
        f"attention error over {measured['attention_tokens']:,} tokens. On {where['hardware']}, {where['date']}, with "
        f"nibble {where['nibble']}, {where['packages']}; attention by {where['backends']}.",
        f"    {certificate.command}",
        "What the figures mean, and which are good: docs/evaluation.md.",
    ]
    return "\n\n".join(parts) + "\n"


def _subject_rows(certificate: Certificate) -> Iterator[tuple[str, str]]:
    subject = certificate.subject
    yield "config and weights", subject.weights
    yield "cache layout", f"{subject.layout} ({subject.scheme}, {subject.pages})"
    yield "KV scales", subject.scales or "none needed"
    yield "compute dtype", subject.dtype
    yield from ((name, str(value)) for name, value in subject.options.items())


def _layers(errors: tuple[float, ...]) -> Iterator[str]:
    if errors:
        pairs = ((str(layer), f"{error:.2%}") for layer, error in enumerate(errors))
        yield "## Attention error by layer"
        yield "\n".join(markdown_table(("layer", "error"), pairs))
