"""Where a model lies, by its name, and what its small files say. No torch or Transformers: the server asks early."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import nibble
from nibble.config import BUNDLED, Config
from nibble.drafts import BUNDLED_HEADS
from nibble.errors import ConfigError, WeightError
from nibble.formats import scheme_file

INDEX_FILE = "model.safetensors.index.json"
MODELOPT_FILE = "hf_quant_config.json"
"""File of a checkpoint in which ModelOpt says what it has quantised."""
TOKENIZER_FILES = ("tokenizer*", "vocab.*", "*.model", "merges.txt")

MTP, EAGLE3 = "mtp", "eagle3"
"""Kinds of heads that draft (heads.py), as they stand in front of the name of a checkpoint: `eagle3:PATH`."""

PUBLISHED_FOLDER = Path(__file__).with_name("published")
"""Configs that come with Nibble, a folder a model: enough for a plan."""
PUBLISHED = {
    "qwen3-8b": ("Qwen/Qwen3-8B",),
    "qwen3-30b-a3b": ("Qwen/Qwen3-30B-A3B",),
    "qwen3-235b-a22b": ("Qwen/Qwen3-235B-A22B",),
    "qwen3-next-80b-a3b": ("Qwen/Qwen3-Next-80B-A3B-Instruct", "Qwen/Qwen3-Next-80B-A3B-Thinking"),
    "llama-3.1-8b": (
        "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Meta-Llama-3.1-8B",
        "meta-llama/Meta-Llama-3.1-8B-Instruct",
    ),
    "llama-3.3-70b": ("meta-llama/Llama-3.3-70B-Instruct",),
    "mistral-small-24b": ("mistralai/Mistral-Small-24B-Instruct-2501", "mistralai/Mistral-Small-24B-Base-2501"),
    "gemma-3-27b": ("google/gemma-3-27b-it", "google/gemma-3-27b-pt"),
    "gpt-oss-20b": ("openai/gpt-oss-20b",),
    "gpt-oss-120b": ("openai/gpt-oss-120b",),
    "deepseek-r1": (
        "deepseek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-R1-0528", "deepseek-ai/DeepSeek-V3",
        "deepseek-ai/DeepSeek-V3-0324",
    ),
    "deepseek-v3.1": ("deepseek-ai/DeepSeek-V3.1", "deepseek-ai/DeepSeek-V3.1-Terminus"),
    "deepseek-v3.2": ("deepseek-ai/DeepSeek-V3.2", "deepseek-ai/DeepSeek-V3.2-Exp"),
    "glm-4.6": ("zai-org/GLM-4.6",),
    "glm-5": ("zai-org/GLM-5",),
    "kimi-k2": ("moonshotai/Kimi-K2-Instruct",),
}  # fmt: skip
"""Models whose configs come with Nibble -> their names on the hub."""
HUB_TIMEOUT_S = 2.0
"""How long the hub's host is waited for before a model's name is given up."""


def split_head(model: str) -> tuple[str, str]:
    """Return the kind of head that a name asks for, empty for a model, and the name or folder of its checkpoint."""
    kind, colon, path = model.partition(":")
    return (kind, path) if colon and kind in (MTP, EAGLE3) else ("", model)


def locate(model: str) -> str:
    """Return the local folder of a bundled model or a folder, else the hub name; without the kind of a head."""
    model = split_head(model)[1]
    if model in (*BUNDLED, *BUNDLED_HEADS.values()):
        return str(_bundled(model))
    path = Path(model).expanduser()
    return str(path) if path.exists() else model


def local_folder(model: str) -> Path | None:
    """Return the folder of a model's checkpoint, None for a hub model of which this machine has no copy."""
    path = Path(locate(model))
    return path if path.exists() else cached_folder(model)


def has_tokenizer(folder: Path) -> bool:
    """Return whether a checkpoint folder has files of a tokenizer."""
    return any(True for pattern in TOKENIZER_FILES for _ in folder.glob(pattern))


def locate_config(model: str) -> tuple[str, str]:
    """Return where to read a model's config for a plan, and a note where it is not the model's own copy.

    A folder comes first, then the hub's local cache, then a config that came with Nibble, then the hub.
    """
    path = locate(model)
    if Path(path).exists():
        return path, ""
    if cached := cached_folder(model):
        return str(cached), ""
    if name := _published_name(model):
        return str(
            PUBLISHED_FOLDER / name
        ), f"config of {model}: built in, as published; there is no local copy"
    return model, ""


def hub_name(model: str) -> str:
    """Return the name on the hub of a model that only plans know by a short one; others unchanged."""
    return PUBLISHED[model.lower()][0] if model.lower() in PUBLISHED else model


def _published_name(model: str) -> str | None:
    """Return the model of PUBLISHED that a name means, on the hub or here."""
    wanted_name = model.lower()
    names = ((name, (name, *(entry.lower() for entry in entries))) for name, entries in PUBLISHED.items())
    return next((name for name, spellings in names if wanted_name in spellings), None)


def cached_folder(model: str) -> Path | None:
    """Return the newest snapshot of a hub model with a config in huggingface_hub's cache, without importing that."""
    home = Path(
        os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface"
    )
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
    repository = cache / f"models--{split_head(model)[1].replace('/', '--')}"
    try:
        snapshot = repository / "snapshots" / (repository / "refs" / "main").read_text().strip()
    except (OSError, ValueError):
        return None
    return snapshot if (snapshot / "config.json").exists() else None


def require_hub(model: str) -> None:
    """Raise WeightError at once where a model must come from the hub, and that cannot be reached."""
    if problem := hub_problem():
        raise unreachable(model, problem)


def hub_problem() -> str:
    """Return why the hub cannot be reached, nothing where it can. Libraries try for most of a minute."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
        return "HF_HUB_OFFLINE is set"
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    # Behind a proxy its host is the one to reach.
    names = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
    proxy = next((os.environ[name] for name in names if os.environ.get(name)), None)
    address = urlsplit(proxy if proxy and "//" in proxy else f"//{proxy}" if proxy else endpoint)
    host, port = address.hostname or "", address.port or (80 if address.scheme == "http" else 443)
    return "" if _connects(host, port) else f"no connection to {host} within {HUB_TIMEOUT_S:.0f} s"


def _connects(host: str, port: int) -> bool:
    """Whether a host takes a connection within HUB_TIMEOUT_S. Looking up its name has no timeout of its own."""
    opened = threading.Event()

    def connect() -> None:
        with suppress(OSError), socket.create_connection((host, port), timeout=HUB_TIMEOUT_S):
            opened.set()

    attempt = threading.Thread(target=connect, daemon=True)
    attempt.start()
    attempt.join(HUB_TIMEOUT_S)
    return opened.is_set()


def unreachable(model: str, why: str) -> WeightError:
    """Return the error for a model that is no folder, and that the hub does not give."""
    names = PUBLISHED.get(model.lower())
    own = (
        f"only `nibble plan` knows it by this name, and the hub has its weights as {names[0]}"
        if names
        else ""
    )
    advice = own or (
        f"for `nibble plan` a folder with its config.json is enough, and these come with Nibble: {', '.join(PUBLISHED)}"
    )
    return WeightError(
        f"{model!r} is neither a folder nor a hub model that can be reached ({why}); check the name, or download the "
        f"model first; {advice}"
    )


SMALL_FILES = ("*.json", "*.model", "*.jinja", "*.txt")
"""Of a checkpoint: what is said of it, and its tokenizer."""
CODE_FILES = ("*.py", "*.tiktoken")
"""A checkpoint's own code, and what that reads."""


def pinned(config: Config, *, weights: bool = False) -> Config:
    """Return the config with a local folder for its model, where it names a revision or a folder for downloads.

    Args:
        config: of a model.
        weights: fetch the weights too.

    Raises:
        ConfigError: the model is a local one, which has no revisions.
        WeightError: it cannot be fetched.
    """
    if config.revision is None and config.download_dir is None:
        return config
    if Path(locate(config.model)).exists():
        if config.revision is not None:
            raise ConfigError(f"--revision is for models of the hub, and {config.model!r} is a local one")
        return config
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    patterns = [*SMALL_FILES, *(["*.safetensors"] if weights else [])]
    patterns += CODE_FILES if config.trust_remote_code else ()
    try:
        folder = snapshot_download(
            config.model, revision=config.revision, cache_dir=config.download_dir, allow_patterns=patterns
        )
    except (OSError, ValueError, HfHubHTTPError) as error:
        revision = f" at revision {config.revision!r}" if config.revision else ""
        raise WeightError(f"cannot fetch {config.model!r}{revision}: {first_line(error)}") from error
    return replace(config, model=folder, revision=None)


def _bundled(name: str) -> Path:
    package = Path(nibble.__file__).parent
    # An installed package has its models inside, a source checkout has them two folders up.
    for folder in (package / "_models" / name, package.parents[1] / "models" / name):
        if (folder / "config.json").exists():
            return folder
    raise WeightError(
        f"the bundled model {name!r} is not part of this installation; name a folder or a hub model"
    )


def model_file(model: str, name: str) -> Path | None:
    """Return a small file of a model by its name, None where the model has none. Raise WeightError.

    A hub model's file is downloaded; without network, what the cache of the hub lacks counts as not there.
    """
    folder = Path(locate(model))
    if folder.exists():
        return folder / name if (folder / name).is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return Path(hf_hub_download(model, name))
    except EntryNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise WeightError(f"cannot fetch {name} of {model!r}: {first_line(error)}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a checkpoint, an empty one where there is no file. Raise WeightError."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise TypeError(f"but a {type(content).__name__}")
        return content
    except (ValueError, TypeError) as error:
        raise WeightError(
            f"{path} is not a JSON object ({error}); download or save the checkpoint again"
        ) from error


def own_kv_formats(folder: Path) -> Path | None:
    """Return the file of a checkpoint that names KV formats by layer, None where it has none. Raise WeightError.

    That is what `nibble tune-precision` has written there, else what ModelOpt has.
    """
    if (own := folder / scheme_file.FILE_NAME).exists():
        return own
    paths = (folder / MODELOPT_FILE, folder / "config.json")
    return next((path for path in paths if scheme_file.modelopt_layers(read_json(path)) is not None), None)


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that Transformers loads: the one of its name, else those of the index, else all.

    A folder may hold the same weights in another spelling, as `consolidated.safetensors`.
    """
    whole = folder / "model.safetensors"
    if whole.exists():
        return [whole]
    index = read_json(folder / INDEX_FILE).get("weight_map") or {}
    return sorted({folder / name for name in index.values()}) or sorted(folder.glob("*.safetensors"))


def modelopt_entry(folder: Path) -> dict[str, Any]:
    """Return what ModelOpt's own file in a checkpoint says, an empty entry where there is none. Raise WeightError."""
    file = folder / MODELOPT_FILE
    entry = read_json(file).get("quantization") or {}
    if not isinstance(entry, dict):
        raise WeightError(f"{file} is no quantisation config; download or save the checkpoint again")
    return entry


_LOUD = (
    "transformers.modeling_utils", "transformers.utils.loading_report",
    "transformers.generation.configuration_utils",
)  # fmt: skip
_NOT_OURS = ("LOAD REPORT", "generation flags are not valid")
"""Load reports become errors, and generation flags are read by generation_config.py."""


def _no_report(record: logging.LogRecord) -> bool:
    return not any(text in record.getMessage() for text in _NOT_OURS)


@contextmanager
def quiet() -> Iterator[None]:
    """Run the body without progress bars and load reports; models/checkpoint.py turns the latter into errors."""
    from transformers.utils import logging as transformers_logging

    bars = transformers_logging.is_progress_bar_enabled()
    loggers = [logging.getLogger(name) for name in _LOUD]
    transformers_logging.disable_progress_bar()
    # Filters and not levels: other warnings of these loggers still appear.
    for logger in loggers:
        logger.addFilter(_no_report)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(_no_report)
        if bars:
            transformers_logging.enable_progress_bar()


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type's name."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
