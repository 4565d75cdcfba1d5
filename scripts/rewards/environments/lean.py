"""math_formal_lean: a proof that compiles; NeMo-Gym alone verifies it."""

from scripts.rewards.spec import EnvironmentSpec
from scripts.rows.request import PromptRow, Text


class LeanRow(PromptRow, kw_only=True):
    """math_formal_lean: a proof that compiles."""

    header: str
    formal_statement: Text
    informal_prefix: str | None = None
    name: str | None = None
    turn_index: int = 0


ENVIRONMENTS = dict.fromkeys(
    ("math_formal_lean_simple_agent", "math_formal_lean_refinement_agent"), EnvironmentSpec(LeanRow)
)
