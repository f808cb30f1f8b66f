"""Tokens of text columns and of queries: one definition for both, so that they always agree.

    text      "The Café's 2 re-used caches"
    split     the  café  s  2  re  used  caches     Unicode, positions 0 to 6
    stop      ·    café  s  2  re  used  caches     with stop words; positions stay
    stem      ·    café  s  2  re  us    cach       with stemming

Text is normalised (NFKC) and case-folded. `tokenizer="unicode"` makes a token of each run of
letters, digits and marks, and of each ideograph and hiragana on its own; everything else separates.
`"whitespace"` separates at whitespace alone, for tags and identifiers. Tokens of more than
`TERM_BYTES_MAX` bytes are not indexed. A document's length is the number of its indexed tokens.

A column is split in one pass over its characters: classes by table lookup, tokens where classes
change. Python runs once per distinct word, not per token. Columns with characters beyond ASCII
are normalised value by value first.

The tables are those of Python's Unicode version. A newer Python may classify code points that were
unassigned when an index was built; no other token changes.

The stemmer of English is Porter's algorithm of 1980, with the two changes of its author's own
implementation (-bli, -logi). Written here rather than taken from a package: stems are part of an
index's bytes, so a release of a package that stems one word differently would make rows unfindable.
It runs once per distinct word of a segment. Words that are not lower-case ASCII letters are
returned unchanged.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from reef.errors import ErrorKind, InvalidInputError

_VOWEL = "[aeiouy]"
_RUN_C, _RUN_V = "[^aeiou][^aeiouy]*", "[aeiouy][aeiou]*"
_ONE_OR_MORE = re.compile(f"^(?:{_RUN_C})?{_RUN_V}{_RUN_C}")
_EXACTLY_ONE = re.compile(f"^(?:{_RUN_C})?{_RUN_V}{_RUN_C}(?:{_RUN_V})?$")
_TWO_OR_MORE = re.compile(f"^(?:{_RUN_C})?(?:{_RUN_V}{_RUN_C}){{2}}")
_HAS_VOWEL = re.compile(f"^(?:{_RUN_C})?{_VOWEL}")
_SHORT = re.compile(f"^{_RUN_C}{_VOWEL}[^aeiouwxy]$")
_DOUBLE = re.compile(r"([^aeiouylsz])\1$")
_WORD = re.compile("[a-z]{3,}")
_PLURAL = re.compile("^(.+?)(ss|i)es$")
_STEP_2 = {
    "ational": "ate",
    "tional": "tion",
    "enci": "ence",
    "anci": "ance",
    "izer": "ize",
    "bli": "ble",
    "alli": "al",
    "entli": "ent",
    "eli": "e",
    "ousli": "ous",
    "ization": "ize",
    "ation": "ate",
    "ator": "ate",
    "alism": "al",
    "iveness": "ive",
    "fulness": "ful",
    "ousness": "ous",
    "aliti": "al",
    "iviti": "ive",
    "biliti": "ble",
    "logi": "log",
}
_STEP_3 = {
    "icate": "ic",
    "ative": "",
    "alize": "al",
    "iciti": "ic",
    "ical": "ic",
    "ful": "",
    "ness": "",
}
_STEP_4 = (
    *("ement", "ance", "ence", "able", "ible", "ment", "ant", "ent", "ism"),
    *("ate", "iti", "ous", "ive", "ize", "al", "er", "ic", "ou"),
)
_SUFFIX_4 = re.compile(f"^(.+?)({'|'.join(_STEP_4)})$")
ANALYSIS = 1
"""The version of the rules on this page. An index of another one is not searched."""
TERM_BYTES_MAX = 128
QUERY_TERMS_MAX = 1024
"""Distinct terms of a query; more are rejected rather than searched for minutes."""
SEPARATOR, LETTER, SINGLE = 0, 1, 2
SINGLE_RANGES = ((0x3041, 0x309F), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF))
SINGLE_PLANES = (0x20000, 0x323AF)
ASSIGNED_END = 0x32400
"""Letters and marks end here, but for the variation selectors of plane 14."""
SELECTORS = (0xE0100, 0xE01F0)
QUOTED = re.compile(r'"([^"]*)"')
STOP_WORDS = frozenset(
    (
        *("a", "an", "and", "are", "as", "at", "be", "but", "by", "for", "if"),
        *("in", "into", "is", "it", "no", "not", "of", "on", "or", "such", "that"),
        *("the", "their", "then", "there", "these", "they", "this", "to", "was", "will", "with"),
    )
)
OptionValue = str | int | float | bool
LANGUAGES = ("", "english")
TOKENIZERS = ("unicode", "whitespace")
Characters = npt.NDArray[np.uint8] | npt.NDArray[np.uint32]


def _suffix_pattern(suffixes: dict[str, str]) -> re.Pattern[str]:
    return re.compile(f"^(.+?)({'|'.join(sorted(suffixes, key=len, reverse=True))})$")


_SUFFIX_2, _SUFFIX_3 = _suffix_pattern(_STEP_2), _suffix_pattern(_STEP_3)


@lru_cache(maxsize=1 << 16)
def stem(word: str) -> str:
    """Return the stem of a lower-case word.

    >>> [stem(word) for word in ("storage", "stores", "relational", "running")]
    ['storag', 'store', 'relat', 'run']
    """
    if not _WORD.fullmatch(word):
        return word
    y_first = word[0] == "y"  # a consonant at the beginning of a word
    word = "Y" + word[1:] if y_first else word
    word = _final_y(_past(_plural(word)))
    word = _replace_suffix(word, _SUFFIX_2, _STEP_2)
    word = _replace_suffix(word, _SUFFIX_3, _STEP_3)
    word = _final_e(_residue(word))
    return "y" + word[1:] if y_first else word


def _plural(word: str) -> str:
    if match := _PLURAL.match(word):
        return match[1] + match[2]
    return word[:-1] if word[-1] == "s" and word[-2] != "s" else word


def _past(word: str) -> str:
    if word.endswith("eed"):
        return word[:-1] if _ONE_OR_MORE.match(word[:-3]) else word
    for suffix in ("ed", "ing"):
        if word.endswith(suffix):
            rest = word[: -len(suffix)]
            return _restore_ending(rest) if _HAS_VOWEL.match(rest) else word
    return word


def _restore_ending(word: str) -> str:
    """Return a word from which -ed or -ing was cut as it is spelled without them."""
    if word.endswith(("at", "bl", "iz")):
        return word + "e"
    if _DOUBLE.search(word):
        return word[:-1]
    return word + "e" if _SHORT.match(word) else word


def _final_y(word: str) -> str:
    return word[:-1] + "i" if word[-1] == "y" and _HAS_VOWEL.match(word[:-1]) else word


def _replace_suffix(word: str, pattern: re.Pattern[str], replacements: dict[str, str]) -> str:
    match = pattern.match(word)
    if match and _ONE_OR_MORE.match(match[1]):
        return match[1] + replacements[match[2]]
    return word


def _residue(word: str) -> str:
    """Cut the last suffix of a long stem: -ion only after s or t."""
    if match := _SUFFIX_4.match(word):
        return match[1] if _TWO_OR_MORE.match(match[1]) else word
    if word.endswith(("sion", "tion")) and _TWO_OR_MORE.match(word[:-3]):
        return word[:-3]
    return word


def _final_e(word: str) -> str:
    if word[-1] == "e":
        rest = word[:-1]
        once = _EXACTLY_ONE.match(rest)
        if _TWO_OR_MORE.match(rest) or (once and not _SHORT.match(rest)):
            word = rest
    if word.endswith("ll") and _TWO_OR_MORE.match(word):
        return word[:-1]
    return word


class TextOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the text of one index becomes tokens, and whether their positions are stored."""

    language: str = ""
    """"english" or empty; decides the next two unless they are given."""
    stemming: bool | None = None
    stop_words: bool | None = None
    tokenizer: str = "unicode"
    """Or "whitespace"."""
    positions: bool = False
    """Needed for quoted phrases; roughly doubles the index."""

    @classmethod
    def parse(cls, options: Mapping[str, OptionValue]) -> "TextOptions":
        """Return checked options; unknown names and values are rejected."""
        try:
            parsed = msgspec.convert(dict(options), cls)
        except msgspec.ValidationError as error:
            raise _invalid(f"{error}; options are {', '.join(cls.__struct_fields__)}") from error
        if parsed.language not in LANGUAGES:
            raise _invalid(f"language: expected one of {LANGUAGES}, found {parsed.language!r}")
        if parsed.tokenizer not in TOKENIZERS:
            raise _invalid(f"tokenizer: expected one of {TOKENIZERS}, found {parsed.tokenizer!r}")
        if not parsed.language and (parsed.stemming or parsed.stop_words):
            raise _invalid("stemming and stop words need a language, got none")
        return parsed

    @property
    def stems(self) -> bool:
        return bool(self.language) if self.stemming is None else self.stemming

    @property
    def stops(self) -> bool:
        return bool(self.language) if self.stop_words is None else self.stop_words


def _invalid(problem: str) -> InvalidInputError:
    return InvalidInputError(f"text index: {problem}", kind=ErrorKind.INVALID_OPTION)


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a column in row order."""

    words: list[str]
    """Distinct, normalised and case-folded; before stop words and stemming."""
    codes: npt.NDArray[np.int32]
    """Per token: its place in `words`."""
    rows: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    """Within the row, counting every token."""


@dataclass(frozen=True, slots=True)
class Phrase:
    """Terms at fixed distances; the first is at distance 0."""

    terms: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class TextQuery:
    """The terms of a query with the number of times each is in it, in order of appearance."""

    terms: dict[str, int]
    phrases: tuple[Phrase, ...] = ()


class Analyzer:
    """Turns words into terms: stop words become None, others their stems."""

    def __init__(self, options: TextOptions) -> None:
        self.options = options
        self._stops = STOP_WORDS if options.stops else frozenset()
        self._stems = options.stems

    def term(self, word: str) -> str | None:
        """Return the term that a word is indexed under; None if it is not indexed."""
        if word in self._stops or len(word) > TERM_BYTES_MAX:
            return None
        if not word.isascii() and len(word.encode()) > TERM_BYTES_MAX:
            return None
        return stem(word) if self._stems else word

    def split(self, column: pa.Array) -> Tokens:
        return split(column, self.options.tokenizer)

    def query(self, text: str) -> TextQuery:
        """Parse a query: words, and phrases in double quotes, which a result has to contain."""
        terms = [term for term, _ in self._place_terms(text.replace('"', " "))]
        if len(set(terms)) > QUERY_TERMS_MAX:
            raise InvalidInputError(
                f"text query has {len(set(terms))} distinct terms, at most {QUERY_TERMS_MAX}"
            )
        quoted = [self._place_terms(phrase) for phrase in QUOTED.findall(text)]
        phrases = tuple(dict.fromkeys(_phrase(placed) for placed in quoted if placed))
        return TextQuery(dict(Counter(terms)), phrases)

    def _place_terms(self, text: str) -> list[tuple[str, int]]:
        """Return the terms of a text with their positions."""
        words = split_text(text, self.options.tokenizer)
        terms = ((self.term(word), position) for position, word in enumerate(words))
        return [(term, position) for term, position in terms if term is not None]


def _phrase(placed: Iterable[tuple[str, int]]) -> Phrase:
    listed = list(placed)
    first = listed[0][1]
    return Phrase(tuple((term, at - first) for term, at in listed))


def split(column: pa.Array, tokenizer: str = "unicode") -> Tokens:
    """Return the tokens of a column of strings; a null has none."""
    characters, bounds = _characters(column)
    classes = _classes(tokenizer)[characters]
    inside = classes != SEPARATOR
    begins = inside.copy()
    begins[1:] &= ~inside[:-1] | (classes[1:] == SINGLE) | (classes[:-1] == SINGLE)
    firsts = bounds[:-1][bounds[:-1] < len(characters)]
    begins[firsts] = inside[firsts]
    ends = inside.copy()
    ends[:-1] &= ~inside[1:] | begins[1:]
    starts, stops = np.flatnonzero(begins), np.flatnonzero(ends) + 1
    per_row = np.searchsorted(starts, bounds)
    counts = np.diff(per_row)
    rows = np.repeat(np.arange(len(column), dtype=np.int32), counts)
    positions = np.arange(len(starts), dtype=np.int32) - np.repeat(
        per_row[:-1].astype(np.int32), counts
    )
    encoded = _strings(characters[inside], stops - starts).dictionary_encode()
    return Tokens(encoded.dictionary.to_pylist(), encoded.indices.to_numpy(), rows, positions)


def split_text(text: str, tokenizer: str = "unicode") -> list[str]:
    """Return the tokens of one short text, such as a query; `split` is for columns.

    >>> split_text("Ｒｅｅｆ: object-storage 東京")
    ['reef', 'object', 'storage', '東', '京']
    """
    folded, classes = _fold_case(text), _class_bytes(tokenizer)
    words: list[str] = []
    start = -1
    for place, character in enumerate(folded):
        kind = classes[ord(character)]
        if kind == LETTER and start >= 0:
            continue
        if start >= 0:
            words.append(folded[start:place])
        start = place if kind == LETTER else -1
        if kind == SINGLE:
            words.append(character)
    return words if start < 0 else [*words, folded[start:]]


def _characters(column: pa.Array) -> tuple[Characters, npt.NDArray[np.int64]]:
    """Return the folded characters of all rows one after the other, and where each row begins."""
    if column.null_count:
        column = column.fill_null("")
    offsets = np.frombuffer(column.buffers()[1], np.int32, len(column) + 1, 4 * column.offset)
    data = column.buffers()[2]
    raw = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    raw = raw[offsets[0] : offsets[-1]]
    if not len(raw) or raw.max() < 0x80:
        return _ascii_folds()[raw], (offsets - offsets[0]).astype(np.int64)
    texts = [_fold_case(text) for text in column.to_pylist()]
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    joined = "".join(texts).encode("utf-32-le")
    return np.frombuffer(joined, np.uint32), np.concatenate(([0], np.cumsum(lengths)))


def _fold_case(text: str) -> str:
    if text.isascii():
        return text.lower()
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())


def _strings(kept: Characters, lengths: npt.NDArray[np.int64]) -> pa.Array:
    """Return tokens of these lengths, in characters, as an Arrow array."""
    if kept.dtype == np.uint8:
        ends, data = np.cumsum(lengths), kept.tobytes()
    else:
        widths = 1 + (kept >= 0x80).astype(np.int64) + (kept >= 0x800) + (kept >= 0x10000)
        edges = np.concatenate(([0], np.cumsum(widths)))
        ends = edges[np.cumsum(lengths)]
        data = kept.tobytes().decode("utf-32-le").encode()
    offsets = np.concatenate(([0], ends)).astype(np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.string(), len(lengths), buffers)


@cache
def _ascii_folds() -> npt.NDArray[np.uint8]:
    table = np.arange(256, dtype=np.uint8)
    table[ord("A") : ord("Z") + 1] += 32
    return table


@cache
def _classes(tokenizer: str) -> npt.NDArray[np.uint8]:
    """Return the class of each code point."""
    table = np.zeros(0x110000, np.uint8)
    if tokenizer == "whitespace":
        table[:] = LETTER
        table[[code for code in range(ASSIGNED_END) if chr(code).isspace()]] = SEPARATOR
        return table
    category = unicodedata.category
    letters = [category(chr(code))[0] in "LMN" for code in range(ASSIGNED_END)]
    table[:ASSIGNED_END] = letters
    table[slice(*SELECTORS)] = LETTER
    for first, last in (*SINGLE_RANGES, SINGLE_PLANES):
        table[first : last + 1] *= SINGLE
    return table


@cache
def _class_bytes(tokenizer: str) -> bytes:
    return _classes(tokenizer).tobytes()
