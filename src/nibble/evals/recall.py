"""Recall: look-ups among near-identical keys and exact copies, answered greedily by the engine and judged exactly.

A task fills a context with entries (a key and a random value each) and then asks for one of them. The value
cannot be guessed, so a model answers only by reading it back from its KV cache; and the keys come in families
whose members differ in one character or one word, so a cache that blurs the keys picks the wrong entry.

Every task follows from a `random.Random`, and lengths are measured by a `count` function that the caller passes (text
in, number of tokens out). `cases` takes seeds below `TRAINING_SEEDS`. The bundled demo model was trained on documents
whose seeds start there, so that no evaluation case repeats a training document.

    >>> words = lambda text: len(text.split())
    >>> case = cases(seed=7, number=1, length_tokens=256, count=words)[0]
    >>> case.prompt.endswith(case.answer)
    False
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import cycle

from nibble.engine.llm import LLM
from nibble.engine.request import Delta


def grade(llm: LLM, cases: Sequence[RecallCase]) -> Iterator[bool]:
    """Yield of each question whether its greedy answer is exact."""
    # All are submitted before the first one is read, so that the engine batches them.
    answers = [llm.stream(case.prompt, max_tokens=_answer_tokens(llm, case), temperature=0) for case in cases]
    for pieces, case in zip(answers, cases, strict=True):
        yield _is_exact(pieces, case.answer)


END = 200
"""Characters before an answer."""


def _answer_tokens(llm: LLM, case: RecallCase) -> int:
    """Return the tokens that the answer takes, however it joins on to the prompt."""
    # Text far before the answer does not change how it joins.
    end = case.prompt[-END:]
    count = len(llm.tokenizer.encode(end + case.answer)) - len(llm.tokenizer.encode(end))
    # A tokenizer may join the answer's first characters to the last token of the prompt.
    return max(count, len(llm.tokenizer.encode(case.answer)), 1)


def _is_exact(pieces: Iterator[Delta], answer: str) -> bool:
    """Return whether the pieces begin with `answer`; a wrong answer is given up at its first wrong character."""
    text = ""
    # Closing aborts the request, so a wrong answer gives up its pages at once.
    with closing(pieces):  # type: ignore[type-var]
        for piece in pieces:
            text += piece.text
            if not (answer.startswith(text) or text.startswith(answer)):
                return False
    return text.startswith(answer)


TRAINING_SEEDS = 1 << 32
"""Seeds from here upwards belong to training; evaluation uses smaller ones."""

Count = Callable[[str], int]
"""Measures a text in tokens."""

Filler = Callable[[random.Random], str]
"""Draws a block of unrelated text that ends in a newline."""


@dataclass(frozen=True)
class RecallCase:
    """One question. Greedy decoding of `prompt` must continue with exactly `answer`."""

    prompt: str
    """The whole context, which ends right before the answer."""
    answer: str
    """The expected continuation; it begins and ends on a token boundary of common tokenizers."""
    kind: str
    """The name of the surface form (one of `KINDS`)."""


@dataclass(frozen=True)
class Span:
    """A piece of a training document; the loss counts only the tokens of spans to learn."""

    text: str
    learn: bool


@dataclass(frozen=True)
class Form:
    """The surface of a task. Templates take `{key}` and `{value}`."""

    head: str
    """Text before the first entry."""
    entry: str
    """One key and its value."""
    tail: str
    """Text between the last entry and the first question."""
    question: str
    """The question, up to the answer."""
    answer: str = "{value}"
    """The answer."""
    close: str = "'\n"
    """What follows the answer."""
    again: str = ""
    """Text before the second and every later question."""
    block: bool = False
    """Whether values are blocks of several lines rather than single words."""
    filler: bool = False
    """Whether blocks of unrelated code stand between the entries."""


FORMS: dict[str, Form] = {
    "dict": Form("registry = {\n", "    '{key}': '{value}',\n", "}\n\n", "assert registry['{key}'] == '"),
    "assign": Form("# settings\n", "{key} = '{value}'\n", "\n", ">>> {key}\n'"),
    "call": Form(
        "store = Store()\n", "store.put('{key}', '{value}')\n", "\n", "assert store.get('{key}') == '"
    ),
    "prose": Form(
        "The codes are as follows.\n\n",
        "The code of `{key}` is `{value}`.\n",
        "\n",
        "Question: what is the code of `{key}`?\nAnswer: `",
        close="`\n",
    ),
    "table": Form("key\tvalue\n", "{key}\t{value}\n", "\n", "{key}\t", close="\n"),
    "chat": Form(
        "<|user|>\nRemember these codes.\n",
        "- `{key}`: `{value}`\n",
        "",
        "What is the code of `{key}`?<|end|>\n<|assistant|>\n",
        answer="`{value}`",
        close="<|end|>\n",
        again="<|user|>\n",
    ),
    "scattered": Form("", "{key} = '{value}'\n\n", "\n", ">>> {key}\n'", filler=True),
    "copy": Form("", "### block {key}\n{value}\n\n", "", "### repeat {key}\n", close="\n\n", block=True),
}
"""Surface forms by name. Within a form, a key is preceded by the same kind of character everywhere, so that a
byte-pair tokenizer spells it the same way in the entry and in the question."""

KINDS = tuple(FORMS)

_WORD_LIST = """
amber apple arrow atlas badge baker basin beach birch blade bloom board brick brook cabin cable camel
candle canyon castle cedar chalk cherry cliff clock cloud clover copper coral cotton crane creek crown
dawn delta desert dragon drum eagle earth ember falcon feather field flame forest fossil fox frost garden
ghost glass globe gold grape grass harbor hawk hazel honey horse island ivory jade jewel jungle kettle
king kite lake lemon light lily lion lotus magnet maple marble meadow metal mirror moon moss mountain
needle night north oak ocean olive onyx opal orange orchid otter owl palm panda paper pearl pepper piano
pilot pine planet plum pond poppy prism quartz queen rabbit rain raven reef ring river robin rocket rose
ruby sail salt sand shadow shell silver sky smoke snow south spark spider spring star steel stone storm
sugar summer sun swan table temple thunder tiger timber tower train trail tulip turtle valley velvet
violet walnut water wave west whale wheat willow wind winter wolf wood zebra
"""
KEY_WORDS = tuple(_WORD_LIST.split())
HEX = "0123456789abcdef"
DIGITS = "0123456789"
PREFIXES = ("k_", "id_", "key_", "item_", "node_", "cfg_", "user_", "x_")
FAMILIES = (8, 16, 32)
"""Keys per family: a base key and its neighbours, in which one part is another or two adjacent ones swap."""


def cases(seed: int, number: int, length_tokens: int, count: Count, per_context: int = 1) -> list[RecallCase]:
    """Draw evaluation cases whose contexts go round `KINDS` in turn.

    There is always one entry at least, so a length below some 150 tokens may be exceeded.

    Args:
        seed: below `TRAINING_SEEDS`.
        number: how many cases.
        length_tokens: upper bound on prompt plus answer, in tokens.
        count: measures a text in tokens.
        per_context: how many cases ask about one context, each about another entry of it. Neighbours share it.

    Raises:
        ValueError: the seed belongs to training.
    """
    if not 0 <= seed < TRAINING_SEEDS:
        raise ValueError(f"evaluation seeds lie in [0, {TRAINING_SEEDS}); got {seed}")
    rng, kinds = random.Random(seed), cycle(KINDS)
    result: list[RecallCase] = []
    while len(result) < number:
        kind = next(kinds)
        context, *questions = document(rng, length_tokens, count, kind, per_context, apart=True)
        for i in range(0, len(questions), 3):
            question, answer = questions[i : i + 2]
            result.append(RecallCase(context.text + question.text, answer.text, kind))
    return result[:number]


def document(
    rng: random.Random,
    length_tokens: int,
    count: Count,
    kind: str,
    questions: int = 1,
    filler: Filler | None = None,
    *,
    apart: bool = False,
) -> list[Span]:
    """Render entries and questions so that everything before the last `close` fits `length_tokens`.

    First comes a span of context, then three for each question: it, its answer, what closes that.

    Args:
        rng: the source of every choice.
        length_tokens: upper bound, in tokens.
        count: measures a text in tokens.
        kind: one of `KINDS`.
        questions: how many of the entries are asked for, at most.
        filler: draws the blocks between scattered entries; `code_filler` when left out.
        apart: each question comes right after the context, in a text of its own, and these fit `length_tokens`.
    """
    form, draw_filler = FORMS[kind], filler or code_filler
    keys, values = _key_maker(rng), value_maker(rng, form.block)

    def entries_of(number: int) -> tuple[list[tuple[str, str]], list[str]]:
        pairs = [(key, values()) for key in keys(number)]
        return pairs, [_render_entry(form, *pair, rng, draw_filler) for pair in pairs]

    # A first draw tells the size of an entry; the second one has enough entries for the length.
    pairs, entries = entries_of(16)
    per_entry = count("".join(entries)) / len(entries)
    pairs, entries = entries_of(math.ceil(1.1 * length_tokens / per_entry) + 2)
    # Drawn once, so that fitting the number of entries does not change which are asked for.
    order = rng.sample(range(len(pairs)), len(pairs))

    def render(number: int, padding: str = "") -> tuple[list[Span], int]:
        """Return spans of a document with `number` entries, and its tokens up to the end of the last answer."""
        spans = [Span(padding + form.head + "".join(entries[:number]) + form.tail, False)]
        for i in [i for i in order if i < number][:questions]:
            spans += _question_spans(form, *pairs[i], again=len(spans) > 1 and not apart)
        return spans, max(map(count, _texts(spans, apart)))

    number = min(len(pairs), max(1, int(length_tokens / per_entry)))
    spans, total = render(number)
    for attempts in itertools.count(1):
        room = length_tokens - total
        # The size of an entry is a mean. Too long is cut until it fits; too short is filled up twice at most,
        # so that the loop ends.
        if room < 0 and number > 1:
            number = max(1, number - math.ceil(-room / per_entry))
        elif room >= 2 * per_entry and number < len(pairs) and attempts <= 2:
            number = min(len(pairs), number + int(room / per_entry))
        else:
            break
        spans, total = render(number)
    if form.block or form.filler:  # large entries leave room
        spans, _ = render(number, _draw_padding(rng, length_tokens - total, count))
    return spans


def _render_entry(form: Form, key: str, value: str, rng: random.Random, filler: Filler) -> str:
    text = form.entry.format(key=key, value=value)
    return f"{filler(rng)}\n{text}" if form.filler else text


def _texts(spans: Sequence[Span], apart: bool) -> Iterator[str]:
    """Yield what is before the last `close`; apart: the context with each of its questions and answers alone."""
    if not apart:
        yield "".join(span.text for span in spans[:-1])
        return
    for i in range(1, len(spans), 3):
        yield "".join(span.text for span in (spans[0], *spans[i : i + 2]))


def _draw_padding(rng: random.Random, room: int, count: Count) -> str:
    """Draw comment lines of at most `room` tokens."""
    lines = ""
    while True:
        line = f"# see {rng.choice(KEY_WORDS)} and {rng.choice(KEY_WORDS)}\n"
        # Two tokens are left over: a tokenizer may split the text otherwise where padding is put before it.
        if count(lines + line) + 2 > room:
            return lines
        lines += line


def _question_spans(form: Form, key: str, value: str, again: bool) -> list[Span]:
    text = (form.again if again else "") + form.question.format(key=key)
    return [Span(text, False), Span(form.answer.format(value=value), True), Span(form.close, True)]


def _key_maker(rng: random.Random) -> Callable[[int], list[str]]:
    """Choose a style of keys; the result draws that many distinct keys, shuffled, in families."""
    style = rng.choice(("hex", "digits", "words"))
    alphabet = {"hex": HEX, "digits": DIGITS, "words": KEY_WORDS}[style]
    prefix = rng.choice(PREFIXES)
    size = rng.randint(3, 5) if style == "words" else rng.randint(6, 14)
    family = rng.choice(FAMILIES)

    def neighbour(parts: list[str]) -> list[str]:
        place = rng.randrange(len(parts) - 1)
        if rng.random() < 0.3:  # two adjacent parts change places
            return [*parts[:place], parts[place + 1], parts[place], *parts[place + 2 :]]
        place = rng.randrange(len(parts))
        return [*parts[:place], rng.choice(alphabet), *parts[place + 1 :]]

    def spell(parts: list[str]) -> str:
        return "_".join(parts) if style == "words" else prefix + "".join(parts)

    def draw(number: int) -> list[str]:
        spelled: dict[str, None] = {}  # an ordered set
        while len(spelled) < number:
            base = [rng.choice(alphabet) for _ in range(size)]
            members = [base, *(neighbour(base) for _ in range(family - 1))]
            spelled.update(dict.fromkeys(map(spell, members)))
        # Cut before they are shuffled: families stay complete, so that keys have their neighbours.
        keys = list(spelled)[:number]
        rng.shuffle(keys)
        return keys

    return draw


def value_maker(rng: random.Random, block: bool) -> Callable[[], str]:
    """Choose a style of values; each call of the result draws one.

    Blocks may be made of four digits only, so that many places of a context look alike for a few tokens.
    """
    style = rng.choice(("hex", "digits", "words", "few") if block else ("hex", "digits", "words"))
    alphabet = {"hex": HEX, "digits": DIGITS, "few": "0123"}.get(style, "")
    size = rng.randint(6, 10)

    def word() -> str:
        if style == "words":
            return f"{rng.choice(KEY_WORDS)}-{rng.choice(KEY_WORDS)}-{rng.randrange(10, 100)}"
        return "".join(rng.choice(alphabet) for _ in range(size))

    if not block:
        return word
    rows, columns = rng.randint(2, 4), rng.randint(1, 3)
    return lambda: "\n".join(" ".join(word() for _ in range(columns)) for _ in range(rows))


VERBS = ("load", "parse", "merge", "update", "check", "render", "split", "count", "find", "reset", "send")
NOUNS = ("config", "token", "buffer", "message", "record", "header", "index", "result", "path", "node")
STATEMENTS = (
    "if {a} is None:\n        return {b}",
    "if not {a}:\n        raise ValueError('{noun} is empty')",
    "{a} = [item for item in {a} if item is not None]",
    "for item in {a}:\n        {b}.append(item)",
    "{b} = sorted({a}, key=len)",
    "{b} = {a}.get('{noun}', {number})",
    "with open({a}) as file:\n        {b} = file.read()",
    "while len({a}) > {number}:\n        {a}.pop()",
    "assert isinstance({a}, (list, tuple))",
    "{b} = {a} + {number}",
)


def code_filler(rng: random.Random) -> str:
    """Draw a small Python function that has nothing to do with the entries around it."""
    a, b = rng.sample(NOUNS, 2)
    verb = rng.choice(VERBS)
    lines = [
        f"def {verb}_{a}({a}, {b}=None):",
        f'    """{verb.capitalize()} the {a} of a {rng.choice(NOUNS)}."""',
    ]
    for statement in rng.sample(STATEMENTS, rng.randint(1, 4)):
        lines.append("    " + statement.format(a=a, b=b, noun=rng.choice(NOUNS), number=rng.randrange(100)))
    lines.append(f"    return {b}")
    return "\n".join(lines) + "\n"
