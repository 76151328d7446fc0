"""Checkpoints that are broken, incomplete or of a kind that Nibble would serve wrong: each is refused with its cause.

What can be known before weights load must be said before weights load.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import (
    blockwise_overlay,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
)

from nibble import LLM
from nibble.config import Config
from nibble.engine.plan import plan_engine
from nibble.errors import ConfigError, RequestError, WeightError
from nibble.models import observe as observing
from nibble.models.observe import observe
from nibble.models.refusals import ConvolutionsWatch, PositionsWatch, check_config, check_masks
from tiny import BASE, save_model, save_tiny

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_model(tmp_path)


def serve(folder: Path | str) -> LLM:
    return LLM(str(folder), kv_format="fp32", max_context=64, kv_memory="8MiB")


def edit(folder: Path, **changes: Any) -> None:
    """Changes entries of config.json; None removes one."""
    path = folder / "config.json"
    data = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test where weights are read."""

    def read(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("nibble.engine.build.load", read)


class TestCheckpoints:
    def test_shards(self, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
        sharded = tmp_path_factory.mktemp("sharded")
        AutoModelForCausalLM.from_pretrained(folder).save_pretrained(sharded, max_shard_size="100KB")
        assert len(list(sharded.glob("*.safetensors"))) > 2
        ids = list(range(1, 20))
        assert torch.equal(serve(sharded).logits(ids), serve(folder).logits(ids))

    def test_a_missing_shard(self, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
        sharded = tmp_path_factory.mktemp("sharded")
        AutoModelForCausalLM.from_pretrained(folder).save_pretrained(sharded, max_shard_size="100KB")
        lost = sorted(sharded.glob("*.safetensors"))[1]
        lost.unlink()
        with pytest.raises(WeightError, match=rf"lacks 1 of the \d+ weight files that .* names, {lost.name}"):
            serve(sharded)

    def test_tied_embeddings(self, tmp_path: Path) -> None:
        folder = save_model(tmp_path, tie_word_embeddings=True)
        assert "lm_head.weight" not in load_file(folder / WEIGHTS)
        assert serve(folder).logits([1, 2, 3]).isfinite().all()

    def test_half_precision_weights_are_computed_in_float32_on_a_cpu(self, folder: Path) -> None:
        tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / WEIGHTS).items()}
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})
        edit(folder, dtype="bfloat16")
        assert serve(folder).logits([1, 2, 3]).dtype == torch.float32

    def test_a_missing_tensor(self, folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        del tensors["model.layers.1.mlp.up_proj.weight"]
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})
        with pytest.raises(
            WeightError, match=r"lacks 1 tensors, model.layers.1.mlp.up_proj.weight .*incomplete"
        ):
            serve(folder)

    def test_an_unexpected_tensor(self, folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        tensors["model.layers.0.self_attn.q_proj.lora"] = torch.ones(2)
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})
        with pytest.raises(WeightError, match=r"q_proj.lora among them: they would be ignored"):
            serve(folder)

    def test_wrong_shapes(self, folder: Path) -> None:
        edit(folder, intermediate_size=64)
        with pytest.raises(
            WeightError, match=r"other shapes than config.json .*\(64, 96\) stored, needed \(64, 64\)"
        ):
            serve(folder)

    def test_a_weight_file_cut_short(self, folder: Path) -> None:
        content = (folder / WEIGHTS).read_bytes()
        (folder / WEIGHTS).write_bytes(content[: len(content) // 2])
        with pytest.raises(WeightError, match="broken or cut short"):
            serve(folder)

    def test_no_weights_at_all(self, folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        with pytest.raises(WeightError, match=r"has no weights: neither \*.safetensors nor \*.bin"):
            serve(folder)

    def test_no_tokenizer(self, folder: Path) -> None:
        llm = serve(folder)
        assert llm.generate([1, 2, 3], max_tokens=2).completions[0].token_ids
        with pytest.raises(RequestError, match="no tokenizer: give token ids"):
            llm.generate("text")

    def test_opening_a_model_prints_nothing(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        save_tiny(tmp_path)
        capfd.readouterr()
        serve(tmp_path)
        assert capfd.readouterr() == ("", "")

    def test_a_broken_checkpoint_prints_nothing_either(
        self, folder: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        edit(folder, num_hidden_layers=4, layer_types=None)
        capfd.readouterr()
        with pytest.raises(WeightError, match="lacks"):
            serve(folder)
        assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("no_weights")
class TestBeforeWeights:
    def test_a_plan_reads_no_weights(self, folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        assert plan_engine(Config(model=str(folder))).model_spec.layers == 3

    def test_no_config(self, folder: Path) -> None:
        (folder / "config.json").unlink()
        with pytest.raises(WeightError, match=r"has no config.json; name the folder"):
            serve(folder)

    def test_a_config_that_is_not_json(self, folder: Path) -> None:
        (folder / "config.json").write_text('{"model_type": "llama",')
        with pytest.raises(
            WeightError, match=r"config.json is not a JSON object .*save the checkpoint again"
        ):
            serve(folder)

    def test_a_config_with_a_senseless_value(self, folder: Path) -> None:
        edit(folder, hidden_size="wide")
        with pytest.raises(ConfigError, match="hidden_size"):
            serve(folder)

    def test_an_unknown_hub_name_offline(self) -> None:
        with pytest.raises(
            WeightError, match=r"neither a folder nor a hub model that can be reached .*check the name"
        ):
            serve("nibble-tests/no-such-model")

    def test_an_unknown_family(self, folder: Path) -> None:
        edit(folder, model_type="of_tomorrow")
        with pytest.raises(ConfigError, match="of_tomorrow"):
            serve(folder)

    def test_remote_code(self, folder: Path) -> None:
        edit(folder, model_type="of_tomorrow", auto_map={"AutoConfig": "code.Config"})
        (folder / "code.py").write_text("raise AssertionError('the code was run')")
        with pytest.raises(ConfigError, match="does not run such code"):
            serve(folder)

    def test_a_context_longer_than_the_model(self, folder: Path) -> None:
        with pytest.raises(ConfigError, match="max_context 4096 is more than the 1024 tokens"):
            LLM(str(folder), max_context=4096)


TINY_LAYERS = {"num_hidden_layers": 2}
REFUSED = {
    "deepseek_v4": ("compressed_sparse_attention layers are more than attention", {}),
    "t5": ("encoder-decoder", {}),
    "vit": ("no causal language model", {}),
}


@pytest.mark.parametrize("family", REFUSED)
def test_families_refused_by_their_config(family: str) -> None:
    reason, options = REFUSED[family]
    with pytest.raises(ConfigError, match=f"cannot be served: .*{reason}"):
        check_config(AutoConfig.for_model(family, **options))


OBSERVED = {
    "falcon": ("fixed set of attention implementations", {}),
    "gptj": ("fixed set of attention implementations", {}),
    "bloom": ("do not attend through Transformers' AttentionInterface", {}),
    "mpt": ("do not attend through Transformers' AttentionInterface", {}),
    "xmod": (
        r"XmodOutput.lang_adapter\) depends on values of tensors",
        {"is_decoder": True, "default_language": "en_XX", "num_hidden_layers": 2},
    ),
    "diffllama": ("layer 0 attends 2 times in one pass", {"num_hidden_layers": 2}),
    "granitemoehybrid": (
        "none of its layers attends",
        {"layer_types": ["linear_attention"] * 2, **TINY_LAYERS},
    ),
    "recurrent_gemma": ("convolution model.layers.0.temporal_block.conv_1d", {"num_hidden_layers": 3}),
    "bart": ("counts positions by itself", {"is_encoder_decoder": False}),
    "phimoe": ("largest position of the batch", {"num_hidden_layers": 2}),
    "bert": ("is_causal=False", {"is_decoder": False}),
    "paligemma": ("is_causal=False", {}),
    "gemma3_text": ("is_causal=False", {"use_bidirectional_attention": True}),
}


@pytest.mark.parametrize("family", OBSERVED)
def test_families_refused_by_what_they_do(family: str) -> None:
    reason, options = OBSERVED[family]
    with pytest.raises(ConfigError, match=reason):
        observe(AutoConfig.for_model(family, **options), family, "float32")


def test_a_config_is_observed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, make = [], observing.skeleton
    monkeypatch.setattr(observing, "skeleton", lambda config: made.append(config) or make(config))
    first, same, longer = (AutoConfig.for_model("qwen3", **{**BASE, "hidden_size": 48}) for _ in range(3))
    longer.max_position_embeddings *= 2
    found = [observe(config, "a", "float32") for config in (first, same, longer)]
    assert found[0] is found[1] and made == [first, longer]
    assert found[2].max_context == 2 * found[0].max_context


class TestGuard:
    """models/refusals.py on its own."""

    def check(self, rule: Any, window: int | None, max_context: int = 100, chunk: int | None = None) -> None:
        check_masks([(0, rule, window, chunk)], "toy", max_context)

    def test_causal_masks_pass(self) -> None:
        self.check(None, None)
        self.check(causal_mask_function, None)
        self.check(sliding_window_causal_mask_function(8), 8)
        self.check(chunked_causal_mask_function(100, torch.zeros(1, dtype=torch.long)), None)

    def test_masks_of_chunks_pass_where_the_config_says_so(self) -> None:
        """Whose padding has no values, as that of a model that is observed."""
        rule = chunked_causal_mask_function(16, torch.zeros(1, dtype=torch.long, device="meta"))
        self.check(rule, None, chunk=16)
        for chunk in (None, 8, 32):
            with pytest.raises(ConfigError, match="never builds masks"):
                self.check(rule, None, chunk=chunk)
        with pytest.raises(ConfigError, match="not simply causal within 16 tokens"):
            self.check(causal_mask_function, None, chunk=16)

    @pytest.mark.parametrize(
        ("rule", "window"),
        [
            (sliding_window_causal_mask_function(8), None),
            (sliding_window_causal_mask_function(8), 9),
            (causal_mask_function, 8),
            (chunked_causal_mask_function(16, torch.zeros(1, dtype=torch.long)), None),
            (or_masks(causal_mask_function, lambda b, h, q, k: k < 4), None),
            (or_masks(causal_mask_function, blockwise_overlay(torch.zeros(1, 8, dtype=torch.long))), None),
        ],
    )
    def test_other_masks_are_refused(self, rule: Any, window: int | None) -> None:
        with pytest.raises(ConfigError, match="never builds masks"):
            self.check(rule, window)

    def test_positions(self) -> None:
        given, table = torch.arange(4)[None], torch.rand(8, 2)
        for use in (
            lambda: table[given, :],
            given.float,
            lambda: nn.functional.embedding(given, table),
        ):
            with PositionsWatch(given) as watch:
                use()
            watch.check("toy")
        ids, table = torch.zeros(1, 5, dtype=torch.long), torch.rand(64, 2)
        for count in (
            lambda: torch.arange(64)[:5],
            lambda: table[:5],
            lambda: table.narrow(0, 0, 5),
            lambda: table.split([5, 59])[0],
            lambda: ids.ne(1).cumsum(-1),
            lambda: torch.tensor(range(5)),
        ):
            with PositionsWatch(torch.arange(5)[None]) as watch:
                count()
            with pytest.raises(ConfigError, match="counts positions by itself"):
                watch.check("toy")
        with PositionsWatch(given) as watch:
            torch.max(given)
        with pytest.raises(ConfigError, match="largest position of the batch"):
            watch.check("toy")

    def test_a_model_may_have_no_positions(self) -> None:
        given, ids, table = torch.arange(5)[None], torch.zeros(1, 5, dtype=torch.long), torch.rand(64, 2)
        with PositionsWatch(given) as watch:
            assert given.shape[1] == 5
            x = nn.functional.embedding(ids, table)
            (x.repeat_interleave(2, 1).view(5, 2, 2).sum(1) + torch.zeros(5, 2)).softmax(-1)
            torch.arange(64)
        watch.check("toy")

    def test_convolutions(self) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Conv1d(2, 2, 3))
        x = torch.rand(2, 3)
        refused = pytest.raises(ConfigError, match=r"convolution 1 looks at neighbouring tokens")
        with refused, ConvolutionsWatch(model, "toy"):
            model(x)
        with refused, ConvolutionsWatch(model, "toy"):
            nn.functional.conv1d(x, model[1].weight)
        with refused, ConvolutionsWatch(model, "toy"):
            nn.functional.conv1d(x, model[1].weight.detach().flip(2))
        # What serves convolutions is given a view of the weight.
        with ConvolutionsWatch(model, "toy"):
            assert model[1].weight.squeeze(1).shape == (2, 2, 3)
        # A tower that text does not pass.
        with ConvolutionsWatch(model, "toy"):
            model[0](x).to(model[1].weight.dtype)


def modelopt(algo: str | None, **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "modelopt",
        "quant_algo": algo,
        "kv_cache_scheme": {"num_bits": 8, "type": "float"},
        **more,
    }


BY_LAYER = {
    "quantized_layers": {},
    "kv_cache_quant_algo": "MIXED_PRECISION",
    "kv_cache_quantized_layers": {"model.layers.1.self_attn": {"quant_algo": "FP8"}},
    "kv_cache_schema_version": 1,
}
"""What ModelOpt says of KV formats by layer."""


def test_auto_takes_what_modelopt_says_of_each_layer(folder: Path) -> None:
    entry = {"quant_algo": "MIXED_PRECISION", **BY_LAYER}
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": entry}))
    plan = LLM(str(folder), kv_format="auto", kv_scales="one").plan
    assert {layer: group.scheme for group in plan.groups for layer in group.layers} == {
        0: "bf16", 1: "fp8_e4m3", 2: "bf16"
    }  # fmt: skip
    weights = {**entry, "quantized_layers": {"model.layers.0.mlp.up_proj": {"quant_algo": "FP8"}}}
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": weights}))
    with pytest.raises(
        WeightError, match="declares weights quantised by modelopt, and holds no quantised matrix"
    ):
        serve(folder)


@pytest.mark.usefixtures("no_weights")
class TestQuantisedWeights:
    @pytest.mark.parametrize("algo", ["W4A8_AWQ", "W4A16_AWQ", "MXFP8", "OF_TOMORROW"])
    def test_modelopt_in_config_json(self, folder: Path, algo: str) -> None:
        edit(folder, quantization_config=modelopt(algo))
        with pytest.raises(
            ConfigError, match=f"weights of modelopt that cannot be read: {algo}; use another"
        ):
            serve(folder)

    def test_modelopt_in_its_older_form(self, folder: Path) -> None:
        entry = {"quant_method": "modelopt", "quantization": {"quant_algo": "W4A8_AWQ"}}
        edit(folder, quantization_config=entry)
        with pytest.raises(ConfigError, match="modelopt that cannot be read: W4A8_AWQ"):
            serve(folder)

    def test_modelopt_in_its_own_file(self, folder: Path) -> None:
        layers = {"model.layers.0.mlp.up_proj": {"quant_algo": "W4A16_AWQ"}, "lm_head": {"quant_algo": "FP8"}}
        entry = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": entry}))
        with pytest.raises(ConfigError, match="modelopt that cannot be read: W4A16_AWQ;"):
            serve(folder)

    def test_a_broken_modelopt_file(self, folder: Path) -> None:
        (folder / "hf_quant_config.json").write_text("{")
        with pytest.raises(WeightError, match=r"hf_quant_config.json is not a JSON object"):
            serve(folder)

    @pytest.mark.parametrize("entry", [{"quant_method": "of_tomorrow"}, {"bits": 4}])
    def test_methods_that_transformers_does_not_know(self, folder: Path, entry: dict[str, Any]) -> None:
        edit(folder, quantization_config=entry)
        with pytest.raises(ConfigError, match="would load as if they were unquantised"):
            serve(folder)


@pytest.mark.parametrize(
    "entry",
    [
        modelopt(None),
        modelopt("NONE"),
        {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {}},
        modelopt("MIXED_PRECISION", **BY_LAYER),
    ],
)
def test_a_config_that_quantises_the_cache_only_is_served(
    folder: Path, entry: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    expected = serve(folder).logits([1, 2, 3])
    edit(folder, quantization_config=entry)
    (folder / "hf_quant_config.json").write_text(
        json.dumps({"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}})
    )
    capfd.readouterr()
    assert torch.equal(serve(folder).logits([1, 2, 3]), expected)
    assert capfd.readouterr() == ("", "")


def test_a_multimodal_checkpoint_answers_text(tmp_path: Path) -> None:
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
    }
    text = {
        **BASE,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision, mm_tokens_per_image=4)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    model.save_pretrained(tmp_path)
    ids = list(range(1, 40))
    with torch.inference_mode():
        expected = model(torch.tensor([ids]), use_cache=False).logits[0]
    assert (serve(tmp_path).logits(ids) - expected).abs().max() < 1e-4


def test_a_pytorch_file_of_garbage(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"garbage, not weights" * 10)
    with pytest.raises(WeightError, match="is broken, or is no PyTorch checkpoint"):
        serve(folder)
