"""Each rule of recurrent layers in each format of states, in shapes of published models, against the definition.

On a GPU alone, as the definition itself serves on a CPU: NIBBLE_TEST_GPU=1 pytest tests/conformance --ledger
docs/ledger.json records what conformed. What is run is the start-up test (engine/state_test.py): prompts, chunks that
are cut anywhere, and decode steps.
"""

from __future__ import annotations

import datetime
import json
from dataclasses import asdict
from importlib.metadata import version

import pytest
import torch

from conformance_report import PROPERTY
from nibble.attention.planner import state_support
from nibble.attention.planner.evidence import LedgerEntry
from nibble.cache.state_pool import StatePool
from nibble.engine.state_test import state_test
from nibble.hardware import probe
from nibble.kernels.state_formats import FORMATS
from nibble.model_spec import RecurrentGroup

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LAYER = (0,)
SHAPES = {
    "qwen3-next-80b-a3b": RecurrentGroup("delta", "delta", LAYER, 32, 128, 128, 16, False, 8192, 4),
    "qwen3.5-27b": RecurrentGroup("delta", "delta", LAYER, 48, 128, 128, 16, False, 10240, 4),
    "kimi-linear-48b-a3b": RecurrentGroup("delta", "delta", LAYER, 32, 128, 128, 32, True, 12288, 4),
    "bamba-9b": RecurrentGroup("decay", "decay", LAYER, 128, 64, 128, 1, False, 8448, 4),
    "nemotron-h-8b": RecurrentGroup("decay", "decay", LAYER, 128, 64, 128, 8, False, 10240, 4),
    "falcon-h1-1.5b": RecurrentGroup("decay", "decay", LAYER, 48, 64, 256, 1, False, 3584, 4),
    "minimax-01": RecurrentGroup("decay", "decay", LAYER, 64, 128, 128, 64, False),
    "jamba-mini": RecurrentGroup("selective", "selective", LAYER, 1, 8192, 16, 1, False, 8192, 4),
    "lfm2-1.2b": RecurrentGroup("conv", "conv", LAYER, conv_channels=2048, conv_taps=3),
    "odd": RecurrentGroup("delta", "delta", LAYER, 6, 40, 24, 2, False, 152, 3),
}
SLOTS = 3


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", SHAPES)
def test_rule_conforms(name: str, dtype: str, format: str, request: pytest.FixtureRequest) -> None:
    group, machine = SHAPES[name], probe("cuda")
    today = datetime.date.today().isoformat()
    versions = {package: version(package) for package in ("torch", "triton")}
    for phase in state_support.PHASES:
        entry = LedgerEntry(
            *state_support.key(group, phase, format, machine.arch), machine.name, today, versions
        )
        request.node.user_properties.append((PROPERTY, json.dumps(asdict(entry))))
    pool = StatePool((group,), SLOTS, format, dtype, machine.device, poison=True)
    state_test(pool, (group,), dtype)
