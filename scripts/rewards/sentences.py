"""Sentences, words and the language of a text, by rules that need no trained model."""

import re

import langdetect

_INNER = "\0"  # a full stop that ends no sentence
_END = "\1"  # the end of a sentence
_STARTERS = r"(?:Mr|Mrs|Ms|Dr|Prof|Capt|Cpt|Lt|He|She|It|They|Their|Our|We|But|However|That|This|Wherever)"
_INNER_STOPS = (
    r"\b(?:Mr|St|Mrs|Ms|Dr)\.",
    r"\.(?=(?:com|net|org|io|gov|edu|me))",
    r"(?<=\d)\.(?=\d)",
    r"\bPh\.D\.",
    r"(?<=\s)[A-Za-z]\.(?= )",
    rf"(?:[A-Z]\.){{2,3}}(?! {_STARTERS})",
    r"[A-Za-z]\.[A-Za-z]\.(?:[A-Za-z]\.)?",
    rf"(?<= )(?:Inc|Ltd|Jr|Sr|Co)\.(?! {_STARTERS})",
)
_OPENING_QUOTE = re.compile(r'(?<![^\s(\[{<])"|(?<=^")"')
_TOKEN = re.compile(
    r"\.\.\.|--|``|''|\w+(?=n['’]t\b)|n['’]t\b|['’](?:s|re|ve|ll|d|m)\b|\w+(?:[-.,:/@]\w+)*|\S", re.IGNORECASE
)
langdetect.DetectorFactory.seed = 0


def split_sentences(text: str) -> list[str]:
    """Split a text after full stops, question and exclamation marks, except in abbreviations, initials and numbers.

    Two marks in a row have an empty piece between.
    """
    text = f" {text}  ".replace("\n", " ")
    text = _keep_inner_stops(re.sub(r"\.{2,}", lambda match: _INNER * len(match[0]) + _END, text))
    text = re.sub(r'([.!?])(["”])', lambda match: match[2] + match[1], text)
    text = re.sub(r"[.?!]", lambda match: match[0] + _END, text)
    pieces = [piece.strip().replace(_INNER, ".") for piece in text.split(_END)]
    return pieces if pieces[-1] else pieces[:-1]


def count_sentences(text: str) -> int:
    """Count the sentences of a text: each ends with a mark before white space, or with the text."""
    words = _keep_inner_stops(f" {text} ").split()
    ends = [word.rstrip("\"'”’)]*_").endswith((".", "?", "!")) for word in words]
    return sum(ends) + (bool(ends) and not ends[-1])


def _keep_inner_stops(text: str) -> str:
    for pattern in _INNER_STOPS:
        text = re.sub(pattern, lambda match: match[0].replace(".", _INNER), text)
    return text


def tokens(text: str) -> list[str]:
    """Split a text into words and marks, nearly as the Penn Treebank: don't is do and n't, a full stop is a token.

    A double quote becomes two single ones, leaning at an opening.
    """
    return _TOKEN.findall(_OPENING_QUOTE.sub("``", text).replace('"', "''"))


def language_of(text: str) -> str | None:
    """Return the ISO 639-1 code of a text's language (zh-cn, zh-tw for Chinese); None for a text without features."""
    try:
        return langdetect.detect(text)
    except langdetect.LangDetectException:
        return None


def languages() -> list[str]:
    """List the codes that `language_of` may return."""
    langdetect.detector_factory.init_factory()
    return langdetect.detector_factory._factory.get_lang_list()
