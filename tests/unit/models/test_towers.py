"""Multimodal checkpoints serve text with the weights of their language model alone, whatever their tensors are called."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from families import TOLERANCE, VOCAB, tiny_model
from nibble import LLM, ConfigError, WeightError
from nibble.models.hub import quiet
from nibble.models.observations import observe_model
from nibble.models.towers import key_mapping
from towers import tower_model

pytestmark = pytest.mark.filterwarnings("ignore")  # foreign code warns of itself

IDS = torch.randint(1, VOCAB, (40,), generator=torch.Generator().manual_seed(1)).tolist()
WEIGHTS = "model.safetensors"


def serve(folder: Path) -> LLM:
    return LLM(str(folder), kv_format="fp32", max_context=96, max_running=2, token_budget=7, kv_memory="8MiB")


def logits(model: Any) -> Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([IDS]), use_cache=False).logits[0]


def save(model: Any, folder: Path) -> Path:
    with quiet():
        model.save_pretrained(folder)
    return folder


def edit(folder: Path, **changes: Any) -> dict[str, Any]:
    """Change config.json; None removes an entry."""
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    return config


def rename(folder: Path, name_of: Callable[[str], str], **more: Tensor) -> None:
    tensors = {name_of(name): x for name, x in load_file(folder / WEIGHTS).items()}
    save_file({**tensors, **more}, folder / WEIGHTS, metadata={"format": "pt"})


@pytest.fixture
def qwen(tmp_path: Path) -> tuple[Path, Tensor]:
    model = tower_model("Qwen3VLForConditionalGeneration")
    return save(model, tmp_path), logits(model)


def test_no_weights_but_those_of_text_are_loaded(qwen: tuple[Path, Tensor]) -> None:
    folder, expected = qwen
    llm = serve(folder)
    assert (llm.logits(IDS) - expected).abs().max() < TOLERANCE
    names = {name for name, _ in llm.engine.runner.model.named_parameters()}
    assert all(name.startswith(("model.language_model.", "lm_head.")) for name in names)
    stored = {name: x for name, x in load_file(folder / WEIGHTS).items() if "visual" not in name}
    assert observe_model(str(folder), "float32").weight_bytes == 4 * sum(x.numel() for x in stored.values())


def test_weights_of_images_need_not_be_there(qwen: tuple[Path, Tensor]) -> None:
    folder, expected = qwen
    tensors = {name: x for name, x in load_file(folder / WEIGHTS).items() if "visual" not in name}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    assert (serve(folder).logits(IDS) - expected).abs().max() < TOLERANCE


def test_a_checkpoint_that_names_no_class(qwen: tuple[Path, Tensor]) -> None:
    folder, expected = qwen
    edit(folder, architectures=None)
    assert (serve(folder).logits(IDS) - expected).abs().max() < TOLERANCE


def test_an_end_token_of_the_text_config_ends_answers(qwen: tuple[Path, Tensor]) -> None:
    folder, _ = qwen
    (folder / "generation_config.json").unlink(missing_ok=True)
    answer = serve(folder).generate([IDS], temperature=0, max_tokens=8)[0].completions[0].token_ids
    text = json.loads((folder / "config.json").read_text())["text_config"]
    edit(folder, text_config={**text, "eos_token_id": answer[3]})
    ended = serve(folder).generate([IDS], temperature=0, max_tokens=8)[0].completions[0]
    assert ended.finish_reason == "stop" and len(ended.token_ids) <= 4


@pytest.mark.parametrize("change", ["missing", "unexpected", "wrong"])
def test_tensors_of_text_are_still_checked(change: str, qwen: tuple[Path, Tensor]) -> None:
    folder, _ = qwen
    tensors, name = load_file(folder / WEIGHTS), "model.language_model.layers.1.self_attn.q_proj.weight"
    if change == "missing":
        del tensors[name]
    elif change == "unexpected":
        tensors["model.language_model.layers.1.self_attn.q_proj.bias"] = torch.ones(64)
    else:
        tensors[name] = torch.ones(8, 8)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(WeightError, match=r"language_model\.layers\.1\.self_attn\.q_proj"):
        serve(folder)


def test_quantisation_that_the_text_config_declares(qwen: tuple[Path, Tensor]) -> None:
    """As Kimi K2.5 does. Of the KV cache alone it changes nothing; weights that cannot be read are refused."""
    folder, expected = qwen
    text = json.loads((folder / "config.json").read_text())["text_config"]
    for algorithm in (None, "W4A8_AWQ"):
        entry = {"quant_method": "modelopt", "quant_algo": algorithm, "kv_cache_quant_algo": "FP8"}
        edit(folder, text_config={**text, "quantization_config": entry})
        if algorithm is None:
            assert (serve(folder).logits(IDS) - expected).abs().max() < TOLERANCE
        else:
            with pytest.raises(ConfigError, match="W4A8_AWQ"):
                serve(folder)


def test_a_class_of_text_alone_may_be_named_with_the_config_of_all_towers(tmp_path: Path) -> None:
    whole = tower_model("Llama4ForConditionalGeneration")
    save(whole.language_model, tmp_path)
    whole.config.save_pretrained(tmp_path)
    edit(tmp_path, architectures=["Llama4ForCausalLM"])
    assert (serve(tmp_path).logits(IDS) - logits(whole)).abs().max() < TOLERANCE


OLD_NAMES = {
    "Gemma3ForConditionalGeneration": [
        (r"^model\.language_model\.", "language_model.model."),
        (r"^model\.(vision_tower|multi_modal)", r"\1"),
    ],
    "Mistral3ForConditionalGeneration": [
        (r"^model\.language_model\.", "language_model.model."),
        (r"^lm_head", "language_model.lm_head"),
    ],
    "Qwen2_5_VLForConditionalGeneration": [
        (r"^model\.language_model\.", "model."),
        (r"^model\.visual\.", "visual."),
    ],
}


@pytest.mark.parametrize("name", OLD_NAMES)
def test_names_of_older_checkpoints(name: str, tmp_path: Path) -> None:
    """As checkpoints on the hub have them, whatever this version of Transformers writes."""
    model = tower_model(name)
    save(model, tmp_path)

    def old(name: str) -> str:
        for pattern, replacement in OLD_NAMES[type(model).__name__]:
            name = re.sub(pattern, replacement, name)
        return name

    rename(tmp_path, old)
    assert (serve(tmp_path).logits(IDS) - logits(model)).abs().max() < TOLERANCE


@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights(tied: bool, tmp_path: Path) -> None:
    """A head of its own counts where the checkpoint has one, as for Transformers."""
    save(tower_model("Qwen3VLForConditionalGeneration, tied"), tmp_path)
    if not tied:
        edit(tmp_path, tie_word_embeddings=False)
        head = 0.3 * torch.randn(VOCAB, 64, generator=torch.Generator().manual_seed(2))
        rename(tmp_path, str, **{"lm_head.weight": head})
    assert ("lm_head.weight" in load_file(tmp_path / WEIGHTS)) is not tied
    with quiet():
        model = transformers.AutoModelForImageTextToText.from_pretrained(
            tmp_path, attn_implementation="eager"
        )
    assert (serve(tmp_path).logits(IDS) - logits(model.float().eval())).abs().max() < TOLERANCE


# Checkpoints that bring code for the whole, and name a language model that Transformers knows


def save_wrapped(family: str, folder: Path, prefix: str, part: str, **more: Any) -> Tensor:
    """Save a language model as part of a model that Transformers does not know; return its logits."""
    model = tiny_model(family)
    save(model, folder)
    nested = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(
            {
                "model_type": "somebodys_vl",
                "architectures": ["SomebodysVL"],
                "auto_map": {"AutoConfig": "code.Config", "AutoModel": "code.Model"},
                "vision_config": {"hidden_size": 8},
                part: {**nested, **more},
            }
        )
    )
    rename(folder, lambda name: prefix + name, **{"vision_model.embeddings.weight": torch.ones(3, 3)})
    return logits(model)


@pytest.mark.parametrize(
    ("family", "prefix", "part", "more"),
    [
        ("qwen2", "language_model.", "llm_config", {}),
        ("deepseek_v3", "language_model.", "text_config", {"model_type": "kimi_k2"}),
        ("qwen3", "llm.", "language_config", {}),
        ("gpt2", "text_model.", "text_config", {}),
    ],
)
def test_a_language_model_within_foreign_code(
    family: str, prefix: str, part: str, more: dict[str, Any], tmp_path: Path
) -> None:
    expected = save_wrapped(family, tmp_path, prefix, part, **more)
    llm = serve(tmp_path)
    assert observe_model(str(tmp_path), "float32").family == family
    assert (llm.logits(IDS) - expected).abs().max() < TOLERANCE


def test_tensors_within_foreign_code_are_checked(tmp_path: Path) -> None:
    save_wrapped("qwen2", tmp_path, "language_model.", "llm_config")
    rename(tmp_path, str, **{"language_model.model.layers.0.extra.weight": torch.ones(3)})
    with pytest.raises(WeightError, match=r"model\.layers\.0\.extra\.weight"):
        serve(tmp_path)
    rename(tmp_path, lambda name: name.replace("layers.0.extra", "x").replace("embed_tokens", "words"))
    with pytest.raises(WeightError, match=r"no tensor like model\.embed_tokens\.weight"):
        serve(tmp_path)


def test_foreign_code_around_an_unknown_language_model_is_refused(tmp_path: Path) -> None:
    save_wrapped("qwen2", tmp_path, "language_model.", "llm_config", model_type="somebodys_llm")
    with pytest.raises(ConfigError, match="Nibble does not run such code"):
        serve(tmp_path)


def test_prefixes() -> None:
    embedding = "model.embed_tokens.weight"
    names = ["vision.embed_tokens.weight", "lm_head.weight"]
    for name, expected in {
        "language_model.model.embed_tokens.weight": {r"^language_model\.": ""},
        "model.language_model.embed_tokens.weight": {r"^model\.language_model\.": "model."},
        "model.embed_tokens.weight": {"^": ""},
    }.items():
        assert key_mapping([name, "lm_head.weight"], embedding) == expected
    assert key_mapping([*names, "language_model.model.embed_tokens.weight"], embedding) == {
        r"^language_model\.": ""
    }
