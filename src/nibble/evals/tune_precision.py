"""One run of `nibble tune-precision`: measure on the end of a text, choose, write the file, verify on the beginning.

Between both lies what scales are measured on, where a checkpoint has none: no token is verified that was used before.

The exact window is chosen with the formats. What codes of a single layer lose is measured with the default window,
since they act on far tokens only. Then the best formats beside each window are measured as a whole, over a text as long
as the request that the window's bytes are spread over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from nibble import formats
from nibble.attention import backends
from nibble.attention.planner.plan import Plan
from nibble.cache.scales import KVScales
from nibble.config import Config
from nibble.engine.llm import LLM
from nibble.engine.parallel_plan import require_one_gpu
from nibble.engine.plan import EnginePlan, plan_engine
from nibble.engine.scale_source import Origin, find_source, resolve_scales
from nibble.errors import ConfigError
from nibble.evals import perplexity, run
from nibble.evals.perplexity import CALIBRATION_TOKENS, Window
from nibble.evals.precision import (
    Assignment,
    Candidate,
    Measurement,
    Progress,
    Search,
    Target,
    WindowOption,
    candidates,
    stored_streams,
)
from nibble.evals.precision_report import Goal, LayerChoice, Outcome
from nibble.evals.report import SchemeResult, Sizes
from nibble.formats import scheme as schemes
from nibble.formats import scheme_file
from nibble.formats.scheme import Scheme
from nibble.hardware import Hardware
from nibble.model_spec import Stream
from nibble.models.checkpoint import download

WINDOWS = (64, 96, 128, 160, 192, 224, 256)
"""Exact windows that are tried where none is asked for, beside none: the default and a few longer ones."""
FAR = 4
"""Text is computed in pieces of so many exact windows: in shorter ones hardly any token would be far."""


@dataclass(frozen=True, slots=True)
class _Text:
    """The parts of a text."""

    searched: tuple[Window, ...]
    """What candidates are measured on."""
    request: tuple[Window, ...]
    """What exact windows are measured on."""
    context: int
    """Tokens of the request that their bytes are spread over; the text may have fewer."""
    calibration: str
    name: str
    digest: str

    def facts(self, goal: Goal) -> dict[str, Any]:
        """Return on how much of what is measured."""
        return {
            "text": self.name,
            "text_sha256": self.digest,
            "tokens": sum(window.scored for window in self.searched),
            "window": max(len(window.ids) for window in self.searched),
            "verify_tokens": goal.verify_tokens,
            "context": self.context,
        }


def tune(
    config: Config,
    goal: Goal,
    out: Path,
    *,
    text: Path | None = None,
    hardware: Hardware | None = None,
    command: str = "",
    progress: Progress | None = None,
) -> Outcome:
    """Choose a scheme for each layer, write it to a file, and measure it as a whole.

    Args:
        config: How the model is served, but for the scheme.
        goal: What is searched for.
        out: The file.
        text: To measure on; the model's heldout.txt if left out.
        hardware: Another machine that the scheme is for; None for this one. Everything is measured on this one.
        command: What was typed, for the file.
        progress: Is called as passes are done.

    Raises:
        ConfigError: The goal cannot be reached, or the text is too short.
    """
    require_one_gpu(config, "tune-precision")
    content = perplexity.read_text(text, config.model).content
    plan = plan_engine(replace(config, kv_format=_plain(config), kv_layers=""))
    here = Target(config, plan.model_spec, plan.hardware, backends.available_backends())
    trials = _trials(here, goal)
    here = replace(here, window=_usual_window(here, trials))
    there = here if hardware is None else replace(here, hardware=hardware, backends=backends.all_backends())
    _check_far(min(goal.window, goal.tokens, plan.model_spec.max_context), here.window or 0)
    # Compiling would take longer than the few steps.
    llm = LLM(**asdict(replace(plan.config, compile=False, graphs=False)))
    try:
        parts = _split(llm, plan, content, goal, text)
        measurement = Measurement(llm.engine.runner.model, here, scales_for(llm, plan, parts.calibration))
        dropped = measurement.without_scales(trials)
        losses = measurement.losses([x for x in trials if x not in dropped], parts.searched, progress)
        search = Search(there, losses, {f"{x.stream.name} in {x.name}": why for x, why in dropped.items()})
        options = _windows(measurement, search, goal, parts, progress)
    finally:
        llm.close()
    assignment = _solve(search, goal, options)
    environment = {**run.environment(plan), "for": str(there.hardware), "command": command}
    outcome = _outcome(search, assignment, options, str(out), parts.facts(goal), environment)
    _save(outcome, there, assignment, out)
    if goal.verify_tokens:
        outcome = _verified(outcome, config, goal, text)
        _save(outcome, there, assignment, out)
    return outcome


def _plain(config: Config) -> str:
    """Return the format that stores the compute dtype of this machine unchanged."""
    plan = plan_engine(replace(config, kv_layers=""))
    return formats.plain(plan.plan.dtype).name


def _trials(target: Target, goal: Goal) -> list[Candidate]:
    """Return what is tried in each layer group; raise ConfigError for an unknown format."""
    names = tuple(filter(None, map(str.strip, (goal.candidates or "").split(",")))) or schemes.TUNED
    tried = tuple(dict.fromkeys(map(schemes.parse, names)))
    if wrong := [scheme.name for scheme in tried if schemes.mixed(scheme.base) or "+" in scheme.name]:
        raise ConfigError(
            f"{wrong[0]} is no format: K and V are measured apart, K under all transforms, and put together as is "
            "best; name formats in --candidates, as nvfp4,nvfp4_amax"
        )
    trials = [trial for group in target.model_spec.groups for trial in candidates(group, tried)]
    for group in target.model_spec.groups:
        for stream in stored_streams(group):
            if not any(trial.group == group and trial.stream == stream for trial in trials):
                raise ConfigError(
                    f"no candidate can store {stream.name} of group {group.name}; formats that fit: "
                    f"{', '.join(schemes.fitting(*group.streams))}"
                )
    return trials


def _check_far(piece: int, window: int) -> None:
    """Raise ConfigError where text in pieces of so many tokens has hardly any far ones."""
    if piece < FAR * window:
        raise ConfigError(
            f"text in pieces of {piece} tokens says little of a cache whose newest {window} are exact; use at least "
            f"{FAR * window} in --window, --tokens and --context, or a shorter --kv-window"
        )


def _usual_window(target: Target, trials: Sequence[Candidate]) -> int:
    """Return the exact window that candidates are measured with: what is asked for, else the default of 4 bits."""
    if target.config.kv_window is not None:
        return target.config.kv_window
    planned = replace(target, window=None)
    for trial in trials:
        scheme = trial.scheme(target.plain)
        if scheme.is_4bit:
            return planned.plan(dict.fromkeys(target.owners(trial.group), scheme)).window
    return 0


def _windows(
    measurement: Measurement, search: Search, goal: Goal, text: _Text, progress: Progress | None
) -> tuple[WindowOption, ...]:
    """Return the exact windows that may be chosen, each measured with the formats that would be chosen beside it.

    Args:
        measurement: What is measured with.
        search: The candidates' losses, and where the model is to be served.
        goal: What is searched for.
        text: To measure on.
        progress: Is called before each pass.
    """
    options = _affordable(search, text.context, len(text.request[0].ids))
    assignments = [_solve(search, goal, (option,), search.smallest) for option in options]
    plans = [
        replace(measurement.target, window=option.tokens).plan(assignment.schemes)
        for option, assignment in zip(options, assignments, strict=True)
    ]
    wholes = measurement.wholes(plans, text.request, progress)
    return tuple(
        replace(option, factor=whole / assignment.loss if assignment.loss else 1.0)
        for option, assignment, whole in zip(options, assignments, wholes, strict=True)
    )


def _affordable(search: Search, request: int, piece: int) -> tuple[WindowOption, ...]:
    """Return the exact windows that can be served, of those with the same bytes the longest.

    Args:
        search: Where the model is to be served.
        request: Tokens of the request that a window's bytes are spread over.
        piece: Tokens of the pieces of the text that they are measured on.
    """
    config, stored = search.target.config, search.smallest.schemes
    # Sinks need a window.
    usual = (() if config.kv_sinks else (0,)) + WINDOWS
    by_bytes = {}
    for tokens in (x for x in usual if FAR * x <= piece) if config.kv_window is None else (config.kv_window,):
        target = replace(search.target, window=tokens)
        reason = target.refuses(stored)
        if reason and config.kv_window is None:
            search.skipped[f"an exact window of {tokens} tokens"] = reason
        else:
            option = WindowOption.of(target.plan(stored), request)
            by_bytes[option.exact_bytes] = option
    if not by_bytes:
        raise ConfigError(
            f"no exact window can be tried on text in pieces of {piece} tokens"
            + "".join(f"; {name}: {reason}" for name, reason in search.skipped.items())
            + "; use a longer text (--text, --context), or name the window with --kv-window"
        )
    return tuple(by_bytes.values())


def _split(llm: LLM, plan: EnginePlan, content: str, goal: Goal, path: Path | None) -> _Text:
    """Cut a text into what is verified, what scales are measured on, and what is searched; raise ConfigError.

    Args:
        llm: Whose tokenizer counts.
        plan: The model, as it is measured.
        content: The text.
        goal: How much of it is used for what.
        path: Of the text, None for the model's.
    """
    parts = perplexity.split_text(
        content, goal.verify_tokens or 1, llm.tokenizer.encode, llm.tokenizer.decode
    )
    ids = llm.tokenizer.encode(content)
    least = goal.verify_tokens + CALIBRATION_TOKENS + goal.tokens
    if len(ids) < least:
        raise ConfigError(
            f"the text has {len(ids):,} tokens, and {least:,} are needed: {goal.tokens:,} to search, "
            f"{CALIBRATION_TOKENS:,} for scales and {goal.verify_tokens:,} to verify; name a longer one with --text, "
            "or use fewer with --tokens and --verify-tokens"
        )
    longest = plan.model_spec.max_context
    context = min(goal.context, plan.config.max_context or longest, longest)
    piece = min(context, perplexity.affordable_window(plan.model_spec.vocab_size))
    if plan.config.kv_window:
        _check_far(piece, plan.config.kv_window)
    unverified = ids[goal.verify_tokens + CALIBRATION_TOKENS :]
    return _Text(
        perplexity.windows(ids[-goal.tokens :], min(goal.window, longest)),
        perplexity.windows(unverified[-max(context, goal.tokens) :], piece),
        context,
        parts.calibration,
        path.name if path else perplexity.HELDOUT,
        parts.digest,
    )


def scales_for(llm: LLM, plan: EnginePlan, calibration: str) -> Callable[[Plan], KVScales]:
    """Return what gives a plan the KV scales that serving it would use."""

    @cache
    def measured() -> KVScales:
        return llm.measure_scales([calibration])

    def scales_of(candidate: Plan) -> KVScales:
        cache_plan = replace(plan, plan=candidate)
        source = find_source(cache_plan, download)
        return measured() if source.origin is Origin.MEASURED else resolve_scales(cache_plan, source)

    return scales_of


def _solve(
    search: Search, goal: Goal, windows: Sequence[WindowOption], otherwise: Assignment | None = None
) -> Assignment:
    """Return what is best; where nothing reaches the goal, `otherwise`, or raise ConfigError."""
    try:
        if goal.bits is not None:
            return search.within_bits(goal.bits, windows)
        assert goal.max_kl is not None
        return search.within_kl(goal.max_kl, windows)
    except ConfigError:
        if otherwise is None:
            raise
        return otherwise


def _outcome(
    search: Search,
    assignment: Assignment,
    windows: Sequence[WindowOption],
    path: str,
    measured: Mapping[str, object],
    environment: Mapping[str, str],
) -> Outcome:
    layers = []
    streams = _streams(search.target)
    for layer, entry in sorted(assignment.layers.items()):
        stored = {x.name: entry.scheme.format_of(x).name for x in streams[layer] if x.name in entry.losses}
        layers.append(
            LayerChoice(layer, entry.scheme.name, stored, entry.bytes_per_token, dict(entry.losses))
        )
    sensitivity: dict[str, dict[str, tuple[float, ...]]] = {}
    for (_, trial), loss in sorted(search.losses.items(), key=lambda item: item[0][0]):
        by_name = sensitivity.setdefault(trial.stream.name, {})
        by_name[trial.name] = (*by_name.get(trial.name, ()), loss)
    return Outcome(
        model=search.target.config.model,
        path=path,
        layers=tuple(layers),
        bits=assignment.bits,
        bytes_per_token=assignment.bytes_per_token,
        window=assignment.window.tokens,
        bytes_with_window=assignment.bytes_with_window,
        predicted_kl=assignment.loss,
        sensitivity=sensitivity,
        skipped=search.skipped,
        measured=measured,
        environment=environment,
        windows=tuple(asdict(option) for option in windows),
    )


def _streams(target: Target) -> dict[int, tuple[Stream, ...]]:
    """Return what each layer caches."""
    return {layer: group.streams for group in target.model_spec.groups for layer in group.layers}


def by_layer(target: Target, assignment: Assignment) -> dict[int, Scheme]:
    """Return the scheme of every layer: of one that reads another's pages, that layer's."""
    owner = target.model_spec.owner
    return {layer: assignment.layers[owner[layer]].scheme for layer in range(target.model_spec.layers)}


def _save(outcome: Outcome, target: Target, assignment: Assignment, out: Path) -> None:
    facts = {name: value for name, value in outcome.as_dict().items() if name not in {"path", "layers"}}
    # A window that was asked for is named too: --kv-window may be left out in serving.
    usual = replace(target, window=None).plan(assignment.schemes).window
    tokens = assignment.window.tokens
    named = tokens != usual or target.config.kv_window is not None
    scheme_file.save(out, by_layer(target, assignment), _streams(target), tokens if named else None, **facts)


def _verified(outcome: Outcome, config: Config, goal: Goal, text: Path | None) -> Outcome:
    """Return the outcome with the scheme measured as a whole, through the engine as it serves."""
    sizes = Sizes(
        tokens=goal.verify_tokens,
        recall_cases=0,
        attention_tokens=0,
        request_tokens=outcome.measured["context"],
    )
    report = run.evaluate(config, (outcome.path, *goal.compare), sizes, text)
    notes = list(outcome.notes)
    result: SchemeResult = next(entry for entry in report.results if entry.name == outcome.path)
    if goal.max_kl is not None and result.kl > goal.max_kl:
        notes.append(
            f"measured as a whole the KL is {result.kl:.5f}, more than --max-kl {goal.max_kl:g}: effects of layers add "
            "up otherwise here, or the text is harder; ask for less"
        )
    return replace(outcome, verified=report.results, notes=tuple(notes))
