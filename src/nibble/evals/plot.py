"""The plot of an evaluation: quality against bytes per token.

The only user of matplotlib, which is optional.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nibble.errors import ConfigError
from nibble.evals.report import Report

MARKS = "os^vD<>pP*X"
INSTALL = "pip install 'nibble-llm[plot]'"


def require() -> None:
    """Raises ConfigError where matplotlib is missing: to be called before hours of measuring."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"a plot needs matplotlib, which is not installed: {INSTALL}") from error


def plot(report: Report, path: Path) -> None:
    """Writes a picture (its kind by the file's suffix: png, svg, pdf): KL and recall over bytes per token."""
    require()
    import matplotlib
    from matplotlib.figure import Figure

    panels = 2 if report.lengths else 1
    # Not pyplot, which would keep the figure and may open a window.
    figure = Figure(figsize=(4.6 * panels + 2.4, 4.2), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    _kl(axes[0], report)
    if report.lengths:
        _recall(axes[1], report)
    figure.legend(*axes[-1].get_legend_handles_labels(), loc="outside right upper", fontsize=8, frameon=False)
    # Without a date and random ids the same report gives the same file.
    stable = {"Date": None} if path.suffix == ".svg" else {}
    with matplotlib.rc_context({"svg.hashsalt": report.model}):
        try:
            figure.savefig(path, dpi=150, metadata=stable)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot write the plot {path}: {error}") from error


def _kl(axes: Any, report: Report) -> None:
    """Distance from the yardstick. The yardstick itself, at 0, is drawn on the axis below all others."""
    divergences = [result.kl for result in report.results if result.kl > 0]
    floor = min(divergences, default=1e-6) / 2
    _points(axes, report, [max(result.kl, floor) for result in report.results])
    # The divergences of 8 and 4 bits differ by orders of magnitude.
    axes.set_yscale("log")
    axes.set_ylim(bottom=floor)
    _label(axes, f"KL from {report.yardstick}, nats per token", "Next-token predictions: lower is better")


def _recall(axes: Any, report: Report) -> None:
    _points(
        axes, report, [100 * sum(result.recall.values()) / len(result.recall) for result in report.results]
    )
    first, last = report.lengths[0], report.lengths[-1]
    span = f"{first:,} to {last:,}" if first != last else f"{first:,}"
    # A little beyond 0 and 100, so that marks there are not cut.
    axes.set_ylim(-3, 103)
    _label(axes, "exact answers, %", f"Recall over {span} tokens: higher is better")


def _points(axes: Any, report: Report, heights: Sequence[float]) -> None:
    """One mark for each scheme, of its own colour and shape: schemes of the same bytes lie close together."""
    for index, (result, height) in enumerate(zip(report.results, heights, strict=True)):
        mark = MARKS[index % len(MARKS)]
        axes.plot(
            [result.bytes_per_token], [height], mark, label=result.name, color=f"C{index % 10}", markersize=7,
            alpha=0.8, clip_on=False, linestyle="none",
        )  # fmt: skip


def _label(axes: Any, y: str, title: str) -> None:
    axes.set_xlabel("KV cache, bytes per token")
    axes.set_ylabel(y)
    axes.set_title(title, fontsize=10)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
