"""A user's own environment is one Python file that the recipe names; what is wrong with it is said by file and row."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from scripts.backends.protocol import StopRequest, TrainingJob, read_job, write_job
from scripts.errors import UserError
from scripts.recipe.load import load_recipe, load_site
from scripts.recipe.resolve import own_environments, resolve_stage, training_config
from scripts.recipe.stage_settings import Probe
from scripts.rewards.episode import episode_response, tools_of, whole_text
from scripts.rewards.registry import (
    check_row,
    environment_factory,
    own_metrics,
    register,
    reward_groups,
    scores,
    spec_of,
)
from scripts.stage.probe import SampledRow, try_rewards
from scripts.train.preflight import check_stage
from tests.cases import cases, tables_of
from tests.conftest import ROOT, SHORT
from tests.stages import ready_stage, refused_by_backend

EXAMPLE = "config/environments/word_count.py"
VERIFY = "def verify(row, response): return 1.0\n"


def row(words: object = 3, name: str = "word_count") -> dict:
    agent = {"type": "responses_api_agents", "name": name}
    return {"agent_ref": agent, "responses_create_params": {"input": f"say {words} of them"}, "words": words}


@pytest.fixture
def recipe(tmp_path):
    """The short recipe with an environment of the user's in the blend rlvr1."""

    def write(file: str | Path = EXAMPLE, name: str = "word_count", **changes: object):
        values = yaml.safe_load(SHORT.read_text())
        values["source"] = {"kind": "folder", "path": str(tmp_path)}
        values["environments"] = {name: str(file)}
        values["blends"]["rlvr1"]["environments"] = [name]
        for blend in values["blends"].values():
            del blend["rows"]
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(values | changes))
        return load_recipe(path)

    return write


@pytest.fixture
def own(tmp_path):
    """An environment `mine` of given source text."""

    def write(text: str) -> Path:
        path = tmp_path / "mine.py"
        path.write_text(text)
        register({"mine": path})
        return path

    return write


def test_the_example_rewards_its_rows_wherever_rewards_are_asked_for():
    register({"word_count": ROOT / EXAMPLE})
    assert reward_groups([(row(2), ["one two", "one", "one one", "", "say 2"])])[0] == [1, 0.5, 0, 0, 0]
    assert scores([(row(2), "some words")]) == [1.0]
    assert check_row(row(3)) is None
    assert check_row(row("x")) == "words is 'x' instead of a number from 1 on"


def test_a_files_tags_are_a_rows_tags_and_must_be_texts(own):
    own("def verify(row, response): return 0.0\ndef tags(row): return ['short', 'short'] if row['words'] < 3 else 3\n")
    mine = [row(words) | {"agent_ref": {"type": "responses_api_agents", "name": "mine"}} for words in (2, 3)]
    assert spec_of(mine[0]).tags(mine[0]) == ["short"] and spec_of(row(2)).tags(row(2)) == []
    with pytest.raises(UserError, match=r"mine: tags of .*mine.py returned 3 instead of a list of texts"):
        spec_of(mine[1]).tags(mine[1])


def test_metrics_are_numbers_by_name_and_a_response_that_breaks_them_has_none(own, capsys):
    own(f"{VERIFY}def metrics(row, response): return {{'words': len(response.split()), 'share': 1 / len(response)}}\n")
    mine = row(3, "mine")
    assert own_metrics(mine, "one two") == {"words": 2.0, "share": 1 / 7} and own_metrics(row(3), "one") == {}
    assert [own_metrics(mine, "") for _ in range(2)] == [{"left out": 1.0}] * 2
    said = r"warning: .* raised at .*mine.py:2: ZeroDivisionError.*no metrics, and counted as 'left out'\n"
    assert re.fullmatch(said, capsys.readouterr().err)
    assert own_metrics(mine, "one two") == {"words": 2.0, "share": 1 / 7, "left out": 0.0}
    assert reward_groups([(mine, [""])])[0] == [1.0]


@pytest.mark.parametrize(
    ("returned", "says"),
    [("3", "returned 3 instead of numbers by name"), ("{'a': None}", "returned None, which is no")],
)
def test_metrics_that_are_none_are_refused_by_the_preflight(own, returned, says):
    own(f"{VERIFY}def metrics(row, response): return {returned}\n")
    with pytest.raises(UserError, match=rf"^split:1: environment mine: metrics of .*mine.py {says}"):
        try_rewards({"mine": [SampledRow("split:1", row(3, "mine"))]}, Probe())


def test_what_the_file_says_is_part_of_the_config_of_stages_whose_blend_lists_it(recipe, tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text("def verify(row, response): return 0.0\n")
    loaded = recipe(mine, "mine")
    assert own_environments(loaded, "rlvr1") == own_environments(loaded) == {"mine": mine}
    assert own_environments(loaded, "rlhf") == own_environments(loaded, "sft") == {}
    before = resolve_stage(loaded, "rlvr1")
    assert "environments" not in resolve_stage(loaded, "rlhf").values()
    mine.touch()
    assert resolve_stage(loaded, "rlvr1") == before
    mine.write_text("def verify(row, response): return 1.0\n")
    assert resolve_stage(loaded, "rlvr1").environments != before.environments
    with pytest.raises(UserError, match=r"mine.py has changed since the stage was planned"):
        register(own_environments(loaded), before.environments)


def test_a_recipes_mistakes_are_named_by_line(recipe):
    with pytest.raises(UserError, match=r"recipe.yaml:\d+: environments.mine: no such file: .*/nowhere.py"):
        recipe("nowhere.py", "mine")
    with pytest.raises(UserError, match=r"environments.mcqa_simple_agent: an environment has this name already"):
        recipe(name="mcqa_simple_agent")
    with pytest.raises(UserError, match=r"'word_count' is not known; did you mean word_counts\?"):
        recipe(environments={"word_counts": EXAMPLE})


@cases("own_environment.files", "text", "says")
def test_a_file_that_cannot_be_used_is_one_message(own, text, says):
    with pytest.raises(UserError, match=says) as error:
        own(text)
    assert str(error.value).startswith("environment mine: ")


@cases("own_environment.verify", "body", "says")
def test_what_verify_does_wrong_is_named_with_the_row(own, body, says):
    own(f"def verify(row, response):\n    {body}\n")
    with pytest.raises(UserError, match=says) as error:
        reward_groups([(row(3, "mine"), ["a"])])[0]
    assert "(the row that asks 'say 3 of them')" in str(error.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [("def verify(row): return 1.0\n", r"verify\(\) takes 1 pos"), ("verify = 3\n", "'int' object is not callable")],
)
def test_a_verify_that_cannot_be_called_is_named_with_the_row(own, text, says):
    own(text)
    raised = r"verify of .*mine.py raised at .*mine.py: TypeError"
    with pytest.raises(UserError, match=rf"{raised}: .*{says}.*say 3 of them"):
        reward_groups([(row(3, "mine"), ["a"])])


def test_a_response_that_verify_was_not_made_for_is_worth_nothing_and_says_why(own):
    own("def verify(row, response):\n    return int(response.isdigit()) and 1 / int(response)\n")
    rewards = reward_groups([(row(3, "mine"), ["2", "0", "x"])])[0]
    assert rewards == [0.5, 0.0, 0.0]
    assert re.search(r"raised at .*mine.py:2: ZeroDivisionError", rewards[1].why) and not hasattr(rewards[2], "why")
    own(f"{VERIFY}def compare(row, responses): return [1 / len(text) for text in responses]\n")
    assert all("ZeroDivisionError" in reward.why for reward in reward_groups([(row(3, "mine"), ["a", ""])])[0])


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("return None if response == 'b' else 1.0", "returned None, which is no finite number"),
        ("return float('nan') if response == 'b' else 1.0", "returned nan"),
        ("return '1' if response == 'b' else 1.0", "returned '1'"),
        ("return 1.5 if response == 'b' else 1.0", "returned 1.5, which is not from 0 to 1"),
        ("return 1.0 if response == 'a' else int('x')", "raised at .*mine.py:2: ValueError"),
    ],
)
def test_a_response_without_a_reward_earns_nothing_as_long_as_others_are_judged(own, body, why):
    own(f"def verify(row, response):\n    {body}\n")
    mine = row(3, "mine")
    judged, unjudged = reward_groups([(mine, ["a", "b"])])[0]
    assert (judged, unjudged) == (1.0, 0.0) and re.search(f"mine.py .*{why}|mine.py {why}", unjudged.why)
    assert [group[0] for group in reward_groups([(mine, ["b"]), (mine, ["a"])], ["rows:1", "rows:2"])] == [0.0, 1.0]
    for groups in ([(mine, ["b", "b"])], [(mine, ["b"]), (mine, ["b"])]):
        with pytest.raises(UserError, match=rf"^rows:1: environment mine: verify of .*{why}"):
            reward_groups(groups, ["rows:1", "rows:2"])
    with pytest.raises(UserError, match=rf"^rows:1: environment mine: verify of .*{why}"):
        reward_groups([(mine, ["a", "b"])], ["rows:1"], is_trial=True)


def test_an_own_reward_that_fails_is_no_fault_of_other_rows(own):
    own("def verify(row, response): return 1 / row['words']\n")
    rewards = reward_groups([(row(0, "mine"), ["a", "b"]), (row(1, "mine"), ["a", "b"])])
    assert rewards == [[0.0, 0.0], [1.0, 1.0]] and "ZeroDivisionError" in rewards[0][1].why
    own(f"{VERIFY}def compare(row, responses): return [None] * len(responses) if row['words'] else [1.0, 0.5]\n")
    rewards = reward_groups([(row(0, "mine"), ["a", "b"]), (row(1, "mine"), ["a", "b"])])
    assert rewards == [[1.0, 0.5], [0.0, 0.0]] and "returned None" in rewards[1][0].why


def test_compare_rewards_a_group_together_and_stands_in_for_verify(own):
    verify = VERIFY.replace("1.0", "True")
    own(f"{verify}def compare(row, responses): return [len(text) for text in responses]\n")
    assert reward_groups([(row(3, "mine"), ["a", "bbb"])])[0] == [1.0, 3.0]
    assert scores([(row(3, "mine"), "a")]) == [1.0]
    for returned, says in (("[1.0]", "returned 1 rewards for 2 responses"), ("3", "returned 3 instead of a list")):
        own(f"{VERIFY}def compare(row, responses): return {returned}\n")
        with pytest.raises(UserError, match=says):
            reward_groups([(row(3, "mine"), ["a", "b"])])[0]


@pytest.fixture
def stage(recipe, tmp_path):
    """Stage rlvr1 on the example's rows."""
    return ready_stage(recipe(), tmp_path, "rlvr1", [row(number % 4 + 2) for number in range(20)])


@pytest.fixture
def job(stage):
    """Two steps of it, from a model with random weights."""
    (stage.paths.run / "checkpoints").mkdir(parents=True)
    model = stage.recipe.model.model_dump(mode="json")
    return TrainingJob(
        stage="rlvr1",
        settings=stage.settings,
        config=training_config(stage.config.values() | {"model": model}),
        train_split=stage.train_split,
        parent_model=None,
        run=stage.paths.run,
        resume_from=None,
        max_num_steps=2,
        threads=1,
        stop=StopRequest(),
        nodes=1,
        environments=own_environments(stage.recipe, "rlvr1"),
    )


def test_the_preflight_tries_it_and_names_the_row_that_it_cannot_reward(stage):
    tried = check_stage(stage)["reward_probe"]["word_count"]
    assert tried["the expected answer"] == 1.0 and tried["the prompt"] == 0.0
    stage.train_split.write_text(stage.train_split.read_text() + json.dumps(row(-1)) + "\n")
    with pytest.raises(UserError, match=r"train-split.jsonl:21: words is -1 instead of a number"):
        check_stage(stage)


def test_the_first_preflight_tries_it_on_the_rows_of_later_stages(recipe, tmp_path):
    (tmp_path / "mine.py").write_text("def verify(row, response): return None\n")
    loaded = recipe(tmp_path / "mine.py", "mine")
    taught = {"messages": [{"role": "user", "content": "say 1"}, {"role": "assistant", "content": "one"}]}
    stage = ready_stage(loaded, tmp_path / "results", "sft", [taught])
    assert refused_by_backend(stage) == []
    ready_stage(loaded, tmp_path / "results", "rlvr1", [row(3, "mine")])
    (said,) = refused_by_backend(stage)
    assert "rlvr1/train-split.jsonl:1: environment mine: verify of" in said and "returned None" in said


def test_it_travels_with_the_job_to_where_ranks_train(job, tmp_path):
    write_job(tmp_path / "job.pickle", job)
    assert read_job(tmp_path / "job.pickle").environments == {"word_count": ROOT / EXAMPLE}


@pytest.mark.slow
def test_it_is_really_trained_with_and_its_metrics_are_logged(recipe, job, tmp_path):
    pytest.importorskip("torch")
    from scripts.backends.trl.train import train_rank as train
    from scripts.evaluate.score import answer_rows
    from scripts.model.loading import fresh_model

    mine = tmp_path / "mine.py"
    metrics = "def metrics(row, response): return {'words': len(response.split())}"
    mine.write_text(f"{(ROOT / EXAMPLE).read_text()}\n\n{metrics}\n")
    loaded = recipe(mine)
    config = job.config.model_copy(update={"environments": resolve_stage(loaded, "rlvr1").environments})
    job = replace(job, config=config, environments=own_environments(loaded, "rlvr1"))
    train(job)
    steps = [json.loads(line) for line in (job.run / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    assert all(0 <= step["environment_rewards"]["word_count"] <= 1 for step in steps)
    assert all(step["own_metrics"].keys() == {"word_count: words"} for step in steps)
    assert (job.run / "checkpoints/step_2").is_dir()
    answers = answer_rows(*fresh_model(config), [job.train_split], {"max_new_tokens": 4, "temperature": 1.0, "seed": 0})
    assert len(answers) == 20 and all(it.metrics == {"words": len(it.response.split())} for it in answers)
    with pytest.raises(UserError, match="has changed since the stage was planned"):
        train(replace(job, config=job.config.model_copy(update={"environments": {"word_count": "0" * 64}})))


PRODUCTS = tables_of("own_environment")["products"]


def begun(**fields: object):
    episode = environment_factory("mine")()
    return episode, episode.reset(json.dumps(row(3, "mine") | fields))


def test_a_class_plays_rollouts_and_says_what_they_earn(own):
    own(PRODUCTS.format(reward="self.first / 10"))
    episode, seen = begun(first=4, hint=" and a hint")
    assert seen == " and a hint" and [tool.__name__ for tool in tools_of(episode)] == ["times"]
    assert episode.times(second=5) == 20 and begun(first=6)[0].times(7) == 42
    with pytest.raises(ValueError, match="no zero"):
        episode.times(second=0)
    call = {"type": "function", "function": {"name": "times", "arguments": {"second": 5}}}
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "times", "content": "20"},
        {"role": "assistant", "content": "twenty"},
    ]
    response = episode_response(messages, episode)
    assert response == "twenty" and whole_text(response) == "times(second=5)\n-> 20\ntwenty"
    assert scores([(row(3, "mine") | {"first": 4}, response)]) == [0.4]


@pytest.mark.parametrize("first", [1, 9], ids=["it sleeps", "it searches a text"])
def test_a_tool_that_does_not_return_is_given_up_and_its_rollout_cannot_be_judged(own, first):
    own(PRODUCTS.format(reward="1.0"))
    episode, _ = begun(first=4)
    for second in (first, 5):
        with pytest.raises(TimeoutError, match=r"times took more than 0.2 s"):
            episode.times(second)
    response = episode_response([{"role": "assistant", "content": ""}], episode)
    (reward,) = scores([(row(3, "mine") | {"first": 4}, response)])
    assert reward == 0 and reward.why == "times took more than 0.2 s"
    assert begun(first=4)[0].times(5) == 20


@pytest.mark.parametrize(
    ("second", "says"), [(2, "NameError: name 'undefined'"), (3, "AttributeError: 'Products' obj")]
)
def test_a_mistake_in_a_tool_is_no_answer_for_the_policy(own, second, says):
    own(PRODUCTS.format(reward="1.0"))
    episode, _ = begun(first=4)
    with pytest.raises(Exception, match=r"undefined|missing"):
        episode.times(second)
    with pytest.raises(UserError, match=rf"environment mine: times of .* raised at .*mine.py:\d+: {says}") as error:
        episode_response([{"role": "assistant", "content": ""}], episode)
    assert "(the row that asks 'say 3 of them')" in str(error.value)


@cases("own_environment.wrong", "reward", "fields", "says")
def test_what_a_class_does_wrong_is_said_before_training(own, reward, fields, says):
    own(PRODUCTS.format(reward=reward))
    sampled = {"mine": [SampledRow("split.jsonl:1", row(3, "mine") | fields)]}
    with pytest.raises(UserError, match=rf"^split.jsonl:1: environment mine: {says}"):
        try_rewards(sampled, Probe())


def test_a_class_that_rewards_by_what_was_done_is_not_tried_on_texts(own):
    own(PRODUCTS.format(reward="0.0"))
    assert try_rewards({"mine": [SampledRow("split.jsonl:1", row(3, "mine") | {"first": 1})]}, Probe()) == ({}, [])


TOOL = '    def go(self, place: str) -> str:\n        """Go.\n\n        Args:\n            place: Where.\n        """\n'
WITH_RESET = "class World:\n    def reset(self, **row): pass\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (WITH_RESET + TOOL, r"defines no function verify\(row, response\), nor a class"),
        (WITH_RESET + VERIFY, "class World has no tool"),
        (
            WITH_RESET + TOOL + WITH_RESET.replace("World", "Other") + VERIFY,
            r"defines several classes .* \(World, Other\)",
        ),
        (
            WITH_RESET + TOOL + "    def get_reward(self): return 1.0\n" + VERIFY,
            r"rewards by get_reward\(\) and by verify\(\)",
        ),
        (WITH_RESET + TOOL.replace("def", "async def") + VERIFY, "World.go is async; make it a plain method"),
        (WITH_RESET + "    def go(self, place): pass\n" + VERIFY, "World.go cannot be shown to a model: .*docstring"),
        (WITH_RESET + TOOL.replace(": str", "") + VERIFY, "World.go cannot be shown to a model: .*type hint"),
        (WITH_RESET + "    tool_timeout = 0\n" + TOOL + VERIFY, "World.tool_timeout is 0 instead of a number"),
    ],
)
def test_a_class_that_cannot_be_used_is_one_message(own, text, says):
    with pytest.raises(UserError, match=rf"^environment mine: .*mine.py: {says}"):
        own(text)


def test_processes_that_sample_together_are_refused_where_there_are_tools(recipe, tmp_path):
    (tmp_path / "mine.py").write_text(PRODUCTS.format(reward="1.0"))
    defaults = yaml.safe_load(SHORT.read_text())["defaults"]
    defaults["grpo"]["policy"]["dtensor_cfg"] = {"enabled": True}
    loaded = recipe(tmp_path / "mine.py", "mine", defaults=defaults)
    stage = ready_stage(loaded, tmp_path / "results", "rlvr1", [row(3, "mine") | {"first": 1}])
    for processes, problems in ((1, 0), (2, 1)):
        (tmp_path / "site.yaml").write_text(f"name: mine\nthreads: 1\nprocesses: {processes}\n")
        found = refused_by_backend(stage, load_site(tmp_path / "site.yaml", loaded))
        assert len(found) == problems and all("TRL plays the turns of environments with tools" in why for why in found)
