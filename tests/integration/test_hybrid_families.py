"""Families with recurrent layers: their logits must be those of the unmodified Transformers model.

Each is a tiny random model, run step by step over pages and states in float32 without an engine (hybrids.py). Prompts
are longer than convolutions, the families' chunks and blocks of the recurrence. The same comparison must notice planted
errors: a state off by a thousandth, inputs of a convolution shifted by a token.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch._dynamo.utils import counters
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from families import TOLERANCE, VOCAB, tiny_config, tiny_model
from hybrids import Driver, adapted, spec_of
from nibble.errors import ConfigError
from nibble.kernels.recurrence import BLOCK
from nibble.model_spec import NO_LAYER, ModelSpec, RecurrentGroup
from nibble.models import checkpoint, hook, invariant, recurrent
from nibble.models.forward import compiled, plain_invariant
from nibble.models.recurrent import recurrent_modules

HYBRIDS = {
    "qwen3_next": RecurrentGroup("delta", "delta", (0, 2), 32, 8, 16, 8, False, 512, 4),
    "qwen3_5_text": RecurrentGroup("delta", "delta", (0, 2), 32, 8, 16, 8, False, 512, 4),
    "qwen3_5_moe_text": RecurrentGroup("delta", "delta", (0, 2), 32, 8, 16, 8, False, 512, 4),
    "kimi_linear": RecurrentGroup("delta", "delta", (0, 2), 4, 16, 16, 4, True, 192, 4),
    "bailing_hybrid": RecurrentGroup("delta", "delta", (0, 2), 4, 16, 16, 4, True, 192, 4),
    "olmo_hybrid": RecurrentGroup("delta", "delta", (0, 2), 32, 16, 8, 32, False, 1024, 4),
    "bamba": RecurrentGroup("decay", "decay", (0, 2), 32, 4, 16, 1, False, 160, 4),
    "granitemoehybrid": RecurrentGroup("decay", "decay", (0, 2), 32, 4, 16, 1, False, 160, 4),
    "nemotron_h": RecurrentGroup("decay", "decay", (0,), 32, 4, 16, 2, False, 192, 4),
    "falcon_h1": RecurrentGroup("decay", "decay", (0, 1, 2, 3), 32, 4, 16, 1, False, 160, 4),
    "zamba2": RecurrentGroup("decay", "decay", (0, 1, 2, 3), 32, 4, 16, 1, False, 160, 4),
    "minimax": RecurrentGroup("decay", "decay", (1, 3), 4, 16, 16, 4, False),
    "jamba": RecurrentGroup("selective", "selective", (0, 2), 1, 128, 16, 1, False, 128, 4),
    "lfm2": RecurrentGroup("conv", "conv", (0, 2), conv_channels=64, conv_taps=3),
    "lfm2_moe": RecurrentGroup("conv", "conv", (0, 2), conv_channels=64, conv_taps=3),
    "lfm3": RecurrentGroup("conv", "conv", (0, 3), conv_channels=64, conv_taps=7),
}
"""By family what its layers must be observed to keep."""
ATTENDING = {
    "nemotron_h": (NO_LAYER, NO_LAYER, 2, NO_LAYER), "falcon_h1": (0, 1, 2, 3), "minimax": (0, NO_LAYER, 2, NO_LAYER),
    "lfm3": (NO_LAYER, 1, 2, NO_LAYER),
}  # fmt: skip
"""Owners of layers, where they are not those of the second and the fourth."""
PLANTED = 2 * BLOCK
"""Tokens before an error is planted."""


class Hybrid:
    """One family: the unmodified model, and a copy as it serves."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.config = tiny_config(name)

    @cached_property
    def model_spec(self) -> ModelSpec:
        return spec_of(self.config)

    @cached_property
    def reference(self) -> Any:
        return tiny_model(self.name).requires_grad_(False)

    @cached_property
    def model(self) -> Any:
        return adapted(self.reference)

    @cached_property
    def expected(self) -> Tensor:
        return self.own_logits(PROMPT)

    def own_logits(self, prompt: list[int]) -> Tensor:
        with torch.inference_mode():
            return self.reference(torch.tensor([prompt]), use_cache=False).logits[0]

    def driver(self, run: Any = None) -> Driver:
        return Driver(self.model, self.model_spec, *([run] if run else []))

    def error_after(self, plant: Callable[[Any], None]) -> float:
        """Largest difference of a logit behind a change of all layers' states in the middle of a prompt."""
        driver = self.driver()
        driver.step({0: PROMPT[:PLANTED]})
        for state in driver.layers.values():
            plant(state)
        logits = driver.step({0: PROMPT[PLANTED:]})
        return float((logits - self.expected[PLANTED:]).abs().max())


def tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB, (count,), generator=generator).tolist()


PROMPT = tokens(100, seed=1)


def present(name: str) -> str:
    """The name, if the installed Transformers has the family."""
    if name not in CONFIG_MAPPING:
        pytest.skip(f"Transformers {transformers.__version__} has no {name}")
    return name


@pytest.fixture(scope="module", params=HYBRIDS)
def hybrid(request: pytest.FixtureRequest) -> Hybrid:
    return Hybrid(present(request.param))


REPEATED = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
"""Families that repeat heads of keys for the values' heads themselves, in older versions of Transformers."""


def test_states_are_observed(hybrid: Hybrid) -> None:
    expected = HYBRIDS[hybrid.name]
    if hybrid.name in REPEATED and hybrid.model_spec.states[0].key_heads == expected.heads:
        expected = replace(expected, key_heads=expected.heads)
    assert hybrid.model_spec.states == (expected,)
    assert hybrid.model_spec.owner == ATTENDING.get(hybrid.name, (NO_LAYER, 1, NO_LAYER, 3))


@pytest.mark.parametrize("chunk", [len(PROMPT), 64, 7])
def test_logits_are_those_of_the_unmodified_model(hybrid: Hybrid, chunk: int) -> None:
    assert hybrid.expected.abs().max() > 0.5, "logits so small that an error would not show"
    error = float((hybrid.driver().logits(PROMPT, chunk) - hybrid.expected).abs().max())
    assert error < TOLERANCE


def test_requests_of_a_step_are_kept_apart(hybrid: Hybrid) -> None:
    """And rows of padding behind them change nothing."""
    driver, prompts = hybrid.driver(), {0: PROMPT[:40], 2: tokens(50, seed=2)}
    expected = {request: hybrid.own_logits(prompt) for request, prompt in prompts.items()}
    for start, stop in ((0, 19), (19, 20), (20, 40)):
        logits = driver.step({request: prompt[start:stop] for request, prompt in prompts.items()}, padding=3)
        for request, part in zip(prompts, logits.split(stop - start), strict=True):
            assert float((part - expected[request][start:stop]).abs().max()) < TOLERANCE


def test_the_unmodified_model_stays_as_it_is(hybrid: Hybrid) -> None:
    assert hybrid.model is not None
    assert torch.equal(hybrid.own_logits(PROMPT), hybrid.expected)


def test_a_planted_error_in_a_state_is_caught(hybrid: Hybrid) -> None:
    if not hybrid.model_spec.states[0].values:
        pytest.skip("its layers keep the inputs of a convolution alone")
    assert hybrid.error_after(lambda state: state.planes[0].mul_(1.001)) > TOLERANCE


def test_a_planted_shift_of_inputs_is_caught(hybrid: Hybrid) -> None:
    if not hybrid.model_spec.states[0].conv_taps:
        pytest.skip("its layers have no convolution")
    assert hybrid.error_after(lambda state: state.inputs_SPC.copy_(state.inputs_SPC.roll(1, 1))) > TOLERANCE


BATCHED = ("qwen3_next", "kimi_linear", "jamba", "lfm2_moe")
"""Families with experts, one for each rule, which are compiled as they are computed without grouped products too."""


def assert_one_graph(hybrid: Hybrid) -> None:
    """Of all steps since counters were cleared."""
    # MLA on a CPU multiplies fewer than 8 rows otherwise.
    latent = any(group.kind == "mla" for group in hybrid.model_spec.groups)
    assert counters["stats"]["unique_graphs"] <= 1 + latent
    assert sum(counters["graph_break"].values()) == 0


@pytest.mark.sample(6)
@pytest.mark.slow
def test_one_graph_serves_all_steps(hybrid: Hybrid) -> None:
    """The others' is that of test_deterministic_models_run_what_is_known."""
    if hybrid.name not in BATCHED:
        pytest.skip("compiled once, below")
    torch._dynamo.reset()
    counters.clear()
    hybrid.model.set_experts_implementation("batched_mm")
    driver = hybrid.driver(partial(compiled, backend="aot_eager"))
    # No step has a single token, for which torch makes a graph of its own.
    for chunk in (len(PROMPT), 64, 7):
        assert float((driver.logits(PROMPT, chunk) - hybrid.expected).abs().max()) < TOLERANCE
    assert_one_graph(hybrid)


COLUMNS = ("jamba",)
"""Families that multiply a weight with tokens as columns: the definition of products has an order for rows alone."""


@pytest.mark.sample(12)
@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_deterministic_models_run_what_is_known(hybrid: Hybrid, is_compiled: bool) -> None:
    """Gated norms, decays and step sizes included: no operator is refused, and chunks have the same bits, all from
    one graph where the model is compiled."""
    torch._dynamo.reset()
    counters.clear()
    with suppress(ValueError):  # without experts
        hybrid.model.set_experts_implementation("grouped_mm")
    driver = hybrid.driver(
        partial(compiled, backend=invariant.interpreted) if is_compiled else plain_invariant
    )
    whole = driver.logits(PROMPT, len(PROMPT))
    assert float((whole - hybrid.expected).abs().max()) < 2 * TOLERANCE
    # A CPU rounds gates otherwise at the end of a vector.
    if hybrid.name not in COLUMNS:
        assert torch.equal(driver.logits(PROMPT, 32), whole)
    if is_compiled:
        # No step has a single token, for which torch makes a graph of its own.
        assert float((driver.logits(PROMPT, 7) - hybrid.expected).abs().max()) < 2 * TOLERANCE
        assert_one_graph(hybrid)


def test_what_serves_is_compared_with_the_familys_own_code(
    hybrid: Hybrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When weights load: once as it should be, and once for each function that serves otherwise."""
    model_spec = hybrid.model_spec
    checkpoint.prepare_model(served(hybrid.name), model_spec)
    for name in {name for _, _, names in recurrent_modules(hybrid.reference) for name in names}:
        with monkeypatch.context() as patch:
            patch.setitem(recurrent.FUNCTIONS, name, partial(_late_by_a_token, recurrent.FUNCTIONS[name]))
            with pytest.raises(ConfigError, match="is not what the family's own code computes"):
                checkpoint.prepare_model(served(hybrid.name), model_spec)


def served(name: str) -> Any:
    """A model as it is loaded to serve."""
    model = tiny_model(name)
    model.set_attn_implementation(hook.NAME)
    return model


def _late_by_a_token(function: Any, *args: Any, **kwargs: Any) -> Any:
    out = function(*args, **kwargs)
    tokens = -1 if function in (recurrent.conv, recurrent.selective) else 1
    return (out[0].roll(1, tokens), None) if isinstance(out, tuple) else out.roll(1, tokens)


REFUSED = {
    "zamba": "ZambaAttention does not say which layer it is",
    "recurrent_gemma": "convolution model.layers.0.temporal_block.conv_1d looks at neighbouring tokens",
    "zaya": "conv_qk_depthwise looks at neighbouring tokens",
    "qwen4_exp_text": r"Qwen4ExpTextQSAIndexer.forward\) reads its attention mask",
    "inkling_text": "InklingShortConvolution gets neither the keywords nor the mask",
    "inkling2_text": "passes position_bias to its attention|ShortConvolution gets neither the keywords nor the mask",
    "inkling2_loop_text": "passes position_bias to its attention",
    "mamba": "MambaMixer gets neither the keywords nor the mask",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[name]):
        spec_of(tiny_config(present(name)))
