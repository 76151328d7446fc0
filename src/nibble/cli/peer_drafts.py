"""Flags of vLLM and SGLang for speculative decoding, put into our words or refused with the reason."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from nibble.errors import ConfigError

ALGORITHM, PATH = "--speculative-algorithm", "--speculative-draft-model-path"
STEPS, TOKENS, CONFIG = "--speculative-num-steps", "--speculative-num-draft-tokens", "--speculative-config"
TOP_K = "--speculative-eagle-topk"
FLAGS = frozenset({ALGORITHM, PATH, STEPS, TOKENS, TOP_K, CONFIG})
"""SGLang's, and vLLM's `--speculative-config`; each has a value."""
DRAFTERS = {
    "ngram": "lookup", "suffix": "lookup", "standalone": "draft", "draft_model": "draft", "eagle3": "eagle3",
    "nextn": "mtp", "mtp": "mtp",
}  # fmt: skip
"""Names of methods and algorithms, in lower case -> ours; families' own names of mtp end like it."""
HEADS = "of heads that draft, EAGLE-3 (eagle3:PATH) and MTP (mtp) are served; so are lookup and draft:PATH"


def translate(flags: Mapping[str, str]) -> list[str]:
    """Return our options for these flags and their values.

    Raises:
        ConfigError: they ask for what is not served; says what is.
    """
    if CONFIG in flags:
        return _of_config(flags[CONFIG])
    if flags.get(TOP_K, "1") != "1":
        raise ConfigError(f"{TOP_K} {flags[TOP_K]}: drafts are chains here, and no trees; leave it out")
    tokens = flags.get(STEPS)
    # SGLang counts the token before the drafts too.
    if TOKENS in flags:
        tokens = str(_number(TOKENS, flags[TOKENS]) - 1)
    if ALGORITHM not in flags:
        raise ConfigError(f"{min(flags)} needs {ALGORITHM}; ours is --speculative lookup, or draft:PATH")
    return _options(ALGORITHM, flags[ALGORITHM], flags.get(PATH), tokens)


def _of_config(text: str) -> list[str]:
    try:
        settings: Any = json.loads(text)
    except ValueError:
        settings = None
    if not isinstance(settings, dict):
        raise ConfigError(
            f'{CONFIG} must be a JSON object, as \'{{"method": "ngram", "num_speculative_tokens": 5}}\', not {text!r}'
        )
    model, tokens = settings.get("model"), settings.get("num_speculative_tokens")
    # vLLM takes a model without a method for one that drafts.
    method = settings.get("method") or ("draft_model" if model else "ngram")
    return _options(CONFIG, str(method), model, None if tokens is None else str(tokens))


def _options(flag: str, method: str, path: str | None, tokens: str | None) -> list[str]:
    drafter = "mtp" if method.lower().endswith("_mtp") else DRAFTERS.get(method.lower())
    if drafter is None:
        raise ConfigError(f"{flag} {method}: {HEADS}")
    if drafter in ("draft", "eagle3"):
        if not path:
            raise ConfigError(
                f"{flag} {method} names no model that drafts; ours is --speculative {drafter}:PATH"
            )
        drafter = f"{drafter}:{path}"
    return ["--speculative", drafter, *(["--speculative-tokens", tokens] if tokens else [])]


def _number(flag: str, text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"{flag} must be a number of tokens, not {text!r}")
    return int(text)
