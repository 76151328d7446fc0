"""Checkpoints that bring code of their own: refused unasked, served as their code computes with --trust-remote-code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from nibble import LLM, ConfigError, WeightError
from nibble.engine.tokenizer import Tokenizer
from tiny import save_tiny

DEMO = Path(__file__).parents[2] / "models/demo"

CODE = """
from transformers import {base}Config, {base}ForCausalLM

class OwnConfig({base}Config):
    model_type = "own_{name}"

class OwnForCausalLM({base}ForCausalLM):
    config_class = OwnConfig

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = -output.logits
        return output
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 whose code turns the signs of all logits."""
    folder = save_tiny(tmp_path_factory.mktemp("own"), "qwen3")
    (folder / "modeling_own.py").write_text(CODE.format(base="Qwen3", name="qwen3"))
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "own_qwen3",
        "architectures": ["OwnForCausalLM"],
        "auto_map": {
            "AutoConfig": "modeling_own.OwnConfig",
            "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_code_runs_only_where_it_is_trusted(own: Path) -> None:
    with pytest.raises(ConfigError, match="trust"):
        LLM(str(own), kv_format="fp32", kv_memory="8MiB")


def test_what_is_served_is_what_the_code_computes(own: Path) -> None:
    from transformers import AutoModelForCausalLM

    prompt = list(range(5, 30))
    reference = AutoModelForCausalLM.from_pretrained(own, trust_remote_code=True).eval()
    with torch.no_grad():
        expected = reference(torch.tensor([prompt])).logits[0]
    with LLM(str(own), kv_format="fp32", kv_memory="8MiB", trust_remote_code=True) as llm:
        assert (llm.logits(prompt) - expected).abs().max() < 1e-4


TOKENIZER = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast

class OwnTokenizer(PreTrainedTokenizerFast):
    def __init__(self, *args, **kwargs):
        (Path(kwargs["name_or_path"]) / "ran").touch()
        super().__init__(*args, **kwargs)
"""


def test_a_tokenizer_of_its_own_code(tmp_path: Path) -> None:
    folder = tmp_path / "own_tokenizer"
    shutil.copytree(DEMO, folder)
    (folder / "tokenization_own.py").write_text(TOKENIZER)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {
        "tokenizer_class": "OwnTokenizer",
        "auto_map": {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    # Of a type that Transformers knows it would take a tokenizer of its own, unasked.
    (folder / "config.json").write_text(json.dumps({"model_type": "own"}))
    with pytest.raises(WeightError, match="--trust-remote-code runs it"):
        Tokenizer(str(folder))
    assert not (folder / "ran").exists()
    tokenizer = Tokenizer(str(folder), trust_remote_code=True)
    assert len(tokenizer) == len(Tokenizer(str(DEMO)))
    assert (folder / "ran").exists()
