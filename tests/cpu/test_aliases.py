"""Flags of other servers: taken where they mean the same."""

from __future__ import annotations

from dataclasses import fields

import pytest

from nibble.cli.aliases import FLAGS, translated
from nibble.config import Config


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("demo --kv-cache-dtype fp8", "demo --kv-format fp8"),
        ("demo --kv-cache-dtype=nvfp4 --max-model-len 4096", "demo --kv-format=nvfp4 --max-context 4096"),
        ("--model-path demo --disable-radix-cache --port 1", "demo --no-prefix-cache --port 1"),
        ("--model=demo --enforce-eager --dtype half", "demo --no-compile --no-graphs --dtype float16"),
        ("demo --kv-format auto --dtype float", "demo --kv-format auto --dtype float32"),
        ("demo --kv-format nvfp4", "demo --kv-format nvfp4"),
    ],
)
def test_translated(said: str, meant: str) -> None:
    assert translated(said.split()) == meant.split()


def test_every_flag_stands_for_one_that_is_there() -> None:
    known = {
        f"--{prefix}{field.name.replace('_', '-')}" for field in fields(Config) for prefix in ("", "no-")
    }
    assert {word for flag in FLAGS.values() for word in flag.split()} <= known
