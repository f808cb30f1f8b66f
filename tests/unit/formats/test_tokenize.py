"""Tokens: one definition for columns and queries."""

import unicodedata

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef.errors import ErrorKind, InvalidInputError
from reef.formats.tokenize import (
    QUERY_TERMS_MAX,
    TERM_BYTES_MAX,
    Analyzer,
    Phrase,
    TextOptions,
    split,
    split_text,
    stem,
)

STEMS = """caresses caress|ponies poni|ties ti|caress caress|cats cat|feed feed|agreed agre
plastered plaster|bled bled|motoring motor|sing sing|conflated conflat|troubled troubl|sized size
hopping hop|tanned tan|falling fall|hissing hiss|fizzed fizz|failing fail|filing file|happy happi
sky sky|relational relat|conditional condit|rational ration|valenci valenc|digitizer digit
conformabli conform|radicalli radic|differentli differ|vileli vile|analogousli analog
vietnamization vietnam|predication predic|operator oper|feudalism feudal|decisiveness decis
hopefulness hope|callousness callous|formaliti formal|sensitiviti sensit|sensibiliti sensibl
triplicate triplic|formative form|formalize formal|electriciti electr|electrical electr|hopeful hope
goodness good|revival reviv|allowance allow|inference infer|airliner airlin|adjustable adjust
defensible defens|irritant irrit|replacement replac|adjustment adjust|dependent depend
adoption adopt|communism commun|activate activ|effective effect|bowdlerize bowdler|probate probat
rate rate|cease ceas|controll control|roll roll|yields yield|enjoying enjoi|yes ye|as as|é3s é3s"""
TEXTS = st.one_of(
    st.none(),
    st.text(max_size=40),
    st.text("aB9 _-.'\u0130ßéｆ東が\u0301\u3000\n", max_size=30),
)


def per_row(column, tokenizer="unicode"):
    """Return the tokens of each row with their positions."""
    tokens = split(column, tokenizer)
    rows = [[] for _ in range(len(column))]
    for code, row, position in zip(tokens.codes, tokens.rows, tokens.positions, strict=True):
        rows[row].append((tokens.words[code], int(position)))
    return rows


@pytest.mark.parametrize("pair", STEMS.replace("\n", "|").split("|"))
def test_stems_are_those_of_the_published_algorithm(pair):
    """Stems are part of an index's bytes: they never change."""
    word, expected = pair.split()
    assert stem(word) == expected


def test_text_splits_at_everything_but_letters_digits_and_marks():
    """Case, width and composition of characters make no difference; ideographs are single."""
    rows = per_row(
        pa.array(["The CAFE\u0301's 2 re_used caches", None, "", "東京 ｆｕｌｌ", "a.b"])
    )
    words = [[word for word, _ in row] for row in rows]
    expected = ["the", "café", "s", "2", "re", "used", "caches"]
    assert words == [expected, [], [], ["東", "京", "full"], ["a", "b"]]
    assert [at for _, at in rows[0]] == list(range(7))


def test_whitespace_tokenizer_keeps_punctuation():
    """Tags and identifiers stay whole."""
    assert split_text("Foo.bar(x)\tA-1\u3000b", "whitespace") == ["foo.bar(x)", "a-1", "b"]


def test_rows_never_run_into_each_other():
    """The last word of a row and the first of the next are two tokens, in slices too."""
    column = pa.array(["x", "one", "two", "", "three four"])[1:]
    assert [[w for w, _ in row] for row in per_row(column)] == [
        ["one"],
        ["two"],
        [],
        ["three", "four"],
    ]


@given(st.lists(TEXTS, max_size=6), st.sampled_from(["unicode", "whitespace"]))
def test_columns_and_queries_have_the_same_tokens(texts, tokenizer):
    """The pass over a column and the loop over a text follow the same rules."""
    expected = [
        [(word, at) for at, word in enumerate(split_text(text or "", tokenizer))] for text in texts
    ]
    assert per_row(pa.array(texts, pa.string()), tokenizer) == expected


@given(st.text(max_size=30))
def test_tokens_do_not_depend_on_the_form_of_the_text(text):
    """Composed and decomposed characters are the same."""
    assert split_text(unicodedata.normalize("NFD", text)) == split_text(
        unicodedata.normalize("NFC", text)
    )


def test_stop_words_and_stems_by_language():
    """English drops stop words and stems the rest; options switch off either."""
    text = "the relational stores"
    assert [*Analyzer(TextOptions()).query(text).terms] == ["the", "relational", "stores"]
    english = Analyzer(TextOptions.parse({"language": "english"}))
    assert english.query(text).terms == {"relat": 1, "store": 1}
    exact = Analyzer(TextOptions.parse({"language": "english", "stemming": False}))
    assert [*exact.query(text).terms] == ["relational", "stores"]
    complete = Analyzer(TextOptions.parse({"language": "english", "stop_words": False}))
    assert [*complete.query(text).terms] == ["the", "relat", "store"]


def test_phrases_keep_the_gaps_of_stop_words():
    """A quoted phrase has the distances of its terms; other words count once each time."""
    english = Analyzer(TextOptions.parse({"language": "english", "positions": True}))
    query = english.query('"state of the art" storage art "the"')
    assert query.terms == {"state": 1, "art": 2, "storag": 1}
    assert query.phrases == (Phrase((("state", 0), ("art", 3))),)


def test_long_tokens_are_not_indexed():
    """A token of more bytes than a term may have is dropped, in characters of any width."""
    analyzer = Analyzer(TextOptions())
    assert analyzer.term("x" * TERM_BYTES_MAX) is not None
    assert analyzer.term("x" * (TERM_BYTES_MAX + 1)) is None
    assert analyzer.term("é" * (TERM_BYTES_MAX // 2 + 1)) is None


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"language": "klingon"}, "klingon"),
        ({"tokenizer": "ngram"}, "ngram"),
        ({"steming": True}, "steming"),
        ({"positions": "yes"}, "bool"),
        ({"stemming": True}, "language"),
    ],
)
def test_unknown_options_are_rejected(options, found):
    """The error names the option and the values that it can have."""
    with pytest.raises(InvalidInputError, match=found) as caught:
        TextOptions.parse(options)
    assert caught.value.kind is ErrorKind.INVALID_OPTION


def test_queries_are_bounded():
    """A query of too many distinct terms is rejected before anything is read."""
    words = " ".join(map(str, range(QUERY_TERMS_MAX + 1)))
    with pytest.raises(InvalidInputError, match="1025 distinct terms"):
        Analyzer(TextOptions()).query(words)


def test_a_million_tokens_are_split_at_once():
    """Distinct words are listed once; positions begin again in each row."""
    column = pa.array(["alpha beta gamma delta " * 250] * 1000)
    tokens = split(column)
    assert len(tokens.codes) == 1_000_000
    assert sorted(tokens.words) == ["alpha", "beta", "delta", "gamma"]
    assert np.array_equal(tokens.positions[:1000], np.arange(1000))
