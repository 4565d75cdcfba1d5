"""The row contract: what each environment must find in a row, by the name that the row bears.

The field names, their types and what may be left out are those that NeMo-Gym's servers declare. What only leads to a
reward that says nothing (an expected letter that no option bears) is refused as well.
"""

from scripts.data.contract.agents import SweAgents, SwerlGen
from scripts.data.contract.base import Row, problem_of
from scripts.data.contract.examples import FORMS, Demonstration, form_of
from scripts.data.contract.judged import (
    Equivalence,
    GenRm,
    InverseIf,
    Jailbreak,
    JailbreakPolicy,
    MultiChallenge,
    OverRefusal,
    Terminus,
)
from scripts.data.contract.single_turn import (
    Calendar,
    CodeGen,
    InstructionFollowing,
    Lean,
    Math,
    Mcqa,
    NsTools,
    ReasoningGym,
    StringMatch,
    StructuredOutputs,
)
from scripts.data.contract.tools import ParallelToolUse, ToolUse, WorkplaceAssistant

__all__ = ["CONTRACTS", "FORMS", "Demonstration", "Row", "contract_of", "form_of", "problem_of"]

CONTRACTS: dict[str, type[Row]] = {
    "math_with_judge_simple_agent": Math,
    "code_gen_simple_agent": CodeGen,
    "workplace_assistant_simple_agent": WorkplaceAssistant,
    "mcqa_simple_agent": Mcqa,
    "instruction_following_simple_agent": InstructionFollowing,
    "structured_outputs_simple_agent": StructuredOutputs,
    "structured_outputs_v3_simple_agent": StructuredOutputs,
    "structured_outputs_v4_simple_agent": StructuredOutputs,
    "lc_judge_simple_agent": Equivalence,
    "equivalence_llm_judge_simple_agent": Equivalence,
    "calendar_simple_agent": Calendar,
    "genrm_simple_agent": GenRm,
    "genrm_simple_agent_reasoning_off": GenRm,
    "reasoning_gym_simple_agent": ReasoningGym,
    "ns_tools_simple_agent": NsTools,
    "math_formal_lean_simple_agent": Lean,
    "math_formal_lean_refinement_agent": Lean,
    "swerl_gen_simple_agent": SwerlGen,
    "jailbreak_detection_simple_agent": Jailbreak,
    "jailbreak_engagement_with_disclaimer": JailbreakPolicy,
    "jailbreak_refusal_with_explanation": JailbreakPolicy,
    "jailbreak_hard_refusal_no_redirection": JailbreakPolicy,
    "jailbreak_hard_refusal_with_helplines": JailbreakPolicy,
    "over_refusal_detection_simple_agent": OverRefusal,
    "xstest_eval_agent": OverRefusal,
    "multichallenge_simple_agent": MultiChallenge,
    "inverse_if_simple_agent": InverseIf,
    "string_match_simple_agent": StringMatch,
    "terminus_judge_simple_agent": Terminus,
    "terminus_judge_string_only_simple_agent": Terminus,
    "parallel_tool_calls_single_step_tool_use_with_argument_comparison_agent": ParallelToolUse,
    "swe_agents_train": SweAgents,
    "swe_agents_val": SweAgents,
}
TOOL_USE = "single_step_tool_use_with_argument_comparison_agent"


def contract_of(environment: str) -> type[Row] | None:
    """The contract of an environment by its name; None for one that has none here, of which Gym has many."""
    if found := CONTRACTS.get(environment):
        return found
    return ToolUse if environment == TOOL_USE or environment.endswith(f"_{TOOL_USE}") else None
