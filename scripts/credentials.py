"""Find passwords, tokens and keys in text and settings, by form or by name."""

import re
from collections.abc import Iterator
from typing import Any

_FORMS = {
    "a password in an address": r"(?:(?<=://)[^\s/@:]*:(?!\d{1,5}/)[^\s@]+|(?:(?<=http://)|(?<=https://))[^\s/@?#]+)(?=@)",
    "a key in an address": r"(?i:(?<=[?&;#])(?:[\w-]*(?:api[_-]?key|token|secret|passw(?:or)?d|signature|credential)|"
    r"key|sig|auth|pwd)=)[^\s&#]+",
    "a key of Azure": r"(?i:\b(?:account|shared_?access)_?(?:key|signature)=)[^\s;]+",
    "a token of the Hugging Face hub": r"\b(?:hf_(?:oauth_|jwt_)?|api_org_)[A-Za-z0-9]{16,}",
    "a key of OpenAI, Anthropic or their like": r"\b(?:sk|nvapi|gsk|xai)-[A-Za-z0-9_-]{16,}",
    "a token of a Git host": r"\b(?:gh[oprsu]_|github_pat_|glpat-)[A-Za-z0-9_-]{16,}",
    "a key of AWS": r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "a key of Google": r"\bAIza[A-Za-z0-9_-]{30,}",
    "a key of Weights & Biases": r"\bwandb_v1_[A-Za-z0-9_]{16,}",
    "a token of Slack": r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}",
    "a signed token": r"\beyJ[A-Za-z0-9_-]{5,}\.[A-Za-z0-9_-]{5,}\.[A-Za-z0-9_-]*",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "a bearer token": r"\b(?i:bearer|basic)\s+(?=\S*\d)[A-Za-z0-9._~+/=-]{12,}",
}
_ANY = re.compile("|".join(_FORMS.values()))
_NAME = re.compile(
    r"(?:^|_)(?:(?i:api_?key|secret(?:_?key)?|(?:access|account|private|service|shared|signing|storage)_?key"
    r"|(?:anthropic|aws|azure|cohere|deepseek|gemini|github|google|groq|hf|mistral|ngc|nvidia|openai|openrouter|wandb|xai)_?key"
    r"|pass(?:w(?:or)?d|phrase)?|pwd|auth|(?:access|api|auth|bearer|hf)_?token)|TOKEN)\d*$"
)
_SETTING = re.compile(r"[+~]{0,2}([\w.@/-]+)\s*=\s*(.*)", re.DOTALL)
_NO_VALUE = re.compile(r"(?i:|empty|none|null|true|false|dummy\w*|[\"']{2}|(?<!\w)\$\{?[a-z_].*)", re.DOTALL)


def credential_in(text: str) -> str | None:
    """Return the kind of a text's credential, or None."""
    return next((kind for kind, form in _FORMS.items() if re.search(form, text)), None)


def without_credentials(text: str) -> str:
    """Return the text with stars in place of credentials."""
    return _ANY.sub("***", text)


def find_credentials(value: Any, *location: str) -> Iterator[tuple[list[str], str]]:
    """Yield the location and kind of each credential in settings, keys included.

    A variable or setting named token, key or password counts whatever the value's form.
    """
    if isinstance(value, dict):
        for key, part in value.items():
            if kind := credential_in(str(key)):
                yield [*location, str(key)], kind
            else:
                yield from find_credentials(part, *location, str(key))
    elif isinstance(value, list):
        for place, part in enumerate(value):
            yield from find_credentials(part, *location, str(place))
    elif value is not None:
        setting = _SETTING.fullmatch(str(value))
        name, text = setting.groups() if setting else (location[-1] if location else "", str(value))
        if kind := credential_in(str(value)):
            yield [*location], kind
        elif _NAME.search(re.split(r"[./]", name)[-1]) and not _NO_VALUE.fullmatch(text):
            yield [*location], "a credential, by its name"
