"""What is replaced in a family's code is compared with it when weights are loaded: planted differences are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer
from transformers.models.glm5_next import modeling_glm5_next as glm5
from transformers.models.hy_v4.modeling_hy_v4 import HYV4Indexer
from transformers.models.mistral_large4 import modeling_mistral_large4 as mistral4
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from families import tiny_config, tiny_model
from nibble.errors import ConfigError
from nibble.kernels.types import AttentionParams
from nibble.models import dsa, equivalence, hook, linear, refusals
from nibble.models.checkpoint import load, prepare_model
from nibble.models.hub import quiet
from nibble.models.observe import observe

pytestmark = pytest.mark.filterwarnings("ignore")  # foreign code warns of itself


@pytest.fixture
def load_family(tmp_path: Path) -> Callable[[str], Any]:
    """Saves a tiny model of a family, and loads it as an engine does."""

    def load_from(name: str) -> Any:
        with quiet():
            tiny_model(name).save_pretrained(tmp_path)
        config = refusals.load_config(str(tmp_path))
        model_spec = observe(config, str(tmp_path), "float32", 96)
        return prepare_model(load(config, model_spec, "float32", "cpu"), model_spec)

    return load_from


@pytest.mark.parametrize(
    "name", ["qwen3_moe", "gpt_oss", "longcat_flash", "gemma3n_text", "glm_moe_dsa", "deepseek_v32", "hy_v4"]
)
def test_families_that_are_right_are_loaded(name: str, load_family: Callable[[str], Any]) -> None:
    model = load_family(name)
    assert model.config._attn_implementation == hook.NAME


def test_another_expansion_of_latents_is_refused(
    load_family: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expand = DeepseekV3Attention.expand_kv

    def negate(self: Any, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        return expand(self, kv_nope, -k_rot)

    monkeypatch.setattr(DeepseekV3Attention, "expand_kv", negate)
    with pytest.raises(
        ConfigError, match=r"deepseek_v3 cannot be served: model.layers.0.self_attn \(DeepseekV3Atten"
    ):
        load_family("deepseek_v3")


def test_sinks_that_get_lost_are_refused(
    load_family: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_sinks(
        scale: float, window: int | None, softcap: float | None, _: Tensor | None
    ) -> AttentionParams:
        return AttentionParams(scale, window, softcap)

    monkeypatch.setattr(hook, "AttentionParams", without_sinks)
    for name in ("gpt_oss", "hy_v4"):
        with pytest.raises(ConfigError, match=rf"{name} cannot be served: model.layers.0.self_attn"):
            load_family(name)


def test_other_experts_are_refused(
    load_family: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    own: Any = Qwen3MoeExperts.forward.__wrapped__  # type: ignore[attr-defined]

    def halve(self: Any, *args: Any) -> Tensor:
        return 0.5 * own(self, *args)

    def forward(self: Any, *args: Any) -> Tensor:
        return ALL_EXPERTS_FUNCTIONS.get_interface(self.config._experts_implementation, halve)(self, *args)

    monkeypatch.setattr(Qwen3MoeExperts, "forward", forward)
    with pytest.raises(ConfigError, match=r"model.layers.0.mlp \(Qwen3MoeSparseMoeBlock\)"):
        load_family("qwen3_moe")


def test_a_few_experts_stand_for_all(
    load_family: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each expert is as large as a layer of its own; with all of them, the comparison would take seconds."""
    computed: list[set[int]] = []
    own: Any = linear._compute_experts

    def note(self: Any, x_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        computed.append({*experts_TK.flatten().tolist()})
        return own(self, x_TH, experts_TK, weights_TK)

    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, linear._EXPERTS, note)
    model = load_family("deepseek_v3")
    assert computed and all(experts <= {*range(0, 32, 4)} for experts in computed)
    assert max(map(len, computed)) > 4
    assert not any(module._forward_pre_hooks for module in model.modules()), "in service all of them compute"


def test_wrong_linear_layers_are_refused(
    load_family: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = linear.packed_linear
    monkeypatch.setattr(linear, "packed_linear", lambda *args: right(*args) * 1.01)
    with pytest.raises(ConfigError, match=r"opt cannot be served: model.decoder.layers.0.self_attn"):
        load_family("opt")


def test_other_positions_are_refused(
    load_family: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals.PositionsWatch, "check", lambda self, family: None)
    with pytest.raises(ConfigError, match=r"roberta cannot be served: roberta.encoder.layer.0.attention"):
        load_family("roberta")


def test_code_that_fails_is_refused(
    load_family: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise KeyError("no such thing")

    monkeypatch.setattr(DeepseekV3Attention, "expand_kv", fail)
    with pytest.raises(
        ConfigError, match=r"own code, which fails on 16 tokens \(KeyError: 'no such thing'\)"
    ):
        load_family("deepseek_v3")


# Indexers


def test_rotary_values_are_taken_where_the_family_has_them(
    load_family: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {m.first for m in load_family("hy_v4").modules() if isinstance(m, dsa.Indexer)} == {24}
    assert {m.first for m in load_family("deepseek_v32").modules() if isinstance(m, dsa.Indexer)} == {0}
    monkeypatch.setattr(DeepseekV32Indexer, "forward", HYV4Indexer.forward)
    assert {m.first for m in load_family("deepseek_v32").modules() if isinstance(m, dsa.Indexer)} == {24}


def test_an_indexer_that_selects_otherwise_is_refused(
    load_family: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = DeepseekV32Indexer.forward

    def forget(self: Any, hidden_states: Tensor, q_resid: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return own(self, hidden_states, q_resid.flip(-1), *args, **kwargs)

    forget.__wrapped__ = own  # type: ignore[attr-defined]  # the same arguments
    monkeypatch.setattr(DeepseekV32Indexer, "forward", forget)
    with pytest.raises(ConfigError, match="DeepseekV32Indexer selects other tokens"):
        load_family("deepseek_v32")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts_are_told_apart_in_every_dtype(dtype: torch.dtype) -> None:
    config = tiny_config("hy_v4")
    torch.manual_seed(0)
    for cls, first in ((HYV4Indexer, 24), (DeepseekV32Indexer, 0)):
        source = cls(config, 0).to(dtype)
        assert dsa._layout(source)[1] == first
        assert source.index_topk == config.index_topk


def test_indexers_with_other_arguments_are_refused() -> None:
    """They have the attributes of others, and do something else."""
    options: dict[str, Any] = {"hidden_size": 32, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 16}
    with torch.device("meta"), quiet():
        mistral = mistral4.MistralLarge4TextIndexer(mistral4.MistralLarge4TextConfig(**options), 0)
        glm = glm5.Glm5NextTextIndexer(glm5.Glm5NextTextConfig(**options), 0)
    for indexer, arguments in (
        (mistral, "hidden_states, position_embeddings"),
        (glm, "hidden_states, q_resid, attention"),
    ):
        layer = nn.Module()
        layer.indexer = indexer
        with pytest.raises(ConfigError, match=f"{type(indexer).__name__} selects tokens from {arguments}"):
            dsa.indexer_replacements(layer)


# The parts


def test_errors_are_relative_to_each_token() -> None:
    expected = torch.randn(1, equivalence.TOKENS, 8, generator=torch.Generator().manual_seed(0))
    error = partial(equivalence._error, expected=expected, share=0.9, tokens=equivalence.TOKENS)
    assert error(expected) == 0
    assert error(expected * 1.25) == pytest.approx(0.25)
    assert error(None) == error(expected[:, 1:]) == error(expected * torch.nan) == float("inf")
    few = expected.clone()
    few[:, :2] = 0  # chosen by the last bits
    assert error(few) == 0
    few[:, :4] = 0
    assert error(few) == pytest.approx(1)


def test_weights_that_are_no_numbers_are_no_difference() -> None:
    expected = torch.full((1, equivalence.TOKENS, 8), torch.nan)
    assert equivalence._error(expected, expected, 0.9, equivalence.TOKENS) == 0


def test_layers_run_until_each_kind_was_among_them(load_family: Callable[[str], Any]) -> None:
    model = load_family("deepseek_v3")  # a dense layer, then layers with experts
    spec = observe(tiny_config("deepseek_v3"), "m", "float32", 96)
    names = equivalence._compared_modules(model, spec)
    assert names[-1] == "model.layers.1" and "model.layers.0.self_attn" in names
    (group,) = spec.groups
    split = replace(group, name="other", layers=(3,)), replace(group, layers=(0, 1, 2))
    assert equivalence._compared_modules(model, replace(spec, groups=split))[-1] == "model.layers.3"
    assert "model.layers.2" not in equivalence._compared_modules(model, replace(spec, groups=split))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(equivalence, "MAX_LAYERS", 2)
        shared = replace(spec, groups=split, owner=(0, 1, 1, 1))
        assert equivalence._compared_modules(model, shared)[-1] == "model.layers.1"


def test_a_model_without_a_list_of_layers_is_refused() -> None:
    spec = observe(tiny_config("llama"), "m", "float32", 96)
    with pytest.raises(ConfigError, match="does not find the list of its layers"):
        list(equivalence._layers(nn.Linear(2, 2), spec))
