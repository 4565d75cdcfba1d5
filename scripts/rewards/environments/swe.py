"""swerl_gen and swe_agents: software is mended and its tests are run; NeMo-Gym alone verifies that."""

from typing import ClassVar, Literal

from msgspec import Struct

from scripts.rewards.spec import EnvironmentSpec
from scripts.rows.request import PromptRow, Text, broken, parse


def _check_tests(tests: str | list[str] | None, field: str) -> None:
    if isinstance(tests, str):
        parse(tests, field, list[str])


class SwerlInstance(Struct):
    """A task of swerl_gen, with the scripts that test it."""

    instance_id: Text
    repo: str
    setup_script: str
    test_script: str
    regression_script: str
    PASS_TO_PASS: str | list[str]
    FAIL_TO_PASS: str | list[str]
    patch: str

    def __post_init__(self) -> None:
        """Lists of tests may be written as JSON."""
        _check_tests(self.PASS_TO_PASS, "PASS_TO_PASS")
        _check_tests(self.FAIL_TO_PASS, "FAIL_TO_PASS")


class SwerlMetadata(Struct):
    """``metadata`` of a swerl_gen task: the image, and the files that the prompt shows."""

    image: Text
    relevant_file_contents: str | None = None
    remove_repo_name: bool | None = None


class SwerlGenRow(PromptRow, kw_only=True):
    """swerl_gen: a patch or a test from one answer, run in the task's image."""

    instance: SwerlInstance
    metadata: SwerlMetadata
    mode: Literal["eval", "repro-gen"] = "eval"
    dataset_name: str | None = None
    dataset_split: str | None = None
    partial_similarity: bool | None = None

    def check_fields(self) -> None:
        """A patch is applied to the files that the prompt shows."""
        if self.mode == "eval":
            for field in ("relevant_file_contents", "remove_repo_name"):
                if getattr(self.metadata, field) is None:
                    raise broken(f"metadata.{field}", "is missing, and mode is eval")
            parse(self.metadata.relevant_file_contents, "metadata.relevant_file_contents", dict[str, str])


class SweInstance(Struct):
    """What ``instance_dict`` holds, as far as it is the same in every data set."""

    FAIL_TO_PASS: str | list[str] | None = None
    PASS_TO_PASS: str | list[str] | None = None

    def __post_init__(self) -> None:
        """Lists of tests may be written as JSON."""
        _check_tests(self.PASS_TO_PASS, "PASS_TO_PASS")
        _check_tests(self.FAIL_TO_PASS, "FAIL_TO_PASS")


class SweAgentsRow(PromptRow, kw_only=True):
    """swe_agents: an agent works in the instance's image; all it knows of the task stands in the request's metadata."""

    prompt_may_be_empty: ClassVar[bool] = True

    def check_fields(self) -> None:
        """The metadata names the instance and holds it whole."""
        metadata = self.responses_create_params.metadata or {}
        for field in ("instance_id", "dataset_name", "split", "problem_statement", "instance_dict"):
            if not metadata.get(field):
                raise broken(f"responses_create_params.metadata.{field}", "is missing or empty")
        parse(metadata["instance_dict"], "responses_create_params.metadata.instance_dict", SweInstance)


ENVIRONMENTS = {
    "swerl_gen_simple_agent": EnvironmentSpec(SwerlGenRow),
    **dict.fromkeys(("swe_agents_train", "swe_agents_val"), EnvironmentSpec(SweAgentsRow)),
}
