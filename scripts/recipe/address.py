"""Addresses in settings: whether one may be written into a file that records and logs repeat.

A password in front of the host, and values that are keys by their form or name, are found in all settings
(scripts.credentials). Here stands what is known of addresses alone.
"""

import re
from urllib.parse import unquote, urlsplit

from scripts.recipe.strict import invalid

HEADERS = ("+", ":", "-")
"""How Apprise's queries mark a header, a field of the payload, or a parameter of the request."""
LEAST = 16
"""Characters of a word that may be a token."""
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
_BETWEEN_WORDS = re.compile(r"[-_.~%:,;@+&=/\s]+")
_CAMEL_CASE = re.compile(r"[A-Z]*[a-z]+([A-Z][a-z]+)*[A-Z]*\d*")
_CHANGES = re.compile(r"(?<=[A-Za-z])(?=\d)|(?<=\d)(?=[A-Za-z])")


def alert_address(url: str) -> str:
    """Return an address for alerts; pydantic's error for one with a word that may be a secret."""
    parts = urlsplit(url)
    texts = [parts.netloc, parts.path, parts.fragment]
    for option in parts.query.split("&"):
        name, _, value = option.partition("=")
        if unquote(name).startswith(HEADERS):
            raise invalid("sets a header or a field of the message, which may be a secret" + REMEDY)
        texts.append(value)
    if any(looks_like_a_token(unquote(text)) for text in texts):
        raise invalid("holds a word that may be a token" + REMEDY)
    return url


def store_address(url: str) -> str:
    """Return the address of a store; pydantic's error for one with options, or with a token in front of its host."""
    if "://" not in url:
        return url
    parts = urlsplit(url.rpartition("::")[2])
    if parts.query or parts.fragment:
        raise invalid(
            "has options behind ? or #; credentials and endpoints are set in the environment (docs/remote.md)"
        )
    user, at, _ = parts.netloc.rpartition("@")
    if at and looks_like_a_token(user):
        raise invalid("holds a word that may be a token; credentials are set in the environment (docs/remote.md)")
    return url


REMEDY = ", not shown here; put the address into a variable of the environment and the variable's name into urls_from"


def looks_like_a_token(text: str) -> bool:
    """Whether a text holds a word of random signs: a UUID, or a long one that mixes digits or cases."""
    if _UUID.search(text):
        return True
    return any(_is_random(word) for word in _BETWEEN_WORDS.split(text))


def _is_random(word: str) -> bool:
    """Whether a word is long, and changes between letters and digits, or between cases, as no name does."""
    if len(word) < LEAST:
        return False
    mixes_digits = len(_CHANGES.findall(word)) > 1
    mixes_cases = word.lower() != word and word.upper() != word and not _CAMEL_CASE.fullmatch(word)
    return mixes_digits or mixes_cases
