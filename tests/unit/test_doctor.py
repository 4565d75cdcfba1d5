"""What the doctor says of the shipped recipes on the shipped sites: their paths are nobody's, and nothing else is wrong."""

import pytest

from tests import programs


@pytest.mark.parametrize(("recipe", "site"), [("super3", "h100"), ("super3-b200", "b200")])
def test_on_its_site_only_paths_are_missing_and_the_note_is_told(tmp_path, recipe, site):
    config = tmp_path / "config.yaml"
    config.write_text(
        f"recipe: config/recipes/{recipe}.yaml\nsite: config/sites/{site}.yaml\nresults: /lustre/results\n"
    )
    out = programs.run("scripts.commands.__main__", "doctor", "--config", config, "--model", "/lustre/sft").stdout
    assert "note: Published data are a part of what the released model learnt from" in out
    assert out.index("note: ") > out.rindex("(docs/traps.md, trap ")
    for line in out.splitlines():
        missing = ("no ray.sub there", "no such image", "no config.json there", "all stages", "was tried; run some")
        assert line.startswith(("note: ", "6 stages: ")) or any(it in line for it in missing), line


@pytest.mark.parametrize(("recipe", "status"), [("super3", 0), ("nano3", 1)])
def test_a_plan_that_snakemake_would_refuse_fails(recipe, status, tmp_path):
    """As they come, Super's recipe downloads its data, and Nano's names a folder that is to be filled in."""
    config = tmp_path / "config.yaml"
    config.write_text(f"recipe: config/recipes/{recipe}.yaml\nsite: config/sites/h100.yaml\nresults: {tmp_path}/made\n")
    done = programs.run("scripts.commands.__main__", "plan", "--config", config)
    assert done.returncode == status == done.stdout.count("Snakemake will refuse all of it: /path/to/nano3_blends")


def test_the_plan_ends_with_the_note(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(f"recipe: config/recipes/omni3.yaml\nsite: config/sites/h100.yaml\nresults: {tmp_path}/results\n")
    out = programs.run("scripts.commands.__main__", "plan", "--config", config).stdout
    assert out.splitlines()[-1].startswith("note: The data of 3 of the 25 environments that the released model learnt")
