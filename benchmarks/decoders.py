"""Roofline of FP4 decoders: GB/s of packed E2M1 streamed through each way of decoding it, with a trivial consumer.

    python benchmarks/decoders.py [--out FOLDER] [--report]

What the arithmetic alone allows, before attention asks for scales, products and a softmax. Gate: each decoder's values
are those of the format. Operations are for eight values, counted in the source (decoders.cu).
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from report import markdown
from torch import Tensor

import gpu
from nibble.kernels.nvrtc import INT, LONG, POINTER, Kernel, cubin

SOURCE = Path(__file__).with_suffix(".cu")
BYTES = 2 << 30
WORDS = 32
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Decoder:
    """macro: its number in the source. operations: for eight values, without the consumer's."""

    macro: int
    what: str
    operations: int


DECODERS = (
    Decoder(0, "none: bytes are only read", 0),
    Decoder(1, "float16, value by value: shifts and masks", 15),
    Decoder(2, "float16, byte by byte: signs and magnitudes of four values at once", 11),
    Decoder(3, "float16, from a bit order of its own", 11),
    Decoder(4, "E4M3 by a table in registers (prmt)", 9),
    Decoder(5, "E4M3 by table, then converted to float16", 13),
)


def own_order(words: Tensor) -> Tensor:
    """E2M1 codes [N, 8] in decoder 3's order: halves hold magnitudes at 9, 6, 3, 0, signs at 15, 12, 13, 14."""
    halves = torch.stack((words & 0xFFFF, (words >> 16) & 0xFFFF), 1)
    places = zip((9, 6, 3, 0), (15, 12, 13, 14), strict=True)
    return torch.stack([(halves >> m & 7) | (halves >> s & 1) << 3 for m, s in places], 1).flatten(1)


def expected(decoder: Decoder, words: Tensor) -> Tensor:
    """The values [N, 8] of words, sorted: an order that suits a kernel is as good as any."""
    plain = torch.stack([words >> (4 * i) & 15 for i in range(8)], 1)
    codes = own_order(words) if decoder.macro == 3 else plain
    table = torch.tensor([*VALUES, *(-value for value in VALUES)])
    return table[codes.long()].sort(1).values


def found(decoder: Decoder, kernel: Kernel, words: Tensor) -> Tensor:
    out = torch.zeros(WORDS, 4, dtype=torch.int32, device="cuda")
    kernel.launch(1, WORDS, 0, (POINTER, POINTER), (words.int().cuda().data_ptr(), out.data_ptr()))
    if decoder.macro == 4:
        return out[:, :2].contiguous().view(torch.float8_e4m3fn).float().sort(1).values.cpu()
    shift = 1.0 if decoder.macro == 5 else 2.0**14
    return (out.view(torch.float16).float() * shift).sort(1).values.cpu()


def measure(decoder: Decoder, data: Tensor, arch: int) -> float:
    """GB/s; stops where the decoder is wrong."""
    code = cubin(SOURCE, arch, {"DECODER": decoder.macro})
    words = torch.randint(-(1 << 31), 1 << 31, (WORDS,))
    if decoder.macro and not torch.equal(
        found(decoder, Kernel(code, "first", 0), words), expected(decoder, words)
    ):
        raise SystemExit(f"wrong values: {decoder.what}")
    blocks = torch.cuda.get_device_properties(0).multi_processor_count * 8
    out = torch.empty(blocks * 256, dtype=torch.int32, device="cuda")
    types = (POINTER, POINTER, LONG, INT)
    values = (data.data_ptr(), out.data_ptr(), data.numel() // 16, 0x3C003C00)
    launch = partial(Kernel(code, "stream", 0).launch, blocks, 256, 0, types, values)

    def step() -> list[Tensor]:
        launch()
        return []

    return data.numel() / gpu.time_calls(step, 1, graph=False).ms / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    gpu.add_output_options(parser)
    options = parser.parse_args()
    major, minor = torch.cuda.get_device_capability()
    data = torch.randint(0, 256, (BYTES,), dtype=torch.uint8, device="cuda")
    speeds = {decoder: measure(decoder, data, 10 * major + minor) for decoder in DECODERS}
    read = speeds[DECODERS[0]]
    table = markdown(
        ("decoder", "operations / 8 values", "GB/s", "share of reading alone"),
        [(d.what, d.operations, f"{gbps:.0f}", f"{gbps / read:.0%}") for d, gbps in speeds.items()],
    )
    figures = [asdict(decoder) | {"gbps": gbps} for decoder, gbps in speeds.items()]
    gpu.publish("decoders", options, __doc__ or "", (table,), gpu.versions(), decoders=figures)


if __name__ == "__main__":
    main()
