"""instruction_following: the response obeys verifiable instructions, named and parametrised as in IFEval and sequels.

IFEval: Zhou et al., "Instruction-Following Evaluation for Large Language Models", arXiv:2311.07911, table 1. Sequels:
Pyatkin et al., "Generalizing Verifiable Instruction Following", arXiv:2507.02833, named as in NeMo-Gym. A checker takes
the response and the instruction's arguments, and is linear in the response's length. Sentences, words and the language
of a text are found by rules that need no trained model.
"""

import json
import re
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from operator import eq, ne
from typing import Annotated, Any, Literal

import langdetect
from msgspec import Meta

from scripts.processes import OnceAProcess
from scripts.recipe.environment import Environment
from scripts.rewards.spec import EnvironmentSpec
from scripts.rewards.verdict import HARMLESS
from scripts.rows.request import PromptRow, Text, broken

_OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
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
    _languages()
    try:
        return langdetect.detect(text)
    except langdetect.LangDetectException:
        return None


def languages() -> list[str]:
    """List the codes that `language_of` may return."""
    return [*_languages()]


@OnceAProcess
def _languages() -> list[str]:
    """Read langdetect's profiles; a thread that asks meanwhile would be answered from those read so far."""
    langdetect.detector_factory.init_factory()
    return langdetect.detector_factory._factory.get_lang_list()


def _compare(count: int, relation: str, bound: int) -> bool:
    if relation not in ("at least", "less than"):
        raise ValueError(f"relation {relation!r} is neither 'at least' nor 'less than'")
    return count >= bound if relation == "at least" else count < bound


def _times(word: str, text: str) -> int:
    return len(re.findall(re.escape(word.strip()), text, re.IGNORECASE))


def _same(response: str, prompt_to_repeat: str) -> bool:
    return response.strip().lower() == prompt_to_repeat.strip().lower()


def _keyword_frequency(response: str, keyword: str, frequency: int, relation: str) -> bool:
    return _compare(_times(keyword, response), relation, frequency)


def _letter_frequency(response: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return _compare(response.lower().count(letter.strip().lower()), let_relation, let_frequency)


def _keyword_position(response: str, keyword: str, n: int, m: int) -> bool:
    sentences = split_sentences(response)
    words = tokens(sentences[n - 1]) if 0 < n <= len(sentences) else []
    return 0 < m <= len(words) and words[m - 1] == keyword.strip()


def _language(response: str, language: str) -> bool:
    if language not in languages():
        raise ValueError(f"language {language!r} is none of {', '.join(languages())}")
    return language_of(response) in (language, None)


def _paragraphs(response: str, mark: str) -> int | None:
    """Count the parts between marks that are not blank; None when a blank part stands between two parts."""
    parts = response.split(mark)
    if any(not part.strip() for part in parts[1:-1]):
        return None
    return sum(bool(part.strip()) for part in parts)


def _nth_paragraph_first_word(response: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    parts = response.split("\n\n")
    count = sum(bool(part.strip()) for part in parts)
    if not 0 < nth_paragraph <= count or count != num_paragraphs:
        return False
    words = parts[nth_paragraph - 1].split()
    return bool(words) and re.split(r"[.,?!'\"]", words[0].lstrip("'").lstrip('"'))[0].lower() == first_word.lower()


def _postscript(response: str, postscript_marker: str) -> bool:
    marker = postscript_marker.strip()
    pattern = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}.get(marker, re.escape(marker.lower()))
    return re.search(pattern, response.lower()) is not None


def _highlights(response: str, num_highlights: int) -> bool:
    marked = re.findall(r"\*[^\n*]*\*", response) + re.findall(r"\*\*[^\n*]*\*\*", response)
    return sum(bool(text.strip("*").strip()) for text in marked) >= num_highlights


def _json_format(response: str) -> bool:
    text = response.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def _title(response: str) -> bool:
    for line in response.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if 0 <= start < end - 2 and line[start : end + 2].lstrip("<").rstrip(">").strip():
            return True
    return False


def _bigrams(response: str) -> bool:
    words = response.split()
    pairs = zip(words[::2], words[1::2], strict=False)
    return all(first.startswith("<<") and second.endswith(">>") for first, second in pairs)


def _repeat_phrase(response: str, phrase: str, small_n: int) -> bool:
    """Check for `small_n` copies of a phrase, each with at most one changed word, the last with exactly one."""
    words = phrase.split()
    start, end = f"{words[0]} ", f" {words[-1]}"
    found = [match.split() for line in response.split("\n") for match in _between(start, end, line)]
    if len(found) != small_n or any(len(match) != len(words) for match in found):
        return False
    changed = [sum(map(ne, match, words)) for match in found]
    return max(changed) <= 1 and changed[-1] == 1


def _between(start: str, end: str, line: str) -> list[str]:
    found, place = [], 0
    while (first := line.find(start, place)) >= 0 and (last := line.find(end, first + len(start))) >= 0:
        place = last + len(end)
        found.append(line[first:place])
    return found


def _first_word(response: str, first_word: str) -> bool:
    return bool(response.strip()) and _same(response.split(maxsplit=1)[0], first_word)


def _last_word(response: str, last_word: str) -> bool:
    return bool(response.strip()) and _same(re.sub(r"[^\w\s]", "", response.rsplit(maxsplit=1)[-1]), last_word)


def _counting_composition(response: str, n_sent: int, n_words: int) -> bool:
    """Check for three paragraphs of `n_sent` sentences of `n_words` tokens."""
    parts = [part for part in response.split("***") if part.strip()]
    if _paragraphs(response, "***") != 3:
        return False
    sentences = [split_sentences(part.strip()) for part in parts]
    return all(len(part) == n_sent and all(len(tokens(sentence)) == n_words for sentence in part) for part in sentences)


INSTRUCTIONS: dict[str, Callable[..., bool]] = {
    "keywords:existence": lambda response, keywords: all(_times(keyword, response) for keyword in keywords),
    "keywords:frequency": _keyword_frequency,
    "keywords:forbidden_words": lambda response, forbidden_words: (
        not any(re.search(rf"\b{re.escape(word)}\b", response, re.IGNORECASE) for word in forbidden_words)
    ),
    "keywords:letter_frequency": _letter_frequency,
    "language:response_language": _language,
    "length_constraints:number_sentences": lambda response, num_sentences, relation: _compare(
        count_sentences(response), relation, num_sentences
    ),
    "length_constraints:number_paragraphs": lambda response, num_paragraphs: (
        _paragraphs(response, "***") == num_paragraphs
    ),
    "length_constraints:number_words": lambda response, num_words, relation: _compare(
        len(re.findall(r"\w+", response)), relation, num_words
    ),
    "length_constraints:nth_paragraph_first_word": _nth_paragraph_first_word,
    "detectable_content:number_placeholders": lambda response, num_placeholders: (
        sum("[" in part for line in response.split("\n") for part in line.split("]")[:-1]) >= num_placeholders
    ),
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": lambda response, num_bullets: (
        len(re.findall(r"^[^\S\n]*(?:-|\*(?!\*))", response, re.MULTILINE)) == num_bullets
    ),
    "detectable_format:constrained_response": lambda response: any(option in response for option in _OPTIONS),
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": lambda response, section_spliter, num_sections: (
        len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d+", response)) >= num_sections
    ),
    "detectable_format:json_format": _json_format,
    "detectable_format:title": _title,
    "combination:two_responses": lambda response: (
        _paragraphs(response, "******") == 2 == len({part.strip() for part in response.split("******")} - {""})
    ),
    "combination:repeat_prompt": lambda response, prompt_to_repeat: (
        response.strip().lower().startswith(prompt_to_repeat.strip().lower())
    ),
    "startend:end_checker": lambda response, end_phrase: (
        response.strip().strip('"').lower().endswith(end_phrase.strip().lower())
    ),
    "startend:quotation": lambda response: re.fullmatch('".*"', response.strip(), re.DOTALL) is not None,
    "change_case:capital_word_frequency": lambda response, capital_frequency, capital_relation: _compare(
        sum(token.isupper() for token in tokens(response)), capital_relation, capital_frequency
    ),
    "change_case:english_capital": lambda response: response.isupper() and _language(response, "en"),
    "change_case:english_lowercase": lambda response: response.islower() and _language(response, "en"),
    "punctuation:no_comma": lambda response: "," not in response,
    # The sequels'.
    "copy:repeat_phrase": _repeat_phrase,
    "copy:copy": _same,
    "copy:copying_simple": _same,
    "copy:copying_multiple": lambda response, prompt_to_repeat, N: (
        len(parts := response.split("******")) == N and all(_same(part, prompt_to_repeat) for part in parts)
    ),
    "new:copy_span_idx": lambda response, prompt_to_repeat, n_start, n_end: _same(
        response, prompt_to_repeat[n_start:n_end]
    ),
    "detectable_format:sentence_hyphens": lambda response: all(
        map(eq, response.split("-"), split_sentences(response.replace("-", " ")))
    ),
    "detectable_format:square_brackets": lambda response: all(
        word.startswith("[") and word.endswith("]") for word in response.split()
    ),
    "detectable_format:bigram_wrapping": _bigrams,
    "keywords:no_adjacent_consecutive": lambda response: all(
        ord(second) - ord(first) != 1 for first, second in pairwise(word[0].lower()[0] for word in response.split())
    ),
    "keywords:word_once": lambda response, keyword: _times(keyword, response) == 1,
    "keywords:word_count_different_numbers": _keyword_frequency,
    "keywords:exclude_word_harder": lambda response, keyword, instruction=None: f" {keyword.strip()} " not in response,
    "keywords:palindrome": lambda response: any(word == word[::-1] for word in response.split()),
    "keywords:keyword_specific_position": _keyword_position,
    "keywords:start_end": lambda response: len(words := tokens(response)) > 1 and words[0].lower() == words[-1].lower(),
    "paragraphs:paragraphs": lambda response: _paragraphs(response, "***") == 2,
    "paragraphs:paragraphs2": lambda response: _paragraphs(response, "\n\n") == 2,
    "first_word:first_word_sent": lambda response, first_word: all(
        _first_word(piece, first_word) for piece in split_sentences(response)
    ),
    "first_word:first_word_answer": _first_word,
    "last_word:last_word_sent": lambda response, last_word: all(
        _last_word(piece, last_word) for piece in split_sentences(response)
    ),
    "last_word:last_word_answer": _last_word,
    "punctuation:punctuation_dot": lambda response: "." not in response,
    "punctuation:punctuation_exclamation": lambda response: "!" not in response,
    "count:lowercase_counting": lambda response, N: len(re.findall(r"\b[a-z]+\b", response)) <= N,
    "count:counting_composition": _counting_composition,
    "count:count_unique": lambda response: max(Counter(tokens(response)).values(), default=0) <= 1,
    "count:count_increment_word": lambda response, keyword1, keyword2: (
        _times(keyword1, response) == 1 and _times(keyword2, response) == 2
    ),
    "letters:letter_counting": lambda response, N, relation: _compare(
        len(re.findall(r"[a-zA-Z]", response)), relation, N
    ),
    "letters:letter_counting2": _letter_frequency,
}


def obeys(name: str, response: str, arguments: dict[str, Any] | None) -> bool:
    """Check a response against the instruction `name`; null arguments are left out.

    KeyError for an unknown name; TypeError, ValueError or AttributeError for arguments that do not fit.
    """
    return INSTRUCTIONS[name](response, **{key: value for key, value in (arguments or {}).items() if value is not None})


class InstructionFollowingRow(PromptRow, kw_only=True):
    """instruction_following: instructions by name, each with arguments."""

    id: int
    instruction_id_list: Annotated[list[Text], Meta(min_length=1)]
    kwargs: list[dict[str, Any] | None]
    prompt: str
    grading_mode: Literal["binary", "fraction"] = "binary"

    def check_fields(self) -> None:
        """Refuse another number of arguments than of instructions."""
        given, asked = len(self.kwargs), len(self.instruction_id_list)
        if given != asked:
            raise broken("kwargs", f"has {given} entries for {asked} instructions")


def verify(row: dict[str, Any], response: str) -> float:
    """Return 1.0 if every instruction is obeyed (``grading_mode`` fraction: the share), else 0.0; empty is 0.0."""
    if not response.strip():
        return 0.0
    obeyed = [
        obeys(name, response, given) for name, given in zip(row["instruction_id_list"], row["kwargs"], strict=True)
    ]
    return sum(obeyed) / len(obeyed) if row.get("grading_mode") == "fraction" else float(all(obeyed))


def check(row: dict[str, Any]) -> str | None:
    """Say why the row's instructions cannot be verified, or None."""
    for name, given in zip(row["instruction_id_list"], row["kwargs"], strict=True):
        if name not in INSTRUCTIONS:
            return f"instruction {name!r} has no verifier"
        try:
            obeys(name, HARMLESS, given)
        except (TypeError, ValueError, AttributeError) as error:
            return f"instruction {name}: {str(error).rpartition('() ')[2]}"
    return None


def tags(row: dict[str, Any]) -> list[str]:
    """Return the instructions' names and number."""
    names = row["instruction_id_list"]
    return [f"{len(names)} instruction{'s' if len(names) > 1 else ''}", *dict.fromkeys(names)]


SPEC = EnvironmentSpec(InstructionFollowingRow, verify, check=check, tags=tags)
ENVIRONMENTS = {Environment.INSTRUCTION_FOLLOWING: SPEC}
