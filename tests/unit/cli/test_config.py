"""What a user may write in Config, SamplingParams and layer rules, and how it is refused or put in one form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nibble.config import Config, SamplingParams, configured, sampling
from nibble.errors import ConfigError, RequestError
from nibble.spec import CacheSpec

NAN = float("nan")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max_tokens", None, r"max_tokens must lie in .* and be an integer, not None"),
        ("max_tokens", 2.0, "be an integer, not 2.0"),
        ("top_k", True, "top_k must lie in .* be an integer, not True"),
        ("n", "2", "n must lie in .* be an integer, not '2'"),
        ("n", 0, r"n must lie in \[1, 1024\], not 0"),
        ("logprobs", 1.5, "be an integer or None, not 1.5"),
        ("seed", "7", "be an integer or None, not '7'"),
        ("temperature", "hot", "temperature must lie in .* be a number, not 'hot'"),
        ("temperature", NAN, "temperature must lie in"),
        ("temperature", -1e-9, "temperature must lie in"),
        ("top_p", None, "be a number, not None"),
        ("top_p", 0, "top_p must be above 0"),
        ("ignore_eos", 1, "ignore_eos must be True or False, not 1"),
        ("stop", [1], r"stop must be a list of strings, not \[1\]"),
        ("stop", 5, "stop must be a list of strings, not 5"),
        ("stop", ["a", ""], "stop strings must not be empty"),
        ("stop_token_ids", ["x"], "stop_token_ids must be a list of integers"),
        ("stop_token_ids", 3, "stop_token_ids must be a list of integers, not 3"),
        ("logit_bias", [1], "logit_bias must map token ids to numbers"),
        ("logit_bias", {"x": 1.0}, "logit_bias keys must be token ids, as 42 or '42', not 'x'"),
        ("logit_bias", {1.0: 1.0}, "logit_bias keys must be"),
        ("logit_bias", {1: NAN}, "logit_bias values must be finite"),
        ("logit_bias", {1: 1e39}, "logit_bias values must be finite"),
        ("logit_bias", {1: "2"}, "logit_bias values must be finite numbers, not '2'"),
    ],
)
def test_sampling_refuses(name: str, value: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as raised:
        sampling(**{name: value})
    assert raised.value.status == 400


def test_sampling_puts_values_in_one_form() -> None:
    empty = sampling(stop=None, stop_token_ids=None, logit_bias=None, seed=None, logprobs=None)
    assert empty == SamplingParams()
    found = sampling(stop="END", stop_token_ids=[3], logit_bias={"42": 1, 7: -0.5}, temperature=9e-7)
    assert (found.stop, found.stop_token_ids) == (("END",), (3,))
    assert found.logit_bias == {42: 1, 7: -0.5}
    assert found.temperature == 0.0 and sampling(temperature=1e-6).temperature == 1e-6


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("page_size", "16", r"page_size must be an integer or None, not '16' \(str\)"),
        ("token_budget", 1.5, "token_budget must be an integer or None, not 1.5"),
        ("max_running", True, "max_running must be an integer, not True"),
        ("kv_format", None, r"kv_format must be a text, not None \(NoneType\)"),
        ("prefix_cache", "no", "prefix_cache must be True or False, not 'no'"),
        ("kv_memory", 1.5, "kv_memory must be a text or None, not 1.5"),
        ("max_running", 0, "max_running must be at least 1"),
        ("kv_fromat", "nvfp4", "unknown option 'kv_fromat': did you mean 'kv_format'"),
    ],
)
def test_config_refuses(name: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configured(**{"model": "m", name: value})


def test_config_takes_bytes_and_paths() -> None:
    found = configured(model=Path("a/b"), kv_scales=Path("s.json"), kv_memory=1 << 20)
    assert found == Config(model="a/b", kv_scales="s.json", kv_memory="1048576")


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("2-0=fp32", "range of layers '2-0' runs backwards"),
        ("0,,1=fp32", "'0,,1' has an empty item"),
        ("=fp32", "has an empty item"),
        ("0-9=fp32", "layer 4 is out of range"),
    ],
)
def test_layer_rules_refused(rule: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CacheSpec.from_config(Config(model="m", kv_layers=rule)).scheme_by_layer(4)
