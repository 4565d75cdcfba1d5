"""Environments without a verifier here: NeMo-Gym's servers reward the rows, the table has the contracts."""

from typing import Any, ClassVar, Literal

from msgspec import UNSET, UnsetType, defstruct

from scripts.recipe.environment import Environment
from scripts.rewards.environments.genrm import GenRmRow
from scripts.rewards.environments.structured_outputs import StructuredOutputsRow
from scripts.rewards.spec import EnvironmentSpec
from scripts.rows.request import PromptRow, Text, broken

_OBJECT, _TEXT, _COUNT, _ID = dict[str, Any] | None, str | None, int | None, str | int | None
_POLICIES = ("engagement_with_disclaimer", "refusal_with_explanation", "hard_refusal_no_redirection")
_POLICIES += ("hard_refusal_with_helplines",)
_JUDGED = {"expected_answer?": _TEXT, "metadata?": _OBJECT, "uuid?": _ID}
_RUBRIC = {"rubric?": list[dict[str, Any]] | None, "metadata?": _OBJECT, "uuid?": _ID, "task_id?": _COUNT}
_JAILBREAK = {"adversarial_prompt?": _TEXT, "attack_type?": _TEXT, "metadata?": _OBJECT}
_PROOF = {"header": str, "formal_statement": Text, "informal_prefix?": _TEXT, "name?": _TEXT, "turn_index?": int}
_TERMINUS = {"metadata": dict[str, Any], "expected_answer?": _TEXT, "uuid?": _ID, "threshold?": float | None}
_REFUSED = {"safe_prompt?": _TEXT, "category?": _TEXT, "contrast_prompt?": _TEXT, "metadata?": _OBJECT}
# Types by field; fields with a question mark may be missing.
_FIELDS: dict[str, dict[str, Any]] = {
    "calendar_simple_agent": {"exp_cal_state": dict[str, dict[str, Any]]},
    "equivalence_llm_judge_simple_agent": _JUDGED | {"options?": list[dict[str, str]] | None},
    "inverse_if_simple_agent": _RUBRIC
    | dict.fromkeys(["prompt?", "reference_response?", "judge_prompt_template?", "judge_system_prompt?"], _TEXT),
    "jailbreak_detection_simple_agent": _JAILBREAK | {"response_policy_mapped?": _TEXT},
    **{f"jailbreak_{policy}": _JAILBREAK | {"response_policy_mapped": Text} for policy in _POLICIES},
    "lc_judge_simple_agent": _JUDGED,
    "math_formal_lean_refinement_agent": _PROOF,
    "math_formal_lean_simple_agent": _PROOF,
    "multichallenge_simple_agent": _RUBRIC | {"context?": _TEXT},
    "over_refusal_detection_simple_agent": _REFUSED,
    "ns_tools_simple_agent": {"question": str, "expected_answer": Text, "verifier_type?": _TEXT},
    f"parallel_tool_calls_{Environment.TOOL_USE}": {"expected_action": dict[str, Any]},
    "string_match_simple_agent": {
        "expected_answer": Text,
        "extraction_mode?": Literal["boxed", "final_answer", "last_line", "full_response"],
        "case_sensitive?": bool,
    },
    "swerl_gen_simple_agent": {
        "instance": dict[str, Any],
        "metadata": dict[str, Any],
        "mode?": Literal["eval", "repro-gen"],
        "dataset_name?": _TEXT,
        "dataset_split?": _TEXT,
        "partial_similarity?": bool | None,
    },
    "terminus_judge_simple_agent": _TERMINUS,
    "terminus_judge_string_only_simple_agent": _TERMINUS,
    "workplace_assistant_simple_agent": {
        "id": int,
        "ground_truth": list[dict[str, str]] | str,
        "category": str,
        "environment_name": str,
    },
    "xstest_eval_agent": _REFUSED,
}


class GymRow(PromptRow, kw_only=True):
    """A row of the table."""

    def check_fields(self) -> None:
        """Refuse a row without the field compared by a judge, here or in ``metadata``."""
        for field in ("expected_answer", "rubric"):
            if not getattr(self, field, True) and (self.metadata or {}).get(field) in (None, "", []):
                raise broken(field, "is missing or empty, and metadata has none, so every answer would earn 0")


class SweAgentsRow(PromptRow, kw_only=True):
    """swe_agents: an agent works in the instance's image; the request's metadata describes the task."""

    prompt_may_be_empty: ClassVar[bool] = True

    def check_fields(self) -> None:
        """Refuse metadata without the whole instance."""
        metadata = self.responses_create_params.metadata or {}
        for field in ("instance_id", "dataset_name", "split", "problem_statement", "instance_dict"):
            if not metadata.get(field):
                raise broken(f"responses_create_params.metadata.{field}", "is missing or empty")


def _contract(name: str, types: dict[str, Any]) -> type[PromptRow]:
    """Make the contract of an environment's rows."""
    fields = [
        (field[:-1], kind | UnsetType, UNSET) if field.endswith("?") else (field, kind) for field, kind in types.items()
    ]
    return defstruct(name, fields, bases=(GymRow,), kw_only=True)


ENVIRONMENTS = {
    **{name: EnvironmentSpec(_contract(name, types)) for name, types in _FIELDS.items()},
    "genrm_simple_agent_reasoning_off": EnvironmentSpec(GenRmRow),
    "reasoning_gym_simple_agent": EnvironmentSpec(
        _contract("reasoning_gym", {"question": str, "answer": _TEXT, "metadata": dict[str, Any]}),
        answer=lambda row: f"<answer>{row['answer']}</answer>" if isinstance(row.get("answer"), str) else None,
    ),
    "structured_outputs_v3_simple_agent": EnvironmentSpec(StructuredOutputsRow),
    "structured_outputs_v4_simple_agent": EnvironmentSpec(StructuredOutputsRow),
    "swe_agents_train": EnvironmentSpec(SweAgentsRow),
    "swe_agents_val": EnvironmentSpec(SweAgentsRow),
}
