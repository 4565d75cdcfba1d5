"""A stage goes on from its newest checkpoint after an environment's file was corrected, and tells so."""

import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from scripts.commands.plan import Planned
from scripts.errors import UserError
from scripts.files import read_json, write_json
from scripts.recipe.load import load_recipe, load_site
from scripts.recipe.resolve import config_text, resolve_stage
from scripts.recipe.yaml_file import leaves
from scripts.records import Facts, Reach
from scripts.report.chain import chain_text, read_chain
from scripts.report.verify import verify
from scripts.stage.amending import amend, undo
from scripts.stage.consistency import of_checkpoint
from scripts.stage.estimate import estimate
from scripts.stage.owner import hold
from scripts.stage.progress import read_log
from scripts.stage.provenance import record_of
from scripts.stage.publish import publish_checkpoint
from scripts.stage.rule_settings import settings_files
from scripts.stage.stage import Stage
from scripts.stage.state import States
from scripts.stage.store import facts_in, identity_of
from scripts.stage.training_folder import TrainingFolder
from tests.conftest import ROOT, SHORT
from tests.stages import as_of, checkpoint, open_folder, ready_stage
from tests.unit.test_store import fill, here, killed_at, log, save  # noqa: F401  (here: a fixture)

BECAUSE = "its division failed on an empty answer"
PROMPT = {
    "agent_ref": {"type": "responses_api_agents", "name": "mine"},
    "responses_create_params": {"input": "Is 3 odd?"},
    "words": 3,
}


def write_environment(text: str) -> None:
    """Write the user's environment, which returns this."""
    Path("mine.py").write_text(f"def verify(row, response): return {text}\n")


def stage_of(**changes: object) -> Stage:
    """A stage of 12 steps, rewarded by the user's environment, with `changes` of its settings."""
    short = yaml.safe_load(SHORT.read_text())
    settings = {
        "algorithm": "grpo",
        "blend": "rlvr1",
        "checkpointing": {"save_period": 2},
        "grpo": {"max_num_steps": 12},
    }
    recipe = {
        "name": "amended",
        "seed": 3,
        "source": {"kind": "folder", "path": "."},
        "model": short["model"],
        "evaluation": short["evaluation"],
        "environments": {"mine": "mine.py", "other": "other.py"},
        "blends": {"rlvr1": {"holdout": 1, "environments": ["mine", "other"]}},
        "defaults": short["defaults"],
        "stages": {"rlvr1": settings | changes},
    }
    Path("other.py").write_text("def verify(row, response): return 0.5\n")
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe))
    loaded = load_recipe(Path("recipe.yaml"))
    stage = replace(ready_stage(loaded, Path("results/a"), "rlvr1", [PROMPT] * 8), root=Path("results"))
    stage.paths.directory.mkdir(exist_ok=True)
    stage.paths.config.write_text(config_text(stage.config.values()))
    return stage


@pytest.fixture
def stage():
    """The stage after its environment was corrected, whose training failed at step 8."""
    write_environment("1 / len(response)")
    run = fill(open_folder(stage_of()), 2, 4, 6, 8)
    log(run, [9])
    TrainingFolder(run).note_reach(8, Reach(12))
    write_environment("1 / max(1, len(response))")
    return stage_of()


def state_of(stage: Stage):
    """Where the stage stands, from files alone."""
    return States(stage.recipe, stage.results, root=stage.root).of(stage.name)


def planned_words(stage: Stage) -> str:
    """What `plan` tells of the stage."""
    state, site = state_of(stage), load_site(ROOT / "config/sites/laptop.yaml", stage.recipe)
    return " ".join(Planned(state, estimate(site, stage, state.left), 60).words())


def test_a_training_that_differs_in_an_environments_file_is_gone_on_from(stage):
    before = stage.paths.run
    amendment = amend(stage, BECAUSE)
    amended = replace(stage)
    folder = Path("results/store", amended.identity)
    assert amended.identity == amendment["identity"] not in (before.name, stage.identity)
    assert amended.facts == stage.facts | {"amended": {"from": before.name, "step": 8}}
    assert amended.paths.run == folder and [each.step for each in TrainingFolder(folder).checkpoints] == [2, 4, 6, 8]
    assert TrainingFolder(folder).newest_checkpoint().step == 8
    linked, of_before = (checkpoint(run, 8) / "model.safetensors" for run in (folder, before))
    assert linked.samefile(of_before)
    assert [it["step"] for it in read_log(folder / "metrics.jsonl")] == [*range(1, 9)]
    assert [(it["from"], it["to"], it["outcome"]) for it in TrainingFolder(folder).attempts] == [(0, 8, "amended")]
    assert TrainingFolder(folder).noted_reach(8) == Reach(12)
    assert facts_in(read_json(folder / "identity.json")) == amended.facts


def test_a_second_call_changes_nothing(stage):
    amend(stage, BECAUSE)
    before = stage.paths.amended.read_bytes()
    assert amend(replace(stage), "another reason")["because"] == BECAUSE
    assert stage.paths.amended.read_bytes() == before


def test_plan_names_the_command_and_then_the_step(stage):
    words = planned_words(stage)
    assert "trains again" not in words and "12 of 12" in words
    assert (
        "step 8 was reached before environments.mine changed: "
        '`stagecoach amend rlvr1 --because "..."` goes on from there'
    ) in words
    amend(stage, BECAUSE)
    words = planned_words(replace(stage))
    assert words.startswith("resumes at step 8 4 of 12") and "stagecoach amend" not in words


def test_without_the_link_to_its_folder_an_amended_stage_still_goes_on_from_the_step(stage):
    amend(stage, BECAUSE)
    amended = replace(stage)
    shutil.rmtree(amended.training.path)
    assert (state_of(amended).state, state_of(amended).start) == ("unfinished", 8)
    assert TrainingFolder(open_folder(amended)).newest_step == 8


def test_a_stage_without_an_amendment_has_the_identity_that_it_had(stage):
    assert "amended" not in stage.facts and stage.identity == identity_of(stage.own_facts)
    assert "amended" in Facts.__annotations__
    amend(stage, BECAUSE)
    undo(replace(stage))
    assert not stage.paths.amended.exists() and replace(stage).identity == stage.identity


def test_what_was_undone_trains_from_the_start_and_may_be_amended_again(stage):
    first = amend(stage, BECAUSE)
    assert undo(replace(stage)) == first
    assert TrainingFolder(open_folder(replace(stage))).newest_step == 0
    with pytest.raises(UserError, match="is not amended as it is now"):
        undo(replace(stage))
    again = amend(replace(stage), "a second thought")
    assert (again["identity"], again["because"]) == (first["identity"], "a second thought")


def test_snakemake_comes_to_know_of_an_amendment_and_of_its_end(stage):
    def settings() -> str:
        return settings_files(stage.recipe, stage.results)[stage.results / "settings/train/rlvr1.json"].text

    before = settings()
    amend(stage, BECAUSE)
    assert settings() != before
    undo(replace(stage))
    assert settings() == before


def test_an_edit_after_it_is_told_and_amended_from_the_amended(stage):
    first = amend(stage, BECAUSE)
    save(replace(stage).training.path, 10)
    write_environment("0.5")
    edited = stage_of()
    assert edited.amendment is None and "step 10 was reached before environments.mine changed" in planned_words(edited)
    second = amend(edited, "half is enough")
    assert (second["from"], second["step"]) == (first["identity"], 10)
    stands = replace(edited)
    record = record_of(stands, 10)
    assert [each["because"] for each in record["amended"]] == [BECAUSE, "half is enough"]
    write_environment("1 / max(1, len(response))")
    assert stage_of().identity == first["identity"], "the edit taken back, the first amendment is in force"
    write_environment("1 / len(response)")
    assert stage_of().identity == first["from"], "what was trained at first stays trainable"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"policy": {"optimizer": {"lr": 0.5}}}, ["policy.optimizer.lr 0.001 -> 0.5"]),
        ({"loss_fn": {"reference_policy_kl_penalty": 0.02}}, ["loss_fn.reference_policy_kl_penalty 0.0 -> 0.02"]),
        ({"grpo": {"max_num_steps": 14}}, ["grpo.max_num_steps 12 -> 14"]),
    ],
)
def test_a_setting_is_amended_with_both_values_in_the_record(stage, changes, told):
    changed = stage_of(**changes)
    before = stage.paths.run
    key = told[0].partition(" ")[0]
    words = planned_words(changed)
    assert f"step 8 was reached before environments.mine and {key} changed" in words, words
    assert f"{changed.planned} of {changed.planned}" in words
    amendment = amend(changed, BECAUSE)
    assert amendment["changed"] == ["environments.mine", *told]
    amended = replace(changed)
    assert (amended.facts["amended"], amended.planned) == ({"from": before.name, "step": 8}, changed.planned)
    assert planned_words(amended).startswith(f"resumes at step 8 {changed.planned - 8} of {changed.planned}")
    assert record_of(amended, 12)["amended"][0]["changed"] == amendment["changed"]
    write_environment("1 / len(response)")
    unamended = stage_of()
    assert (unamended.identity, unamended.amendment) == (before.name, None), "what was trained at first stays trainable"


def test_an_amended_setting_that_was_undone_is_amended_again(stage):
    changed = stage_of(policy={"optimizer": {"lr": 0.5}})
    first = amend(changed, BECAUSE)
    fill(replace(changed).training.path, 12)
    undo(replace(changed))
    again = amend(replace(changed), "a second thought")
    assert (again["identity"], again["step"], again["changed"]) == (first["identity"], 8, first["changed"])


def test_a_pin_is_amended(stage, monkeypatch):
    pinned = dict(stage.config.release)
    monkeypatch.setattr("scripts.backends.trl.sampler.pinned_versions", lambda *_: pinned | {"trl": "9.9"})
    assert amend(stage_of(), BECAUSE)["changed"] == ["environments.mine", f"release.trl {pinned['trl']} -> 9.9"]


def test_a_training_that_is_to_be_longer_goes_on_from_its_last_step(stage):
    fill(stage.paths.run, 12)
    write_environment("1 / len(response)")
    longer = stage_of(grpo={"max_num_steps": 14})
    assert amend(longer, "it still learns")["step"] == 12
    assert planned_words(replace(longer)).startswith("resumes at step 12 2 of 14")


OTHER_STEPS = "the checkpoint's place in the rows is counted in steps of the other size"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"seed": 4}, "seed 3 -> 4 (the order of the rows and all random numbers follow from it)"),
        ({"grpo": {"num_prompts_per_step": 2}}, f"grpo.num_prompts_per_step 4 -> 2 ({OTHER_STEPS})"),
        ({"data": {"shuffle": True}}, "data.shuffle None -> True (the rows would come in another order"),
        ({"policy": {"max_total_sequence_length": 48}}, "policy.max_total_sequence_length 64 -> 48 (it decides which"),
        (
            {"policy": {"optimizer": {"name": "adamw_torch"}}},
            "policy.optimizer.name None -> adamw_torch (the checkpoint",
        ),
    ],
)
def test_what_a_checkpoint_cannot_carry_is_refused_with_the_key_and_the_reason(stage, changes, told):
    changed = stage_of(**changes)
    with pytest.raises(UserError, match=r"^rlvr1: differs from .* in what may not be amended: ") as error:
        amend(changed, BECAUSE)
    assert told in str(error.value) and "environments.mine" not in str(error.value)
    assert not changed.paths.amended.exists() and "stagecoach amend" not in planned_words(changed)


def test_every_setting_of_a_config_may_be_amended_or_says_why_not():
    for recipe in sorted((ROOT / "config/recipes").glob("*.yaml")):
        loaded = load_recipe(recipe)
        for name in loaded.stages:
            config = resolve_stage(loaded, name)
            may = {key for key, _ in leaves(config.values()) if not config.why_not_amended(key)}
            is_trained = config.kind is not None
            assert any(key.startswith("release.") for key in may) and bool(may - {*config.release}) == is_trained
            assert not {"seed", "algorithm", "backend"} & may


@pytest.mark.parametrize("split", ["train", "validation"])
def test_rows_may_not_be_amended(stage, split):
    described = read_json(stage.manifest)
    described[split]["sha256"] = "1" * 64
    write_json(stage.manifest, described)
    with pytest.raises(UserError, match="training split" if split == "train" else "validation split"):
        amend(replace(stage), BECAUSE)
    assert not stage.paths.amended.exists()


def test_a_config_that_is_not_what_was_trained_is_refused(stage):
    config = stage.paths.run / "config.yaml"
    config.write_text(config.read_text().replace("max_num_steps: 12", "max_num_steps: 11"))
    with pytest.raises(UserError, match=r"config\.yaml, which is not the config that was trained"):
        amend(stage, BECAUSE)


def test_a_training_without_steps_left_is_refused(stage):
    fill(stage.paths.run, 12)
    assert "stagecoach amend" not in planned_words(stage)
    with pytest.raises(UserError, match="has reached step 12 of 12, so no step is left"):
        amend(stage, BECAUSE)


def test_nothing_is_amended_where_nothing_differs_or_nothing_was_trained():
    write_environment("1.0")
    stage = stage_of()
    with pytest.raises(UserError, match="no training differs from it in what may be amended alone"):
        amend(stage, BECAUSE)
    open_folder(stage)
    write_environment("0.5")
    with pytest.raises(UserError, match="has no checkpoint"):
        amend(stage_of(), BECAUSE)


@pytest.mark.parametrize("because", ["", " \n", "the key hf_" + "a" * 34])
def test_the_reason_is_words_without_a_credential(stage, because):
    with pytest.raises(UserError, match=r"^--because: "):
        amend(stage, because)


def test_a_damaged_checkpoint_is_not_gone_on_from(stage):
    (checkpoint(stage.paths.run, 8) / "model.safetensors").write_bytes(b"WEIGHTS of step 8")
    with pytest.raises(UserError, match=r"step_8: model\.safetensors has the right size but other content"):
        amend(stage, BECAUSE)
    assert not stage.paths.amended.exists()


def test_a_training_at_work_is_not_gone_on_from(stage):
    with hold(TrainingFolder(stage.paths.run).owner_file), pytest.raises(UserError, match="is at work here"):
        amend(stage, BECAUSE)


def test_a_start_that_is_gone_is_named_with_the_way_out(stage):
    run = stage.paths.run
    amend(stage, BECAUSE)
    shutil.rmtree(replace(stage).training.path)
    shutil.rmtree(run)
    with pytest.raises(UserError, match=r"step_8: is not there, .*stagecoach amend rlvr1 --undo"):
        open_folder(replace(stage))


def test_a_stage_that_started_from_the_start_meanwhile_is_still_amended(stage):
    save(open_folder(stage), 2)
    assert amend(stage, BECAUSE)["step"] == 8
    save(replace(stage).training.path, 10)
    undo(replace(stage))
    for step in (4, 6, 8):
        save(stage.training.path, step)
    with pytest.raises(UserError, match="its own training is at step 8"):
        amend(replace(stage), BECAUSE)


def test_record_and_lineage_tell_step_environment_and_reason(stage):
    amend(stage, BECAUSE)
    amended = replace(stage)
    fill(amended.training.path, 12)
    publish_checkpoint(amended.training.checkpoints[-1], amended.paths.ckpt, record_of(amended, 12))
    record = read_json(amended.paths.record)
    assert record["facts"]["amended"] == {"from": record["amended"][0]["from"], "step": 8}
    assert record["trained_by"][0]["steps"][0] == 1
    chain = read_chain(amended.paths.ckpt)
    told = f"amended at step 8 of 12: environments.mine changed, because {BECAUSE}"
    assert told in chain_text(chain)
    assert [line for line in verify(chain).problems if "record.json: missing" not in line] == []
    assert [*of_checkpoint(amended.paths)] == []
    record["amended"][0]["step"] = 6
    write_json(amended.paths.record, record)
    assert ["its facts have another amendment than it tells of" in line for line in of_checkpoint(amended.paths)] == [
        True
    ]


def test_an_earlier_checkpoint_of_the_stage_is_amended_with_it(stage):
    amend(stage, BECAUSE)
    assert as_of(replace(stage), 10).identity == replace(stage).identity


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_the_stage_as_it_was_or_amended(stage, tmp_path_factory):
    before = stage.paths.run
    kept = tmp_path_factory.mktemp("kept") / "results"  # not in the project, whose folder is the source of the rows
    shutil.copytree("results", kept, symlinks=True)
    for call in range(1, 1000, 7):
        status = killed_at(call, lambda: amend(replace(stage), BECAUSE))
        assert all(
            each.damage() is None for run in Path("results/store").glob("*") for each in TrainingFolder(run).checkpoints
        )
        assert TrainingFolder(before).newest_step == 8
        found = replace(stage)
        assert state_of(found).state == ("unfinished" if found.amendment else "stale")
        if status == 0:
            break
        assert status == -signal.SIGKILL
        assert amend(replace(stage), BECAUSE)["step"] == 8
        folder = replace(stage).training.path
        assert [each.step for each in TrainingFolder(folder).checkpoints] == [2, 4, 6, 8] and TrainingFolder(
            folder
        ).newest_checkpoint().step == 8
        assert [it["step"] for it in read_log(folder / "metrics.jsonl")] == [*range(1, 9)]
        left = [path for path in Path("results").rglob("*") if path.name.startswith(".") or path.name == "owner.json"]
        assert [path for path in left if path != TrainingFolder(before).owner_file] == [], (
            "a dead lock of the other folder stops nobody"
        )
        shutil.rmtree("results")
        shutil.copytree(kept, "results", symlinks=True)
    assert call > 50
