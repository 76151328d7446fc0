"""Messages name options as flags on the command line, and as arguments in Python."""

from __future__ import annotations

import subprocess
import sys

import pytest

from nibble.errors import in_python


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            "raise --kv-memory, or choose a --kv-format with fewer",
            "raise kv_memory=, or choose a kv_format= with fewer",
        ),
        ("start with --kv-scales calibrate", 'start with kv_scales="calibrate"'),
        ("a smaller --max-running (now 256) would help", "a smaller max_running= (now 256) would help"),
        ("--max-context 4096; --kv-memory 64MiB, if", 'max_context=4096; kv_memory="64MiB", if'),
        ("a smaller --max-context would help", "a smaller max_context= would help"),
        ("start without: --no-compile", "start without: compile=False"),
        ("--hisparse host_memory=64GiB does not", 'hisparse="host_memory=64GiB" does not'),
        (
            "what works: nibble plan demo --kv-format fp8_e4m3",
            "what works: nibble plan demo --kv-format fp8_e4m3",
        ),
        ("a -- b, page--size", "a -- b, page--size"),
    ],
)
def test_options_in_python(message: str, expected: str) -> None:
    assert in_python(message) == expected


CODE = """
from nibble import LLM, NibbleError
try:
    LLM("demo", device="cpu", kv_memory="1KiB")
except NibbleError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_users_script_sees_no_flags() -> None:
    told = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True).stdout
    assert "kv_memory=" in told and "--" not in told
