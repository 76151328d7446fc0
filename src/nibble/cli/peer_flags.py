"""Flags of vLLM and SGLang that are more than another name of ours: answered, or put into our words.

serve.py has those that mean the same. What has no counterpart is refused here with what to do instead, so that nobody
must guess from `No such option`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from nibble.cli import peer_drafts
from nibble.errors import ConfigError

ONE_GPU = (
    "GPUs of a host share each layer (--tp), or have a server each; a scheme of fewer bytes saves some, too"
)
PARALLEL = {
    **dict.fromkeys(
        ("--pipeline-parallel-size", "-pp", "--pp", "--pp-size"), "pipeline parallelism is not served"
    ),
    **dict.fromkeys(
        ("--expert-parallel-size", "--ep", "--ep-size"),
        "experts are divided among the GPUs of --tp by --expert-parallel",
    ),
}
"""Flags of how many GPUs share the work -> why more than one is refused."""
EVENTS_CONFIG = "--kv-events-config"
EVENTS = {"endpoint": "--kv-events", "replay_endpoint": "--kv-events-replay", "topic": "--kv-events-topic"}
"""Settings of `--kv-events-config` -> our options."""
DEFAULT_ENDPOINT = "tcp://*:5557"
"""Where vLLM and SGLang publish."""
DEQUANTISED = "--prefill-kv-cache-dequant-dtype"
HISPARSE, HISPARSE_CONFIG = "--enable-hisparse", "--hisparse-config"
SETTINGS = {"device_buffer_size": "buffer", "host_memory": "host_memory", "host_format": "host_format"}
"""Settings of `--hisparse-config` -> ours of `--hisparse`."""
ANSWERS = {
    "--kv-cache-dtype-skip-layers": "name the layers and their scheme, as --kv-layers 0,-1=bf16",
    "--calculate-kv-scales": "scales are measured by --kv-scales calibrate",
    "--quantization-param-path": "scales of a file are read by --kv-scales FILE",
    "--enable-lora": "LoRA is not served",
    "--enable-hierarchical-cache": "a host tier is there for sparse attention: --hisparse on",
}
"""Flags without a counterpart -> what to do instead."""


def translate(arguments: Sequence[str]) -> list[str]:
    """Return a command line without the flags that are answered here.

    Args:
        arguments: As they were written.

    Raises:
        ConfigError: A flag asks for what is not served; says what is.
    """
    rest: list[str] = []
    drafts: dict[str, str] = {}
    tier: dict[str, Any] | None = None
    queue = iter(arguments)
    for argument in queue:
        flag, equals, value = argument.partition("=")
        if flag in ANSWERS:
            raise ConfigError(f"{flag} has no counterpart here: {ANSWERS[flag]}")
        if flag in (*PARALLEL, DEQUANTISED, HISPARSE_CONFIG, EVENTS_CONFIG, *peer_drafts.FLAGS):
            value = value if equals else next(queue, "")
            if flag in peer_drafts.FLAGS:
                drafts[flag] = value
            elif flag == EVENTS_CONFIG:
                rest += _events(_settings(flag, value))
            elif flag == HISPARSE_CONFIG:
                tier = {**(tier or {}), **_settings(flag, value)}
            else:
                _check_usual(flag, value)
        elif flag == HISPARSE:
            tier = tier or {}
        else:
            rest.append(argument)
    rest += peer_drafts.translate(drafts) if drafts else []
    return rest if tier is None else [*rest, *_hisparse(tier)]


def _check_usual(flag: str, value: str) -> None:
    """Raise ConfigError for another value than the one that is served here."""
    if flag in PARALLEL and value != "1":
        raise ConfigError(f"{flag} {value}: {PARALLEL[flag]}: {ONE_GPU}")
    if flag == DEQUANTISED and value != "auto":
        raise ConfigError(
            f"{flag} {value} has no counterpart here: prompts read pages as they are stored, or dequantised to the "
            "compute dtype where a kernel needs or profits by it; leave it out, and choose by --prefill-backend "
            "(`nibble plan` says which it is)"
        )


EXAMPLES = {
    HISPARSE_CONFIG: '{"device_buffer_size": 4096}',
    EVENTS_CONFIG: '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}',
}


def _settings(flag: str, text: str) -> Mapping[str, Any]:
    """Return the settings of a flag that has them as JSON; raise ConfigError where they are no object."""
    try:
        settings = json.loads(text)
    except ValueError:
        settings = None
    if not isinstance(settings, dict):
        raise ConfigError(f"{flag} must be a JSON object, as '{EXAMPLES[flag]}', not {text!r}")
    return settings


def _events(settings: Mapping[str, Any]) -> list[str]:
    """Return our options for the settings of `--kv-events-config`; raise ConfigError for one without a counterpart.

    vLLM publishes where `enable_kv_cache_events` is true, SGLang where `publisher` is zmq.
    """
    switches = {"enable_kv_cache_events", "publisher"}
    if unknown_names := sorted(settings.keys() - EVENTS.keys() - switches):
        raise ConfigError(
            f"{EVENTS_CONFIG} {', '.join(unknown_names)}: there is no such setting here, leave it out; there are "
            f"{', '.join([*EVENTS, *sorted(switches)])}"
        )
    publisher = settings.get("publisher")
    if publisher not in (None, "zmq", "null"):
        raise ConfigError(f"{EVENTS_CONFIG} publisher is zmq or null, not {publisher!r}")
    is_on = settings.get("enable_kv_cache_events", publisher == "zmq")
    if not is_on or publisher == "null":
        return []
    values = {"endpoint": DEFAULT_ENDPOINT, **settings}
    return [text for name, flag in EVENTS.items() if values.get(name) for text in (flag, str(values[name]))]


def _hisparse(settings: Mapping[str, Any]) -> list[str]:
    """Return our options for the settings of `--hisparse-config`; raise ConfigError for one without a counterpart."""
    unknown_names = sorted(settings.keys() - SETTINGS.keys() - {"top_k", "host_to_device_ratio"})
    if unknown_names:
        raise ConfigError(
            f"{HISPARSE_CONFIG} {', '.join(unknown_names)}: there is no such setting here; there are top_k, "
            f"{', '.join(SETTINGS)}"
        )
    if "host_to_device_ratio" in settings:
        raise ConfigError(
            f"{HISPARSE_CONFIG} host_to_device_ratio has no counterpart here: name the host's part in bytes, as "
            "--hisparse buffer=4096,host_memory=64GiB; by default it is half of what is free"
        )
    ours = [f"{SETTINGS[name]}={value}" for name, value in settings.items() if name in SETTINGS]
    # What a query looks at is a matter of the model, and not of the tier.
    top_k = ["--index-topk", str(settings["top_k"])] if "top_k" in settings else []
    return ["--hisparse", ",".join(ours) or "on", *top_k]
