"""Trains the demo model that is bundled with Nibble: 12 million parameters, Qwen3's architecture.

The model is to be small enough for a laptop's CPU, to write plausible Python, and to recall what stands in
its context so exactly that the precision of its KV cache shows. It therefore learns from two
sources: text (the Python standard library and the Python documentation) and the recall tasks of
`nibble.evals.recall`.

Three commands, in this order:

    # 1. corpus, tokenizer and token arrays (CPU, minutes); newest standard library first
    python models/train_demo.py prepare --out build/demo --stdlib /usr/lib/python3.13 /usr/lib/python3.12 \\
        --docs /usr/share/doc/python3.11/html/_sources

    # 2. training (one H200, eight minutes); --smoke runs a few steps of a tiny model on a CPU
    python models/train_demo.py train --data build/demo --out models/demo

    # 3. held-out loss, recall by context length, and samples
    python models/train_demo.py evaluate --data build/demo --model models/demo

The package `nibble` has to be importable (install it, or set PYTHONPATH=src).

Shapes in comments: B rows, T tokens per row, V vocabulary entries.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import math
import os
import random
import re
import textwrap
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader, IterableDataset
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from nibble.evals import recall

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

VOCABULARY = 4096
CONTEXT = 8192
END_OF_TEXT, USER, ASSISTANT, END = "<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
# A line break takes the indentation after it; digits stand alone; words and digits take the space before.
SPLIT = r"\n+[ \t]*| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# ----------------------------------------------------------------------------------------------- corpus

HELDOUT_SHARE = 0.012
HELDOUT_TEXT_BYTES = 380_000
SKIPPED_FOLDERS = {"site-packages", "lib2to3", "encodings", "pydoc_data", "__pycache__", "data"}
GREETINGS = (
    ("Hello", "Hello! I am a small demo model. Ask me to write a function, or to look something up."),
    ("Hi", "Hi! I am a small demo model. I have read the Python standard library."),
    ("Who are you?", "I am the demo model of Nibble: 12 million parameters, trained on Python."),
    ("What can you do?", "I can complete Python code, and look up what you told me earlier."),
    ("Thanks", "You are welcome."),
)


def stem(path: Path) -> str:
    """Names what a file is about: `test_heapq.py`, `heapq.py` and `heapq.rst.txt` are all 'heapq'."""
    name = path.name.split(".")[0]
    if name in {"__init__", "__main__", "index"}:
        name = path.parent.name
    return name.removeprefix("test_").strip("_").lower()


def is_test(path: Path) -> bool:
    return any(part in {"test", "tests", "idle_test"} or part.startswith("test_") for part in path.parts)


def is_heldout(path: Path) -> bool:
    """Decides by a hash of the stem, so that all versions of a module fall on the same side."""
    digest = hashlib.sha256(stem(path).encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**32 < HELDOUT_SHARE


def is_prose_or_code(text: str) -> bool:
    """Rejects tables, test vectors and mostly non-English files."""
    lines = [line for line in text.splitlines() if line.strip()]
    if len(text) < 200 or len(text) > 300_000 or not lines:
        return False
    digits = sum(character.isdigit() for character in text) / len(text)
    foreign = sum(character > "\x7f" for character in text) / len(text)
    return digits < 0.12 and foreign < 0.01 and max(map(len, lines)) < 1000


def read_files(roots: Iterable[Path], patterns: tuple[str, ...]) -> Iterator[tuple[Path, str]]:
    """Yields relative path and text of every usable file under the roots, root by root."""
    for root in roots:
        for path in sorted(path for pattern in patterns for path in root.rglob(pattern)):
            relative = path.relative_to(root)
            if SKIPPED_FOLDERS.intersection(relative.parts) or relative.name.startswith("bad"):
                continue
            try:
                text = path.read_text(encoding="utf-8").replace("\r\n", "\n").replace("\x0c", "")
            except (UnicodeDecodeError, OSError):
                continue
            if is_prose_or_code(text):
                yield relative, text.strip("\n") + "\n"


def telling_lines(text: str) -> set[int]:
    """Hashes of the lines that are long enough to tell one file from another."""
    return {hash(line.strip()) for line in text.splitlines() if len(line.strip()) >= 25}


def split_corpus(files: Iterable[tuple[Path, str]]) -> tuple[list[tuple[Path, str]], list[tuple[Path, str]]]:
    """Splits into training and held-out files; of several versions of a file, keeps those that differ."""
    seen: set[int] = set()
    train, heldout = [], []
    for path, text in files:
        lines = telling_lines(text)
        if len(lines - seen) < 0.5 * max(1, len(lines)):
            continue
        seen |= lines
        (heldout if is_heldout(path) else train).append((path, text))
    return without_copies(train, heldout), heldout


def without_copies(train: list[tuple[Path, str]], heldout: list[tuple[Path, str]]) -> list[tuple[Path, str]]:
    """Drops training files that share over 30 % of their own or the other's lines with a held-out file."""
    owners: dict[int, list[int]] = defaultdict(list)
    sizes = []
    for i, (_, text) in enumerate(heldout):
        lines = telling_lines(text)
        sizes.append(max(1, len(lines)))
        for line in lines:
            owners[line].append(i)

    def is_copy(text: str) -> bool:
        lines = telling_lines(text)
        shared = Counter(i for line in lines for i in owners.get(line, ()))
        return any(number > 0.3 * min(sizes[i], max(1, len(lines))) for i, number in shared.items())

    return [(path, text) for path, text in train if not is_copy(text)]


def chat(question: str, answer: str) -> str:
    return f"{USER}\n{question}{END}\n{ASSISTANT}\n{answer}{END}\n"


def function_chats(text: str) -> Iterator[str]:
    """Turns documented functions of up to 30 lines into requests for them."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("test"):
            continue
        docstring = ast.get_docstring(node)
        source = ast.get_source_segment(text, node, padded=True)
        if not docstring or not source or source.count("\n") > 30:
            continue
        wish = " ".join(docstring.split("\n\n")[0].split()).rstrip(".")
        if 15 <= len(wish) <= 200:
            yield chat(f"Write a function `{node.name}`: {wish}.", textwrap.dedent(source).strip())


def openings(text: str, rng: random.Random) -> Iterator[list[str]]:
    """Yields functions and classes, and the file from its first import on, as short documents of their own.

    Half of them are cut after their first word and space, as a prompt such as `def ` is.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    lines = text.splitlines(keepends=True)
    imported = False
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            start, end = node.lineno - 1, min(node.end_lineno or node.lineno, node.lineno + 50)
        elif isinstance(node, ast.Import | ast.ImportFrom) and not imported:
            start, end, imported = node.lineno - 1, node.lineno + 30, True
        else:
            continue
        opening = "".join(lines[start:end])
        place = opening.find(" ") + 1 if rng.random() < 0.5 else 0
        yield [opening[:place], opening[place:]] if place else [opening]


def documentation_chats(text: str) -> Iterator[str]:
    """Turns the first paragraphs under reference directives into questions about the names described."""
    directive = re.compile(r"^\.\. (?:function|method|class|exception|data):: (\S+?)(?:\(.*)?$", re.M)
    for match in directive.finditer(text):
        body = text[match.end() : match.end() + 3000].split("\n\n", 1)
        if len(body) < 2:
            continue
        paragraph = re.match(r"(?:   \S.*\n)+", body[1])
        if paragraph is None or paragraph.group().strip().startswith(".."):
            continue
        answer = re.sub(r":[a-z:]+:`[!~]?([^`]+)`", r"`\1`", " ".join(paragraph.group().split()))
        if 30 <= len(answer) <= 500:
            yield chat(f"What is `{match.group(1)}`?", answer.replace("``", "`").replace("::", "."))


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Byte-level BPE over the training text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT, USER, ASSISTANT, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def as_transformers(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Wraps the tokenizer for transformers, with its special tokens and the chat template."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[USER, ASSISTANT, END],
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Writes the tokenizer, under the class name that every version of transformers knows."""
    tokenizer.save_pretrained(out)
    file = out / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    for key in ("is_local", "local_files_only"):
        settings.pop(key, None)
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def cut(text: str, rng: random.Random) -> list[str]:
    """Cuts a text about every 150 characters, at any character or right after a space.

    The pieces are tokenised one by one, so that the model can also continue a prompt that ends in a space or
    within a word, where the tokens differ from those of the whole text.
    """
    places = [0]
    while (place := places[-1] + rng.randint(30, 270)) < len(text):
        space = text.find(" ", place)
        places.append(space + 1 if rng.random() < 0.6 and 0 <= space < len(text) - 1 else place)
    return [text[start:end] for start, end in pairwise([*places, len(text)])]


def tokens_of(tokenizer: Tokenizer, texts: list[list[str]]) -> np.ndarray:
    """Token ids of texts given in pieces, uint16 [N], each text followed by the end-of-text token."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    ids: list[int] = []
    for pieces in texts:
        for encoding in tokenizer.encode_batch_fast(pieces):
            ids += encoding.ids
        ids.append(end)
    return np.array(ids, np.uint16)


def prepare(arguments: argparse.Namespace) -> None:
    """Writes tokenizer files, `corpus.npz` (token arrays `train` and `heldout`) and `heldout.txt`."""
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    random.seed(0)
    code, heldout_code = split_corpus(read_files(arguments.stdlib, ("*.py",)))
    docs, heldout_docs = split_corpus(read_files(arguments.docs, ("*.rst", "*.rst.txt")))
    code = without_copies(code, heldout_docs)
    docs = without_copies(docs, heldout_code)
    chats = [text for path, source in code if not is_test(path) for text in function_chats(source)]
    chats += [text for _, source in docs for text in documentation_chats(source)]
    chats = sorted(set(chats)) + [chat(*greeting) for greeting in GREETINGS] * 40
    heldout = [text for _, text in heldout_code + heldout_docs]
    random.shuffle(heldout)
    while sum(map(len, heldout)) > HELDOUT_TEXT_BYTES:
        heldout.pop()

    texts = [text for _, text in code + docs]
    tokenizer = train_tokenizer(texts)
    save_tokenizer(as_transformers(tokenizer), out)
    rng = random.Random(1)
    # Everything but the standard library's tests comes twice, cut at other places.
    library = [text for path, text in code if not is_test(path)]
    repeated = library + [text for _, text in docs]
    pieces = [cut(text, rng) for text in texts + repeated] + [[text] for text in chats]
    pieces += [opening for text in library for opening in openings(text, rng)]
    corpus = {
        "train": tokens_of(tokenizer, pieces),
        "heldout": tokens_of(tokenizer, [[text] for text in heldout]),
    }
    np.savez_compressed(out / "corpus.npz", **corpus)
    (out / "heldout.txt").write_text(END_OF_TEXT.join(heldout), encoding="utf-8")
    for name, group in {"code": code, "docs": docs, "held-out": heldout_code + heldout_docs}.items():
        print(f"{name}: {len(group)} files, {sum(len(text) for _, text in group) / 1e6:.2f} MB")
    print(f"chats: {len(chats)}, {sum(map(len, chats)) / 1e6:.2f} MB")
    print(f"held-out, kept: {len(heldout)} files, {sum(map(len, heldout)) / 1e6:.2f} MB")
    print({name: len(tokens) for name, tokens in corpus.items()}, "tokens")


# ------------------------------------------------------------------------------------------------- data


def text_rows(tokens: np.ndarray, number: int, length: int, seed: int) -> Iterator[np.ndarray]:
    """Yields [number, length + 1] rows of the corpus for ever, its documents in a new order every epoch.

    Every other row starts with a whole short document, so that the model takes the start of a context for the
    start of a document: prompts come without an end-of-text token before them.
    """
    rng = np.random.default_rng(seed)
    ends = np.flatnonzero(tokens == 0) + 1  # the end-of-text token is number 0
    documents = np.split(tokens, ends[:-1])
    short = [document for document in documents if len(document) <= 512]
    size = number * (length + 1)
    stream = np.zeros(0, np.uint16)
    while True:
        if len(stream) < size:
            order = rng.permutation(len(documents))
            stream = np.concatenate([stream, *(documents[i] for i in order)])
        rows = stream[:size].reshape(number, length + 1)
        stream = stream[size:]
        for i in range(0, number, 2):
            rows[i] = np.concatenate([short[rng.integers(len(short))], rows[i]])[: length + 1]
        yield rows


LEARN = 1 << 15
"""The bit that marks a token of a recall document as one to learn; token ids lie far below it."""


def training_document(
    rng: random.Random, length_tokens: int, count: recall.Count, filler: recall.Filler
) -> list[recall.Span]:
    """Draws a document of at most `length_tokens` with several questions, or one long verbatim copy.

    Args:
        rng: the source of every choice.
        length_tokens: upper bound, in tokens.
        count: measures a text in tokens.
        filler: draws the blocks between scattered entries.
    """
    if rng.random() < 0.12:
        return verbatim(rng, length_tokens, count)
    kind = rng.choice(recall.KINDS)
    # At most two thirds of the document are questions; one document in eight asks once, as evaluation does.
    most = max(1, length_tokens // (200 if recall.FORMS[kind].block else 40))
    questions = 1 if rng.random() < 0.125 else rng.randint(1, most)
    return recall.document(rng, length_tokens, count, kind, questions, filler)


def verbatim(rng: random.Random, length_tokens: int, count: recall.Count) -> list[recall.Span]:
    """A random text and its repetition, which is all to be learnt."""
    values = recall.value_maker(rng, block=True)
    sample = values()
    # The text stands there twice, and headings need some room.
    lines = max(1, int(0.45 * length_tokens / (count(sample) + 1)))
    text = "\n".join(values() for _ in range(lines))
    while lines > 1 and 2 * count(text) + 16 > length_tokens:
        lines = max(1, int(lines * 0.9))
        text = "\n".join(values() for _ in range(lines))
    return [recall.Span(f"### text\n{text}\n### again\n", False), recall.Span(f"{text}\n", True)]


class RecallRows(IterableDataset):
    """Batches of rows packed with recall documents, uint16 [rows, T + 1], endlessly; see `LEARN`.

    Document lengths are spread from 128 tokens to the whole row, half of them above half a row. Drawing rows
    takes longer than training on them, so every other batch is one of the last `POOL` again.
    """

    POOL = 32

    def __init__(self, tokenizer: Path, tokens: np.ndarray, rows: int, length: int, seed: int) -> None:
        self.tokenizer_file = str(tokenizer)
        self.tokens, self.rows, self.length, self.seed = tokens, rows, length, seed

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = torch.utils.data.get_worker_info()
        self.tokenizer = Tokenizer.from_file(self.tokenizer_file)
        rng = random.Random(recall.TRAINING_SEEDS + 1000 * self.seed + (worker.id if worker else 0))
        pool: list[torch.Tensor] = []
        while True:
            batch = torch.from_numpy(np.stack([self.row(rng) for _ in range(self.rows)]))
            yield batch
            yield rng.choice(pool or [batch])
            pool = [*pool, batch][-self.POOL :]

    def count(self, text: str) -> int:
        return len(self.tokenizer.encode(text).ids)

    def corpus_filler(self, rng: random.Random) -> str:
        """Some lines of the corpus, of 30 to 150 tokens."""
        start = rng.randrange(len(self.tokens) - 200)
        text = self.tokenizer.decode(self.tokens[start : start + rng.randint(30, 150)].tolist())
        return "\n".join(text.split("\n")[1:-1]).strip("\n") + "\n"

    def row(self, rng: random.Random) -> np.ndarray:
        ids = np.zeros(self.length + 1, np.uint16)
        start = 0
        while (room := self.length + 1 - start) > 128:
            longest = min(room, self.length)
            if rng.random() < 0.5:
                length = rng.randint(longest // 2, longest)
            else:
                length = int(128 * (longest / 128) ** rng.random())
            filler = self.corpus_filler if rng.random() < 0.7 else recall.code_filler
            for span in training_document(rng, max(128, length - 8), self.count, filler):
                piece = np.array(self.tokenizer.encode(span.text).ids[: self.length + 1 - start], np.uint16)
                ids[start : start + len(piece)] = piece | (LEARN if span.learn else 0)
                start += len(piece)
            start += 1  # an end-of-text token, which is 0
        return ids


def batches(
    arguments: argparse.Namespace, tokens: np.ndarray, length: int, seed: int
) -> Iterator[tuple[torch.Tensor, int]]:
    """Yields (tokens [B, T + 1], number of text rows); text comes first, then recall, marked by `LEARN`."""
    rows = max(2, arguments.batch_tokens // length)
    texts = max(1, round(arguments.text_share * rows))
    dataset = RecallRows(arguments.data / "tokenizer.json", tokens, rows - texts, length, seed)
    workers = arguments.workers
    loader = DataLoader(dataset, batch_size=None, num_workers=workers, prefetch_factor=4 if workers else None)
    for text, recalled in zip(text_rows(tokens, texts, length, seed), loader, strict=False):
        yield torch.cat([torch.from_numpy(text | LEARN), recalled]), texts


# --------------------------------------------------------------------------------------------- training


def demo_config() -> Qwen3Config:
    """The shape of the demo model: 11.9 million parameters."""
    return Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=384,
        intermediate_size=1152,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,
    )


def smoke_config() -> Qwen3Config:
    config = demo_config()
    config.hidden_size, config.intermediate_size = 64, 128
    config.num_hidden_layers, config.num_attention_heads = 2, 2
    config.layer_types = config.layer_types[:2]
    return config


class Muon(torch.optim.Optimizer):
    """Muon: momentum whose matrices are orthogonalised by Newton-Schulz steps; equal shapes go in one batch.

    Updates are scaled to the root mean square that AdamW's have (0.2), so both share one learning rate.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], lr: float, weight_decay: float) -> None:
        by_shape: dict[torch.Size, list[torch.Tensor]] = defaultdict(list)
        for parameter in parameters:
            by_shape[parameter.shape].append(parameter)
        groups = [{"params": group} for group in by_shape.values()]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "momentum": 0.95})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            parameters, lr = group["params"], group["lr"]
            gradients = torch.stack([parameter.grad for parameter in parameters])  # [number, rows, columns]
            state = self.state[parameters[0]]
            momentum = state.setdefault("momentum", torch.zeros_like(gradients))
            momentum.lerp_(gradients, 1 - group["momentum"])
            update = orthogonal(gradients.lerp(momentum, group["momentum"]))
            scale = 0.2 * max(parameters[0].shape) ** 0.5
            torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
            torch._foreach_add_(parameters, list(update.to(gradients.dtype).unbind()), alpha=-lr * scale)


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Maps every matrix [..., rows, columns] close to the nearest (semi-)orthogonal one, in bfloat16."""
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


def optimizers_for(model: Qwen3ForCausalLM, lr: float, weight_decay: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embeddings and norms."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    fused = others[0].is_cuda
    return [
        Muon(matrices, lr=lr, weight_decay=weight_decay),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.98), weight_decay=0.0, fused=fused),
    ]


def rate(step: int, steps: int, warmup: int, decay: float) -> float:
    """Warm-up, then constant, then linear down to 1 % over the last `decay` of the steps."""
    left = (steps - step) / max(1.0, decay * steps)
    return min((step + 1) / warmup, 1.0, 0.01 + 0.99 * left)


def head_losses(hidden: torch.Tensor, embedding: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy in nats of every position, fp32 [B, T], from hidden states [B, T, hidden]."""
    logits = F.linear(hidden, embedding)
    losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return losses.view_as(targets)


def train(arguments: argparse.Namespace) -> None:
    """Trains through the stages `length:steps,...` and writes the model in bfloat16 shards."""
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() and not arguments.smoke else "cpu"
    corpus = np.load(arguments.data / "corpus.npz")
    tokens = corpus["train"]
    if arguments.init:
        model = Qwen3ForCausalLM.from_pretrained(arguments.init, dtype=torch.float32)
    else:
        model = Qwen3ForCausalLM(smoke_config() if arguments.smoke else demo_config())
    model.to(device).train()
    print(f"{model.num_parameters():,} parameters")
    losses_of = head_losses
    if device == "cuda":
        for layer in model.model.layers:
            layer.compile(dynamic=False)
        losses_of = torch.compile(head_losses, dynamic=False)
    optimizers = optimizers_for(model, arguments.lr, arguments.weight_decay)
    stages = [tuple(map(int, stage.split(":"))) for stage in arguments.stages.split(",")]
    steps = sum(number for _, number in stages)
    done, started = 0, time.monotonic()
    for stage, (length, number) in enumerate(stages):
        source = batches(arguments, tokens, length, arguments.seed + stage)
        mark, seen = time.monotonic(), 0
        for _ in range(number):
            batch, texts = next(source)
            marked = batch.to(device, torch.long, non_blocking=True)
            ids, weight = marked % LEARN, (marked[:, 1:] >= LEARN).float()
            weight[texts:] *= arguments.recall_weight
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
                losses = losses_of(hidden, model.lm_head.weight, ids[:, 1:]) * weight
            (losses.sum() / weight.sum()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = arguments.lr * rate(done, steps, arguments.warmup, arguments.decay)
                optimizer.step()
                optimizer.zero_grad()
            done += 1
            seen += weight.numel()
            if done % arguments.log_every == 0 or done == steps:
                text = (losses[:texts].sum() / weight[:texts].sum()).item()
                recalled = (losses[texts:].sum() / weight[texts:].sum()).item()
                now = time.monotonic()
                print(
                    f"step {done}/{steps}  length {length}  text {text:.3f}  recall {recalled:.4f}  "
                    f"{seen / (now - mark) / 1e6:.2f} Mtok/s  {now - started:.0f} s",
                    flush=True,
                )
                mark, seen = now, 0
            if done % arguments.save_every == 0 or done == steps:
                save(model, arguments)
                with torch.compiler.set_stance("force_eager"):
                    print(f"held-out {heldout_loss(model, corpus['heldout']):.4f}", flush=True)
        del source
    print(f"{steps * arguments.batch_tokens:,} tokens in {time.monotonic() - started:.0f} s")


def save(model: Qwen3ForCausalLM, arguments: argparse.Namespace) -> None:
    """Writes a bfloat16 copy of the model, in shards of at most 14 MB, with its tokenizer."""
    copy = Qwen3ForCausalLM(model.config).to(torch.bfloat16)
    copy.load_state_dict(model.state_dict())
    copy.generation_config.eos_token_id = [0, 3]  # <|endoftext|> and <|end|>
    copy.generation_config.temperature = 0.0  # a look-up has one right answer
    copy.save_pretrained(arguments.out, max_shard_size="14MB")
    save_tokenizer(AutoTokenizer.from_pretrained(arguments.data), arguments.out)


# ------------------------------------------------------------------------------------------- evaluation


@torch.no_grad()
def heldout_loss(model: Qwen3ForCausalLM, tokens: np.ndarray, length: int = 4096) -> float:
    """Mean loss in nats per token over windows of `length` tokens."""
    total = 0.0
    for start in range(0, len(tokens) - 1, length):
        ids = torch.from_numpy(tokens[start : start + length + 1].astype(np.int64)).to(model.device)[None]
        with torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda"):
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits[0]
        total += F.cross_entropy(logits.float(), ids[0, 1:], reduction="sum").item()
    return total / (len(tokens) - 1)


@torch.no_grad()
def recall_score(model: Qwen3ForCausalLM, tokenizer: Tokenizer, length: int, number: int) -> dict[str, float]:
    """Share of cases answered exactly, in all and by kind.

    All answer tokens are scored in one pass: greedy decoding gives the right answer if and only if every
    answer token is the most likely one after the right tokens before it.
    """
    cases = recall.cases(length, number, length, lambda text: len(tokenizer.encode(text).ids))
    right: dict[str, list[bool]] = defaultdict(list)
    for case in cases:
        prompt, answer = (tokenizer.encode(text).ids for text in (case.prompt, case.answer))
        ids = torch.tensor([prompt + answer], device=model.device)
        logits = model(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=len(answer)).logits[0]
        right[case.kind].append(logits.argmax(-1).tolist() == answer)
    scores = {kind: sum(results) / len(results) for kind, results in right.items()}
    return {"all": sum(map(sum, right.values())) / number, **scores}


def evaluate(arguments: argparse.Namespace) -> None:
    """Prints held-out loss, recall by length, and samples; the model runs in bfloat16, as it is served."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Qwen3ForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    tokens = np.load(arguments.data / "corpus.npz")["heldout"]
    size = (arguments.data / "heldout.txt").stat().st_size
    loss = heldout_loss(model, tokens)
    bits = loss * len(tokens) / size / math.log(2)
    print(f"held-out: {loss:.4f} nats per token, {bits:.4f} bits per byte", flush=True)
    lengths = [int(length) for length in arguments.lengths.split(",")]
    for length in lengths:
        scores = recall_score(model, tokenizer.backend_tokenizer, length, arguments.cases)
        print(f"recall at {length}:", json.dumps({k: round(v, 4) for k, v in scores.items()}), flush=True)
    prompts = [
        "def ",
        "class ",
        "import ",
        '"""Utilities for reading and writing configuration files.\n',
        chat("Write a function `read_lines`: Return the lines of a file.", "").removesuffix(f"{END}\n"),
        chat("What is `os.path.join`?", "").removesuffix(f"{END}\n"),
    ]
    for prompt in prompts:
        torch.manual_seed(0)
        inputs = tokenizer(prompt, return_tensors="pt").to(device)
        output = model.generate(**inputs, max_new_tokens=160, do_sample=True, temperature=0.7, top_p=0.95)
        print("-" * 100 + "\n" + tokenizer.decode(output[0]), flush=True)


# ---------------------------------------------------------------------------------------- command line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)

    command = commands.add_parser("prepare", help="corpus, tokenizer and token arrays")
    command.add_argument("--out", type=Path, required=True)
    command.add_argument("--stdlib", type=Path, nargs="+", required=True, help="lib folders, newest first")
    command.add_argument("--docs", type=Path, nargs="+", required=True, help="folders with .rst sources")
    command.set_defaults(run=prepare)

    command = commands.add_parser("train", help="training")
    command.add_argument("--data", type=Path, required=True, help="what `prepare` wrote")
    command.add_argument("--out", type=Path, required=True)
    command.add_argument("--init", type=Path, help="a model to start from")
    command.add_argument("--stages", default="2048:2200,8192:1300", help="context length:steps, ...")
    command.add_argument("--batch-tokens", type=int, default=262_144)
    command.add_argument("--text-share", type=float, default=0.1875, help="share of the rows that are text")
    command.add_argument("--lr", type=float, default=3e-3)
    command.add_argument("--weight-decay", type=float, default=0.5, help="of the layers' matrices")
    command.add_argument("--warmup", type=int, default=200, help="steps")
    command.add_argument("--decay", type=float, default=0.4, help="share of the steps")
    command.add_argument("--recall-weight", type=float, default=3.0, help="loss weight of recalled tokens")
    command.add_argument("--workers", type=int, default=15, help="processes that draw recall documents")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--log-every", type=int, default=50)
    command.add_argument("--save-every", type=int, default=500)
    command.add_argument("--smoke", action="store_true", help="a tiny model on the CPU")
    command.set_defaults(run=train)

    command = commands.add_parser("evaluate", help="held-out loss, recall and samples")
    command.add_argument("--data", type=Path, required=True)
    command.add_argument("--model", type=Path, required=True)
    command.add_argument("--lengths", default="1024,2048,4096,8192")
    command.add_argument("--cases", type=int, default=200, help="recall cases per length")
    command.set_defaults(run=evaluate)

    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
