"""structured_outputs: the response is one value, in the format that the row names, that obeys the row's schema."""

import csv
import io
import json
import tomllib
from collections.abc import Callable
from functools import lru_cache
from typing import Any
from xml.parsers.expat import ExpatError

import xmltodict
import yaml
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from jsonschema_specifications import REGISTRY
from referencing.exceptions import Unresolvable

from scripts.rewards.response import parse_calls
from scripts.rewards.sandbox import sandbox

SECONDS = 10.0
Schema = dict[str, Any]
_SLOW = ("attern", "uniqueItems", "contains", "$ref")  # by these a schema can keep a JSON validator busy


def verify(row: dict[str, Any], response: str) -> float:
    """1.0 if the whole response parses as ``schema_type`` and validates against ``schema_str``, else 0.0.

    ``schema_type`` is json, yaml, xml, toml or csv; the texts of XML and CSV are taken for the types that the schema
    has there. With ``response_mode: tool_call`` the value is the arguments of the one call that the response makes, of
    ``tool_name`` where the row has one, or their ``tool_payload_key``. The schema (JSON Schema 2020-12) is made strict
    first, as the environment does: of every object all declared properties are required and no others allowed.
    """
    kind, schema = row.get("schema_type", "json"), row["schema_str"]
    if not response.strip():
        return 0.0
    if row.get("response_mode") == "tool_call":
        calls = parse_calls(response)
        if len(calls) != 1 or row.get("tool_name") not in (None, "", calls[0].name):
            return 0.0
        key = row.get("tool_payload_key")
        if key and key not in calls[0].arguments:
            return 0.0
        kind, response = "json", json.dumps(calls[0].arguments[key] if key else calls[0].arguments)
    if kind == "json" and not any(word in schema for word in _SLOW):
        return judge(kind, schema, response)
    confined = sandbox("scripts.rewards.structured_outputs:judge")
    return confined.call(kind, schema, response, seconds=SECONDS).value or 0.0


def check(row: dict[str, Any]) -> str | None:
    """Why the row's schema cannot be used, or None."""
    kind = row.get("schema_type", "json")
    if kind not in _PARSERS:
        return f"schema_type {kind!r} is not supported; {', '.join(_PARSERS)} are"
    try:
        _validator(row["schema_str"])
    except SchemaError as error:
        return f"schema_str is no JSON schema: {error.message}"
    except ValueError as error:
        return f"schema_str is not JSON: {error}"
    return None


def judge(kind: str, schema_text: str, text: str) -> float:
    """1.0 if a text in a format obeys a schema, else 0.0.

    It may take for ever: by a schema's regular expressions, and by formats in which a short text is a huge value.
    """
    try:
        value = _PARSERS[kind](text)
    except (ValueError, RecursionError, yaml.YAMLError, ExpatError, csv.Error):
        return 0.0
    if kind in ("xml", "csv"):
        value = (_typed if kind == "xml" else _typed_rows)(value, json.loads(schema_text))
    return _obeys(value, schema_text)


def _obeys(value: Any, schema_text: str) -> float:
    try:
        return float(_validator(schema_text).is_valid(value))
    except (RecursionError, Unresolvable):
        return 0.0


_PARSERS: dict[str, Callable[[str], Any]] = {
    "json": json.loads,
    "yaml": yaml.safe_load,
    "xml": xmltodict.parse,
    "toml": tomllib.loads,
    "csv": lambda text: list(csv.DictReader(io.StringIO(text))),
}


@lru_cache(maxsize=4096)
def _validator(schema_text: str) -> Any:
    schema = _strict(json.loads(schema_text))
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema, registry=REGISTRY)


def _strict(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    strict = {key: _strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict):
        strict |= {"required": list(schema["properties"]), "additionalProperties": False}
    return strict


def _typed(value: Any, schema: Any) -> Any:
    """A value of XML, where all is text, with the schema's types; what cannot be converted stays text.

    A list is repeated elements within one, ``<tags><tag>a</tag><tag>b</tag></tags>``; an empty element is an empty
    string where the schema has one.
    """
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind == "object" and isinstance(value, dict):
        properties = schema.get("properties", {})
        return {key: _typed(part, properties.get(key)) for key, part in value.items()}
    if kind == "array":
        if isinstance(value, dict) and len(value) == 1:
            value = next(iter(value.values()))
        items = value if isinstance(value, list) else [] if value is None else [value]
        return [_typed(item, schema.get("items", {})) for item in items]
    if kind == "string" and value is None:
        return ""
    return _scalar(value, kind) if isinstance(value, str) and isinstance(kind, str) else value


def _typed_rows(rows: list[dict[str, str | None]], schema: Schema) -> list[dict[str, Any]]:
    properties = schema.get("items", schema).get("properties", {})
    kinds = {key: part.get("type", "string") for key, part in properties.items()}
    return [{key: _cell(value, kinds.get(key, "string")) for key, value in row.items()} for row in rows]


def _cell(value: str | None, kinds: str | list[str]) -> Any:
    """A cell of CSV as the first of the kinds that fits; an empty one is null where that is allowed."""
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not value:
        return None if "null" in kinds else value
    for kind in kinds:
        if kind == "string" or not isinstance(typed := _scalar(value, kind), str):
            return value if kind == "string" else typed
    return value


def _scalar(text: str, kind: str) -> Any:
    try:
        if kind == "integer":
            return int(text)
        if kind == "number":
            return float(text)
    except ValueError:
        return text
    if kind == "boolean":
        return {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)
    return text
