"""What serves in the place of families' functions: the same arguments, the same results, and nothing ignored."""

from __future__ import annotations

import inspect
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.jamba.modeling_jamba import mamba_selective_scan
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.lfm2.modeling_lfm2 import causal_conv1d_fn
from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan
from transformers.models.olmo_hybrid.modeling_olmo_hybrid import torch_chunk_gated_delta_rule

import nibble.attention.recurrent as states
from nibble.attention.operators import Step
from nibble.errors import ConfigError
from nibble.kernels.recurrence import StateBatch, layer_state
from nibble.model_spec import RecurrentGroup
from nibble.models import hook, recurrent

TOKENS = 37
LAYER = 3


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def context(group: RecurrentGroup) -> states.RecurrentStates:
    layers = {LAYER: layer_state(group, 1, "fp32", torch.float32, 0, "cpu")}
    return states.RecurrentStates(layers, StateBatch((0,), (0,), (TOKENS,), (0,), (TOKENS,)))


def serve(own: states.RecurrentStates, rule: str, arguments: dict[str, Any], rest: Any) -> Tensor:
    assert not rest
    if rule == "conv":
        return states.conv(own, LAYER, **arguments)
    if rule == "selective":
        return states.selective(own, LAYER, **arguments)
    return states.recurrence(own, LAYER, **arguments, delta=rule == "delta")


def serving(**sizes: Any) -> Any:
    return partial(serve, context(RecurrentGroup("", layers=(LAYER,), **sizes)))


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_convolution(activation: str | None, has_bias: bool) -> None:
    x, weight, bias = torch.randn(1, 6, TOKENS), torch.randn(6, 4), torch.randn(6) if has_bias else None
    own = serving(rule="conv", conv_channels=6, conv_taps=4)
    expected = causal_conv1d_fn(x, weight, bias, activation)
    assert torch.allclose(recurrent.conv(own, x, weight, bias, activation), expected, atol=1e-5)


@pytest.mark.parametrize("normalizes", [False, True])
@pytest.mark.parametrize("key_decay", [False, True])
def test_delta_rule(key_decay: bool, normalizes: bool) -> None:
    key_heads = 4 if key_decay else 2
    query, key = torch.randn(2, 1, TOKENS, key_heads, 8) / (1 if normalizes else 4)
    value, beta = torch.randn(1, TOKENS, 4, 16), torch.rand(1, TOKENS, 4)
    g = -torch.rand(1, TOKENS, 4, 8) if key_decay else -torch.rand(1, TOKENS, 4)
    family = chunk_kimi_delta_attention if key_decay else torch_chunk_gated_delta_rule
    own = serving(rule="delta", heads=4, rows=16, columns=8, key_heads=key_heads, key_decay=key_decay)
    options = {"g": g, "beta": beta, "use_qk_l2norm_in_kernel": normalizes}
    out, state = recurrent.delta_rule(own, query, key, value, **options)
    assert state is None
    assert torch.allclose(out, family(query, key, value, **options)[0], atol=1e-4)


@pytest.mark.parametrize("dt_limit", [(0.0, float("inf")), (0.2, 0.4)])
@pytest.mark.parametrize("has_skip", [False, True])
def test_state_space(dt_limit: tuple[float, float], has_skip: bool) -> None:
    x, dt = torch.randn(1, TOKENS, 4, 8), torch.randn(1, TOKENS, 4)
    B, C = torch.randn(2, 1, TOKENS, 2, 16)
    options = {
        "D": torch.randn(4) if has_skip else None, "dt_bias": torch.randn(4), "dt_softplus": True,
        "dt_limit": dt_limit, "chunk_size": 8,
    }  # fmt: skip
    own = serving(rule="decay", heads=4, rows=8, columns=16, key_heads=2)
    arguments = x, dt, -torch.rand(4), B, C
    expected = mamba2_chunk_scan(*arguments, **options)
    assert torch.allclose(recurrent.state_space(own, *arguments, **options), expected, atol=1e-4)


@pytest.mark.parametrize("has_gate", [False, True])
def test_selective(has_gate: bool) -> None:
    x, dt, gate = torch.randn(3, 1, 8, TOKENS)
    B, C = torch.randn(2, 1, 4, TOKENS)
    options = {
        "D": torch.randn(8), "z": gate if has_gate else None, "delta_bias": torch.randn(8), "delta_softplus": True,
    }  # fmt: skip
    own = serving(rule="selective", heads=1, rows=8, columns=4, key_heads=1)
    arguments = x, dt, -torch.rand(8, 4), B, C
    expected = mamba_selective_scan(*arguments, **options)
    assert torch.allclose(recurrent.selective(own, *arguments, **options), expected, atol=1e-4)


def double(x: Tensor) -> Tensor:
    return 2 * x


class Doubling(nn.Module):
    layer_idx = LAYER

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return double(x) + 1


class Silent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixer = Doubling()

    def forward(self, x: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        return self.mixer(x, attention_mask=attention_mask)


class Speaking(Silent):
    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return self.mixer(x, **kwargs)


def test_a_forward_is_made_once_more_with_functions_as_arguments() -> None:
    forward = recurrent._with_arguments(Doubling.forward, ("double",))
    assert forward(Doubling(), torch.ones(1), double=lambda x: 5 * x) == 6
    assert Doubling()(torch.ones(1)) == 3, "the class stays as it is"
    assert forward.__globals__ is Doubling.forward.__globals__
    assert forward.__code__.co_filename == __file__
    line = inspect.getsourcelines(Doubling.forward)[1]
    assert forward.__code__.co_firstlineno == line


def test_what_is_no_function_of_its_module_is_refused() -> None:
    factor = 2

    def forward(self: Any, x: Tensor) -> Tensor:
        return double(x) * factor

    with pytest.raises(ConfigError, match="more than a function of its module"):
        recurrent._with_arguments(forward, ("double",))
    with pytest.raises(ConfigError, match="source cannot be read"):
        recurrent._with_arguments(eval("lambda self, x: double(x)"), ("double",))


def test_layers_that_keep_keywords_to_themselves() -> None:
    silent, speaking = Silent(), Speaking()
    model = nn.ModuleList([silent, speaking])
    assert recurrent.silent_parents(model, [silent.mixer, speaking.mixer]) == [silent]


def test_a_layer_gets_the_context_by_a_mask_of_its_parent() -> None:
    silent, step, contexts = Silent(), Step(), []

    def own(self: Any, x: Tensor, *, attention_mask: Tensor | None, causal_conv1d_fn: Any) -> Tensor:
        (serve,) = causal_conv1d_fn.args
        contexts.append(serve.args[1])
        assert attention_mask is None
        return x

    silent.mixer.forward = MethodType(hook._recurrent_forward(own, ("causal_conv1d_fn",)), silent.mixer)
    hook._hand_on(silent, torch.ones(1), **{hook.CONTEXT: step})
    assert contexts == [step]
    with pytest.raises(ConfigError, match="neither the keywords nor the mask"):
        silent(torch.ones(1))


@pytest.mark.parametrize(
    "rest",
    [
        {"initial_state": torch.zeros(1)},
        {"return_final_states": True},
        {"seq_idx": torch.zeros(1, 4)},
        {"scale": 2.0},
    ],
    ids=str,
)
def test_no_keyword_is_ignored(rest: dict[str, Any]) -> None:
    x = torch.zeros(TOKENS, 4, device="meta")
    arguments = {"x": x}
    with pytest.raises(ConfigError, match=rf"passes {next(iter(rest))} to its recurrence"):
        hook._keep_state(Doubling(), hook.Observer(), "conv", arguments, rest)
    harmless = {"initial_state": None, "output_final_state": False, "use_mambapy": True, "use_cache": False}
    observer = hook.Observer()
    assert hook._keep_state(Doubling(), observer, "conv", arguments, harmless).shape == x.shape
    assert [(call.layer, call.rule) for call in observer.recurrent_calls] == [(LAYER, "conv")]


def test_another_activation_is_refused() -> None:
    with pytest.raises(ConfigError, match="followed by gelu"):
        recurrent.conv(serving(rule="conv"), torch.zeros(1, 6, TOKENS), torch.zeros(6, 4), None, "gelu")


def test_who_looks_at_attention_alone_does_not_go_on_with_empty_values() -> None:
    with pytest.raises(ConfigError, match="looks at attention alone"):
        hook._keep_state(Doubling(), hook.Observer(), "conv", {"x": torch.zeros(TOKENS, 4)}, {})
