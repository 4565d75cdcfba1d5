"""The contract of every row of prompts: the environment's name, and the request for NeMo-Gym.

A row is converted to a Struct: unknown fields are ignored, types are strict, and ``__post_init__`` holds further rules,
with a ValueError that names the field. The rules of a request are those of Gym's servers, which answer other requests
with HTTP 422 and fail the rollout.
"""

import json
import re
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

T = TypeVar("T")
Text = Annotated[str, Meta(min_length=1)]
Positive = Annotated[int, Meta(ge=1)]
_WITH_PATH = re.compile(r"(.+) - at `(\$[^`]*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.+)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(.+)`")


def broken(field: str, says: str) -> ValueError:
    """Return the ValueError of a rule: the field's path in the object, and the problem."""
    return ValueError(f".{field}: {says}")


def problem_of(row: Any, contract: type) -> str | None:
    """Return the first breach of a contract, with the path in the row, or None."""
    try:
        msgspec.convert(row, contract)
    except msgspec.ValidationError as error:
        return _with_path(error)
    return None


def _with_path(error: msgspec.ValidationError) -> str:
    found = _WITH_PATH.fullmatch(str(error))
    says, path = found.groups() if found else (str(error), "$")
    if says.startswith("."):
        return path + says
    for pattern, short in ((_MISSING, "is missing"), (_UNKNOWN, "is not a field that Gym knows here")):
        if match := pattern.fullmatch(says):
            return f"{path}.{match[1]}: {short}"
    return f"{path}: {says[0].lower()}{says[1:].replace('`', '')}"


def parse(text: str, field: str, kind: type[T] | Any = Any) -> T:
    """Parse a field of JSON text as `kind`; NaN passes, as in Python's reader."""
    try:
        return msgspec.convert(json.loads(text), kind)
    except msgspec.ValidationError as error:
        raise broken(field, f"in its JSON, {_with_path(error)}") from None
    except (ValueError, RecursionError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else error
        raise broken(field, f"is not JSON ({what})") from None


class AgentRef(Struct):
    """The agent of Gym for the row, and so the environment that rewards the response."""

    type: Literal["responses_api_agents"]
    name: Text


class InputText(Struct, tag="input_text"):
    """A text in a message."""

    text: str


class InputImage(Struct, tag="input_image"):
    """A picture in a message, as an address or a data URI."""

    image_url: Text
    detail: Literal["low", "high", "auto"]
    file_id: str | None = None


class OutputText(Struct, tag="output_text"):
    """A text by the assistant, without a hosted model's additions."""

    text: str
    annotations: Annotated[list[Any], Meta(max_length=0)]
    logprobs: Annotated[list[Any], Meta(max_length=0)] | None = None


class Refusal(Struct, tag="refusal"):
    """A refusal by the assistant."""

    refusal: str


class Summary(Struct):
    """A part of a thought."""

    type: Literal["summary_text"]
    text: str


ITEM_FIELDS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": ("id", "summary"),
}


class Item(Struct):
    """An item of the conversation so far: a message, a call of a tool, a tool's result, or a thought."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | UnsetType = UNSET
    content: str | list[InputText | InputImage | OutputText | Refusal] | UnsetType | None = UNSET
    id: str | UnsetType | None = UNSET
    status: Literal["in_progress", "completed", "incomplete"] | UnsetType | None = UNSET
    call_id: Text | UnsetType = UNSET
    name: Text | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    output: str | UnsetType = UNSET
    summary: list[Summary] | UnsetType = UNSET
    encrypted_content: str | None = None

    def __post_init__(self) -> None:
        """Require the fields of the item's type, an object as a call's arguments, and parts of one side alone."""
        if self.type == "message" and isinstance(self.content, str) and self.role is not UNSET:
            return
        for field in ITEM_FIELDS[self.type]:
            if getattr(self, field) in (UNSET, None):
                raise broken(field, "is null" if getattr(self, field) is None else f"is missing in a {self.type}")
        if self.type == "message" and isinstance(self.content, list):
            outputs = sum(isinstance(part, OutputText | Refusal) for part in self.content)
            if outputs and (self.role != "assistant" or not isinstance(self.id, str) or self.status is None):
                raise broken("content", "has a part that only an assistant's message with an id can have")
            if 0 < outputs < len(self.content):
                raise broken("content", "mixes parts that the assistant said with input_text or input_image")
        if self.type == "function_call" and self.arguments:  # vLLM takes an empty text for no arguments
            parse(self.arguments, "arguments", dict)


class Tool(Struct, forbid_unknown_fields=True):
    """A tool for the policy; Gym's model server knows functions with a schema alone."""

    type: Literal["function"]
    name: Text
    parameters: dict[str, Any]
    strict: bool | UnsetType | None = UNSET
    description: str = ""

    def __post_init__(self) -> None:
        """Require ``strict``, of any value, as Gym does."""
        if self.strict is UNSET:
            raise broken("strict", "is missing, and Gym refuses a tool without it; null will do")


class ReasoningSettings(Struct, forbid_unknown_fields=True):
    """``reasoning``, without effect on a local model."""

    effort: Literal["minimal", "low", "medium", "high"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class PlainText(Struct, tag="text", forbid_unknown_fields=True):
    """An answer in words."""


class AnyJson(Struct, tag="json_object", forbid_unknown_fields=True):
    """An answer in JSON."""


class JsonSchema(Struct, tag="json_schema", forbid_unknown_fields=True):
    """An answer by a schema."""

    name: str
    schema: dict[str, Any]
    description: str = ""
    strict: bool | None = None


class TextForm(Struct, forbid_unknown_fields=True):
    """``text``: the form of the answer, without effect on a local model."""

    format: PlainText | AnyJson | JsonSchema | UnsetType = UNSET
    verbosity: Literal["low", "medium", "high"] | None = None


Includable = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]


class Request(Struct, forbid_unknown_fields=True):
    """``responses_create_params``: a request of the Responses API, without fields unknown to Gym.

    Every release of NeMo-RL overwrites ``temperature`` and ``top_p``.
    """

    input: str | list[Item]
    background: bool | None = None
    include: list[Includable] | None = None
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    max_tool_calls: Positive | None = None
    metadata: dict[str, str] | None = None
    model: str | None = None
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    prompt: None = None
    reasoning: ReasoningSettings | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    store: bool | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    text: TextForm | None = None
    tool_choice: Literal["none", "auto", "required"] = "auto"
    tools: list[Tool] = []
    top_logprobs: int | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    user: str | None = None

    def __post_init__(self) -> None:
        """Refuse streaming."""
        if self.stream:
            raise broken("stream", "must be false: Gym does not stream")


class PromptRow(Struct, kw_only=True):
    """The contract of every row of prompts, and the whole contract of environments unknown here."""

    agent_ref: AgentRef
    responses_create_params: Request
    placeholder: Any = msgspec.field(name="_hf_placeholder", default=UNSET)

    prompt_may_be_empty: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Require a prompt, and no placeholder."""
        if self.placeholder is not UNSET:
            raise broken("_hf_placeholder", "is left; fill the blend first (scripts.data.fill)")
        if not self.responses_create_params.input and not self.prompt_may_be_empty:
            raise broken("responses_create_params.input", "is empty; it must be the prompt or the messages before it")
        self.check_fields()

    def check_fields(self) -> None:
        """Check an environment's fields beyond types."""
