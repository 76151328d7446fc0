"""What a load test asks of a server: prompts with lengths, shared prefixes, conversations, files of prompts.

Owns Workload and Load, the settings; Turn, the sources of prompts, sessions() and arrivals(). Everything drawn follows
from `seed`, request by request, so that more requests begin with the same ones. A field's doc is its command-line help.
Must not know of HTTP or of clocks, and must not import torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Protocol

from nibble.config import _option as option
from nibble.errors import ConfigError, unknown
from nibble.evals.load_report import goals

ARRIVALS = ("poisson", "fixed")
KINDS = ("random", "prefix", "file")
HUMANS, SYSTEMS = {"human", "user"}, {"system"}
Prompt = str | list[int]
_WORDS = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work government number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father power
hour game line end member law car city community name president team minute idea kid body information back parent face
others level office door health person art war history party result change morning reason research girl guy moment
"""
WORDS = tuple(_WORDS.split())
"""Common enough that most vocabularies have a token for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is asked. Raises ConfigError where a value is malformed."""

    workload: str = option(
        "random", "What is asked: `random` prompts, prompts that share a `prefix`, or a `file`."
    )
    requests: int = option(100, "Requests; conversations, where there are several turns.")
    input_tokens: str = option("512", "Tokens of a prompt: a number, or a range such as 128-1024.")
    output_tokens: str = option("128", "Most tokens of an answer: a number, or a range.")
    prefixes: int = option(4, "Prefixes of `prefix`, each shared by an equal part of the requests.")
    prefix_tokens: int = option(1024, "Tokens of a shared prefix; those of the prompt follow it.")
    turns: int = option(
        1, "Turns of a conversation; each one's prompt has all turns before it and their answers."
    )
    think: float = option(0.0, "Seconds between an answer and the next turn.")
    file: str | None = option(
        None, "Prompts, one JSON value a line: a text, `prompt`, `messages`, or ShareGPT's `conversations`."
    )
    text: bool = option(
        False,
        "Send texts, not token ids. So it is in chats, in conversations, and where no vocabulary is known.",
    )
    vocab: int | None = option(
        None, "Tokens of the vocabulary, of which prompts are drawn; what /v1/models says."
    )
    ignore_eos: bool = option(False, "Ask for answers of full length (not an option of OpenAI's own API).")
    temperature: float = option(0.0, "Temperature of the answers.")
    seed: int = option(0, "Seed of prompts, lengths, arrivals and sampling.")

    def __post_init__(self) -> None:
        if self.workload not in KINDS:
            raise ConfigError(unknown("workload", self.workload, KINDS))
        if (self.workload == "file") != (self.file is not None):
            raise ConfigError("--workload file and --file belong together")
        for name in ("requests", "prefixes", "prefix_tokens", "turns"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.think < 0 or self.temperature < 0:
            raise ConfigError("think and temperature must not be negative")
        if self.vocab is not None and self.vocab < 2:
            raise ConfigError(f"vocab must be at least 2, not {self.vocab}")
        _ = self.inputs, self.outputs

    @property
    def inputs(self) -> range:
        """Lengths of prompts."""
        return lengths("input_tokens", self.input_tokens)

    @property
    def outputs(self) -> range:
        """Lengths of answers."""
        return lengths("output_tokens", self.output_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How a workload is sent. Raises ConfigError where a value is malformed."""

    model: str | None = option(None, "What the server calls the model; the first of its /v1/models.")
    chat: bool = option(False, "Ask /v1/chat/completions, not /v1/completions.")
    rate: float = option(math.inf, "Requests a second (conversations, that is); inf: all at once.")
    arrivals: str = option("poisson", "How they arrive: `poisson`, or `fixed`, at equal distances.")
    max_concurrency: int | None = option(
        None, "Most requests that are open at a time; others wait in the client."
    )
    warmup: int = option(1, "Requests before the measurement, which are not counted.")
    timeout: float = option(600.0, "Seconds after which a request has failed.")
    goodput: str | None = option(
        None, "What makes a request good, in ms, as ttft:500,itl:50; also tpot and e2e. ITL is its longest."
    )
    body: str | None = option(None, "A JSON object that each request's body is extended by.")
    api_key: str | None = option(
        None, "Sent as a bearer token; NIBBLE_API_KEY or OPENAI_API_KEY, if left out."
    )

    def __post_init__(self) -> None:
        if self.arrivals not in ARRIVALS:
            raise ConfigError(unknown("kind of arrivals", self.arrivals, ARRIVALS))
        if not self.rate > 0 or not self.timeout > 0:
            raise ConfigError("rate and timeout must be above 0")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError(f"max_concurrency must be at least 1, not {self.max_concurrency}")
        if self.warmup < 0:
            raise ConfigError(f"warmup must not be negative, not {self.warmup}")
        goals(self.goodput)
        _ = self.extra

    @property
    def extra(self) -> dict[str, Any]:
        """What each body is extended by."""
        try:
            found = json.loads(self.body or "{}")
        except ValueError as error:
            raise ConfigError(f"body is not JSON: {error}") from None
        if not isinstance(found, dict):
            raise ConfigError('body must be a JSON object, as {"top_k": 20}')
        return found


@dataclass(frozen=True, slots=True)
class Turn:
    """What a client adds to its conversation, and how much may be answered."""

    prompt: Prompt
    max_tokens: int


Session = tuple[Turn, ...]


class Source(Protocol):
    """Draws prompts."""

    def draw(self, dice: Random, tokens: int) -> Prompt: ...


@dataclass(frozen=True, slots=True)
class Ids:
    """Prompts as token ids, exact in length. The ends of the vocabulary, where special tokens lie, are left out."""

    vocab: int

    def draw(self, dice: Random, tokens: int) -> list[int]:
        return dice.choices(range(min(256, self.vocab // 16), self.vocab - self.vocab // 32), k=tokens)


@dataclass(frozen=True, slots=True)
class Words:
    """Prompts as texts, whose length in tokens is near what is asked."""

    tokens_per_word: float = 1.0

    def draw(self, dice: Random, tokens: int) -> str:
        return " ".join(dice.choices(WORDS, k=max(1, round(tokens / self.tokens_per_word))))


def lengths(name: str, text: str) -> range:
    """`512` or `128-1024`, both ends included; raises ConfigError."""
    low, dash, high = text.partition("-")
    try:
        found = range(int(low), int(high if dash else low) + 1)
    except ValueError:
        raise ConfigError(f"cannot read {text!r}; write {name} as 512 or 128-1024") from None
    if not found or found[0] < 1:
        raise ConfigError(f"{name} must be at least 1, and a range must not end before it begins: {text!r}")
    return found


def sessions(asked: Workload, source: Source) -> list[Session]:
    """What is asked, in order of arrival. A file gives as many as it has, if those are fewer than `requests`."""
    if asked.workload == "file":
        return _from_file(asked)
    found = [_drawn(asked, source, Random(f"{asked.seed} request {i}")) for i in range(asked.requests)]
    return _prefixed(asked, source, found) if asked.workload == "prefix" else found


def warmups(asked: Workload, source: Source, count: int) -> list[Session]:
    """Requests of the same size that share nothing with those that are measured."""
    return [_drawn(asked, source, Random(f"{asked.seed} warm-up {i}"))[:1] for i in range(count)]


def arrivals(rate: float, poisson: bool, count: int, seed: int) -> list[float]:
    """Seconds after the start at which each of `count` arrives. rate: per second; infinite for all at once."""
    if rate == math.inf:
        return [0.0] * count
    if not poisson:
        return [i / rate for i in range(count)]
    dice, now, found = Random(f"{seed} arrivals"), 0.0, []
    for _ in range(count):
        found.append(now)
        now += dice.expovariate(rate)
    return found


def joined(first: Prompt, second: Prompt) -> Prompt:
    """One prompt after another, of the same kind."""
    if isinstance(first, list) and isinstance(second, list):
        return first + second
    return f"{first} {second}"


def _drawn(asked: Workload, source: Source, dice: Random) -> Session:
    return tuple(
        Turn(source.draw(dice, dice.choice(asked.inputs)), dice.choice(asked.outputs))
        for _ in range(asked.turns)
    )


def _prefixed(asked: Workload, source: Source, found: Sequence[Session]) -> list[Session]:
    """Each session behind one of the prefixes, which come in random order, so that no prefix comes all at once."""
    prefixes = [
        source.draw(Random(f"{asked.seed} prefix {i}"), asked.prefix_tokens) for i in range(asked.prefixes)
    ]
    order = [i % asked.prefixes for i in range(len(found))]
    Random(f"{asked.seed} order").shuffle(order)
    return [
        (Turn(joined(prefixes[which], first.prompt), first.max_tokens), *rest)
        for which, (first, *rest) in zip(order, found, strict=True)
    ]


# Files


def _from_file(asked: Workload) -> list[Session]:
    path = Path(asked.file or "")
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    found = []
    for where, entry in _entries(path, text):
        prompts = _prompts(entry)
        if not prompts:
            raise ConfigError(f"{where} has no prompt: see --file")
        found.append((prompts[: asked.turns], _limit(entry)))
    Random(f"{asked.seed} order").shuffle(found)
    return [
        tuple(
            Turn(prompt, limit or Random(f"{asked.seed} answer {i} {turn}").choice(asked.outputs))
            for turn, prompt in enumerate(prompts)
        )
        for i, (prompts, limit) in enumerate(found[: asked.requests])
    ]


def _entries(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """Values with where they stand: of lines, or of one array, as ShareGPT is published."""
    try:
        if text.lstrip().startswith("["):
            try:
                yield from ((f"{path}, entry {i}", entry) for i, entry in enumerate(json.loads(text)))
                return
            except ValueError:
                pass  # lines of arrays
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                yield f"{path}, line {number},", json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{path} is neither lines of JSON nor an array: {error}") from None


def _prompts(entry: Any) -> list[Prompt]:
    """What the client says, turn by turn; a system's words stand before the first."""
    if isinstance(entry, str) or _is_ids(entry):
        return [entry] if entry else []
    if not isinstance(entry, dict):
        return []
    for key in ("messages", "conversations", "conversation"):
        if isinstance(entry.get(key), list):
            return _said(entry[key])
    return _prompts(entry.get("prompt") or entry.get("text") or "")


def _said(messages: Sequence[Any]) -> list[Prompt]:
    system, found = "", list[Prompt]()
    for message in messages:
        if not isinstance(message, dict):
            return []
        role, words = (
            message.get("role") or message.get("from"),
            message.get("content") or message.get("value"),
        )
        if not isinstance(words, str) or not words:
            continue
        if role in SYSTEMS:
            system = f"{words}\n\n"
        elif role in HUMANS:
            found.append(words if found else system + words)
    return found


def _is_ids(entry: Any) -> bool:
    return isinstance(entry, list) and all(isinstance(token, int) for token in entry)


def _limit(entry: Any) -> int | None:
    """How long the answer may be, if the entry says so."""
    said = (entry.get("output_tokens") or entry.get("max_tokens")) if isinstance(entry, dict) else None
    return said if isinstance(said, int) and said > 0 else None
