"""Settings of held-out scores and of lm-eval's tasks."""

from typing import Any

from pydantic import Field, NonNegativeInt, PositiveInt

from scripts.recipe.gym_release import JUDGES_GONE, Gym, GymServer, ServerName, check_gym
from scripts.recipe.sampling import Sampling, Temperature, TemplateVariables
from scripts.recipe.strict import Amount, Name, Strict, invalid, matching

TaskName = matching(r"^[\w][\w.:+-]*$")

OF_TASKS = {"tasks", "apply_chat_template", "max_length", "chat_template_kwargs"}


class Task(Strict):
    """A task, group or tag of lm-evaluation-harness, with settings over its file's."""

    task: TaskName
    num_fewshot: NonNegativeInt | None = None
    """Examples before each question."""
    limit: Amount | None = None
    """Documents of each task, as a number or share; none: all."""
    gen_kwargs: dict[str, bool | int | float | str | list[str]] = Field({})
    """Over the task's generation_kwargs, such as {max_gen_toks: 2048, temperature: 0.6}."""
    metric: str | None = None
    """The counting metric, such as exact_match,flexible-extract; none: the task's first."""
    include_path: str | None = None
    """The folder of your task's file, from Snakemake's working directory."""


class Evaluation(Sampling):
    """Held-out scores, a response to each validation row of all blends of prompts; and scores of tasks."""

    gone = JUDGES_GONE | {
        "fewshot_as_multiturn": "leave it out; examples are turns of the conversation under any chat template",
        "held_out": "leave it out; say `max_new_tokens` and `stages`, or `tasks`, which score any backend's exports",
        "nodes": "leave it out; exports are scored on one node",
    }

    tasks: list[TaskName | Task] = Field([])
    """Tasks of lm-evaluation-harness on which every stage's export is scored (benchmarks.json)."""
    apply_chat_template: bool = True
    """Of tasks: where the export has a template."""
    max_length: PositiveInt | None = None
    """Of tasks: most tokens of prompt and response; none: the model's limit."""
    chat_template_kwargs: TemplateVariables = Field({})
    """Variables of the chat template, such as enable_thinking."""
    temperature: Temperature = Field(0.0, description="0: greedy.")
    max_new_tokens: PositiveInt | None = None
    """Of a response to a held-out prompt; none: no held-out scores are taken."""
    blends: list[Name] | None = None
    """None: every blend of prompts."""
    stages: list[Name] | None = None
    """Stages to score, of any backend; none: stages of backend trl."""
    gym: Gym | None = None
    """None: the verifiers here score the rows."""
    gym_servers: dict[ServerName, GymServer] = Field({})
    """How Gym's servers are reached, by name."""
    test: bool = False
    """Score the chain's ends on the blends' test rows too (test.json)."""

    @property
    def task_list(self) -> list[Task]:
        """The tasks, mere names included."""
        return [Task(task=task) if isinstance(task, str) else task for task in self.tasks]

    @property
    def asked(self) -> dict[str, Any]:
        """All settings of the tasks."""
        return self.model_dump(mode="json", include=OF_TASKS, exclude_defaults=True)

    def _refuse_misfits(self) -> None:
        names = [task.task for task in self.task_list]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise invalid(f"{', '.join(twice)} stands there more than once", "evaluation.tasks")
        if self.max_new_tokens is None and self.test:
            raise invalid("scores held-out rows; say max_new_tokens too", "evaluation.test")
        check_gym(self.gym, self.gym_servers)
