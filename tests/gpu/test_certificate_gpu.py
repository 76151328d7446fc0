"""Certificates on a GPU: scales that a start measures are those that were certified, in this process and in another.

Skipped where there is no GPU, or it is not asked for: NIBBLE_TEST_GPU=1 pytest tests/gpu
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nibble import LLM
from nibble.config import Config
from nibble.evals.certify import certify
from nibble.evals.report import Sizes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

OPTIONS = {
    "kv_format": "nvfp4",
    "kv_scales": "calibrate",
    "device": "cuda",
    "kv_memory": "512MiB",
    "compile": False,
}
SMALL = Sizes(tokens=2048, recall_cases=4, recall_lengths=(1024,), attention_tokens=256)


def test_a_start_finds_what_was_certified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIBBLE_CERTIFICATES", str(tmp_path))
    found = certify(Config(model="demo", **OPTIONS), SMALL)  # type: ignore[arg-type]
    assert (
        0 < found.figures.kl < 1 and "NVIDIA" in found.line and found.path and found.path.parent == tmp_path
    )
    bound = f"kl={found.figures.kl * 1.001:.9f}"
    with LLM("demo", **OPTIONS, require_quality=bound) as llm:  # type: ignore[arg-type]
        assert llm.certificate == found
    call = (
        f"from nibble import LLM; print(LLM('demo', **{OPTIONS}, require_quality={bound!r}).certificate.line)"
    )
    again = subprocess.run(
        [sys.executable, "-c", call], env=dict(os.environ), capture_output=True, text=True, check=False
    )
    assert again.returncode == 0, again.stderr
    assert found.line in again.stdout
