"""The stemmer of English text indexes: Porter's algorithm of 1980, with the two changes of its
author's own implementation (-bli, -logi).

Written here rather than taken from a package: stems are part of an index's bytes, so a release of a
package that stems one word differently would make rows unfindable. It runs once per distinct word
of a segment. Words that are not lower-case ASCII letters are returned unchanged.
"""

import re
from functools import lru_cache

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


def _suffix_pattern(suffixes: dict[str, str]) -> re.Pattern[str]:
    return re.compile(f"^(.+?)({'|'.join(sorted(suffixes, key=len, reverse=True))})$")


_SUFFIX_2, _SUFFIX_3 = _suffix_pattern(_STEP_2), _suffix_pattern(_STEP_3)
_SUFFIX_4 = re.compile(f"^(.+?)({'|'.join(_STEP_4)})$")


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
    word = _replaced(word, _SUFFIX_2, _STEP_2)
    word = _replaced(word, _SUFFIX_3, _STEP_3)
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
            return _restored(rest) if _HAS_VOWEL.match(rest) else word
    return word


def _restored(word: str) -> str:
    """Return a word from which -ed or -ing was cut as it is spelled without them."""
    if word.endswith(("at", "bl", "iz")):
        return word + "e"
    if _DOUBLE.search(word):
        return word[:-1]
    return word + "e" if _SHORT.match(word) else word


def _final_y(word: str) -> str:
    return word[:-1] + "i" if word[-1] == "y" and _HAS_VOWEL.match(word[:-1]) else word


def _replaced(word: str, pattern: re.Pattern[str], replacements: dict[str, str]) -> str:
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
