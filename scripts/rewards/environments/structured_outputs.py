"""structured_outputs: the response is JSON that obeys the row's schema; Gym verifies other formats and calls."""

import json
from functools import lru_cache
from typing import Any, Literal

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from jsonschema_specifications import REGISTRY
from msgspec import Struct, defstruct
from referencing.exceptions import Unresolvable

from scripts.recipe.environment import Environment
from scripts.rewards.confine import unavailable
from scripts.rewards.sandbox import sandbox
from scripts.rewards.spec import EnvironmentSpec
from scripts.rewards.verdict import value_of
from scripts.rows.request import PromptRow, broken, parse

SECONDS = 10.0
_SLOW = ("attern", "uniqueItems", "contains", "$ref")  # by these a schema can keep a JSON validator busy


def verify(row: dict[str, Any], response: str) -> float:
    """Return 1.0 if the whole response is JSON that validates against ``schema_str``, else 0.0.

    The schema (JSON Schema 2020-12) is made strict first: every declared property of an object is required, and no
    further property allowed.
    """
    schema = row["schema_str"]
    if not response.strip():
        return 0.0
    if not _may_be_slow(schema):
        return obeys(schema, response)
    confined = sandbox("scripts.rewards.environments.structured_outputs:obeys")
    return value_of(confined.call(schema, response, seconds=SECONDS))


def check(row: dict[str, Any]) -> str | None:
    """Say why the row's format or schema cannot be used here, or None."""
    for field, known in (("schema_type", "json"), ("response_mode", "text")):
        if row.get(field) not in (None, known):
            return (
                f"{field} {row[field]!r} has no verifier here: name NeMo-Gym's server structured_outputs (gym.servers)"
            )
    try:
        _validator(row["schema_str"])
    except SchemaError as error:
        return f"schema_str is no JSON schema: {error.message}"
    return unavailable() if _may_be_slow(row["schema_str"]) else None


def _may_be_slow(schema: str) -> bool:
    return any(word in schema for word in _SLOW)


def obeys(schema_text: str, text: str) -> float:
    """Return 1.0 if a text in JSON obeys a schema, else 0.0; the schema's regular expressions may never return."""
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
    """A JSON schema, as far as a mistake would fail every answer."""

    type: SchemaType | list[SchemaType] | None = None
    properties: "dict[str, Schema | bool]" = {}
    items: "Schema | bool | list[Schema | bool] | None" = None
    enum: list[Any] | None = None
    anyOf: "list[Schema | bool]" = []
    oneOf: "list[Schema | bool]" = []
    allOf: "list[Schema | bool]" = []


# Fields without effect on the reward; Gym refuses other types.
_TEXTS = """tool_name tool_payload_key problem_type schema_repr source_format source_record_id source_schema_type
    tool_schema_mode tool_choice instruction_layout instruction_detail_level system_instruction_style tool_name_style
    distractor_style tool_union_mode"""
_NOTES = dict.fromkeys(_TEXTS.split(), str) | dict.fromkeys(["num_turns", "num_tools", "num_distractors"], int)
_NOTES |= dict.fromkeys(["has_distractors", "parallel_tool_calls"], bool)
_FIELDS = [(name, kind | None, None) for name, kind in _NOTES.items()]


class StructuredOutputsRow(defstruct("_Noted", _FIELDS, bases=(PromptRow,), kw_only=True), kw_only=True):
    """structured_outputs: the answer, or the arguments of a call, obey a schema."""

    schema_str: str
    schema_type: Literal["json", "yaml", "xml", "toml", "csv"]
    response_mode: str | None = "text"

    def check_fields(self) -> None:
        """Refuse a text that is no schema, and a tool that is not offered."""
        parse(self.schema_str, "schema_str", Schema)
        offered = {tool.name for tool in self.responses_create_params.tools}
        if self.response_mode == "tool_call" and self.tool_name and self.tool_name not in offered:
            raise broken("tool_name", f"{self.tool_name!r} is none of responses_create_params.tools")


ENVIRONMENTS = {Environment.STRUCTURED_OUTPUTS: EnvironmentSpec(StructuredOutputsRow, verify, check=check, waits=True)}
