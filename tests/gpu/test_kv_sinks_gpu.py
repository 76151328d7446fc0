"""First tokens in the compute dtype on a GPU: errors shrink, and steps of all kinds agree, recorded ones too.

Skipped where there is no GPU, or it is not asked for: NIBBLE_TEST_GPU=1 pytest tests/gpu
"""

from __future__ import annotations

import pytest
import torch
from test_exact_window_gpu import SCHEMES, TEXT, TOKENS, decoding_error, kl, logits, opened

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


# demo-mla has sparse attention, which has no sinks.
@pytest.mark.parametrize(("model", "kv_format"), [("demo", kv_format) for kv_format in SCHEMES["demo"]])
def test_errors_shrink_with_sinks(model: str, kv_format: str) -> None:
    with opened(model, "bf16", 0) as plain:
        ids = plain.tokenizer.encode(TEXT)[:TOKENS]
        expected = logits(plain, ids, 512)
    errors, decoding = {}, {}
    for sinks in (0, 64, 896):
        with opened(model, kv_format, 64, kv_sinks=sinks) as llm:
            assert llm.plan.sinks == sinks
            errors[sinks] = [kl(expected, logits(llm, ids, chunk)) for chunk in (512, 100)]
            decoding[sinks] = decoding_error(llm, ids)
        print(model, kv_format, sinks, errors[sinks], decoding[sinks])
    # With all tokens exact, what is left is the arithmetic of other kernels, 3e-4 on an H200.
    assert max(errors[896]) < 0.15 * min(errors[0])
    assert max(errors[64]) < 1.1 * min(errors[0])
    # Other chunks round otherwise; a query that reads the wrong tokens would show as an error of another size.
    assert abs(errors[64][0] - errors[64][1]) < 0.2 * max(errors[64])
    # Of a few answers: codes flip where arithmetic differs in a last bit.
    assert decoding[896] < 1.2 * decoding[64] < 1.8 * decoding[0]
