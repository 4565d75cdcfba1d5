"""What every row of prompts has, whatever rewards it: the environment's name, and the request that Gym makes of it.

A row is decoded into a Struct. Fields that a Struct does not name are ignored, types are taken strictly, and what a
type cannot say stands in ``__post_init__``, whose ValueError names the field. The request's own rules are those by
which Gym's servers parse it: what they do not know or cannot read is an HTTP 422, and the rollout fails.
"""

import json
import re
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from scripts.rows.messages import Message, last_user_text

T = TypeVar("T")
Text = Annotated[str, Meta(min_length=1)]
Positive = Annotated[int, Meta(ge=1)]
_WITH_PATH = re.compile(r"(.+) - at `(\$[^`]*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.+)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(.+)`")
_decoder = cache(msgspec.json.Decoder)


def broken(field: str, says: str) -> ValueError:
    """What a rule raises: the field's path within its object, and what is wrong with it."""
    return ValueError(f".{field}: {says}")


def problem_of(row: Any, contract: type) -> str | None:
    """The first thing in a row that breaks its contract, with its path; None: nothing does."""
    try:
        msgspec.convert(row, contract)
    except msgspec.ValidationError as error:
        return _with_path(error)
    return None


def _with_path(error: msgspec.ValidationError) -> str:
    """The error with its path in front."""
    found = _WITH_PATH.fullmatch(str(error))
    says, path = found.groups() if found else (str(error), "$")
    if says.startswith("."):
        return path + says
    for pattern, short in ((_MISSING, "is missing"), (_UNKNOWN, "is not a field that Gym knows here")):
        if match := pattern.fullmatch(says):
            return f"{path}.{match[1]}: {short}"
    return f"{path}: {says[0].lower()}{says[1:].replace('`', '')}"


def parse(text: str, field: str, kind: type[T] | Any = Any) -> T:
    """The value of a field that holds JSON as text; what Python's own reader takes (NaN) is good enough there."""
    try:
        try:
            return _decoder(kind).decode(text)
        except msgspec.ValidationError:
            raise
        except (ValueError, RecursionError):
            return msgspec.convert(json.loads(text), kind)
    except msgspec.ValidationError as error:
        raise broken(field, f"in its JSON, {_with_path(error)}") from None
    except (ValueError, RecursionError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else error
        raise broken(field, f"is not JSON ({what})") from None


class AgentRef(Struct):
    """Which agent of Gym plays the row, and so which environment rewards it."""

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
    text: ClassVar[str] = ""


class OutputText(Struct, tag="output_text"):
    """A text that the assistant said; what a hosted model adds to one is not taken."""

    text: str
    annotations: Annotated[list[Any], Meta(max_length=0)]
    logprobs: Annotated[list[Any], Meta(max_length=0)] | None = None


class Refusal(Struct, tag="refusal"):
    """A refusal of the assistant's."""

    refusal: str
    text: ClassVar[str] = ""


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
    """One item of the conversation before the policy's turn: a message, a call of a tool, its result, or a thought."""

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
        """Each kind has its fields; a message's content is there, a call's arguments are an object."""
        if self.type == "message" and isinstance(self.content, str) and self.role is not UNSET:
            return
        for field in ITEM_FIELDS[self.type]:
            if getattr(self, field) in (UNSET, None):
                raise broken(field, "is null" if getattr(self, field) is None else f"is missing in a {self.type}")
        if self.type == "message" and isinstance(self.content, list):
            self._check_parts()
        if self.type == "function_call" and self.arguments:  # vLLM takes an empty text for no arguments
            parse(self.arguments, "arguments", dict)

    def _check_parts(self) -> None:
        """Parts are all given, or all said, which they can be by an assistant alone."""
        outputs = sum(isinstance(part, OutputText | Refusal) for part in self.content)
        if not outputs:
            return
        if self.role != "assistant" or not isinstance(self.id, str) or self.status is None:
            raise broken("content", "has a part that only an assistant's message with an id can have")
        if outputs < len(self.content):
            raise broken("content", "mixes parts that the assistant said with input_text or input_image")

    def as_message(self) -> Message:
        """Its role and its text, parts joined; no text where it is no message."""
        parts = self.content if isinstance(self.content, list) else ()
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in parts)
        return {"role": self.role, "content": text}


class Tool(Struct, forbid_unknown_fields=True):
    """A tool that the policy may call; Gym's server of the policy knows functions alone, with the schema of each."""

    type: Literal["function"]
    name: Text
    parameters: dict[str, Any]
    strict: bool | UnsetType | None = UNSET
    description: str = ""

    def __post_init__(self) -> None:
        """Gym refuses a tool without ``strict``, whatever it says."""
        if self.strict is UNSET:
            raise broken("strict", "is missing, and Gym refuses a tool without it; null will do")


class ReasoningSettings(Struct, forbid_unknown_fields=True):
    """``reasoning``, which a model of one's own does not read."""

    effort: Literal["minimal", "low", "medium", "high"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class PlainText(Struct, tag="text", forbid_unknown_fields=True):
    """An answer in words."""


class AnyJson(Struct, tag="json_object", forbid_unknown_fields=True):
    """An answer in JSON."""


class JsonSchema(Struct, tag="json_schema", forbid_unknown_fields=True):
    """An answer that obeys a schema."""

    name: str
    schema: dict[str, Any]
    description: str = ""
    strict: bool | None = None


class TextForm(Struct, forbid_unknown_fields=True):
    """``text``: the form of the answer, which a model of one's own does not read."""

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
    """``responses_create_params``: a request of the Responses API. Gym refuses one with fields that it does not know.

    ``temperature`` and ``top_p`` may stand there: every release of NeMo-RL overwrites them with the policy's own.
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
        """A response comes whole."""
        if self.stream:
            raise broken("stream", "must be false: Gym does not stream")


class PromptRow(Struct, kw_only=True):
    """The contract that every row of prompts obeys, and the only one of environments that are not known here."""

    agent_ref: AgentRef
    responses_create_params: Request
    placeholder: Any = msgspec.field(name="_hf_placeholder", default=UNSET)

    prompt_may_be_empty: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """There is a prompt, and nothing is left to fill in."""
        if self.placeholder is not UNSET:
            raise broken("_hf_placeholder", "is left; fill the blend first (scripts.data.fill)")
        if not self.responses_create_params.input and not self.prompt_may_be_empty:
            raise broken("responses_create_params.input", "is empty; it must be the prompt or the messages before it")
        self.check_fields()

    def check_fields(self) -> None:
        """Refuse what the types of an environment's own fields cannot."""

    def needs_question(self, why: str) -> None:
        """Refuse a row whose conversation holds no text of the user's."""
        given = self.responses_create_params.input
        messages = [{"role": "user", "content": given}] if isinstance(given, str) else map(Item.as_message, given)
        if not last_user_text(messages):
            raise broken("responses_create_params.input", f"has no text of the user's, {why}")
