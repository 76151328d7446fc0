"""nibble.transformers on a GPU: the same cache, written and read by the kernels that are planned there.

Skipped where there is no GPU, or it is not asked for: NIBBLE_TEST_GPU=1 pytest tests/gpu
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import nibble.transformers as nt
from nibble.models.hub import locate
from nibble.transformers.cache import CACHE

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def load(model: str, device: str, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(locate(model), dtype=dtype).to(device)


def ids(rows: int, count: int) -> torch.Tensor:
    return torch.randint(10, 500, (rows, count), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("model", "scheme", "limit"),
    [("demo", "bf16", 0.05), ("demo", "nvfp4", 0.3), ("demo", "k8v4", 0.3), ("demo-mla", "fp8_ds_mla", 0.3)],
)
def test_logits_are_those_of_the_cpu(model: str, scheme: str, limit: float) -> None:
    """Relative to float32 over the same cache: within the rounding of 16 bits, and the steps that it changes."""
    given, found = ids(3, 200), []
    mask = torch.ones_like(given)
    mask[1, :50] = 0
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        served = load(model, device, dtype)
        cache = nt.NibbleCache(served, scheme, **({} if model == "demo" else {"kv_scales": "one"}))
        parts = [
            served(
                given[:, start:stop].to(device),
                attention_mask=mask[:, :stop].to(device),
                past_key_values=cache,
                logits_to_keep=1,
            ).logits
            for start, stop in ((0, 150), (150, 199), (199, 200))
        ]
        found.append(torch.cat(parts, 1).float().cpu())
    expected, answer = found
    assert float((answer - expected).norm() / expected.norm()) < limit


def test_beams_and_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that beams share are copied on the device, and all of them when the pool grows."""
    model, given = load("demo", "cuda", torch.bfloat16), ids(2, 60).cuda()
    options = {"num_beams": 4, "max_new_tokens": 80, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(given, **{CACHE: nt.NibbleCache(model, kv_memory="64MiB")}, **options)
    monkeypatch.setattr("nibble.transformers.store.FIRST_TOKENS", 64)
    cache = nt.NibbleCache(model)
    before = cache.nbytes
    assert torch.equal(model.generate(given, **{CACHE: cache}, **options), expected)
    assert cache.nbytes > before
