"""Detokenising piece by piece, and stop strings that arrive in pieces."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nibble.engine.tokenizer import Detokenizer, StopStrings, Tokenizer
from nibble.errors import WeightError

TEXT = "naïve café ☕ 日本語 👩‍👩‍👧 \t\n end"


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Tokenizer:
    return Tokenizer(str(tiny))


@given(st.lists(st.integers(0, 259), max_size=20), st.booleans())
def test_texts_are_those_of_transformers(ids: list[int], shows: bool) -> None:
    tokenizer = Tokenizer(str(_folder()))
    ids = [token for token in ids if token < len(tokenizer)]
    expected = tokenizer._inner.decode(ids, skip_special_tokens=not shows, clean_up_tokenization_spaces=False)
    assert tokenizer.decode(ids, None if shows else frozenset()) == expected


def test_a_class_that_decodes_by_itself_does_so(tiny: Path) -> None:
    tokenizer, ids = Tokenizer(str(tiny)), [72, 73]
    kind = type(tokenizer._inner)

    class Own(kind):  # type: ignore[misc, valid-type]
        def _decode(self, token_ids: list[int], **kwargs: object) -> str:
            return f"{len(token_ids)} tokens, {kwargs['clean_up_tokenization_spaces']}"

    tokenizer._inner.__class__ = Own
    assert tokenizer.decode(ids) == "2 tokens, False"


def test_no_half_characters(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.add([token]) for token in tokenizer.encode(TEXT)]
    assert "".join(pieces) + detokenizer.finish() == TEXT
    assert not any("\ufffd" in piece for piece in pieces)
    assert "☕" in pieces and "日" in pieces, "a character comes whole, with its last byte"


def test_an_unfinished_character_is_dropped_at_the_end(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    shown = detokenizer.add(tokenizer.encode("ab☕")[:-1])
    assert shown + detokenizer.finish() == "ab"


@given(st.lists(st.integers(0, 5), max_size=12), st.sampled_from([frozenset(), frozenset({258}), None]))
def test_special_tokens_are_shown_or_not(picks: list[int], shown: frozenset[int] | None) -> None:
    tokenizer = Tokenizer(str(_folder()))
    tokenizer._inner.add_special_tokens({"additional_special_tokens": ["<a>", "[B]"]})
    tokenizer = _again(tokenizer)
    eos, a, b = (tokenizer.token_of(word) for word in ("<eos>", "<a>", "[B]"))
    assert None not in {eos, a, b} and tokenizer.token_of("x") is None
    shown = frozenset({b}) if shown else shown
    cloud = tokenizer.encode("☁")
    parts = [
        ([eos], "<eos>"),
        ([a], "<a>"),
        ([b], "[B]"),
        (tokenizer.encode(" x"), " x"),
        (cloud, "☁"),
        ([b, b], "[B][B]"),
    ]
    ids = [token for pick in picks for token in parts[pick][0]]
    hidden = {0, 1, 2, 5} if shown == frozenset() else {0, 1} if shown else set()
    detokenizer = Detokenizer(tokenizer, (), shown)
    text = "".join(detokenizer.add([token]) for token in ids) + detokenizer.finish()
    assert (
        text
        == "".join(parts[pick][1] for pick in picks if pick not in hidden)
        == tokenizer.decode(ids, shown)
    )


def _again(tokenizer: Tokenizer) -> Tokenizer:
    """As it is loaded when it has been saved."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        tokenizer._inner.save_pretrained(folder)
        return Tokenizer(folder)


@given(st.text(max_size=20), st.integers(1, 4))
def test_pieces_of_any_size_add_up(text: str, size: int) -> None:
    tokenizer = Tokenizer(str(_folder()))
    ids = tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.add(ids[i : i + size]) for i in range(0, len(ids), size)]
    whole = tokenizer.decode(ids)
    assert "".join(pieces) + detokenizer.finish() == whole.rstrip("\ufffd")


def _folder() -> Path:
    import tempfile

    from tiny import save_tokenizer

    folder = Path(tempfile.gettempdir()) / "nibble-test-tokenizer"
    return folder if (folder / "tokenizer.json").exists() else save_tokenizer(folder)


@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(1, 5),
)
def test_stop_strings_cut_where_the_whole_text_would_be_cut(text: str, stops: list[str], size: int) -> None:
    finder, shown, stopped = StopStrings(stops), "", False
    for i in range(0, len(text), size):
        piece, stopped = finder.add(text[i : i + size])
        shown += piece
        if stopped:
            break
    shown += "" if stopped else finder.finish()
    seen = text[: i + size] if stopped else text  # what had arrived when a stop string was first complete
    ends = [seen.index(stop) for stop in stops if stop in seen]
    assert stopped == bool(ends) and shown == seen[: min(ends, default=len(seen))]


def test_stop_strings_that_stay_and_that_do_not_count_yet() -> None:
    assert StopStrings(["b", "ab"], include=True).add("xaby") == ("xab", True)
    finder = StopStrings(["ab"])
    assert finder.add("xab a", may_stop=False) == ("xab ", False), "a stop string before its time is text"
    assert finder.add("b") == ("", True), "one that ends after it counts"


def test_words_within_and_at_the_beginning_of_words(tokenizer: Tokenizer) -> None:
    (inside,) = tokenizer.token_sequences(["fox"])
    assert tokenizer.decode(inside) == "fox"

    class Spaced(Tokenizer):
        def __init__(self) -> None:
            pass

        def encode(self, text: str, **kwargs: object) -> list[int]:
            vocab = {"fox": [1], " fox": [2], "a b": [3, 4], " a b": [0, 3, 4], "x y": [5, 6], " x y": [7, 6]}
            return vocab[text]

    assert Spaced().token_sequences([" fox"]) == [[1], [2]]
    assert Spaced().token_sequences(["a b", "x y"]) == [[3, 4], [5, 6], [7, 6]], (
        "a space of its own is no word's"
    )


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("tokenizer.json", "{}", "tokenizer.json has no entry 'added_tokens'"),
        ("tokenizer.json", "{", "tokenizer.json is no JSON object"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json is no JSON object"),
        ("tokenizer.json", None, "there is no vocabulary"),
    ],
)
def test_a_broken_file_is_named(
    tiny: Path, tmp_path: Path, name: str, content: str | None, reason: str
) -> None:
    folder = Path(shutil.copytree(tiny, tmp_path / "model"))
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    with pytest.raises(WeightError, match=f"{reason}.*files again"):
        Tokenizer(str(folder))


def with_template(tiny: Path, folder: Path, file: str, template: str) -> Tokenizer:
    shutil.copytree(tiny, folder, dirs_exist_ok=True)
    content = json.dumps({"chat_template": template}) if file.endswith(".json") else template
    (folder / file).write_text(content)
    return Tokenizer(str(folder))


PARTS_ALONE = (
    "{% for message in messages %}{{ message['role'] }}: {% for line in message['content'] %}"
    "{% if line['type'] == 'text' %}{{ line['text'] }}{% elif line['type'] == 'image' %}<image>{% endif %}"
    "{% endfor %}; {% endfor %}"
)
EITHER = (
    "{% for message in messages %}{{ message['role'] }}: {% if message['content'] is string %}={{ message['content'] }}"
    "{% else %}{% for line in message['content'] %}{{ line['text'] }}{% endfor %}{% endif %}; {% endfor %}"
)
STRINGS = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] }}; {% endfor %}"


@pytest.mark.parametrize("file", ["chat_template.jinja", "chat_template.json"])
@pytest.mark.parametrize(
    ("template", "text"),
    [
        (PARTS_ALONE, "system: be kind; user: hi; "),
        (EITHER, "system: =be kind; user: =hi; "),
        (STRINGS, "system: be kind; user: hi; "),
    ],
    ids=["parts", "either", "strings"],
)
def test_chat_templates_of_multimodal_checkpoints(
    file: str, template: str, text: str, tiny: Path, tmp_path: Path
) -> None:
    """In a file of the processor or the tokenizer's; one that reads lists of parts must not lose a plain text."""
    tokenizer = with_template(tiny, tmp_path, file, template)
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    assert tokenizer.decode(tokenizer.chat(messages)) == text


def test_a_template_of_the_tokenizer_comes_first(tiny: Path, tmp_path: Path) -> None:
    with_template(tiny, tmp_path, "chat_template.json", EITHER)
    tokenizer = with_template(tmp_path, tmp_path / "more", "chat_template.jinja", STRINGS)
    assert tokenizer.chat_template == STRINGS
