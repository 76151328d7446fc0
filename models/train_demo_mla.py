"""Trains the demo model with latents and sparse attention: MLA and DSA, DeepSeek V3.2's architecture, 11.5 million
parameters. Tokenizer, corpus and tasks are those of the first demo model (train_demo.py).

Every token looks at 128 others, which an indexer chooses, so that a mistake of the indexer, of its keys' precision or
of the latents' shows in what the model recalls. Training has DeepSeek-V3.2's stages:

    dense    all tokens look at all tokens before them; the indexer is left out
    index    only the indexer learns: its distribution is to be that of the attention, summed over heads
    sparse   tokens look at what the indexer chose; the model learns the text, the indexer the attention over its choice

Three commands, in this order, with `nibble` importable (install it, or set PYTHONPATH=src):

    # on a CPU, minutes; newest standard library first
    python models/train_demo_mla.py prepare --out build/demo-mla --stdlib /usr/lib/python3.13 /usr/lib/python3.12 \\
        --docs /usr/share/doc/python3.11/html/_sources
    # on one H200, nine minutes; --smoke runs a few steps of a tiny model on a CPU
    python models/train_demo_mla.py train --data build/demo-mla --out models/demo-mla
    # held-out loss and recall: dense, sparse, and with the latest tokens only
    python models/train_demo_mla.py evaluate --data build/demo-mla --model models/demo-mla

Shape suffixes: B rows, T tokens, Q some of them whose attention the indexer learns from, H heads, D values of a head,
I heads of the indexer, P half the rotary values, V vocabulary entries.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import train_demo as first
from tokenizers import Tokenizer
from torch import Tensor
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

from nibble.evals import recall

STARTED = time.monotonic()
TEXT_SHARE, RECALL_WEIGHT, WEIGHT_DECAY, COOLING = 0.25, 3.0, 0.5, 0.4
"""The share of rows that are text; the weight of recalled tokens in the loss; the decay of the layers' matrices; and
the share of a stage's time in which the learning rate falls."""
FIRST_MODEL = Path(__file__).parent / "demo"
TOP_K = 128
LENGTHS, CASES = (512, 1024, 2048, 4096, 8192), 200
MODES = DENSE, SPARSE, RECENT = "dense", "sparse", "recent"
"""What a token looks at: all before it, the indexer's choice, or as many of the latest. The last is for comparison."""


def clock() -> float:
    """Seconds since the start."""
    return time.monotonic() - STARTED


def prepare(arguments: argparse.Namespace) -> None:
    """What train_demo.py prepares, with the tokenizer of its model; and recall cases, uint16 [cases, length]."""
    tokenizer = Tokenizer.from_file(str(FIRST_MODEL / "tokenizer.json"))
    first.train_tokenizer = lambda texts: tokenizer
    first.prepare(arguments)
    arrays: dict[str, Any] = {}
    for length in LENGTHS:
        ids, answers = np.zeros((CASES, length), np.uint16), np.zeros((CASES, 2), np.int64)
        drawn = recall.cases(length, CASES, length, lambda text: len(tokenizer.encode(text)))
        for i, case in enumerate(drawn):
            prompt, answer = (tokenizer.encode(text).ids for text in (case.prompt, case.answer))
            ids[i, : len(prompt) + len(answer)] = prompt + answer
            answers[i] = len(prompt), len(prompt) + len(answer)
        arrays |= {f"ids{length}": ids, f"answers{length}": answers}
    np.savez_compressed(arguments.out / "cases.npz", **arrays)


def demo_config(smoke: bool = False) -> DeepseekV32Config:
    """The shape of the model. Ranks and index keys have the widths that the formats of real models ask for."""
    layers, hidden, inner = (2, 64, 128) if smoke else (6, 384, 768)
    return DeepseekV32Config(
        vocab_size=first.VOCABULARY, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=8, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=64,
        q_lora_rank=192, kv_lora_rank=128, index_n_heads=8, index_head_dim=128, index_topk=TOP_K,
        first_k_dense_replace=layers, mlp_layer_types=["dense"] * layers, max_position_embeddings=first.CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True, bos_token_id=0, eos_token_id=0, pad_token_id=None,
    )  # fmt: skip


def rotated(x_BTHD: Tensor, cos_T1P: Tensor, sin_T1P: Tensor, interleaved: bool) -> Tensor:
    """Attention pairs neighbours, the indexer the two halves."""
    a, b = (x_BTHD[..., 0::2], x_BTHD[..., 1::2]) if interleaved else x_BTHD.chunk(2, -1)
    return torch.cat((a * cos_T1P - b * sin_T1P, b * cos_T1P + a * sin_T1P), -1).to(x_BTHD.dtype)


def projected(attention: Any, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q_BHTD, k_BHTD and v_BHTD of an attention layer, and what its indexer makes queries of."""
    nope, rope, heads = attention.qk_nope_head_dim, attention.qk_rope_head_dim, attention.num_heads
    low = attention.q_a_layernorm(attention.q_a_proj(x))
    q_nope, q_rope = attention.q_b_proj(low).unflatten(-1, (heads, -1)).split([nope, rope], -1)
    latent, k_rope = attention.kv_a_proj_with_mqa(x).split([attention.kv_lora_rank, rope], -1)
    expanded = attention.kv_b_proj(attention.kv_a_layernorm(latent))
    k_nope, v = expanded.unflatten(-1, (heads, -1)).tensor_split([nope], -1)
    k_rope = rotated(k_rope.unsqueeze(2), cos, sin, True).expand(-1, -1, heads, -1)
    q = torch.cat((q_nope, rotated(q_rope, cos, sin, True)), -1)
    k = torch.cat((k_nope, k_rope), -1)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), low


def indexed(indexer: Any, x: Tensor, low: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q_BTID, k_BTD and weights_BTI of an indexer."""
    rope, heads = indexer.qk_rope_head_dim, indexer.n_heads
    q_BTID = indexer.wq_b(low).unflatten(-1, (heads, -1))
    k_BT1D = indexer.k_norm(indexer.wk(x)).unsqueeze(2)
    q_BTID, k_BT1D = (
        torch.cat((rotated(y[..., :rope], cos, sin, False), y[..., rope:]), -1) for y in (q_BTID, k_BT1D)
    )
    return q_BTID, k_BT1D.squeeze(2), indexer.weights_proj(x) * (indexer.softmax_scale * heads**-0.5)


def index_scores(q_BQID: Tensor, k_BTD: Tensor, weights_BQI: Tensor) -> Tensor:
    """Scores of all tokens for some queries, fp32 [B, Q, T], head by head; bfloat16 would make ties."""
    with torch.autocast(q_BQID.device.type, enabled=False):
        k_BDT, weights_BQI = k_BTD.float().mT, weights_BQI.float()
        scores_BQT = torch.zeros((), device=k_BTD.device)
        for head in range(q_BQID.shape[2]):
            products = q_BQID[:, :, head].float() @ k_BDT
            scores_BQT = scores_BQT + products.relu() * weights_BQI[:, :, head, None]
        return scores_BQT


def choice(scores_BTT: Tensor, causal_TT: Tensor) -> Tensor:
    """The TOP_K best of the tokens up to each, as a mask."""
    scores_BTT = scores_BTT.masked_fill(~causal_TT, -torch.inf)
    best = scores_BTT.topk(min(TOP_K, scores_BTT.shape[-1]), sorted=False).indices
    return torch.zeros_like(scores_BTT, dtype=torch.bool).scatter_(-1, best, True) & causal_TT


def divergence(logits_BHQT: Tensor, scores_BQT: Tensor, allowed_BQT: Tensor) -> Tensor:
    """KL of the indexer's distribution over the allowed tokens from that of the attention, the mean over heads."""
    hidden = ~allowed_BQT
    target = logits_BHQT.float().masked_fill(hidden.unsqueeze(1), -torch.inf).softmax(-1).mean(1)
    guess = scores_BQT.masked_fill(hidden, -torch.inf).log_softmax(-1).masked_fill(hidden, 0.0)
    return (torch.special.xlogy(target, target) - target * guess).sum(-1).mean()


def picked(x_BT: Tensor, places_BQ: Tensor) -> Tensor:
    """The tokens [B, Q, ...] at some places of [B, T, ...]."""
    tail = x_BT.shape[2:]
    return x_BT.gather(1, places_BQ.view(*places_BQ.shape, *(1 for _ in tail)).expand(-1, -1, *tail))


def block(
    layer: Any, hidden: Tensor, cos: Tensor, sin: Tensor, mode: str, places_BQ: Tensor | None
) -> tuple[Tensor, Tensor]:
    """A layer of the model; with places, also what its indexer is to make smaller there."""
    attention, loss, allowed_BTT = layer.self_attn, hidden.new_zeros(()), None
    x = layer.input_layernorm(hidden)
    q, k, v, low = projected(attention, x, cos, sin)
    order = torch.arange(x.shape[1], device=x.device)
    causal_TT = order[:, None] >= order
    if mode == SPARSE or places_BQ is not None:
        index_q, index_k, index_w = indexed(attention.indexer, x.detach(), low.detach(), cos, sin)
    if mode == SPARSE:
        with torch.no_grad():
            allowed_BTT = choice(index_scores(index_q, index_k, index_w), causal_TT)
    if mode == RECENT:
        allowed_BTT = (causal_TT & (order[:, None] - order < TOP_K)).expand(len(x), -1, -1)
    if places_BQ is not None:
        shown = causal_TT.expand(len(x), -1, -1) if allowed_BTT is None else allowed_BTT
        own = picked(q.detach().transpose(1, 2), places_BQ).transpose(1, 2)
        logits = own @ k.detach().mT * attention.scaling
        scores = index_scores(picked(index_q, places_BQ), index_k, picked(index_w, places_BQ))
        loss = divergence(logits, scores, picked(shown, places_BQ))
    mask = None if allowed_BTT is None else allowed_BTT.unsqueeze(1)
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=attention.scaling)
    hidden = hidden + attention.o_proj(out.transpose(1, 2).flatten(2))
    return hidden + layer.mlp(layer.post_attention_layernorm(hidden)), loss


def run(
    model: DeepseekV32ForCausalLM, ids_BT: Tensor, mode: str, places_BQ: Tensor | None = None, of: Any = block
) -> tuple[Tensor, Tensor]:
    """The last hidden states, and the sum of the indexers' losses."""
    hidden = model.model.embed_tokens(ids_BT)
    turns = torch.arange(ids_BT.shape[1], device=ids_BT.device)[:, None] * model.model.rotary_emb.inv_freq
    cos_T1P, sin_T1P = turns.cos().unsqueeze(1), turns.sin().unsqueeze(1)
    losses = []
    for layer in model.model.layers:
        hidden, loss = of(layer, hidden, cos_T1P, sin_T1P, mode, places_BQ)
        losses.append(loss)
    return model.model.norm(hidden), torch.stack(losses).sum()


@dataclass(frozen=True)
class Kind:
    """A kind of stage: tokens of a batch, learning rates of the model and of its indexers (0: frozen), steps until they
    are reached, and the tokens of each row that indexers learn from."""

    mode: str
    batch_tokens: int
    lr: float
    index_lr: float = 0.0
    warmup: int = 20
    places: int = 0


KINDS = {
    "dense": Kind(DENSE, 131_072, 3e-3, warmup=200),
    "index": Kind(DENSE, 65_536, 0.0, 3e-3, places=512),
    "sparse": Kind(SPARSE, 65_536, 5e-4, 1e-3, places=256),
}
STAGES = "dense:2048:190,dense:8192:335,index:8192:385,sparse:2048:455,sparse:8192:525"


class Half:
    """The model without its indexers, or the indexers alone: what has a learning rate of its own; 0 is frozen."""

    def __init__(self, model: DeepseekV32ForCausalLM, indexers: bool, lr: float) -> None:
        parameters = [pair for pair in model.named_parameters() if (".indexer." in pair[0]) == indexers]
        self.parameters, self.lr = [parameter.requires_grad_(lr > 0) for _, parameter in parameters], lr
        matrices = [p for name, p in parameters if "layers" in name and p.ndim == 2]
        others = [p for name, p in parameters if not ("layers" in name and p.ndim == 2)]
        self.optimizers: list[torch.optim.Optimizer] = [
            first.Muon(matrices, lr=lr, weight_decay=WEIGHT_DECAY),
            torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.98), weight_decay=0.0, fused=others[0].is_cuda),
        ]

    def step(self, rate: float) -> None:
        if not self.lr:
            return
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.lr * rate
            optimizer.step()
            optimizer.zero_grad()


class Training:
    """A model on its way through the stages. Every stage ends at a time, whatever was reached by then."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.device = "cuda" if torch.cuda.is_available() and not arguments.smoke else "cpu"
        self.corpus = dict(np.load(arguments.data / "corpus.npz"))
        self.cases = dict(np.load(arguments.data / "cases.npz"))
        self.model = DeepseekV32ForCausalLM(demo_config(arguments.smoke)).to(self.device).train()
        self.block, self.losses = block, first.head_losses
        if self.device == "cuda":
            self.block = torch.compile(block, dynamic=False)
            self.losses = torch.compile(first.head_losses, dynamic=False)
        print(f"{self.model.num_parameters():,} parameters, {clock():.0f} s", flush=True)

    def stage(self, name: str, parts: list[tuple[int, float]], seed: int) -> None:
        """Trains one kind of stage; each part of it has a context length and an end."""
        kind, last = KINDS[name], parts[-1][1]
        if self.arguments.smoke:
            kind = replace(kind, batch_tokens=1024, places=min(16, kind.places))
        rest, indexers = Half(self.model, False, kind.lr), Half(self.model, True, kind.index_lr)
        began, step = 0.0, 0
        for part, (length, end) in enumerate(parts):
            for batch in self.batches(kind, length, seed + part):
                found = self.backward(kind, *batch[:2])
                left = min(1.0, (last - clock()) / (last - began)) if began else 1.0
                rate = min(1.0, (step + 1) / kind.warmup, 0.01 + 0.99 * max(0.0, left) / COOLING)
                rest.step(rate)
                indexers.step(rate)
                step += 1
                if step % 8 == 0 and self.device == "cuda":
                    torch.cuda.synchronize()  # else the clock would tell of steps that have not run
                began = began or clock()  # the first step compiles
                over = clock() > end
                if step % self.arguments.log_every == 0 or over:
                    tell(f"{name} {length}  step {step}", *found, *batch[1:])
                if over:
                    break

    def batches(self, kind: Kind, length: int, seed: int) -> Iterator[tuple[Tensor, Tensor, int]]:
        """ids [B, T + 1], the weights of their losses, and how many rows are text."""
        given = vars(self.arguments)
        options = argparse.Namespace(**given, batch_tokens=kind.batch_tokens, text_share=TEXT_SHARE)
        for batch, texts in first.batches(options, self.corpus["train"], length, seed):
            marked = batch.to(self.device, torch.long, non_blocking=True)
            weight = (marked[:, 1:] >= first.LEARN).float()
            weight[texts:] *= RECALL_WEIGHT
            yield marked % first.LEARN, weight, texts

    def backward(self, kind: Kind, ids: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of one batch, and its losses. Learnt tokens are likelier to teach the indexer than others."""
        places = torch.multinomial(weight + 0.5, kind.places) if kind.places else None
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            hidden, divergence = run(self.model, ids[:, :-1], kind.mode, places, self.block)
            losses = self.losses(hidden, self.model.lm_head.weight, ids[:, 1:]) * weight
        (losses.sum() / weight.sum() + divergence if kind.lr else divergence).backward()
        return losses.detach(), divergence.detach()


def tell(where: str, losses: Tensor, divergence: Tensor, weight: Tensor, texts: int) -> None:
    """Prints the losses of a batch."""
    text, recalled = (losses[rows].sum() / weight[rows].sum() for rows in (slice(texts), slice(texts, None)))
    print(f"{where} text {text:.3f} recall {recalled:.3f} KL {divergence:.3f}  {clock():.0f} s", flush=True)


def train(arguments: argparse.Namespace) -> None:
    """Trains through the stages `kind:length:end,...` and writes the model in bfloat16 shards after each kind."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    training = Training(arguments)
    stages = [stage.split(":") for stage in arguments.stages.split(",")]
    for seed, (name, parts) in enumerate(groupby(stages, itemgetter(0))):
        training.stage(name, [(int(length), float(end)) for _, length, end in parts], 10 * seed)
        save(training.model, arguments.out)
        modes, number = MODES[: 1 if name == "dense" else 3], CASES if name == stages[-1][0] else 40
        report(training.model, training.corpus["heldout"], training.cases, modes, number)


def save(model: DeepseekV32ForCausalLM, out: Path) -> None:
    """Writes a bfloat16 copy of the model, in shards of at most 14 MB, with the first model's tokenizer."""
    copy = DeepseekV32ForCausalLM(model.config).to(torch.bfloat16)
    copy.load_state_dict(model.state_dict())
    copy.generation_config.eos_token_id = [0, 3]  # <|endoftext|> and <|end|>
    copy.generation_config.temperature = 0.0  # a look-up has one right answer
    copy.save_pretrained(out, max_shard_size="14MB")
    file = out / "config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    del settings["layer_types"]  # versions of transformers have different names for them
    file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "heldout.txt"):
        shutil.copyfile(FIRST_MODEL / name, out / name)


@torch.no_grad()
def report(
    model: Any, heldout: np.ndarray, cases: dict[str, np.ndarray], modes: tuple[str, ...], number: int,
    lengths: Sequence[int] = LENGTHS,
) -> None:  # fmt: skip
    """Prints held-out loss in windows of every length, and the share of recall cases answered exactly."""
    for length in lengths:
        line = f"length {length}:"
        windows = heldout[: len(heldout) // length * length].reshape(-1, length)
        ids, answers = cases[f"ids{length}"][:number], cases[f"answers{length}"][:number]
        for mode in modes:
            text = torch.cat([losses[:, :-1] for losses, _ in scored(model, windows, mode)]).mean()
            right = torch.cat([right for _, right in scored(model, ids, mode)]).numpy()
            exact = [right[i, start - 1 : end - 1].all() for i, (start, end) in enumerate(answers)]
            line += f"  {mode} {text:.4f} nats, recall {np.mean(exact):.3f};"
        print(f"{line}  {clock():.0f} s", flush=True)


def scored(model: DeepseekV32ForCausalLM, rows: np.ndarray, mode: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Losses of the next tokens [B, T], and whether each was the likeliest; the last of a row has none."""
    device = model.device
    for some in np.array_split(rows, max(1, rows.size // 16_384)):
        ids = torch.from_numpy(some.astype(np.int64)).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits_BTV = F.linear(run(model, ids, mode)[0], model.lm_head.weight).float()
        targets = ids.roll(-1, 1)
        losses = F.cross_entropy(logits_BTV.flatten(0, 1), targets.flatten(), reduction="none")
        yield losses.view_as(targets), (logits_BTV.argmax(-1) == targets).cpu()


def evaluate(arguments: argparse.Namespace) -> None:
    """Prints what training reports of its last stage."""
    model = DeepseekV32ForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    heldout, cases = np.load(arguments.data / "corpus.npz")["heldout"], np.load(arguments.data / "cases.npz")
    report(model, heldout, dict(cases), MODES, arguments.cases, arguments.lengths)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    commands = parser.add_subparsers(required=True)
    prepares = commands.add_parser("prepare", help="token arrays and recall cases")
    trains = commands.add_parser("train", help="training")
    evaluates = commands.add_parser("evaluate", help="held-out loss and recall")
    for command, run_it in ((prepares, prepare), (trains, train), (evaluates, evaluate)):
        command.set_defaults(run=run_it)
    trains.add_argument("--data", type=Path, required=True, help="what `prepare` wrote")
    evaluates.add_argument("--data", type=Path, required=True, help="what `prepare` wrote")
    prepares.add_argument("--out", type=Path, required=True)
    trains.add_argument("--out", type=Path, required=True)
    prepares.add_argument("--stdlib", type=Path, nargs="+", required=True, help="lib folders, newest first")
    prepares.add_argument("--docs", type=Path, nargs="+", required=True, help="folders with .rst sources")
    trains.add_argument("--stages", default=STAGES, help="kind:context length:end in seconds, ...")
    trains.add_argument("--workers", type=int, default=15, help="processes that draw recall documents")
    trains.add_argument("--log-every", type=int, default=50)
    trains.add_argument("--smoke", action="store_true", help="a tiny model on the CPU")
    evaluates.add_argument("--model", type=Path, required=True)
    evaluates.add_argument("--lengths", type=int, nargs="+", default=LENGTHS[:4])
    evaluates.add_argument("--cases", type=int, default=CASES, help="recall cases per length, at most 200")
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
