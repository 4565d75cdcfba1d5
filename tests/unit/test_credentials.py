"""A password, token or key in a recipe, site or config is refused with its place, and is shown nowhere."""

import re

import pytest
import yaml

from scripts.credentials import credential_in, find_credentials, without_credentials
from scripts.errors import UserError
from scripts.recipe.load import load_config, load_recipe, load_site, parse_config
from tests.cases import tables_of
from tests.conftest import ROOT, SHORT, refusal

CANARY = "CanaryOf5tagecoach42"
FORMS = {name: form.format(canary=CANARY) for name, form in tables_of("credentials")["forms"].items()}
NAMES = ("openai_key", "azure_openai_key", "pass", "smtp_pass", "passphrase", "pwd", "db_pwd", "auth", "http_auth")
RIGHT, PLACES = (tables_of("credentials")[name] for name in ("right", "places"))


def put(values: dict, place: str, value: str) -> dict:
    """The values with another one at a place."""
    *path, last = place.split(".")
    inner = values
    for key in path:
        inner = inner.setdefault(key, {}) if isinstance(inner.get(key, {}), dict) else inner
    inner[last] = value
    return values


@pytest.fixture
def refused(tmp_path):
    """What is said of a file with a text."""

    def refuse(load, text: str, *arguments) -> str:
        path = tmp_path / "settings.yaml"
        path.write_text(text)
        return refusal(load, path, *arguments).replace(str(path), "FILE")

    return refuse


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize(
    ("load", "file", "places"),
    [
        (load_recipe, SHORT, PLACES["recipe"]),
        (load_site, ROOT / "config/sites/laptop.yaml", PLACES["site"]),
        (load_config, ROOT / "config/config.yaml", PLACES["config"]),
    ],
    ids=["recipe", "site", "config"],
)
def test_whatever_the_place_it_is_named_and_the_value_not_shown(form, load, file, places, refused):
    more = [{}] if load is load_config else [load_recipe(SHORT)] if load is load_site else []
    for place in places:  # in the whole file for one form; the others stand there alone, which is read faster
        around = yaml.safe_load(file.read_text()) if form == FORMS["the hub"] else {}
        text = yaml.safe_dump(put(around, place, form))
        message = refused(load, text, *more)
        assert re.fullmatch(rf"FILE:\d+: {re.escape(place)}: holds .*, not shown here; .*", message), message
        assert CANARY not in message and form not in message


def test_a_variable_that_is_called_a_token_or_key_is_refused_whatever_its_value(refused):
    for name in (
        "HF_TOKEN",
        "WANDB_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "DB_PASSWORD",
        "MY_TOKEN2",
        *NAMES,
        *map(str.upper, NAMES),
    ):
        message = refused(load_recipe, yaml.safe_dump({"stages": {"sft": {"environment": {name: "plain"}}}}))
        assert message.startswith(f"FILE:4: stages.sft.environment.{name}: holds a credential, by its name")
        assert "plain" not in message


def test_a_key_an_unknown_word_and_broken_yaml_are_told_of_without_it(refused):
    token = f"hf_{CANARY}"
    texts = [f"{token}: 1\n", f"stages: {{{token}: {{}}}}\n", f"name: !{token} x\n", f"a: *{token}\n"]
    texts += [f"{token}: 1\n{token}: 2\n", f"name: [{token}\n", f'name: "{token}\\q"\n', f"? {{a: {token}}}\n: 1\n"]
    texts.append(f"a: &{token} [*{token}]\n")
    for text in texts:
        assert CANARY not in refused(load_recipe, text)


def test_what_is_said_on_the_command_line_is_refused_alike():
    for act in (
        lambda form: parse_config({"results": form}),
        lambda form: load_config(ROOT / "config/config.yaml", {"model": form}),
    ):
        for form in FORMS.values():
            said = refusal(act, form)
            assert CANARY not in said and form not in said


def test_what_only_looks_like_it_passes():
    words = ("prompt_key", "chosen_key", "sort_key", "pass_rate", "compass", "pass_at_k", "author", "authority")
    assert not list(find_credentials(dict.fromkeys(words, "plain")))
    for value in RIGHT:
        assert credential_in(value) is None and without_credentials(value) == value
        parse_config({"recipe": value, "site": "s"})


def test_a_message_shows_what_a_terminal_would_obey():
    obeyed = "\x1b[2J", "\x1b]0;title\x07", "\x9b31m", "\r", "\x08", "\u202e", "\u2028", "\ud800"
    for text in obeyed:
        message = str(UserError(f"stages.{text}: unknown\n\tsecond line"))
        assert text not in message and message.isascii() and message.endswith(": unknown\n\tsecond line")
    assert str(UserError("Größe ≥ 1, 模型 🚂")) == "Größe ≥ 1, 模型 🚂"


def test_a_message_for_people_never_holds_it():
    for form in FORMS.values():
        if "api_key=" in form and "://" not in form:
            continue  # by its name alone, in settings
        assert CANARY not in str(UserError(f"{form}: no such file"))
