"""structured_outputs_json: the response is one JSON value that obeys the row's schema."""

import json
from functools import lru_cache
from typing import Any

from jsonschema.exceptions import SchemaError, ValidationError
from jsonschema.validators import validator_for


def verify(row: dict[str, Any], response: str) -> float:
    """1.0 if the whole response parses as JSON and validates against ``schema_str``, else 0.0.

    The schema is made strict first, as the environment does: of every object all declared properties are
    required and no others allowed.
    """
    validator = _validator(row["schema_str"])
    try:
        validator.validate(json.loads(response))
    except (ValueError, RecursionError, ValidationError):
        return 0.0
    return 1.0


@lru_cache(maxsize=4096)
def _validator(schema_text: str) -> Any:
    schema = _strict(json.loads(schema_text))
    validator = validator_for(schema)
    validator.check_schema(schema)
    return validator(schema)


def _strict(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {key: _strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict):
        strict |= {"required": list(schema["properties"]), "additionalProperties": False}
    return strict


def check(row: dict[str, Any]) -> str | None:
    """Why the row's schema cannot be used, or None."""
    if row["schema_type"] != "json":
        return f"schema_type {row['schema_type']!r} is not supported; json is"
    try:
        _validator(row["schema_str"])
    except SchemaError as error:
        return f"schema_str is no JSON schema: {error.message}"
    except ValueError as error:
        return f"schema_str is not JSON: {error}"
    return None
