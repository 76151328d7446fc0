"""Trains the demo model with recurrent states: a gated delta net in three of four layers and gated attention in the
fourth, Qwen3-Next's architecture, 4.8 million parameters. Tokenizer, corpus and tasks are those of the first demo model
(train_demo.py).

The parameters are those of Transformers' class and are saved as its checkpoint; the forward pass that trains them is
below, and the logits of both are compared at the end. The delta rule is computed in chunks of 64 tokens by products of
matrices alone, which run fast on a GPU and have gradients: see `delta_rule`.

Three commands, in this order, with `nibble` importable (install it, or set PYTHONPATH=src):

    # on a CPU, minutes; newest standard library first
    python models/train_demo_hybrid.py prepare --out build/demo-hybrid --stdlib /usr/lib/python3.13 \\
        /usr/lib/python3.12 --docs /usr/share/doc/python3.11/html/_sources
    # on one H100 or H200, eight minutes: weights, and report.json with held-out loss and recall;
    # --smoke trains a tiny model on a CPU
    python models/train_demo_hybrid.py train --data build/demo-hybrid --out models/demo-hybrid --seconds 440
    # puts tokenizer and held-out text beside the weights
    python models/train_demo_hybrid.py finish --out models/demo-hybrid

Shape suffixes: B rows, T tokens, E hidden values, N chunks, C tokens of a chunk, J key heads, G value heads of a key
head, K values of a key, V values of a value, H heads of attention, D their values, P half the rotary values.
"""

from __future__ import annotations

import argparse
import json
import lzma
import multiprocessing
import shutil
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import train_demo as first
from tokenizers import Tokenizer
from torch import Tensor
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from nibble.evals import recall

STARTED = time.monotonic()
TEXT_SHARE, RECALL_WEIGHT, WEIGHT_DECAY, COOLING = 0.1875, 3.0, 0.5, 0.4
"""The share of rows that are text; the weight of recalled tokens in the loss; the decay of the layers' matrices; and
the share of the time in which the learning rate falls."""
BATCH_TOKENS, ROW = 131_072, 8192
STAGES = ((4, 0.5), (1, 1.0))
"""How many pieces rows are made of: contexts of 2048, then of 8192; and the share of the time at which that ends."""
CHUNK = 64
FIRST_MODEL = Path(__file__).parent / "demo"
LENGTHS, CASES = (1024, 2048, 4096, 8192), 200
SAVE_EVERY = 100.0
"""Seconds between two checkpoints."""
Weights = dict[str, Tensor]


def clock() -> float:
    """Seconds since the start."""
    return time.monotonic() - STARTED


# ------------------------------------------------------------------------------------------------- data


def prepare(arguments: argparse.Namespace) -> None:
    """What train_demo.py prepares, with the tokenizer of its model, in one file as small as can be: `corpus.xz`."""
    tokenizer = Tokenizer.from_file(str(FIRST_MODEL / "tokenizer.json"))
    first.train_tokenizer = lambda texts: tokenizer
    first.prepare(arguments)
    with np.load(arguments.out / "corpus.npz") as corpus:
        pack(arguments.out / "corpus.xz", corpus["train"], corpus["heldout"])
    (arguments.out / "corpus.npz").unlink()


def pack(file: Path, train: np.ndarray, heldout: np.ndarray) -> None:
    """Writes both arrays, the number of held-out tokens first. Ids are pairs of bytes: matches begin at even places."""
    size = np.array([len(heldout)], "<u4")
    data = size.tobytes() + heldout.astype("<u2").tobytes() + train.astype("<u2").tobytes()
    pairs = {
        "id": lzma.FILTER_LZMA2,
        "preset": 9 | lzma.PRESET_EXTREME,
        "dict_size": 1 << 27,
        "lc": 0,
        "lp": 1,
        "pb": 1,
    }
    file.write_bytes(lzma.compress(data, filters=[{**pairs, "nice_len": 273}]))


def unpack(file: Path) -> tuple[np.ndarray, np.ndarray]:
    """Token ids of the corpus and of the held-out text."""
    data = lzma.decompress(file.read_bytes())
    size = int(np.frombuffer(data, "<u4", 1)[0])
    ids = np.frombuffer(data, "<u2", offset=4).copy()
    return ids[size:], ids[:size]


def draw_cases(length: int, number: int) -> list[tuple[str, list[int], list[int]]]:
    """Kind, prompt and answer of recall cases that training does not see."""
    tokenizer = Tokenizer.from_file(str(FIRST_MODEL / "tokenizer.json"))
    drawn = recall.cases(length, number, length, lambda text: len(tokenizer.encode(text).ids))
    return [(c.kind, tokenizer.encode(c.prompt).ids, tokenizer.encode(c.answer).ids) for c in drawn]


def batches(
    tokens: np.ndarray, pieces: int, row: int, batch_tokens: int, workers: int, seed: int
) -> Iterator[tuple[Tensor, Tensor, int]]:
    """ids [B, row + 1], the weights of their losses, and how many rows are text.

    Rows are made of pieces, each a context of its own. So all contexts have one shape, which is compiled once.
    """
    options = argparse.Namespace(
        batch_tokens=batch_tokens, text_share=TEXT_SHARE, data=FIRST_MODEL, workers=workers
    )
    for batch, texts in first.batches(options, tokens, row // pieces, seed):
        marked = batch.long().view(len(batch) // pieces, -1)[:, : row + 1]
        weight = (marked[:, 1:] >= first.LEARN).float()
        weight[texts // pieces :] *= RECALL_WEIGHT
        yield marked % first.LEARN, weight, texts // pieces


# ------------------------------------------------------------------------------------------------ model


def demo_config(smoke: bool = False) -> Qwen3NextConfig:
    """The shape of the model."""
    hidden, inner, width, layers = (64, 64, 16, 4) if smoke else (256, 256, 64, 8)
    return Qwen3NextConfig(
        vocab_size=first.VOCABULARY, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=width,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=width, linear_value_head_dim=width,
        num_experts=0, max_position_embeddings=first.CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
        tie_word_embeddings=True, bos_token_id=0, eos_token_id=0, pad_token_id=None,
    )  # fmt: skip


def new_model(smoke: bool) -> Qwen3NextForCausalLM:
    """A random model. Of a delta net's heads the first forget within a token, the last over hundreds."""
    model = Qwen3NextForCausalLM(demo_config(smoke))
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            net = layer.linear_attn
            steps = torch.logspace(0, -2.5, len(net.dt_bias))
            net.A_log.data.zero_()
            net.dt_bias.data.copy_(torch.log(torch.expm1(steps)))
    return model


def normed(x: Tensor, weight: Tensor) -> Tensor:
    """RMS norm, fp32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + weight)


def convolved(x_BTE: Tensor, weight_E1W: Tensor) -> Tensor:
    """A causal convolution of each value with those of the tokens before it, and SiLU."""
    width, size = weight_E1W.shape[-1], x_BTE.shape[1]
    padded = F.pad(x_BTE, (0, 0, width - 1, 0))
    taps = [padded[:, i : i + size] * weight_E1W[:, 0, i] for i in range(width)]
    return F.silu(sum(taps[1:], taps[0]))


def inverse(lower: Tensor) -> Tensor:
    """The inverse of I + lower, strictly lower triangular, [..., size, size]: halves first, then their corner."""
    size = lower.shape[-1]
    if size > 16:
        half = size // 2
        top, bottom = inverse(torch.stack((lower[..., :half, :half], lower[..., half:, half:]))).unbind()
        corner = -(bottom @ lower[..., half:, :half]) @ top
        return torch.cat((F.pad(top, (0, half)), torch.cat((corner, bottom), -1)), -2)
    order = torch.arange(size, device=lower.device)
    found = torch.eye(size, device=lower.device).expand_as(lower)
    width = 1
    while width < size:  # blocks on the diagonal are inverted; two neighbours make one
        block = order // width
        corner = ((block[:, None] ^ block) == 1) & (block[:, None] > block)
        part = lower * corner
        found = found - (part if width == 1 else found @ part @ found)
        width *= 2
    return found


def before(turn: Tensor, step: Tensor) -> Tensor:
    """The states before each of n + 1 chunks, where chunk i takes a state S to turn[i] @ S + step[i], [..., n, K, *].

    Two neighbours are one chunk of twice the length, so there are as many rounds as n has bits.
    """
    if not turn.shape[-3]:
        return step.new_zeros(*step.shape[:-3], 1, *step.shape[-2:])
    odd_turn, odd_step = turn[..., 1::2, :, :], step[..., 1::2, :, :]
    even_turn, even_step = turn[..., 0::2, :, :], step[..., 0::2, :, :]
    pairs, odds = odd_turn.shape[-3], even_turn.shape[-3]
    first_turn, first_step = even_turn[..., :pairs, :, :], even_step[..., :pairs, :, :]
    even = before(odd_turn @ first_turn, odd_turn @ first_step + odd_step)
    odd = even_turn @ even[..., :odds, :, :] + even_step
    joined = torch.stack((even[..., :odds, :, :], odd), -3).flatten(-4, -3)
    return torch.cat((joined, even[..., odds:, :, :]), -3)


def delta_rule(
    q_BTJK: Tensor, k_BTJK: Tensor, v_BTJGV: Tensor, decay_BTJG: Tensor, beta_BTJG: Tensor
) -> Tensor:
    """What a gated delta net answers, [B, T, J, G, V], fp32.

    A token takes the state S to exp(decay) S + k (beta (v - k exp(decay) S)), and is answered by q S. Within a chunk,
    (I + A) U = beta V gives all updates at once, where A holds products of keys; between chunks the state is handed on
    by `before`.
    """
    size = v_BTJGV.shape[1]
    chunk = (0, -size % CHUNK)
    q, k = (F.pad(unit(x), (0, 0, 0, 0, *chunk)).unflatten(1, (-1, CHUNK)) for x in (q_BTJK, k_BTJK))
    q, k = (x.permute(0, 3, 1, 2, 4).unsqueeze(2) for x in (q, k))  # [B, J, 1, N, C, K]
    v = F.pad(v_BTJGV.float(), (0, 0, 0, 0, 0, 0, *chunk)).unflatten(1, (-1, CHUNK)).permute(0, 3, 4, 1, 2, 5)
    decay, beta = (
        F.pad(x, (0, 0, 0, 0, *chunk)).unflatten(1, (-1, CHUNK)).permute(0, 3, 4, 1, 2)
        for x in (decay_BTJG, beta_BTJG)
    )
    since = decay.cumsum(-1)  # [B, J, G, N, C]
    order = torch.arange(CHUNK, device=v.device)
    causal = order[:, None] >= order
    kept = (since.unsqueeze(-1) - since.unsqueeze(-2)).masked_fill(~causal, -torch.inf).exp()
    lower = ((k @ k.mT) * kept * beta.unsqueeze(-1)).masked_fill(order[:, None] <= order, 0.0)
    with torch.no_grad():
        solved = inverse(lower)
    # One step of Newton's method: the value is the same, or closer, and it has the gradient.
    solved = 2 * solved - solved @ (solved + lower @ solved)
    grown = since.exp().unsqueeze(-1)
    right = torch.cat((v, k * grown), -1) * beta.unsqueeze(-1)
    update, read = (solved @ right).split([v.shape[-1], k.shape[-1]], -1)
    last = since[..., -1:]
    later = k * (last - since).exp().unsqueeze(-1)
    step, turn = (later.mT @ torch.cat((update, read), -1)).split([v.shape[-1], k.shape[-1]], -1)
    turn = last.exp().unsqueeze(-1) * torch.eye(k.shape[-1], device=v.device) - turn
    state = before(turn[..., :-1, :, :], step[..., :-1, :, :])
    fresh = update - read @ state
    answer = (q * grown) @ state + ((q @ k.mT) * kept) @ fresh
    return answer.permute(0, 3, 4, 1, 2, 5).flatten(1, 2)[:, :size] * q.shape[-1] ** -0.5


def unit(x: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def delta_net(w: Weights, x: Tensor, kind: str) -> Tensor:
    """A gated delta net. Its sizes follow from its weights."""
    groups, width = w["dt_bias"].shape[0], w["norm.weight"].shape[0]
    channels, heads = w["conv1d.weight"].shape[0], groups // 2
    rest = groups // heads * width
    q, k, v, z = (
        F.linear(x, w["in_proj_qkvz.weight"]).unflatten(-1, (heads, -1)).split([width, width, rest, rest], -1)
    )
    b, a = F.linear(x, w["in_proj_ba.weight"]).unflatten(-1, (heads, -1)).chunk(2, -1)
    mixed = convolved(torch.cat((q.flatten(2), k.flatten(2), v.flatten(2)), -1), w["conv1d.weight"])
    keys = heads * width
    q, k, v = mixed.split([keys, keys, channels - 2 * keys], -1)
    with torch.autocast(kind, enabled=False):
        shape = (heads, groups // heads)
        bias, speed = w["dt_bias"].view(shape), w["A_log"].float().exp().view(shape)
        out = delta_rule(
            q.unflatten(-1, (heads, width)), k.unflatten(-1, (heads, width)), v.unflatten(-1, (*shape, width)),
            -speed * F.softplus(a.float() + bias), b.float().sigmoid(),
        )  # fmt: skip
        out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + 1e-6) * w["norm.weight"]
        out = out.flatten(2) * F.silu(z.float()).flatten(2)
    return F.linear(out, w["out_proj.weight"])


def rotated(x_BTHD: Tensor, cos_T1P: Tensor, sin_T1P: Tensor) -> Tensor:
    """Turns the first values of each head."""
    half = cos_T1P.shape[-1]
    a, b, rest = x_BTHD.split([half, half, x_BTHD.shape[-1] - 2 * half], -1)
    return torch.cat((a * cos_T1P - b * sin_T1P, b * cos_T1P + a * sin_T1P, rest), -1)


def attention(w: Weights, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Gated attention."""
    width = w["q_norm.weight"].shape[0]
    q, gate = F.linear(x, w["q_proj.weight"]).unflatten(-1, (-1, 2 * width)).chunk(2, -1)
    k, v = (F.linear(x, w[f"{name}_proj.weight"]).unflatten(-1, (-1, width)) for name in "kv")
    q, k = rotated(normed(q, w["q_norm.weight"]), cos, sin), rotated(normed(k, w["k_norm.weight"]), cos, sin)
    group = q.shape[2] // k.shape[2]
    k, v = (y.repeat_interleave(group, 2) for y in (k, v))
    q, k, v = (y.to(v.dtype).transpose(1, 2) for y in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    return F.linear((out * gate.sigmoid()).flatten(2), w["o_proj.weight"])


def block(w: Weights, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A layer, of either kind."""
    x = normed(hidden, w["input_layernorm.weight"])
    mixer = {name.split(".", 1)[1]: weight for name, weight in w.items() if "_attn." in name}
    linear = "linear_attn.A_log" in w
    hidden = hidden + (delta_net(mixer, x, x.device.type) if linear else attention(mixer, x, cos, sin))
    x = normed(hidden, w["post_attention_layernorm.weight"])
    gate, up = F.linear(x, w["mlp.gate_proj.weight"]), F.linear(x, w["mlp.up_proj.weight"])
    return hidden + F.linear(F.silu(gate) * up, w["mlp.down_proj.weight"])


def run(model: Qwen3NextForCausalLM, ids_BT: Tensor, of: Callable[..., Tensor] = block) -> Tensor:
    """The last hidden states."""
    hidden = model.model.embed_tokens(ids_BT)
    turns = torch.arange(ids_BT.shape[1], device=ids_BT.device)[:, None] * model.model.rotary_emb.inv_freq
    cos_T1P, sin_T1P = turns.cos().unsqueeze(1), turns.sin().unsqueeze(1)
    for layer in model.model.layers:
        hidden = of(dict(layer.named_parameters()), hidden, cos_T1P, sin_T1P)
    return normed(hidden, model.model.norm.weight)


# --------------------------------------------------------------------------------------------- training


class Training:
    """A model in training. It ends at a time, whatever was reached by then, and the learning rate follows the clock."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.arguments, self.steps, self.seen = arguments, 0, 0
        self.device = "cuda" if torch.cuda.is_available() and not arguments.smoke else "cpu"
        self.batch_tokens, self.row = (4096, 512) if arguments.smoke else (BATCH_TOKENS, ROW)
        self.model = new_model(arguments.smoke).to(self.device).train()
        self.train, self.heldout = unpack(arguments.data / "corpus.xz")
        self.optimizers = first.optimizers_for(self.model, arguments.lr, WEIGHT_DECAY)
        self.block, self.losses = block, first.head_losses
        if self.device == "cuda" or arguments.compile:
            self.compile()
        print(f"{self.model.num_parameters():,} parameters, {clock():.0f} s", flush=True)

    def compile(self) -> None:
        """Compiles both functions, for the shape that all batches have. What cannot be compiled is run as it is."""
        self.block = torch.compile(block, dynamic=False)
        self.losses = torch.compile(first.head_losses, dynamic=False)
        ids = torch.randint(
            first.VOCABULARY, (self.batch_tokens // self.row, self.row + 1), device=self.device
        )
        weight = torch.ones(ids[:, 1:].shape, device=self.device)
        try:
            compiled = self.gradients(ids, weight).mean().item()
            print(f"compiled, {clock():.0f} s: loss {compiled:.4f} of random tokens", flush=True)
        except Exception:  # slower training is better than none
            traceback.print_exc()
            self.block, self.losses = block, first.head_losses
        self.model.zero_grad()
        with torch.no_grad():
            plain = first.head_losses(run(self.model, ids[:1, :-1]), self.model.lm_head.weight, ids[:1, 1:])
        print(f"not compiled, fp32: {plain.mean():.4f}", flush=True)

    def run(self) -> None:
        """Trains until the time is over."""
        saved = began = clock()
        for ids, weight, texts in self.all_batches():
            losses = self.step(ids, weight, self.rate(began))
            if self.steps % 8 == 0 and self.device == "cuda":
                torch.cuda.synchronize()  # else the clock would tell of steps that have not run
            if self.steps % self.arguments.log_every == 0:
                self.tell(losses, weight, texts, began)
            if clock() - saved > SAVE_EVERY:
                save(self.model, self.arguments.out)
                saved = clock()
            if clock() > self.arguments.seconds:
                break
        self.tell(losses, weight, texts, began)

    def all_batches(self) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Batches of one context length after the other."""
        for seed, (pieces, end) in enumerate(STAGES):
            source = batches(self.train, pieces, self.row, self.batch_tokens, self.arguments.workers, seed)
            for ids, weight, texts in source:
                yield ids.to(self.device, non_blocking=True), weight.to(self.device, non_blocking=True), texts
                if end < 1 and clock() > end * self.arguments.seconds:
                    break

    def rate(self, began: float) -> float:
        """Warm-up, then constant, then linear down to 1 % over the last part of the time."""
        end = self.arguments.seconds
        left = max(0.0, (end - clock()) / (end - began))
        return min(1.0, (self.steps + 1) / 200, 0.01 + 0.99 * left / COOLING)

    def gradients(self, ids: Tensor, weight: Tensor) -> Tensor:
        """Computes the gradients of a batch, and returns its losses."""
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            hidden = run(self.model, ids[:, :-1], self.block)
            losses = self.losses(hidden, self.model.lm_head.weight, ids[:, 1:]) * weight
        (losses.sum() / weight.sum()).backward()
        return losses.detach()

    def step(self, ids: Tensor, weight: Tensor, rate: float) -> Tensor:
        losses = self.gradients(ids, weight)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.arguments.lr * rate
            optimizer.step()
            optimizer.zero_grad()
        self.steps, self.seen = self.steps + 1, self.seen + weight.numel()
        return losses

    def tell(self, losses: Tensor, weight: Tensor, texts: int, began: float) -> None:
        text, recalled = (
            losses[rows].sum() / weight[rows].sum() for rows in (slice(texts), slice(texts, None))
        )
        if not losses.isfinite().all():
            raise SystemExit(f"step {self.steps}: losses are not finite")
        speed = self.seen / max(1e-3, clock() - began) / 1e6
        print(
            f"step {self.steps}  text {text:.3f}  recall {recalled:.4f}  rate {self.rate(began):.2f}  "
            f"{self.seen / 1e6:.0f} Mtok  {speed:.2f} Mtok/s  {clock():.0f} s", flush=True,
        )  # fmt: skip


def save(model: Qwen3NextForCausalLM, out: Path) -> None:
    """Writes a bfloat16 copy of the model."""
    copy = Qwen3NextForCausalLM(model.config).to(torch.bfloat16)
    copy.load_state_dict(model.state_dict())
    copy.save_pretrained(out, max_shard_size="14MB")
    settings = json.loads((out / "config.json").read_text(encoding="utf-8"))
    settings.pop("layer_types", None)  # versions of transformers have different names for them
    settings["full_attention_interval"] = 4
    write_json(out / "config.json", settings)
    # <|endoftext|> and <|end|> are ends; a look-up has one right answer
    ends = {"bos_token_id": 0, "eos_token_id": [0, 3], "temperature": 0.0}
    write_json(out / "generation_config.json", {"_from_model_config": True, **ends})


def write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def train(arguments: argparse.Namespace) -> None:
    """Trains, saves, and writes `report.json`."""
    torch.set_float32_matmul_precision("high")
    arguments.out.mkdir(parents=True, exist_ok=True)
    number = 4 if arguments.smoke else CASES
    with ProcessPoolExecutor(4, multiprocessing.get_context("spawn")) as pool:
        cases = {length: pool.submit(draw_cases, length, number) for length in LENGTHS}
        training = Training(arguments)
        training.run()
        save(training.model, arguments.out)
        print(f"saved, {clock():.0f} s", flush=True)
        facts = {
            "device": device_name(),
            "torch": torch.__version__,
            "steps": training.steps,
            "tokens": training.seen,
        }
        facts |= {"seconds": round(clock(), 1)}
        report(arguments, training.device, training.heldout, cases, facts)


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


# ------------------------------------------------------------------------------------------- evaluation


def report(
    arguments: argparse.Namespace, device: str, heldout: np.ndarray, cases: dict[int, Future], facts: dict[str, Any]
) -> None:  # fmt: skip
    """Prints and writes what the saved model is worth, after each length anew."""
    file = arguments.out / "report.json"
    same = Qwen3NextForCausalLM.from_pretrained(arguments.out, dtype=torch.float32).eval()
    facts["parameters"] = same.num_parameters()
    model = same.to(device)
    facts |= {"heldout": {}, "recall": {}}
    for length in LENGTHS:
        windows = heldout[: len(heldout) // length * length].reshape(-1, length)[
            : 2 if arguments.smoke else None
        ]
        losses = torch.cat([losses[:, :-1].cpu() for losses, _ in scored(model, windows)])
        facts["heldout"][length] = round(losses.mean().item(), 4)
        facts["recall"][length] = recall_score(model, cases[length].result())
        write_json(file, facts)
        print(
            f"length {length}: {facts['heldout'][length]} nats, recall {facts['recall'][length]}  {clock():.0f} s",
            flush=True,
        )
    facts["largest_difference_of_logits"] = difference(same.cpu(), heldout[:300])
    write_json(file, facts)
    print(f"largest difference of logits {facts['largest_difference_of_logits']:.1e}  {clock():.0f} s")
    assert facts["largest_difference_of_logits"] < 1e-3, "not the model that Transformers has"


@torch.no_grad()
def difference(model: Qwen3NextForCausalLM, ids: np.ndarray) -> float:
    """The largest difference between logits of Transformers' class and of the forward pass above, in fp32."""
    ids_BT = torch.from_numpy(ids.astype(np.int64))[None]
    own = F.linear(run(model, ids_BT), model.lm_head.weight)
    return (model(input_ids=ids_BT, use_cache=False).logits - own).abs().max().item()


def recall_score(
    model: Qwen3NextForCausalLM, cases: list[tuple[str, list[int], list[int]]]
) -> dict[str, float]:
    """The share of exact answers, in all and by kind. All tokens of an answer are scored in one pass."""
    rows = np.zeros((len(cases), max(len(prompt) + len(answer) for _, prompt, answer in cases)), np.uint16)
    for row, (_, prompt, answer) in zip(rows, cases, strict=True):
        row[: len(prompt) + len(answer)] = prompt + answer
    right = torch.cat([right for _, right in scored(model, rows)]).numpy()
    exact: dict[str, list[bool]] = {"all": []}
    for row, (kind, prompt, answer) in zip(right, cases, strict=True):
        hit = bool(row[len(prompt) - 1 : len(prompt) + len(answer) - 1].all())
        exact["all"].append(hit)
        exact.setdefault(kind, []).append(hit)
    return {kind: round(sum(hits) / len(hits), 4) for kind, hits in exact.items()}


@torch.no_grad()
def scored(model: Qwen3NextForCausalLM, rows: np.ndarray) -> Iterator[tuple[Tensor, Tensor]]:
    """Losses of the next tokens [B, T], and whether each was the likeliest; the last of a row has none."""
    device = model.device
    for some in np.array_split(rows, max(1, rows.size // 65_536)):
        ids = torch.from_numpy(some.astype(np.int64)).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits_BTV = F.linear(run(model, ids), model.lm_head.weight).float()
        targets = ids.roll(-1, 1)
        losses = F.cross_entropy(logits_BTV.flatten(0, 1), targets.flatten(), reduction="none")
        yield losses.view_as(targets), (logits_BTV.argmax(-1) == targets).cpu()


def finish(arguments: argparse.Namespace) -> None:
    """Puts the first model's tokenizer and held-out text beside the weights."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "heldout.txt"):
        shutil.copyfile(FIRST_MODEL / name, arguments.out / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    commands = parser.add_subparsers(required=True)
    prepares = commands.add_parser("prepare", help="token arrays")
    trains = commands.add_parser("train", help="training, held-out loss and recall")
    finishes = commands.add_parser("finish", help="tokenizer and held-out text")
    for command, run_it in ((prepares, prepare), (trains, train), (finishes, finish)):
        command.add_argument("--out", type=Path, required=True)
        command.set_defaults(run=run_it)
    prepares.add_argument("--stdlib", type=Path, nargs="+", required=True, help="lib folders, newest first")
    prepares.add_argument("--docs", type=Path, nargs="+", required=True, help="folders with .rst sources")
    trains.add_argument("--data", type=Path, required=True, help="what `prepare` wrote")
    trains.add_argument(
        "--seconds", type=float, default=440.0, help="when training ends, counted from the start"
    )
    trains.add_argument("--lr", type=float, default=3e-3)
    trains.add_argument("--workers", type=int, default=15, help="processes that draw recall documents")
    trains.add_argument("--log-every", type=int, default=50)
    trains.add_argument("--smoke", action="store_true", help="a tiny model on the CPU")
    trains.add_argument("--compile", action="store_true", help="compile on a CPU too")
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
