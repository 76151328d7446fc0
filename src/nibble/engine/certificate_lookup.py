"""Which certificate is that of a plan, and whether it keeps what --require-quality asks for. No torch.

A certificate counts where its subject is that of the plan, to the last item: whatever could change an answer.
They lie beside the model, in certificates/, or in $NIBBLE_CERTIFICATES, else certificates/ in the cache folder:

    certificates/MODEL-SCHEME-KEY.json    certificate.py
    certificates/MODEL-SCHEME-KEY.md      the same for people
"""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from nibble import formats
from nibble.attention.planner.plan import Plan
from nibble.cache import scales as kv_scales
from nibble.cache.scales import KVScales
from nibble.config import BUNDLED, EXACT_STATES, Config, default_of
from nibble.engine.cache_plan import CachePlan
from nibble.engine.certificate import UNKNOWN_SCALES, Certificate, Subject
from nibble.engine.parallel_plan import whole_layout
from nibble.errors import ConfigError
from nibble.hardware import cache_folder
from nibble.models.activations import FULL
from nibble.models.fingerprint import fingerprint
from nibble.models.hub import cached_folder, hub_name, local_folder
from nibble.spec import CacheSpec

FOLDER, FOLDER_VARIABLE = "certificates", "NIBBLE_CERTIFICATES"
ELSEWHERE = frozenset(
    {
        "model", "revision", "download_dir", "kv_format", "kv_layers", "kv_encoder", "kv_transforms", "kv_window",
        "kv_scales", "page_size", "packing", "dtype", "hisparse", "activations", "state_format",
    }
)  # fmt: skip
"""Fields of Config that other items of a subject stand for."""
WITHOUT_EFFECT = frozenset(
    {
        "trust_remote_code", "chat_template", "attention_backend", "prefill_backend", "decode_backend", "tuned",
        "allow_staging", "device", "kv_memory", "gpu_memory_utilization", "threads", "max_context", "max_running",
        "token_budget", "prefix_cache", "compile", "compile_cache", "graphs", "watch_fidelity", "fidelity_alert",
        "require_quality", "seed", "generation_config", "state_interval", "speculative", "speculative_tokens", "tp",
    }
)  # fmt: skip
"""Fields of Config that change no next-token distribution, but by rounding. All others count, new ones too."""
UNCOUNTED = ELSEWHERE | WITHOUT_EFFECT
SPEC_ELSEWHERE = frozenset(
    {
        "scheme", "scheme_file", "layer_rules", "dtype", "page_size", "packing", "prefill_backend", "decode_backend",
        "allow_staging", "kv_memory", "offload", "max_running", "max_context", "token_budget", "prefix_cache", "graphs",
        "piecewise", "watches_fidelity", "chooses_transforms", "sinks", "state_format", "state_interval", "max_drafts",
        "fixed_drafts",
    }
)  # fmt: skip
"""Fields of CacheSpec that other items of a subject stand for, or that change no distribution. All others count."""
PLAN_ELSEWHERE = frozenset(
    {
        "layout", "groups", "owner", "dtype", "notes", "default_notes", "tier", "meaning", "sinks", "states",
        "state_format",
    }
)  # fmt: skip
"""The same of Plan. Sinks count as an option of Config: who asks for none has the certificates of before."""
UNSAID = frozenset(
    {
        "model", "kv_format", "kv_layers", "chat_template", "kv_memory", "max_running", "prefix_cache",
        "watch_fidelity", "fidelity_alert", "require_quality", "seed", "generation_config",
    }
)  # fmt: skip
"""Fields of Config that the command which makes a certificate does not need, or has as arguments."""


def is_unquantised(cache_plan: CachePlan) -> bool:
    """Whether the cache stores what the model computes, so that there is nothing to certify."""
    plan = cache_plan.plan
    entries = (entry for store in plan.stores for layer in store.layers for entry in layer.streams)
    return not _rounded_states(plan) and all(formats.get(entry.format).plain is not None for entry in entries)


def _rounded_states(plan: Plan) -> str:
    """Return the format of recurrent states, if there are any that are rounded; else an empty string."""
    return plan.state_format if plan.states and plan.state_format != EXACT_STATES else ""


def subject_of(cache_plan: CachePlan, scales: KVScales | None) -> Subject:
    """Return what a certificate of a plan is of.

    Args:
        cache_plan: the plan.
        scales: its KV scales, None where they are still to be measured.
    """
    config, plan = cache_plan.config, cache_plan.plan
    spec = CacheSpec.from_config(config)
    usual, states = {entry.name: default_of(entry) for entry in fields(Config)}, _rounded_states(plan)
    # What was left to Nibble counts as it was decided: another version may decide otherwise.
    decided = _others(spec, SPEC_ELSEWHERE) | _others(plan, PLAN_ELSEWHERE)
    return Subject(
        model=Path(config.model).name,
        scheme=_scheme_name(config),
        weights=_weights(local_folder(config.model)),
        # Of all ranks together: how many there are changes an answer by rounding alone.
        layout="+".join(whole_layout(store, cache_plan.model_spec).fingerprint for store in plan.stores),
        pages=f"{_stored_as(plan)}, pages of {plan.page_size} tokens, {plan.layout.packing}",
        scales=_version(cache_plan, scales),
        dtype=plan.dtype,
        options={name: value for name, value in _others(config, UNCOUNTED).items() if value != usual[name]}
        | {name: str(value) for name, value in decided.items()}
        # Said where they are quantised alone: who leaves them has the certificates of before.
        | ({} if cache_plan.activations == FULL else {"activations": cache_plan.activations})
        | ({"state_format": states} if states else {}),
    )


def _stored_as(plan: Plan) -> str:
    """Return the schemes of the layers with transforms, and their encoders: what a scheme's name comes to here."""
    entries = (entry for layer in plan.layout.layers for entry in layer.streams)
    encoders = tuple(dict.fromkeys(entry.encoder for entry in entries if entry.encoder))
    names = ", ".join(dict.fromkeys(group.scheme for group in plan.groups))
    return names + (f" by {', '.join(encoders)}" if encoders else "")


def _others(facts: Config | CacheSpec | Plan, without: frozenset[str]) -> dict[str, Any]:
    """Return the fields of a dataclass but for some."""
    return {entry.name: getattr(facts, entry.name) for entry in fields(facts) if entry.name not in without}


def _version(cache_plan: CachePlan, scales: KVScales | None) -> str:
    if not any(map(kv_scales.needs_scales, cache_plan.plan.stores)):
        return ""
    return UNKNOWN_SCALES if scales is None else scales.version


def _weights(folder: Path | None) -> str:
    try:
        return fingerprint(folder) if folder else ""
    except OSError:
        return ""


def _scheme_name(config: Config) -> str:
    """Return the scheme as `nibble certify` takes it."""
    return config.kv_format + (f"@{config.kv_layers}" if config.kv_layers else "")


def command_for(config: Config) -> str:
    """Return the command that would make a certificate of what `config` serves."""
    arguments = ["nibble", "certify", hub_name(config.model), _scheme_name(config)]
    for entry in fields(config):
        value = getattr(config, entry.name)
        if entry.name in UNSAID or value == default_of(entry):
            continue
        name = entry.name.replace("_", "-")
        arguments += (
            [f"--{name}" if value else f"--no-{name}"] if isinstance(value, bool) else [f"--{name}={value}"]
        )
    return shlex.join(arguments)


# --- where they lie ---------------------------------------------------------------------------------------------------


def folders(model: str) -> tuple[Path, ...]:
    """Return where certificates of a model may lie: beside it, and in the user's folder."""
    own = local_folder(model)
    return (*([own / FOLDER] if own else []), user_folder())


def user_folder() -> Path:
    """Return $NIBBLE_CERTIFICATES, else certificates/ in the cache folder."""
    folder = os.environ.get(FOLDER_VARIABLE)
    return Path(folder) if folder else cache_folder() / FOLDER


def folder_to_write(model: str) -> Path:
    """Return where a new certificate belongs: beside a model of one's own, if that can be written, else the user's."""
    folder = local_folder(model)
    # Bundled models belong to the installation, and copies of the hub's to its cache.
    is_own = folder is not None and model not in BUNDLED and folder != cached_folder(model)
    return folder / FOLDER if is_own and folder and os.access(folder, os.W_OK) else user_folder()


def file_name(subject: Subject) -> str:
    """Return the name of a certificate's file, without its suffix."""
    text = f"{subject.model}-{subject.scheme}"
    return f"{re.sub(r'[^A-Za-z0-9._+-]+', '-', text)}-{subject.key}"


NONE_YET = "there is none yet"


@dataclass(frozen=True, slots=True)
class Lookup:
    """What there is for a plan: a certificate, or why there is none."""

    certificate: Certificate | None
    why: str = ""


def look_up(cache_plan: CachePlan, scales: KVScales | None) -> Lookup | None:
    """Return the newest certificate of a plan, or why none of those that are there counts.

    An unquantised cache needs no certificate, and None is returned.

    Args:
        cache_plan: the plan.
        scales: its KV scales; None where they are still to be measured, and those of any certificate may do.
    """
    if is_unquantised(cache_plan):
        return None
    certificates, broken = _stored(cache_plan.config.model)
    if not certificates:
        return Lookup(None, f"{NONE_YET}{broken}")
    here = subject_of(cache_plan, scales)
    differences = {id(one): list(one.subject.differences(here)) for one in certificates}
    if holding := [one for one in certificates if not differences[id(one)]]:
        return Lookup(max(holding, key=_date))
    # Certificates of other schemes are nobody's mistake.
    near = [one for one in certificates if _is_near(one.subject, here)]
    if not near:
        return Lookup(None, f"{NONE_YET}{broken}")
    nearest = min(near, key=lambda one: len(differences[id(one)]))
    return Lookup(None, f"{nearest.path} does not count: {'; '.join(differences[id(nearest)])}")


def _is_near(subject: Subject, here: Subject) -> bool:
    """Whether a certificate is of the same scheme of the same model, or was before something changed."""
    is_same_model = subject.weights == here.weights or subject.model == here.model
    return is_same_model and (subject.layout == here.layout or subject.scheme == here.scheme)


def _date(certificate: Certificate) -> str:
    return certificate.environment["date"]


def _stored(model: str) -> tuple[list[Certificate], str]:
    """Return all certificates that may be of a model, and what to say of files that are none."""
    certificates, broken = [], ""
    for folder in folders(model):
        for path in sorted(folder.glob("*.json")):
            try:
                certificates.append(Certificate.read(path))
            except ConfigError as error:
                broken = f" ({error})"
    return certificates, broken


# --- what a start asks ------------------------------------------------------------------------------------------------


def require(cache_plan: CachePlan, scales: KVScales | None) -> Certificate | None:
    """Return the certificate of a plan, if there is one, and check it against what `require_quality` says.

    Args:
        cache_plan: the plan.
        scales: its KV scales, None where they are still to be measured.

    Raises:
        ConfigError: something is required, and no certificate counts, or its figures are others.
    """
    config = cache_plan.config
    lookup = look_up(cache_plan, scales)
    if lookup is None:
        return None
    if not config.quality:
        return lookup.certificate
    subject = f"{config.model} with a cache in {_scheme_name(config)}"
    subject += f", and states in {states}," if (states := _rounded_states(cache_plan.plan)) else ""
    bounds = ", ".join(f"{name}={value:g}" for name, value in config.quality.items())
    if (certificate := lookup.certificate) is None:
        raise ConfigError(
            f"{subject} has no certificate that counts, and --require-quality has bounds ({bounds}): {lookup.why}\n"
            f"what would make one: {command_for(config)}"
        )
    if shortfalls := "; ".join(certificate.figures.shortfalls(config.quality)):
        raise ConfigError(
            f"{subject} does not keep the bounds of --require-quality ({bounds}): {shortfalls}\n"
            f"its certificate: {certificate.line} ({certificate.path})\n"
            f"what compares schemes: nibble eval {shlex.quote(config.model)}\n"
            f"what would measure this one again: {command_for(config)}"
        )
    return certificate


def status(cache_plan: CachePlan, lookup: Lookup) -> str:
    """Return one line on what `lookup` says of a plan: the certificate's, or how to make one."""
    if lookup.certificate:
        return lookup.certificate.line
    why = "" if lookup.why == NONE_YET else f" ({lookup.why})"
    return f"not certified{why}: {command_for(cache_plan.config)}"
