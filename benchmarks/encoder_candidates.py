"""Which candidate scales an encoder of a 4-bit format should try: error of K, V and latents against their number.

    python benchmarks/encoder_candidates.py [--tokens 2048] [--perplexity 4096]

Of both bundled models' own K (as it is, and after kmean and rot), V and latents, over the first tokens of text that the
models have not seen. For NVFP4 a candidate is an E4M3 code, counted from the one that fits the largest magnitude of a
block; for MXFP4 and fp4_mx16 an exponent, counted from floor(log2(amax)) - 2. Numbers are the energy of the error less
that of `amax`, mean over layers, and the global scale is what calibration would take: amax * 1.25 / 2688. With
`--perplexity` so many tokens are scored too, by the demo model through `amax`, `4over6` and `sweep` as they are.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from report import markdown
from torch import Tensor

import gpu
from nibble import LLM
from nibble.cache.scales import NONE
from nibble.evals.perplexity import Perplexity, _prompt_context, read_text, split_text, windows
from nibble.formats import nvfp4
from nibble.formats.base import float_table, pack_e2m1, unpack_e2m1
from nibble.formats.transforms import rotate
from nibble.models import hook

CODES = range(-5, 13)
SETS: tuple[tuple[int, ...], ...] = (
    (0,), (0, 4), (0, 5), (-1, 0), (-1, 0, 1), (-1, 0, 5), (-1, 0, 4, 5), (-1, 0, 1, 5), (-1, 0, 1, 2, 3),
    (0, 1, 2, 3, 4), (-1, 0, 1, 4, 5), (0, 1, 2, 3, 4, 5), (-1, 0, 1, 4, 5, 6), (-1, 0, 1, 3, 4, 5),
    (-1, 0, 1, 3, 4, 5, 6), (-2, -1, 0, 1, 3, 4, 5, 6), tuple(range(-1, 7)), tuple(range(-3, 9)), tuple(CODES),
)  # fmt: skip
"""Candidates of NVFP4, fewest first."""
EXPONENTS = range(-2, 4)
EXPONENT_SETS: tuple[tuple[int, ...], ...] = ((0,), (1,), (0, 1), (-1, 0, 1), (0, 1, 2), tuple(EXPONENTS))
SCHEMES = ("bf16", "nvfp4_amax", "nvfp4_4over6", "nvfp4", "nvfp4_amax+kmean+rot", "nvfp4+kmean+rot")
Layers = dict[int, dict[str, Tensor]]


class Recorder(hook.Observer):
    """Attends over an exact cache, and keeps what each layer stores: name -> [T, H, D]."""

    def __init__(self, ctx: Any) -> None:
        super().__init__()
        self._ctx, self.layers = ctx, Layers()

    def observe(self, call: hook.Call) -> Tensor:
        self.layers[call.layer] = {name: x[0].transpose(0, 1).clone() for name, x in call.streams.items()}
        return hook.attend(self._ctx, call)[None]


@torch.inference_mode()
def record(name: str, tokens: int) -> Layers:
    """K and V, or latents, of the first tokens of a bundled model's text."""
    llm = LLM(name, kv_format="fp32", device="cpu")
    ids = torch.tensor([llm.tokenizer.encode(read_text(None, name))[:tokens]])
    recorder = Recorder(_prompt_context(llm.plan, NONE, tokens, torch.device("cpu")))
    model = llm.engine.runner.model
    mask = hook.attention_mask_for(model, ids, recorder)
    positions, last = torch.arange(tokens)[None], torch.tensor([tokens - 1])
    options = {"attention_mask": mask, "use_cache": False, "logits_to_keep": last, hook.CONTEXT: recorder}
    model(input_ids=ids, position_ids=positions, **options)
    llm.close()
    return recorder.layers


def streams(tokens: int) -> dict[str, list[Tensor]]:
    """What is measured -> its values by layer."""
    heads, latents = (record(name, tokens).values() for name in ("demo", "demo-mla"))
    keys = [layer["k"] for layer in heads]
    return {
        "K": keys,
        "K, kmean+rot": [rotate(k - k.mean(0)) for k in keys],
        "V": [layer["v"] for layer in heads],
        "latent": [layer["latent"] for layer in latents],
    }


def energy(blocks: Tensor, steps: Tensor) -> Tensor:
    """Squared error of each block [N, S] under its scale [N], in float64."""
    inverse = steps.reciprocal().nan_to_num(posinf=0.0)[:, None]
    values = unpack_e2m1(pack_e2m1(blocks * inverse, blocks.signbit())) * steps[:, None]
    return (values - blocks).double().square().sum(-1)


def by_code(x: Tensor) -> dict[int, Tensor]:
    """NVFP4: the error of each block by candidate."""
    blocks, scale = x.unflatten(-1, (-1, nvfp4.BLOCK)).flatten(0, -2), x.abs().max() * 1.25 / (6 * 448)
    fitted = (blocks.abs().amax(-1) / (6 * scale)).clamp(max=448).to(torch.float8_e4m3fn)
    code, table = fitted.view(torch.uint8).int(), float_table(fitted.dtype, x.device)
    return {n: energy(blocks, table[(code + n).clamp(0, nvfp4.MAX_CODE)] * scale) for n in CODES}


def by_exponent(x: Tensor, size: int) -> tuple[dict[int, Tensor], Tensor]:
    """Powers of two: the error of each block by candidate, and that of the format's own choice."""
    blocks = x.unflatten(-1, (-1, size)).flatten(0, -2)
    amax = blocks.abs().amax(-1)
    floor = amax.frexp()[1] - 3
    found = {n: energy(blocks, (floor + n).float().exp2()) for n in EXPONENTS}
    own = found[0] if size == 32 else torch.where(amax > 6 * floor.float().exp2(), found[1], found[0])
    return found, own


def less(found: Mapping[int, Tensor], own: Tensor, candidates: Sequence[int]) -> float:
    """The energy of the best candidates' error over that of the format's own, less 1."""
    best = torch.stack([found[n] for n in candidates]).amin(0)
    return float(best.sum() / own.sum()) - 1


def mean(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):+.1%}"


def code_table(x: Mapping[str, Sequence[Tensor]]) -> str:
    found = {name: [by_code(layer) for layer in layers] for name, layers in x.items()}
    rows = [
        (
            str(len(some)),
            ", ".join(map(str, some)),
            *(mean([less(e, e[0], some) for e in errors]) for errors in found.values()),
        )
        for some in SETS
    ]
    return markdown(("tried", "NVFP4: codes from amax's", *found), rows)


def exponent_table(x: Mapping[str, Sequence[Tensor]]) -> str:
    rows = []
    for name, size in (("mxfp4", 32), ("fp4_mx16", 16)):
        found = {of: [by_exponent(layer, size) for layer in layers] for of, layers in x.items()}
        for some in EXPONENT_SETS:
            cells = (mean([less(errors, own, some) for errors, own in layers]) for layers in found.values())
            rows.append((name, ", ".join(map(str, some)), *cells))
    return markdown(("format", "exponents from the floor", *x), rows)


def perplexity_table(tokens: int) -> str:
    rows = []
    for scheme in SCHEMES:
        llm = LLM(
            "demo",
            kv_format=scheme,
            device=gpu.device(),
            prefix_cache=False,
            kv_transforms="none",
            kv_window=0,
        )
        parts = split_text(read_text(None, "demo"), tokens, llm.tokenizer.encode, llm.tokenizer.decode)
        perplexity = Perplexity()
        for window in windows(parts.scored, min(tokens, 4096)):
            perplexity.add(llm.logits(window.ids), window)
        llm.close()
        rows.append((scheme, f"{perplexity.value:.4f}"))
    return markdown(("cache", f"perplexity, {tokens} tokens"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--perplexity", type=int, default=0, help="tokens to score, 0 for none")
    options = parser.parse_args()
    values = streams(options.tokens)
    print(code_table(values), "", exponent_table(values), sep="\n", flush=True)
    if options.perplexity:
        print("", perplexity_table(options.perplexity), sep="\n")


if __name__ == "__main__":
    main()
