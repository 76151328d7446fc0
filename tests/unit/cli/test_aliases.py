"""Flags of other servers: taken where they mean the same."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from nibble.cli.serve import FLAG_ALIASES, VALUE_ALIASES, translate_flags
from nibble.config import Config
from nibble.server.chat_format import CALL_FORMATS, REASONING_FORMATS
from nibble.server.settings import Settings


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("demo --kv-cache-dtype fp8", "demo --kv-format fp8"),
        ("demo --kv-cache-dtype=nvfp4 --max-model-len 4096", "demo --kv-format=nvfp4 --max-context 4096"),
        ("--model-path demo --disable-radix-cache --port 1", "demo --no-prefix-cache --port 1"),
        ("--model=demo --enforce-eager --dtype half", "demo --no-compile --no-graphs --dtype float16"),
        ("demo --kv-format auto --dtype float", "demo --kv-format auto --dtype float32"),
        ("demo --kv-format nvfp4", "demo --kv-format nvfp4"),
        ("demo --enable-auto-tool-choice=true --port 1", "demo --port 1"),
    ],
)
def test_translated(said: str, meant: str) -> None:
    assert translate_flags(said.split()) == meant.split()


def test_every_flag_stands_for_one_that_is_there() -> None:
    known = {
        f"--{prefix}{field.name.replace('_', '-')}"
        for field in (*fields(Config), *fields(Settings))
        for prefix in ("", "no-")
    }
    assert {word for flag in FLAG_ALIASES.values() for word in flag.split()} <= known


def test_every_flag_is_told_of() -> None:
    page = (Path(__file__).parents[3] / "docs/migrating.md").read_text()
    assert [flag for flag in FLAG_ALIASES if f"`{flag}`" not in page and f"`{flag} " not in page] == []


def test_every_format_stands_for_one_that_is_there() -> None:
    assert set(VALUE_ALIASES["--tool-format"].values()) <= set(CALL_FORMATS)
    assert set(VALUE_ALIASES["--reasoning-parser"].values()) <= set(REASONING_FORMATS)
    assert translate_flags(["m", "--tool-call-parser", "qwen25", "--enable-auto-tool-choice"]) == [
        "m",
        "--tool-format",
        "hermes",
    ]
    assert translate_flags(["--tool-call-parser=deepseekv3", "--reasoning-parser=deepseek-r1"]) == [
        "--tool-format=deepseek_v3", "--reasoning-parser=deepseek_r1",
    ]  # fmt: skip
