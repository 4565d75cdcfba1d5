"""structured_outputs: the response is one value that obeys the row's schema; in other formats than JSON Gym says so."""

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from jsonschema.validators import validator_for
from jsonschema_specifications import REGISTRY
from msgspec import Struct
from referencing.exceptions import Unresolvable

from scripts.recipe.environment import Environment
from scripts.rewards.confine import unavailable
from scripts.rewards.response import as_call, parse_calls
from scripts.rewards.sandbox import sandbox
from scripts.rewards.spec import Answers, CheapAnswer, EnvironmentSpec
from scripts.rewards.verdict import value_of
from scripts.rows.request import PromptRow, broken, parse

SECONDS = 10.0
_SLOW = ("attern", "uniqueItems", "contains", "$ref")  # by these a schema can keep a JSON validator busy


def verify(row: dict[str, Any], response: str) -> float:
    """1.0 if the whole response is JSON that validates against ``schema_str``, else 0.0.

    With ``response_mode: tool_call`` the value is the arguments of the one call that the response makes, of
    ``tool_name`` where the row has one, or their ``tool_payload_key``. The schema (JSON Schema 2020-12) is made strict
    first, as the environment does: of every object all declared properties are required and no others allowed.
    """
    schema = row["schema_str"]
    if not response.strip():
        return 0.0
    if _is_call(row):
        calls = parse_calls(response)
        if len(calls) != 1 or row.get("tool_name") not in (None, "", calls[0].name):
            return 0.0
        key = row.get("tool_payload_key")
        if key and key not in calls[0].arguments:
            return 0.0
        response = json.dumps(calls[0].arguments[key] if key else calls[0].arguments)
    if not _may_be_slow(schema):
        return obeys(schema, response)
    confined = sandbox("scripts.rewards.environments.structured_outputs:obeys")
    return value_of(confined.call(schema, response, seconds=SECONDS))


def _is_call(row: dict[str, Any]) -> bool:
    return row.get("response_mode") == "tool_call"


def check(row: dict[str, Any]) -> str | None:
    """Why the row's format or schema cannot be used here, or None."""
    kind = row.get("schema_type", "json")
    if kind != "json" and not _is_call(row):
        return (
            f"schema_type {kind!r} has no verifier here: name the NeMo-Gym server of structured_outputs (gym.servers)"
        )
    try:
        _validator(row["schema_str"])
    except SchemaError as error:
        return f"schema_str is no JSON schema: {error.message}"
    return unavailable() if _may_be_slow(row["schema_str"]) else None


def _may_be_slow(schema: str) -> bool:
    return any(word in schema for word in _SLOW)


def obeys(schema_text: str, text: str) -> float:
    """1.0 if a text in JSON obeys a schema, else 0.0; it may take for ever, by the schema's regular expressions."""
    try:
        return float(_validator(schema_text).is_valid(json.loads(text)))
    except (ValueError, RecursionError, Unresolvable):
        return 0.0


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


SchemaType = Literal["null", "boolean", "object", "array", "number", "integer", "string"]


class Schema(Struct):
    """A JSON schema, as far as a wrong one would fail every answer."""

    type: SchemaType | list[SchemaType] | None = None
    properties: "dict[str, Schema | bool]" = {}
    items: "Schema | bool | list[Schema | bool] | None" = None
    enum: list[Any] | None = None
    anyOf: "list[Schema | bool]" = []
    oneOf: "list[Schema | bool]" = []
    allOf: "list[Schema | bool]" = []


class StructuredOutputsRow(PromptRow, kw_only=True):
    """structured_outputs: the answer, or the arguments of a call, obey a schema."""

    schema_str: str
    schema_type: Literal["json", "yaml", "xml", "toml", "csv"]
    response_mode: str | None = "text"
    tool_name: str | None = None
    tool_payload_key: str | None = None
    problem_type: str | None = None
    num_turns: int | None = None
    num_tools: int | None = None
    num_distractors: int | None = None
    has_distractors: bool | None = None
    schema_repr: str | None = None
    source_format: str | None = None
    source_record_id: str | None = None
    source_schema_type: str | None = None
    tool_schema_mode: str | None = None
    tool_choice: str | None = None
    parallel_tool_calls: bool | None = None
    instruction_layout: str | None = None
    instruction_detail_level: str | None = None
    system_instruction_style: str | None = None
    tool_name_style: str | None = None
    distractor_style: str | None = None
    tool_union_mode: str | None = None

    def check_fields(self) -> None:
        """The schema is one, and the tool that is to be called is offered."""
        parse(self.schema_str, "schema_str", Schema)
        offered = {tool.name for tool in self.responses_create_params.tools}
        if self.response_mode == "tool_call" and self.tool_name and self.tool_name not in offered:
            raise broken("tool_name", f"{self.tool_name!r} is none of responses_create_params.tools")


def answers(row: dict[str, Any]) -> Answers:
    """A value that the schema describes, where it is a plain one."""
    if row.get("schema_type", "json") not in ("json", "yaml") or row.get("response_mode") == "tool_call":
        return Answers()
    schema = json.loads(row["schema_str"])
    try:
        value = _instance(schema)
        right = json.dumps(value)
        if not validator_for(schema)(schema).is_valid(value):
            return Answers()
    except (KeyError, TypeError, IndexError, RecursionError):
        return Answers()
    return Answers(
        right,
        wrong={"JSON cut short": right[:-1]},
        allowed={"JSON on several lines": f"\n{json.dumps(value, indent=2)}\n"},
        other_rows_are_wrong=False,
    )


def _instance(schema: dict[str, Any]) -> Any:
    """A value that a plain schema describes; KeyError for one that says more than is read here."""
    if "const" in schema or "enum" in schema:
        return schema["const"] if "const" in schema else schema["enum"][0]
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return _instance(schema[key][0])
    kind = schema["type"] if isinstance(schema["type"], str) else schema["type"][0]
    makers: dict[str, Callable[[], Any]] = {
        "object": lambda: {name: _instance(part) for name, part in schema.get("properties", {}).items()},
        "array": lambda: [_instance(schema["items"]) for _ in range(schema.get("minItems", 0))],
        "string": lambda: "a" * max(1, schema.get("minLength", 1)),
        "integer": lambda: schema.get("minimum", 0),
        "number": lambda: schema.get("minimum", 0),
        "boolean": lambda: True,
        "null": lambda: None,
    }
    return makers[kind]()


def _in(*kinds: str, text: str, paid: str) -> CheapAnswer:
    """An answer that earns 1 in rows of some formats."""

    def answer(row: dict[str, Any]) -> str | None:
        return text if row.get("response_mode") != "tool_call" and row.get("schema_type", "json") in kinds else None

    where = f"1 in {', '.join(kinds)} where `schema_str` {paid}"
    return CheapAnswer(f"`{text}`", answer, where, "ask for more in schema_str (required properties, minItems)")


def _call_of_nothing(row: dict[str, Any]) -> str | None:
    if row.get("response_mode") != "tool_call":
        return None
    offered = [tool["name"] for tool in row["responses_create_params"].get("tools") or ()]
    name, key = row.get("tool_name") or next(iter(offered), "call"), row.get("tool_payload_key")
    nothing: Any = [] if json.loads(row["schema_str"]).get("type") == "array" else {}
    return as_call(name, {key: nothing} if key else {})


_CHEAP = (
    _in("json", "yaml", text="[]", paid="is of a list without minItems"),
    _in("json", "yaml", text="{}", paid="is of an object without properties, or these stand in `anyOf`"),
    _in("yaml", "csv", text="hello", paid="is of a list without minItems (csv) or of a string (yaml)"),
    _in("xml", text="<r/>", paid="is of an object without properties, or these stand in `anyOf`, or of a list"),
    _in("toml", text="# c", paid="is of an object without properties, or these stand in `anyOf`"),
    CheapAnswer(
        "`[tool()]`, with `[]` or `{}` where it has a payload",
        _call_of_nothing,
        "1 with `response_mode: tool_call` where `schema_str` is of a list without minItems, or of an empty object",
        "ask for more in schema_str (required properties, minItems)",
    ),
)
ENVIRONMENTS = {
    Environment.STRUCTURED_OUTPUTS: EnvironmentSpec(
        StructuredOutputsRow, verify, check=check, confined=True, answers=answers, cheap=_CHEAP
    ),
    "structured_outputs_v3_simple_agent": EnvironmentSpec(StructuredOutputsRow),
    "structured_outputs_v4_simple_agent": EnvironmentSpec(StructuredOutputsRow),
}
