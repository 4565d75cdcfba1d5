"""The doctor on every production recipe and the sources of its release, where they are: what it says, and no more."""

import os
import re
import shutil
import subprocess
import sys

import pytest
import yaml

from scripts.backends.nemo_rl.checks.places import LEAST_IMAGE_BYTES
from scripts.backends.nemo_rl.releases import release_of
from scripts.recipe.load import load_recipe
from tests.conftest import ROOT
from tests.production import GPUS

CHECKOUTS = os.environ.get("STAGECOACH_NEMO_RL")
LATER = {"v0.7.0": ("v0.7.0", "main")}  # the releases that recipes of an earlier one are meant for as well
PRODUCTION = [
    (path.stem, release)
    for path in sorted((ROOT / "config/recipes").glob("*.yaml"))
    for named in re.findall(r"^release: (\S+)", path.read_text(), re.MULTILINE)
    for release in LATER.get(named, (named,))
]
OF_RLVR_AND_RLHF, OF_SWE = "rlvr1, rlvr2, rlvr3, rlhf", "swe1, swe2"
FINDINGS = {
    name: {("warning", OF_RLVR_AND_RLHF, 67), ("warning", OF_SWE, 67), ("warning", "swe2", 87)}
    for name in ("super3", "super3-b200", "super3-small")
}
FINDINGS |= {"ultra3": {("warning", "swe_teacher", 87)}, "lightning35-rlvr": {("warning", "rlvr", 67)}}
FINDINGS |= {"mopd-qwen3-1.7b": {("warning", "mopd", 67)}}
# its configs save asynchronously
OF_MAIN = {name: {("warning", "rlvr", 10)} for name in ("nano3", "lora-8b-megatron")}
OF_MAIN |= {"mopd-qwen3-1.7b": {("warning", "mopd", 10)}}
NO_SLURM = ("warning", "all stages", 35)

pytestmark = pytest.mark.skipif(
    CHECKOUTS is None, reason="STAGECOACH_NEMO_RL names no folder of NeMo-RL's checkouts by release"
)


@pytest.fixture
def doctor(tmp_path):
    """Run the doctor, without Slurm, where a recipe's model, images, caches and checkout are all there."""

    def run(name: str, told: str) -> tuple[int, list[str]]:
        path = tmp_path / f"{name}.yaml"
        text = (ROOT / "config/recipes" / path.name).read_text()
        path.write_text(re.sub(r"^release: .*", f"release: {told}", text, flags=re.MULTILINE))
        recipe, release = load_recipe(path), release_of(told)
        (tmp_path / "model").mkdir()
        (tmp_path / "model/config.json").write_text("{}")
        images = {*release.images, *(stage.image for stage in recipe.stages.values())}
        for image in images:
            with (tmp_path / f"{image}.sqsh").open("wb") as file:
                file.truncate(LEAST_IMAGE_BYTES)
        site = {
            "name": "here",
            "threads": 1,
            "slurm": {"partition": "batch", "gpus_per_node": GPUS.get(name, 8), "max_runtime": 1440},
            "mounts": [f"{tmp_path}:{tmp_path}"],
            "environment": {"HF_HOME": f"{tmp_path}/hub"},
            "nemo_rl": {
                "checkouts": {recipe.release: f"{CHECKOUTS}/{recipe.release}"},
                "images": {image: f"{tmp_path}/{image}.sqsh" for image in images},
                "cache": f"{tmp_path}/cache",
                "sif": f"{tmp_path}/sif",
            },
        }
        (tmp_path / "site.yaml").write_text(yaml.safe_dump(site))
        (tmp_path / "bin").mkdir()
        for program in ("git", "bash"):
            (tmp_path / "bin" / program).symlink_to(shutil.which(program))
        config = yaml.safe_load((ROOT / "config/config.yaml").read_text())
        config |= {"recipe": str(path), "site": f"{tmp_path}/site.yaml"}
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
        command = [sys.executable, "-m", "scripts.commands", "doctor", f"--config={tmp_path}/config.yaml"]
        done = subprocess.run(
            [*command, f"--model={tmp_path}/model"],
            cwd=tmp_path,
            env={"PATH": f"{tmp_path}/bin", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stderr == ""
        return done.returncode, done.stdout.splitlines()

    return run


@pytest.mark.parametrize(("name", "release"), PRODUCTION)
def test_a_shipped_recipe_on_a_right_site_has_only_the_findings_that_its_own_config_earns(doctor, name, release):
    status, (*lines, total) = doctor(name, release)
    lines = [line for line in lines if not line.startswith("note: ")]
    said = {
        re.fullmatch(r"(error|warning): ([\w, ]+): .* \(docs/traps.md, trap (\d+)\)", line).groups() for line in lines
    }
    expected = FINDINGS.get(name, set()) | {NO_SLURM} | (OF_MAIN.get(name, set()) if release == "main" else set())
    assert {(kind, stages, int(trap)) for kind, stages, trap in said} == expected, "\n".join(lines)
    assert (status, total.split(": ")[1].split(",")[0]) == (0, "0 errors")
