"""Detokenising piece by piece, and stop strings that arrive in pieces."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nibble.engine.tokenizer import Detokenizer, StopStrings, Tokenizer

TEXT = "naïve café ☕ 日本語 👩‍👩‍👧 \t\n end"


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Tokenizer:
    return Tokenizer(str(tiny))


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
