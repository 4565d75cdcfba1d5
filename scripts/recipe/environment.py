"""The environments with a verifier here; NeMo-Gym's servers reward the rows of all other names."""

from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator

from scripts.recipe.strict import Name


class Environment(StrEnum):
    """Names in a row's ``agent_ref.name`` whose verifiers are files of scripts/rewards/environments."""

    MATH = "math_with_judge_simple_agent"
    MCQA = "mcqa_simple_agent"
    STRUCTURED_OUTPUTS = "structured_outputs_simple_agent"
    INSTRUCTION_FOLLOWING = "instruction_following_simple_agent"
    CODE_GEN = "code_gen_simple_agent"
    TOOL_USE = "single_step_tool_use_with_argument_comparison_agent"
    TOOLCALL_SCHEMA = "toolcall_schema_single_step_tool_use_with_argument_comparison_agent"
    SEARCH_PIVOT = "search_pivot_single_step_tool_use_with_argument_comparison_agent"
    SWE_PIVOT = "swe_pivot_single_step_tool_use_with_argument_comparison_agent"
    GENRM = "genrm_simple_agent"


EnvironmentName = Annotated[Name, AfterValidator(lambda name: Environment(name) if name in list(Environment) else name)]
