"""Container images: what the config may say, that Dockerfiles are pinned and clean, and that no image is half-made.

mksquashfs, bash and hadolint are the real ones, each skipped where it is not installed; uv and Apptainer are stand-ins.
"""

import difflib
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.backends.nemo_rl.images import GUARDED, PROVED, image_of, task_images, verify, verify_squashfs
from scripts.backends.nemo_rl.releases import load_releases
from scripts.errors import UserError
from tests import programs
from tests.conftest import ROOT
from tests.production import CHECKOUTS, needs_checkouts

DOCKERFILES = sorted((ROOT / "containers").glob("*.Dockerfile"))
DIGEST = "sha256:" + "a" * 64
DOCUMENT = (ROOT / "docs/images.md").read_text()


@pytest.fixture
def hadolint():
    """Run the linter, beside this Python or in PATH, on a Dockerfile."""
    beside = Path(sys.executable).with_name("hadolint")
    if not (linter := beside if beside.exists() else shutil.which("hadolint")):
        pytest.skip("hadolint is not installed (make setup)")
    return lambda path: subprocess.run([linter, path], cwd=ROOT, text=True, capture_output=True, check=False)


@pytest.fixture
def use_uv(tmp_path, monkeypatch):
    """Put a uv in front of PATH that notes its arguments, a line a call, then runs a bash text; the notes' path."""
    folder, calls = tmp_path / "bin", tmp_path / "uv.calls"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def install(body: str) -> Path:
        (folder / "uv").write_text(f"#!/bin/bash\n(printf '%q ' \"$@\"; echo) >> {calls}\n{body}\n")
        (folder / "uv").chmod(0o755)
        return calls

    return install


def test_the_document_has_the_images_of_every_release_and_builds_every_dockerfile():
    table = [[cell.strip() for cell in line.split("|")] for line in DOCUMENT.splitlines() if line.startswith("| `")]
    assert {release for cells in table if len(cells) == 6 for release in cells[4].split(", ")} >= set(load_releases())
    built = set(re.findall(r"--file (containers/\S+)", DOCUMENT))
    controller = "containers/controller.Dockerfile"  # docs/install.md: no stage trains in it
    assert built | {controller} == {str(path.relative_to(ROOT)) for path in DOCKERFILES}


# --- Dockerfiles ---


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_the_dockerfiles_are_clean_for_hadolint(path, hadolint):
    done = hadolint(path)
    assert done.returncode == 0, done.stdout


def test_hadolint_finds_what_is_wrong(tmp_path, hadolint):
    """The linter that lets ours pass does complain."""
    (tmp_path / "Dockerfile").write_text("FROM ubuntu\nRUN cd /x && pip install y\n")
    assert hadolint(tmp_path / "Dockerfile").returncode


def arguments_of(path: Path) -> dict[str, str]:
    return dict(re.findall(r"^ARG (\w+)=(\S+)$", path.read_text(), re.MULTILINE))


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_everything_from_outside_is_pinned(path):
    text, arguments = path.read_text(), arguments_of(path)
    for base in re.findall(r"^FROM (\S+)", text, re.MULTILINE):
        full = re.sub(r"\$\{(\w+)\}", lambda match: arguments[match[1]], base)
        assert re.fullmatch(r"[a-z0-9.]+/[a-z0-9._/-]+:[\w.-]*\d[\w.-]*", full) and not full.endswith(":latest")
    for package in re.findall(r'uv pip install (".*)', text):
        assert all("==" in part for part in re.findall(r'"([^"]+)"', package))
    assert not re.search(r"git clone|--branch|curl .*\| *(ba)?sh", text)
    assert re.search(r"^# syntax=docker/dockerfile:\d+\.\d+\.\d+$", text, re.MULTILINE)


def scripts_of(path: Path) -> list[str]:
    return re.findall(r"^RUN <<'EOF'\n(.*?)^EOF$", path.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_the_scripts_in_the_dockerfiles_are_bash(path):
    for script in scripts_of(path):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def run_script(path: Path, folder: Path, index: int = 0, **variables: str) -> subprocess.CompletedProcess:
    """Run a RUN instruction's script as Docker would, in a folder that stands for /opt/nemo-rl."""
    shell = json.loads(re.search(r"^SHELL (.*)$", path.read_text(), re.MULTILINE)[1])
    environment = os.environ | arguments_of(path) | {"NEMO_GYM_VENV_DIR": str(folder / "venvs")} | variables
    return subprocess.run(
        [*shell, scripts_of(path)[index]], cwd=folder, env=environment, text=True, capture_output=True, check=False
    )


GYM = 'd="$NEMO_GYM_VENV_DIR/responses_api_agents/swe_agents/.venv"; mkdir -p "$d/bin" "$d/lib/vllm-{vllm}.dist-info"; touch "$d/bin/python"; cat "$UV_OVERRIDE"'


def test_the_prefetching_script_overrides_the_judges_vllm_with_the_images_own(tmp_path, use_uv):
    """The RUN script itself, with a stand-in for uv that makes one environment and shows the override."""
    calls = use_uv(GYM.format(vllm="0.20.0"))
    arch = os.uname().machine
    done = run_script(ROOT / "containers/prefetched-venvs.Dockerfile", tmp_path, WHEEL_ARCH=arch)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "vllm @ https://github.com/vllm-project/vllm/releases/download/v0.20.0/"
        f"vllm-0.20.0-cp38-abi3-manylinux_2_35_{arch}.whl\n"
    )
    assert calls.read_text().splitlines()[0].split()[-1] == "examples/nemo_gym/prefetch_super_all_envs.yaml"


@pytest.mark.parametrize(
    ("uv", "variables", "message"),
    [
        (GYM.format(vllm="0.17.0"), {}, "another vLLM than 0.20.0"),
        ("exit 1", {}, "uv run"),
        ("true", {}, "test -n ''"),
        (GYM.format(vllm="0.20.0"), {"WHEEL_ARCH": "riscv"}, "WHEEL_ARCH=riscv, but this is"),
    ],
)
def test_a_prefetch_that_went_wrong_ends_the_build(tmp_path, use_uv, uv, variables, message):
    use_uv(uv)
    (tmp_path / "venvs").mkdir()
    variables = {"WHEEL_ARCH": os.uname().machine} | variables
    done = run_script(ROOT / "containers/prefetched-venvs.Dockerfile", tmp_path, **variables)
    assert done.returncode != 0
    assert message in done.stderr


@pytest.mark.parametrize(("index", "ends_well"), [("cu129", True), ("cu126", False)])
def test_the_swe_script_takes_the_releases_own_pytorch_index(tmp_path, use_uv, index, ends_well):
    use_uv(GYM.format(vllm="0.13.0").removesuffix('; cat "$UV_OVERRIDE"'))
    (tmp_path / "pyproject.toml").write_text(f'[[tool.uv.index]]\nname = "pytorch-{index}"\n')
    done = run_script(ROOT / "containers/super-v3-swe.Dockerfile", tmp_path)
    assert (done.returncode == 0) is ends_well, done.stderr
    assert ends_well or "pyproject.toml has no index pytorch-cu129" in done.stderr


# --- .sqsh ---


@pytest.fixture
def sqsh(tmp_path):
    """A real squashfs image."""
    if not shutil.which("mksquashfs"):
        pytest.skip("mksquashfs is not installed (apt-get install squashfs-tools)")
    (tmp_path / "content").mkdir()
    (tmp_path / "content/data").write_bytes(os.urandom(300_000))
    subprocess.run(["mksquashfs", tmp_path / "content", tmp_path / "real.sqsh", "-quiet", "-no-progress"], check=True)
    return tmp_path / "real.sqsh"


def test_a_whole_sqsh_passes_and_one_cut_short_does_not(sqsh):
    assert verify_squashfs(sqsh) == sqsh.stat().st_size
    for size, message in ((sqsh.stat().st_size - 5000, "cut short"), (100, "cut short"), (50, "not a squashfs")):
        os.truncate(sqsh, size)
        with pytest.raises(UserError, match=message):
            verify_squashfs(sqsh)


def test_a_damaged_superblock_and_another_file_are_refused(sqsh):
    content = bytearray(sqsh.read_bytes())
    content[64:72] = b"\xff" * 7 + b"\x00"
    sqsh.write_bytes(content)
    with pytest.raises(UserError, match="superblock is damaged"):
        verify_squashfs(sqsh)
    sqsh.write_bytes(b"<html>please log in</html>" * 10)
    with pytest.raises(UserError, match="not a squashfs image"):
        verify_squashfs(sqsh)


def test_a_file_is_recorded_with_its_pin_and_compared_from_then_on(sqsh):
    content, source = sqsh.read_bytes(), f"docker://nvcr.io#nvidia/nemo-rl:v0.7.0@{DIGEST}"
    done = programs.run("scripts.backends.nemo_rl.images", "verify", sqsh, source)
    assert done.returncode == 0, done.stderr
    record = json.loads(Path(f"{sqsh}.json").read_text())
    hashed = hashlib.sha256(content).hexdigest()
    assert record == {"source": source, "digest": DIGEST, "bytes": len(content), "sha256": hashed}
    assert verify(sqsh, source) == record
    with pytest.raises(UserError, match=r"is not what .* describes"):
        verify(sqsh, f"{source}-other")
    sqsh.write_bytes(content[:200_000] + bytes([content[200_000] ^ 1]) + content[200_001:])
    with pytest.raises(UserError, match=r"is not what .* describes"):
        verify(sqsh, source)


# --- task images ---

VERIFIED, SWE_GYM, R2E = "princeton-nlp/SWE-bench_Verified", "SWE-Gym/SWE-Gym", "R2E-Gym/R2E-Gym-Subset"
SOURCES = {
    ("astropy__astropy-12907", VERIFIED): (
        "swebench_sweb.eval.x86_64.astropy_1776_astropy-12907.sif",
        "docker://swebench/sweb.eval.x86_64.astropy_1776_astropy-12907",
    ),
    ("Project-MONAI__MONAI-3690", SWE_GYM): (
        "swegym_sweb.eval.x86_64.Project-MONAI_s_MONAI-3690.sif",
        "docker://xingyaoww/sweb.eval.x86_64.project-monai_s_monai-3690",
    ),
    ("aio-libs__AIOHTTP-0af3c1", R2E): ("r2egym_aiohttp_final_0af3c1.sif", "docker://namanjain12/aiohttp_final:0af3c1"),
}


def swe_row(instance: str = "astropy__astropy-12907", dataset: str = VERIFIED, agent: str = "swe_agents_train") -> dict:
    """A row as Gym publishes them, with the fields that name its image."""
    metadata = {"instance_id": instance, "dataset_name": dataset, "split": "test", "instance_dict": "{}"}
    return {"responses_create_params": {"input": [], "metadata": metadata}, "agent_ref": {"name": agent}}


@pytest.fixture
def split(write_rows):
    return lambda *rows: write_rows("train-split.jsonl", rows)


@pytest.mark.parametrize(("instance", "expected"), SOURCES.items(), ids=["Verified", "SWE-Gym", "R2E-Gym"])
def test_the_image_of_an_instance_is_the_one_whose_file_gym_finds_by_its_exact_name(instance, expected):
    """Gym's lookup: the id as it is, then __ as _1776_ and _s_, each also in lower case, in three name patterns."""
    assert image_of(swe_row(*instance), "rows:1") == expected
    identity, dataset = instance
    tried = [identity, *(identity.replace("__", joint) for joint in ("_1776_", "_s_"))]
    tried += [name.lower() for name in tried[1:]]
    if dataset == R2E:
        rest = identity.split("__")[1]
        repository, commit = rest.split("-", 1)
        tried.insert(0, f"{repository.lower()}_final_{commit}")
    patterns = ("swebench_sweb.eval.x86_64.{}.sif", "swegym_sweb.eval.x86_64.{}.sif", "r2egym_{}.sif")
    assert expected[0] in {pattern.format(name) for pattern in patterns for name in tried}


def test_the_rows_of_other_agents_need_no_image_and_an_instance_counts_once(split):
    path = split(swe_row(), swe_row("x", "x", agent="math_with_judge_simple_agent"), swe_row(agent="swe_agents_val"))
    file, image = SOURCES["astropy__astropy-12907", VERIFIED]
    assert {name: source for name, (source, _) in task_images([path, path]).items()} == {file: image}
    ask = ("scripts.backends.nemo_rl.images", "tasks", path, "--missing-in", path.parent)
    assert programs.run(*ask).stdout == f"{file}\t{image}\n"
    (path.parent / file).touch()
    assert programs.run(*ask).stdout == ""


def without(key: str) -> dict:
    row = swe_row()
    del row["responses_create_params"]["metadata"][key]
    return row


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (without("instance_id"), r"train-split.jsonl:2: .*metadata needs a dataset_name and an instance_id"),
        (without("dataset_name"), r"train-split.jsonl:2: .*metadata needs a dataset_name"),
        ({"agent_ref": {"name": "swe_agents_train"}}, r"train-split.jsonl:2: .*metadata needs a dataset_name"),
        (swe_row(dataset="nv-internal-1"), r"train-split.jsonl:2: dataset_name 'nv-internal-1' is none of"),
        (swe_row("../../etc/x__y-1"), r"train-split.jsonl:2: .*, not '../../etc/x__y-1'"),
        (swe_row("a__b"), r"train-split.jsonl:2: .*, not 'a__b'"),
        ({}, r"train-split.jsonl:2: no agent_ref.name"),
    ],
)
def test_a_row_that_names_no_image_is_an_error_with_its_line(split, row, message):
    with pytest.raises(UserError, match=message):
        task_images([split(swe_row(), row)])


def test_a_blend_without_swe_rows_is_an_error(split):
    with pytest.raises(UserError, match="no task image is needed; is this the swe2 blend"):
        task_images([split(swe_row(agent="mcqa_simple_agent"))])


# --- task images, tried ---

# In place of Apptainer: the image's repository in a folder with this machine's own, which a process of its own namespaces
# takes for /. Real are unsquashfs, the namespaces, git and pytest.
APPTAINER = """#!/bin/bash
while [ "$1" != --bind ]; do options="$options $1"; shift; done
proof=${2%%:*} image=$3; shift 3
[[ $options != *--pid* || -n "$UNGUARDED" ]] || own="--pid --fork --mount-proc=$ROOTFS/proc"
mkdir -p "$ROOTFS"
for folder in /*; do
    [ -d "$folder" ] && mkdir -p "$ROOTFS$folder" || continue
    mounts="$mounts mount --rbind $folder $ROOTFS$folder;"
done
rm -rf "$ROOTFS/testbed"; mkdir -p "$ROOTFS/proof"
unsquashfs -quiet -no-progress -o 4096 -d "$ROOTFS/testbed" "$image" > /dev/null
exec unshare --mount bash -c "$mounts mount --bind $proof $ROOTFS/proof
    exec unshare $own chroot $ROOTFS \\"\\$@\\"" apptainer "$@"
"""
WRONG, RIGHT = "def add(a, b):\n    return a - b\n", "def add(a, b):\n    return a + b\n"
TEST = "from sums import add\n\n\ndef test_add():\n    assert add(2, 2) == 4\n"


def diff(name: str, old: str, new: str) -> str:
    before = "/dev/null" if not old else f"a/{name}"
    kind = "" if old else "new file mode 100644\n"
    lines = difflib.unified_diff(old.splitlines(True), new.splitlines(True), before, f"b/{name}")
    return f"diff --git a/{name} b/{name}\n{kind}{''.join(lines)}"


@pytest.fixture
def proved(tmp_path, monkeypatch, write_rows):
    """Prove the image of a row, made of a repository; `spoil` it by a shell's text, `facts` of the row, its machine."""
    if os.geteuid() or not all(map(shutil.which, ("mksquashfs", "unsquashfs", "unshare"))):
        pytest.skip("mounts need root, and images squashfs-tools")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/apptainer").write_text(APPTAINER)
    (tmp_path / "bin/apptainer").chmod(0o755)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("ROOTFS", str(tmp_path / "rootfs"))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}")
    git = "git -c user.name=n -c user.email=e"

    def prove(spoil: str = "true", machine: bytes = b"02", **facts: object) -> subprocess.CompletedProcess:
        repository = tmp_path / "repository"
        repository.mkdir()
        (repository / "sums.py").write_text(WRONG)
        made = f"git init -q -b main . && git add . && {git} commit -qm base && base=$(git rev-parse HEAD) && {spoil}"
        shell = subprocess.run(
            ["bash", "-euc", f'git() {{ command {git} "$@"; }}; {made}; echo $base'],
            cwd=repository,
            check=True,
            capture_output=True,
            text=True,
        )
        told = {"base_commit": shell.stdout.split()[-1], "FAIL_TO_PASS": json.dumps(["test_sums.py::test_add"])}
        told |= {"patch": diff("sums.py", WRONG, RIGHT), "test_patch": diff("test_sums.py", "", TEST)} | facts
        row = swe_row()
        row["responses_create_params"]["metadata"]["instance_dict"] = json.dumps(told)
        (sif := tmp_path / "sif").mkdir()
        subprocess.run(["mksquashfs", repository, tmp_path / "part", "-quiet", "-no-progress"], check=True)
        header = b"#!/usr/bin/env run-singularity\n\0SIF_MAGIC\x0001\x00" + machine
        file, _ = SOURCES["astropy__astropy-12907", VERIFIED]
        (sif / file).write_bytes(header.ljust(4096, b"\0") + (tmp_path / "part").read_bytes())
        split = write_rows("train-split.jsonl", [row])
        return programs.run("scripts.backends.nemo_rl.images", "prove", split, "--sif", sif)

    return prove


def test_an_image_is_proved_in_which_the_gold_patch_alone_pays(proved, tmp_path):
    done = proved()
    assert (done.returncode, done.stdout.count("astropy-12907.sif: proved\n")) == (0, 1), done.stderr
    assert json.loads((tmp_path / "sif" / PROVED).read_text()) == [SOURCES["astropy__astropy-12907", VERIFIED][0]]


UNTRIED = {"FAIL_TO_PASS": []}
FIX = f"printf '{RIGHT}' > sums.py; git commit -qam fix".replace("\n", "\\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "facts", "says"),
    [
        (
            f"git checkout -qb fix; {FIX}; git checkout -q main",
            UNTRIED,
            "git log --all --reflog --not HEAD has commits",
        ),
        (f"{FIX}; git tag fix; git reset -q --hard $base", UNTRIED, "git log --all --reflog --not HEAD has commits"),
        (f"{FIX}; git reset -q --hard $base", UNTRIED, "git log --all --reflog --not HEAD has commits"),
        (FIX, {}, "the empty patch pays 1"),
        ("true", {"patch": diff("other.py", "", "pass\n")}, "the gold patch pays 0"),
        ("true", UNTRIED | {"base_commit": "0" * 40}, "its HEAD does not come from the row's base_commit"),
        ("true", UNTRIED | {"machine": b"04"}, "is for aarch64, but this node is x86_64 (docs/traps.md, trap 88)"),
    ],
    ids=["branch", "tag", "reflog", "mended", "gold", "base", "machine"],
)
def test_an_image_that_would_spoil_rewards_is_named_with_the_reason(proved, tmp_path, spoil, facts, says):
    if platform.machine() != "x86_64":
        pytest.skip("the images are for x86_64")
    done = proved(spoil, **facts)
    assert done.returncode == 1 and f"astropy-12907.sif: {says}" in done.stderr, (done.stdout, done.stderr)
    assert not (tmp_path / "sif" / PROVED).exists()


def test_a_container_without_processes_of_its_own_is_named(proved, monkeypatch):
    monkeypatch.setenv("UNGUARDED", "1")
    assert "its processes may end the node's (docs/traps.md, trap 86)" in proved(**UNTRIED).stderr


def test_rewards_by_other_tests_than_pytests_are_said_not_to_be_tried(proved):
    done = proved(FAIL_TO_PASS=["test_add (sums.Test)"])
    assert done.returncode == 0 and "proved; rewards not tried" in done.stdout


@needs_checkouts
@pytest.mark.parametrize("release", ["v0.6.0", "v0.7.0", "super-v3", "main"])
def test_the_releases_gym_runs_task_images_with_these_options(release):
    agents = Path(CHECKOUTS, release, "3rdparty/Gym-workspace/Gym/responses_api_agents/swe_agents")
    if not agents.is_dir():
        pytest.skip("the checkout was cloned without Gym")
    text = "".join(path.read_text() for path in agents.glob("*.py"))
    assert re.findall(r"apptainer exec (--[^\"{]*) \"", text) == [" ".join(GUARDED)]
    assert "git gc" not in text and "reflog expire" not in text, "it leaves the image's history as it is"
