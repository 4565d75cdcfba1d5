"""The process beside Snakemake that delivers alerts: by the real Apprise to a real HTTP server, and to a real command."""

import json
import os
import subprocess
import sys

import pytest

from scripts.controller.alerts import DEATH, LIMIT, refuse_secret
from scripts.recipe.load import parse_config
from scripts.records import read_lines
from tests.conftest import ROOT, refusal
from tests.receiver import serving

CALL = "1700000000"
CONFIG = {"recipe": "r.yaml", "site": "s.yaml"}


def deliver(folder, alerts: dict, *events: tuple[str, str], **environment: str) -> str:
    """What the process says on its errors; the event CALL is the end of a call."""
    command = [sys.executable, "-m", "scripts.controller.alerts", "--alerts", json.dumps(alerts)]
    given = "".join(json.dumps({"event": event, "text": text}) + "\n" for event, text in events)
    done = subprocess.run(
        [*command, "--results", str(folder), "--call", CALL],
        input=given,
        env=os.environ | environment,
        cwd=ROOT,
        text=True,
        stderr=subprocess.PIPE,
        check=True,
    )
    return done.stderr


@pytest.mark.slow
def test_apprise_and_a_command_are_told_each_event_once_over_several_calls(tmp_path):
    pytest.importorskip("apprise", reason="envs/apprise.txt is not installed")
    told = tmp_path / "told.txt"
    with serving() as server:
        alerts = {"urls_from": ["ALERT_URL"], "command": ["tee", "-a", str(told)]}
        for _ in range(2):
            said = deliver(tmp_path, alerts, ("a", "first"), ("b", "second"), (CALL, "end"), ALERT_URL=server.url)
            assert said == ""
        assert [text for _, text in server.taken] == ["first", "second", "end"]
        assert {title.partition(": ")[2] for title, _ in server.taken} == {str(tmp_path)}
    assert [line for line in told.read_text().splitlines() if "Stagecoach" not in line] == ["first", "second", "end"]
    assert [alert["told"] for alert in read_lines(tmp_path / "alerts.jsonl", dict)] == [True] * 3


@pytest.mark.slow
def test_an_input_that_ends_without_the_calls_end_is_its_death(tmp_path):
    told = tmp_path / "told.txt"
    for _ in range(2):
        deliver(tmp_path, {"command": ["tee", "-a", str(told)]}, ("a", "first"))
    assert [line for line in told.read_text().splitlines() if "Stagecoach" not in line] == ["first", DEATH]


@pytest.mark.slow
def test_what_no_receiver_took_is_said_in_a_line_and_comes_with_the_next(tmp_path):
    told = tmp_path / "told.txt"
    said = deliver(tmp_path, {"command": ["false"]}, ("a", "first"), ("b", "second"), (CALL, "end"))
    assert said == f"alerts: false took no alert within {LIMIT:g} s\n" * 3
    deliver(tmp_path, {"command": ["tee", "-a", str(told)]}, ("a", "first"), ("c", "third"), ("d", "fourth"))
    first, *rest = told.read_text().splitlines()
    assert first.endswith(str(tmp_path))
    assert rest == ["first", "second", "end", "third", first, "fourth"]


@pytest.mark.parametrize(
    "url",
    [
        "slack://T0000000A/B0000000B/c0123456789abcdefghijklm",
        "https://hooks.slack.com/services/T0000000A/B0000000B/c0123456789abcdefghijklm",
        "tgram://123456789:abcdefg_hijklmnop/12315544/",
        "json://host/?+X-Header=c0123456789abcdefghijklm",
    ],
)
def test_a_url_with_a_token_is_refused_without_an_echo(url):
    pytest.importorskip("apprise", reason="envs/apprise.txt is not installed")
    said = refusal(refuse_secret, url)
    assert "with a token or password" in said and "alerts.urls_from" in said
    assert "c0123456789abcdefghijklm" not in said and "abcdefg_hijklmnop" not in said


def test_a_url_without_a_secret_is_taken_and_one_of_nobody_refused():
    pytest.importorskip("apprise", reason="envs/apprise.txt is not installed")
    for url in ("ntfy://ntfy.sh/topic", "json://localhost:8000/x", "mailto://mail.example.org?from=a@b.org&to=x@y.org"):
        refuse_secret(url)
    assert "slak:...: unknown to Apprise" in refusal(refuse_secret, "slak://T/B/C")


@pytest.mark.parametrize(
    ("alerts", "says"),
    [
        ({"urls": ["json://me:c4n4ry-pass@host/x"]}, "holds a password in an address"),
        ({"command": ["curl", "-H", "Authorization: Bearer c4n4ryc4n4ry"]}, "holds a bearer token"),
        ({"urls": ["json://host/hooks/c4n4ry0123456789abcdefgh"]}, "alerts.urls.0: holds a word that may be a token"),
        ({"urls": ["ntfy://c4n4ry0123456789abcdefgh@ntfy.sh/t"]}, "alerts.urls.0: holds a word that may be a token"),
        ({"urls": ["json://host/c4c4c4c4-1234-1234-1234-0c4c4c4c4c45"]}, "holds a word that may be a token"),
        ({"urls": ["json://host/?x=C4n4RYuiopASDFGHjkl"]}, "holds a word that may be a token"),
        ({"urls": ["json://host/x#c4n4ry0123456789abcdefgh"]}, "holds a word that may be a token"),
        ({"urls": ["form://host/?:note=c4n4ry"]}, "sets a header or a field of the message"),
        ({"urls": ["json://host/?method=post&%3Anote=c4n4ry"]}, "sets a header or a field of the message"),
        ({"urls": ["json://host/?+X-Note=c4n4ry"]}, "sets a header or a field of the message"),
        ({"urls_from": ["slack://c4n4ry/B/C"]}, "alerts.urls_from"),
        ({"url": "ntfy://ntfy.sh/topic"}, "did you mean urls?"),
    ],
)
def test_the_config_refuses_secrets_and_slips(alerts, says):
    said = refusal(parse_config, CONFIG | {"alerts": alerts})
    assert says in said
    assert "c4n4ry" not in said.lower() or "urls_from" in alerts


@pytest.mark.parametrize(
    "url",
    [
        "ntfy://ntfy.sh/my-training-2026-runs",
        "ntfys://host/TeamAlertsOfTheCluster",
        "json://training-receiver.example.org/api/v2/alerts?format=text",
        "mailto://mail.example.org?from=stagecoach@example.org&to=somebody@example.org",
        "syslog://localhost",
    ],
)
def test_the_config_has_addresses_whose_words_are_names(url):
    assert parse_config(CONFIG | {"alerts": {"urls": [url]}}).alerts.urls == [url]


@pytest.mark.parametrize(
    "remote",
    [
        "s3://bucket/prefix?AWSAccessKeyId=c4n4ry",
        "az://container/prefix?sas=c4n4ry",
        "s3://bucket/prefix#c4n4ry",
        "s3://c4n4ry0123456789abcdefgh@bucket/prefix",
        "simplecache::s3://bucket/prefix?client=c4n4ry",
    ],
)
def test_the_address_of_a_store_has_no_options_and_no_token(remote):
    said = refusal(parse_config, CONFIG | {"store": {"remote": remote}})
    assert said.startswith("config/config.yaml: store.remote: h") and "environment (docs/remote.md)" in said
    assert "c4n4ry" not in said


@pytest.mark.parametrize(
    "remote",
    ["s3://runs-2026-11/llm-v2", "sftp://me@host:2222/srv/store", "hf://datasets/org/name@main/x", "/mnt/store"],
)
def test_the_address_of_a_store_names_its_place(remote):
    assert parse_config(CONFIG | {"store": {"remote": remote}}).store.remote == remote
