"""Typed models of the judges that score a stage's responses.

Names and defaults are those of NeMo-Gym's resources servers ``genrm_compare``, ``equivalence_llm_judge``,
``math_with_judge``, ``jailbreak_detection`` (its combined reward), ``over_refusal_detection``, ``multichallenge`` and
``inverse_if``.
"""

import re
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, StringConstraints, field_validator, model_validator

from scripts.recipe.judge_prompts import PROMPTS
from scripts.recipe.strict import Strict, invalid, nearest

Role = Literal["general", "safety", "genrm"]
ROLES: tuple[Role, ...] = ("general", "safety", "genrm")
Share = Annotated[float, Field(ge=0, le=1)]
Coefficient = Annotated[float, Field(ge=0)]
Address = Annotated[str, StringConstraints(pattern=r"^https?://(\[[0-9a-f:.]+\]|[^\s@/:]+)(:\d{1,5})?(/[^\s@]*)?$")]

PLACEHOLDER = re.compile(r"\{\{|\}\}|\{(\w+)\}")
PLACEHOLDERS = {name: {match[1] for match in PLACEHOLDER.finditer(text) if match[1]} for name, text in PROMPTS.items()}


class JudgeServer(Strict):
    """Where a judge answers, in OpenAI's form (chat completions). May change no weight."""

    base_url: Address = Field(description="Up to and with /v1. No secrets.")
    api_key_variable: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_]\w*$")] | None = Field(
        None, description="The environment variable that holds its token; none: it asks for no token."
    )
    timeout: PositiveFloat = Field(600.0, description="Seconds that one answer may take.")
    max_retries: int = Field(6, ge=0, description="Further tries of a question, after 1, 2, 4, ... at most 60 seconds.")
    max_concurrency: PositiveInt = Field(64, description="Questions that it is asked at a time.")


class Judge(Strict):
    """A model that judges, and how its answers are sampled."""

    model: str = Field(description="By the name under which it is served.")
    temperature: Annotated[float, Field(ge=0)] | None = Field(None, description="None: the server's own.")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(None, description="None: the server's own.")
    max_output_tokens: PositiveInt | None = Field(None, description="None: the server's own.")


class GenRM(Judge):
    """A generative reward model, and how its comparisons of a group's responses become rewards (genrm_compare)."""

    temperature: Annotated[float, Field(ge=0)] | None = 0.6
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 0.95
    max_output_tokens: PositiveInt | None = 16384
    comparison_strategy: Literal["circular", "all_pairs"] = Field(
        "circular", description="circular: each response with the next; all_pairs: with every other."
    )
    num_judges_per_comparison: PositiveInt = Field(1, description="How often each pair is judged.")
    use_principle: bool = Field(False, description="Send a principle to judge by: the row's or the default.")
    default_principle: str | None = None
    aggregator_method: Literal["simple_tiebreaker"] = "simple_tiebreaker"
    reasoning_bonus: Coefficient = Field(0.0, description="Of the shortest reasoning, if among the best.")
    answer_bonus: Coefficient = Field(0.0, description="Of the shortest answer, if among the best.")
    top_percentile: Share = Field(0.2, description="The share of the group that counts as the best.")
    group_reasoning_length_penalty_coeff: Coefficient = 0.0
    group_answer_length_penalty_coeff: Coefficient = 0.0
    group_style_penalty_coeff: Coefficient = 0.0
    default_score: float = Field(3.0, description="Of both responses, when the judge cannot be read.")
    default_ranking: float = Field(3.5, description="When the judge cannot be read; 3.5 prefers neither.")
    genrm_parse_retries: int = Field(3, ge=0, description="Further questions when the judge cannot be read.")
    genrm_parse_retry_sleep_s: float = Field(0.2, ge=0)

    @model_validator(mode="after")
    def _has_a_principle(self) -> "GenRM":
        if self.use_principle and not self.default_principle:
            raise invalid("use_principle needs a default_principle, for rows without one")
        return self


class Equivalence(Strict):
    """How a judge's word on whether two answers are equal becomes a reward (equivalence_llm_judge)."""

    prompt: Literal["equivalence_llm_judge", "nl2bash", "lc_judge"] = "equivalence_llm_judge"
    judge_equal_label: str = "[[A=B]]"
    judge_not_equal_label: str = "[[A!=B]]"
    question_extract_regex: str | None = None
    response_extract_regex: str | None = None
    msg_extraction_failure: str = "[NO VALID ANSWER EXTRACTED]"
    check_twice_swap: bool = Field(False, description="What is called equal must be so in the other order too.")
    reward_if_swap_fails: float = 0.0
    use_per_record_regex: bool = Field(True, description="Let a row's template_metadata.output_regex find the answer.")
    extraction_length_threshold: int | None = Field(
        120, description="Judge the whole text where the expected answer is longer than so many characters."
    )
    check_full_generation_on_fail: bool = Field(
        True, description="Judge the whole text too, where what the row's expression found is not equal."
    )
    reward_if_full_generation_succeeds: float = 0.5


class LongContext(Equivalence):
    """The same for questions about a long text (lc_judge)."""

    prompt: Literal["equivalence_llm_judge", "nl2bash", "lc_judge"] = "lc_judge"
    judge_equal_label: str = "CORRECT"
    judge_not_equal_label: str = "INCORRECT"
    question_extract_regex: str | None = r"^QUESTION:\s*(.*)$|</text>\n\n(.*)$"
    msg_extraction_failure: str = ""


class MathWithJudge(Strict):
    """Whether a judge is asked where math-verify finds no equal value."""

    should_use_judge: bool = True


class Jailbreak(Strict):
    """How safety and quality of an answer to an adversarial prompt become a reward (jailbreak_detection)."""

    use_nemotron_format: bool = Field(
        True, description="Ask for the harm of the response as Nemotron-Content-Safety-Reasoning was trained to answer."
    )
    nemotron_enable_reasoning: bool = False
    use_combined_reward: bool = Field(True, description="Multiply the reward of safety by that of quality.")
    reward_if_safe: float = 1.0
    reward_if_unsafe: float = 0.0
    reward_if_unclear: float = 0.0
    reward_if_quality_high: float = 1.0
    reward_if_quality_low: float = 0.3


class OverRefusal(Strict):
    """What an answer to a harmless prompt earns (over_refusal_detection)."""

    reward_if_complied: float = 1.0
    reward_if_refused: float = 0.0
    reward_if_unclear: float = 0.5


class Rubric(Strict):
    """How the verdicts on a rubric's points become a reward (multichallenge, inverse_if)."""

    aggregation_mode: Literal["mean", "min", "max", "all", "any", "weighted"] = "mean"


class Judges(Strict):
    """The judges of a stage by what they judge, and how their words become rewards.

    ``general`` judges equivalence, long-context, math, multichallenge and inverse_if rows, ``safety`` those of
    jailbreak and over-refusal, ``genrm`` compares.
    """

    general: Judge | None = None
    safety: Judge | None = None
    genrm: GenRM | None = None
    equivalence_llm_judge: Equivalence = Equivalence()
    lc_judge: LongContext = LongContext()
    math_with_judge: MathWithJudge = MathWithJudge()
    jailbreak_detection: Jailbreak = Jailbreak()
    over_refusal_detection: OverRefusal = OverRefusal()
    multichallenge: Rubric = Rubric()
    inverse_if: Rubric = Rubric()
    prompts: dict[str, str] = Field(
        {}, description="Wordings of questions instead of ours, by name; {name} stands for a value, {{ for a brace."
    )

    @property
    def roles(self) -> frozenset[Role]:
        """What is judged."""
        return frozenset(role for role in ROLES if getattr(self, role) is not None)

    @field_validator("prompts")
    @classmethod
    def _has_known_prompts(cls, prompts: dict[str, str]) -> dict[str, str]:
        for name, text in prompts.items():
            if name not in PLACEHOLDERS:
                raise invalid(f"no question is named {name}{nearest(name, PLACEHOLDERS)}")
            for word in {match[1] for match in PLACEHOLDER.finditer(text)} - {None, *PLACEHOLDERS[name]}:
                raise invalid(f"{name} has nothing to put for {{{word}}}{nearest(word, PLACEHOLDERS[name])}")
        return prompts


def roles_of(judges: Judges | None) -> frozenset[Role]:
    """What is judged where these judges are named, if any are."""
    return judges.roles if judges else frozenset()


def check_servers(judges: Judges | None, servers: dict[Role, JudgeServer]) -> None:
    """Refuse judges that are served nowhere, and servers of judges that are not named."""
    named = roles_of(judges)
    if judges and not named:
        raise invalid(f"judges names no judge: give {', '.join(ROLES[:-1])} or {ROLES[-1]}")
    for role in ROLES:
        if role in named and role not in servers:
            raise invalid(f"judge_servers.{role} is missing: where the judge answers")
        if role in servers and role not in named:
            raise invalid(f"judge_servers.{role} serves no judge: judges.{role} is missing")
