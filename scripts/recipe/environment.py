"""The names of environments, which turn a response into a reward."""

from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator

from scripts.recipe.strict import Name


class Environment(StrEnum):
    """Names that a row's ``agent_ref.name`` may bear; scripts.rewards.environments says what is known of each."""

    MATH = "math_with_judge_simple_agent"
    MCQA = "mcqa_simple_agent"
    STRUCTURED_OUTPUTS = "structured_outputs_simple_agent"
    INSTRUCTION_FOLLOWING = "instruction_following_simple_agent"
    CODE_GEN = "code_gen_simple_agent"
    CALENDAR = "calendar_simple_agent"
    WORKPLACE = "workplace_assistant_simple_agent"
    REASONING_GYM = "reasoning_gym_simple_agent"
    STRING_MATCH = "string_match_simple_agent"
    TOOL_USE = "single_step_tool_use_with_argument_comparison_agent"
    TOOLCALL_SCHEMA = "toolcall_schema_single_step_tool_use_with_argument_comparison_agent"
    SEARCH_PIVOT = "search_pivot_single_step_tool_use_with_argument_comparison_agent"
    SWE_PIVOT = "swe_pivot_single_step_tool_use_with_argument_comparison_agent"
    PARALLEL_TOOL_USE = "parallel_tool_calls_single_step_tool_use_with_argument_comparison_agent"
    GENRM = "genrm_simple_agent"
    GENRM_REASONING_OFF = "genrm_simple_agent_reasoning_off"
    EQUIVALENCE = "equivalence_llm_judge_simple_agent"
    LC_JUDGE = "lc_judge_simple_agent"
    JAILBREAK = "jailbreak_detection_simple_agent"
    JAILBREAK_DISCLAIMER = "jailbreak_engagement_with_disclaimer"
    JAILBREAK_EXPLANATION = "jailbreak_refusal_with_explanation"
    JAILBREAK_HARD_REFUSAL = "jailbreak_hard_refusal_no_redirection"
    JAILBREAK_HELPLINES = "jailbreak_hard_refusal_with_helplines"
    OVER_REFUSAL = "over_refusal_detection_simple_agent"
    XSTEST = "xstest_eval_agent"
    MULTICHALLENGE = "multichallenge_simple_agent"
    INVERSE_IF = "inverse_if_simple_agent"


def _as_environment(name: str) -> str:
    return Environment(name) if name in list(Environment) else name


EnvironmentName = Annotated[Name, AfterValidator(_as_environment)]
