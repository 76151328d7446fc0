"""Trains the head that drafts for the demo model: EAGLE-3 (arXiv 2503.01840), one layer, 1.5 million parameters.

The head reads the hidden states that layers 2 and 4 of the demo get, and the one behind its last layer, and the token
that follows. Its table of tokens and its output matrix are the demo's own, so that it drafts all 4096 tokens and is
small. It learns to say what the demo says next, from the demo's own distribution, and as EAGLE-3 is trained, over
several steps: in step s it reads its own hidden state of step s - 1 where the demo's is not there yet, and attends to
what drafting would have written: rows of the demo's hidden states that are at least s tokens old, and its own of the
steps between.

    # on one H100 or H200, four minutes: the head, and report.json; --smoke runs a few steps on a CPU
    python models/train_demo_head.py train --data build/demo --out models/demo-eagle3 --seconds 220
    # what share of drafts is right, by their place, on held-out text
    python models/train_demo_head.py evaluate --data build/demo --model models/demo-eagle3

`build/demo` is what `train_demo.py prepare` leaves (corpus.npz); `nibble` has to be importable.

Shape suffixes: B rows, N tokens of a row, H hidden size, G heads, D values of a head, V vocabulary, S steps.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import train_demo as first
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3ForCausalLM

STARTED = time.monotonic()
FIRST_MODEL = Path(__file__).parent / "demo"
STATE_LAYERS = (2, 4, 6)
"""Layers whose inputs the head reads; there are six, so the last is what the demo's norm gets."""
HEADS, KV_HEADS, HEAD_DIM, MLP = 6, 2, 64, 352
STEPS, STEP_WEIGHT = 3, 0.8
"""Drafts that are learnt one after another, and the weight of each relative to the one before."""
BATCH_TOKENS, LENGTHS = 32_768, ((1024, 0.75), (4096, 0.93), (8192, 1.0))
"""Tokens of a batch; lengths of rows, and the share of the time at which each ends: long rows take longer."""
TEXT_SHARE, WEIGHT_DECAY, COOLING = 0.5, 0.1, 0.5


def clock() -> float:
    """Seconds since the start."""
    return time.monotonic() - STARTED


class Norm(nn.Module):
    """Root mean square norm, in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight.to(
            x.dtype
        )


def rotated(x_BGND: Tensor, positions_N: Tensor, base: float) -> Tensor:
    """Rotary positions, halves side by side as Llama has them."""
    half = x_BGND.shape[-1] // 2
    frequency = base ** (-torch.arange(half, device=x_BGND.device).float() / half)
    angle_ND = positions_N[:, None].float() * frequency
    cos, sin = angle_ND.cos(), angle_ND.sin()
    a, b = x_BGND.float().split(half, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x_BGND.dtype)


class Head(nn.Module):
    """The head; tensors are called as in EAGLE-3's checkpoints."""

    def __init__(self, demo: Any) -> None:
        super().__init__()
        config, size = demo.config, demo.config.hidden_size
        self.base, eps = config.rope_parameters["rope_theta"], config.rms_norm_eps
        self.fc = nn.Linear(len(STATE_LAYERS) * size, size, bias=False)
        layer = nn.Module()
        layer.hidden_norm, layer.input_layernorm, layer.post_attention_layernorm = (
            Norm(size, eps) for _ in range(3)
        )
        attention, mlp = nn.Module(), nn.Module()
        attention.q_proj = nn.Linear(2 * size, HEADS * HEAD_DIM, bias=False)
        attention.k_proj = nn.Linear(2 * size, KV_HEADS * HEAD_DIM, bias=False)
        attention.v_proj = nn.Linear(2 * size, KV_HEADS * HEAD_DIM, bias=False)
        attention.o_proj = nn.Linear(HEADS * HEAD_DIM, size, bias=False)
        mlp.gate_proj, mlp.up_proj = (nn.Linear(size, MLP, bias=False) for _ in range(2))
        mlp.down_proj = nn.Linear(MLP, size, bias=False)
        layer.self_attn, layer.mlp = attention, mlp
        self.midlayer, self.norm = layer, Norm(size, eps)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(
                    parameter, std=0.01 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
                )

    def qkv(self, embeds_BNH: Tensor, states_BNH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B, G, N, D] of a step; keys and values come once for each head."""
        layer = self.midlayer
        x = torch.cat([layer.input_layernorm(embeds_BNH), layer.hidden_norm(states_BNH)], -1)
        positions = torch.arange(x.shape[1], device=x.device)
        split = [
            F.linear(x, part.weight).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            for part in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
        ]
        q, k = (rotated(part, positions, self.base) for part in split[:2])
        repeats = HEADS // KV_HEADS
        return q, k.repeat_interleave(repeats, 1), split[2].repeat_interleave(repeats, 1)

    def finish(self, states_BNH: Tensor, mixed_BGND: Tensor) -> Tensor:
        """Hidden states behind the layer."""
        layer = self.midlayer
        x = states_BNH + layer.self_attn.o_proj(mixed_BGND.transpose(1, 2).flatten(2))
        y = layer.post_attention_layernorm(x)
        return x + layer.mlp.down_proj(F.silu(layer.mlp.gate_proj(y)) * layer.mlp.up_proj(y))


def attend(q_BGND: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attention of the newest step s: row j reads rows up to j - s of step 0, and row j - s + r of each step r.

    Args:
        q_BGND: of step s.
        keys: of steps 0 to s.
        values: the same.
    """
    steps, count = len(keys) - 1, q_BGND.shape[2]
    q_BGND = q_BGND * HEAD_DIM**-0.5
    scores = q_BGND @ keys[0].transpose(-1, -2)
    rows = torch.arange(count, device=scores.device)
    scores = scores.masked_fill(rows[None, :] > rows[:, None] - steps, float("-inf"))
    own = [(q_BGND * shifted(keys[r], steps - r)).sum(-1, keepdim=True) for r in range(1, steps + 1)]
    weights = torch.cat([scores, *own], -1).float().softmax(-1).to(q_BGND.dtype)
    mixed = weights[..., :count] @ values[0]
    for r in range(1, steps + 1):
        at = count + r - 1
        mixed = mixed + weights[..., at : at + 1] * shifted(values[r], steps - r)
    return mixed


def shifted(x: Tensor, by: int) -> Tensor:
    """x [..., N, D] with row j - by in the place of row j; the first rows are zeros."""
    return F.pad(x, (0, 0, by, 0))[..., : x.shape[-2], :] if by else x


def drafts(head: Head, states_BNX: Tensor, embeds_BNH: Tensor, steps: int) -> list[Tensor]:
    """Hidden states [B, N, H] of each step, behind the layer."""
    keys, values, outputs = list[Tensor](), list[Tensor](), list[Tensor]()
    states = head.fc(states_BNX)
    for _ in range(steps):
        q, k, v = head.qkv(embeds_BNH, states)
        keys, values = [*keys, k], [*values, v]
        if len(keys) == 1:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            # Scores are computed again for the gradient: they take gigabytes.
            mixed = checkpoint(attend, q, keys, values, use_reentrant=False)
        outputs.append(head.finish(states, mixed))
        # Row j goes on from what row j - 1 has left.
        states = shifted(outputs[-1], 1)
    return outputs


@torch.no_grad()
def read(demo: Any, ids_BN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of rows of tokens: the hidden states [B, N, X] for the head, embeddings and logits of the tokens after them.

    The last token has no successor, so there is one row less.
    """
    taken: list[Tensor] = []
    layers = demo.model.layers
    hooks = [
        layers[layer - 1].register_forward_hook(lambda _, __, out: taken.append(out))
        for layer in STATE_LAYERS
    ]
    hidden = demo.model(input_ids=ids_BN, use_cache=False).last_hidden_state
    for hook in hooks:
        hook.remove()
    logits = F.linear(hidden[:, 1:], demo.lm_head.weight)
    return torch.cat(taken, -1)[:, :-1], demo.model.embed_tokens(ids_BN[:, 1:]), logits


def losses_of(head: Head, output: Tensor, logits_BNV: Tensor, matrix_VH: Tensor) -> Tensor:
    """The divergence of a step's distribution from the demo's, in nats, fp32 [B, N]."""
    own = F.linear(head.norm(output), matrix_VH).float().log_softmax(-1)
    target = logits_BNV.float().log_softmax(-1)
    return (target.exp() * (target - own)).sum(-1)


def rate(done: float) -> float:
    """The learning rate at a share of the time: short warm-up, constant, then linear down to 1 %."""
    return min(done / 0.02 + 0.01, 1.0, 0.01 + 0.99 * (1 - done) / COOLING)


def train(arguments: argparse.Namespace) -> None:
    """Trains for some seconds, evaluates, and writes the head."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() and not arguments.smoke else "cpu"
    demo = load_demo(device)
    head = Head(demo).to(device).train()
    if arguments.init:
        load(head, arguments.init)
    print(f"{sum(p.numel() for p in head.parameters()):,} parameters on {device}", flush=True)
    matrices = [p for p in head.parameters() if p.dim() == 2]
    others = [p for p in head.parameters() if p.dim() != 2]
    optimizers = [
        first.Muon(matrices, lr=arguments.lr, weight_decay=WEIGHT_DECAY),
        torch.optim.AdamW(others, lr=arguments.lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    tokens = np.load(arguments.data / "corpus.npz")["train"]
    begun, steps, seen, last = clock(), 0, 0, clock()
    for stage, (length, end) in enumerate(LENGTHS):
        for batch, texts in first.batches(arguments, tokens, min(length, arguments.batch_tokens // 2), stage):
            done = (clock() - begun) / arguments.seconds
            if done >= end:
                break
            marked = batch.to(device, torch.long, non_blocking=True)
            ids, weight_BN = marked % first.LEARN, (marked[:, 2:] >= first.LEARN).float()
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                states, embeds, logits = read(demo, ids[:, :-1])
                outputs = drafts(head, states, embeds, STEPS)
                by_step = [losses_of(head, out, logits, demo.lm_head.weight) for out in outputs]
                total = weight_BN.sum()
                parts = [(x * weight_BN)[:, s:].sum() / total for s, x in enumerate(by_step)]
                loss = sum(part * STEP_WEIGHT**s for s, part in enumerate(parts))
            loss.backward()
            nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = arguments.lr * rate(done)
                optimizer.step()
                optimizer.zero_grad()
            steps, seen = steps + 1, seen + weight_BN.numel()
            if clock() - last > 10 or arguments.smoke:
                last, text = clock(), (by_step[0][:texts] * weight_BN[:texts]).mean().item()
                shown = " ".join(f"{part.item():.3f}" for part in parts)
                print(
                    f"{done:.0%} step {steps} length {length} loss {shown} text {text:.3f} {clock():.0f} s",
                    flush=True,
                )
    save(head, demo, arguments.out)
    print(f"{seen:,} tokens in {steps} steps, {clock() - begun:.0f} s", flush=True)
    report = {
        "tokens": seen,
        "steps": steps,
        "seconds": round(clock() - begun),
        **acceptance(head, demo, arguments),
    }
    (arguments.out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report))


def load(head: Head, folder: Path) -> None:
    """Gives a head the weights of a checkpoint."""
    weights = load_file(folder / "model.safetensors")
    head.load_state_dict({name: x.float() for name, x in weights.items()})


def load_demo(device: str) -> Any:
    """The demo model, which does not learn."""
    demo = Qwen3ForCausalLM.from_pretrained(FIRST_MODEL, dtype=torch.float32).to(device).eval()
    return demo.requires_grad_(False)


@torch.no_grad()
def acceptance(head: Head, demo: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """What share of drafts is the demo's likeliest token, by their place, after right ones, over held-out text."""
    head.eval()
    device = demo.device.type
    heldout, length = np.load(arguments.data / "corpus.npz")["heldout"], arguments.length
    right, reached = [0.0] * STEPS, [0.0] * STEPS
    for start in range(0, min(len(heldout), arguments.tokens) - length, length):
        ids = torch.from_numpy(heldout[start : start + length].astype(np.int64)).to(device)[None]
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            states, embeds, logits = read(demo, ids)
            outputs = drafts(head, states, embeds, STEPS)
            own = [F.linear(head.norm(out), demo.lm_head.weight).argmax(-1) for out in outputs]
        wanted, so_far = logits.argmax(-1), torch.ones_like(own[0], dtype=torch.bool)
        # Tokens of the text are taken for the demo's: only where they are its likeliest a chain goes on.
        follows = torch.cat(
            [wanted[:, :-1] == ids[:, 2:], torch.zeros_like(wanted[:, :1], dtype=torch.bool)], 1
        )
        for step, tokens in enumerate(own):
            hit = (tokens == wanted) & so_far
            right[step] += hit[:, step:].sum().item()
            reached[step] += so_far[:, step:].sum().item()
            so_far = F.pad((hit & follows)[:, :-1], (1, 0))
    shares = [round(a / max(b, 1), 4) for a, b in zip(right, reached, strict=True)]
    return {
        "acceptance": shares,
        "tokens a step": round(1 + sum(math.prod(shares[: s + 1]) for s in range(STEPS)), 3),
    }


def save(head: Head, demo: Any, out: Path) -> None:
    """Writes a bfloat16 copy, with a config as EAGLE-3's checkpoints have it."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {
        name: x.detach().to("cpu", torch.bfloat16).contiguous() for name, x in head.state_dict().items()
    }
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    model = demo.config
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": model.hidden_size,
        "intermediate_size": MLP, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM, "num_hidden_layers": 1, "vocab_size": model.vocab_size,
        "draft_vocab_size": model.vocab_size, "hidden_act": "silu", "rms_norm_eps": model.rms_norm_eps,
        "max_position_embeddings": model.max_position_embeddings, "rope_theta": head.base, "attention_bias": False,
        "mlp_bias": False, "tie_word_embeddings": False, "dtype": "bfloat16",
        # The layers that they come from, as SpecForge writes it.
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in STATE_LAYERS], "use_aux_hidden_state": True,
        },
    }  # fmt: skip
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def evaluate(arguments: argparse.Namespace) -> None:
    """Prints what share of drafts is right."""
    demo = load_demo("cuda" if torch.cuda.is_available() else "cpu")
    head = Head(demo).to(demo.device)
    load(head, arguments.model)
    print(json.dumps(acceptance(head, demo, arguments)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("train", help="training, then acceptance on held-out text")
    command.add_argument("--out", type=Path, required=True)
    command.add_argument("--seconds", type=float, default=220, help="of training alone")
    command.add_argument("--init", type=Path, help="a head to go on from")
    command.add_argument("--lr", type=float, default=3e-3)
    command.add_argument("--workers", type=int, default=14, help="processes that draw recall documents")
    command.add_argument("--batch-tokens", type=int, default=BATCH_TOKENS)
    command.add_argument(
        "--text-share", type=float, default=TEXT_SHARE, help="share of the rows that are text"
    )
    command.add_argument("--smoke", action="store_true", help="on the CPU")
    command.set_defaults(run=train)
    other = commands.add_parser("evaluate", help="acceptance on held-out text")
    other.add_argument("--model", type=Path, required=True)
    other.set_defaults(run=evaluate)
    for one in (command, other):
        one.add_argument("--data", type=Path, required=True, help="what `train_demo.py prepare` wrote")
        one.add_argument("--length", type=int, default=2048, help="tokens of a held-out window")
        one.add_argument("--tokens", type=int, default=100_000, help="held-out tokens")
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
