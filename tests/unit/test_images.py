"""Container images: what the config may say, that Dockerfiles are pinned and clean, and that no image is half-made.

mksquashfs, unsquashfs, git, bash, hadolint and enroot are the real ones, each skipped where it is not installed. Docker
and Apptainer cannot run on a test machine: small programs stand in for them that write down their command line and
environment and leave behind what the real ones would.
"""

import base64
import gzip
import hashlib
import http.server
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

import pytest

from scripts.errors import UserError
from scripts.images.build import build_image, clone
from scripts.images.programs import require, require_buildx
from scripts.images.settings import Images, load_images
from scripts.images.sif import TaskImage, image_of, images_of, verify_sif
from scripts.images.squash import check, enroot_uri, find_image, import_image, verify_squashfs
from scripts.images.table import with_table
from tests import programs
from tests.conftest import ROOT

CONFIG = ROOT / "config/images.yaml"
IMAGES = load_images(CONFIG)
DOCKERFILES = sorted((ROOT / "containers").glob("*.Dockerfile"))
DIGEST = "sha256:" + "a" * 64

# A SIF file with one small data object, written by the SIF library (github.com/sylabs/sif 2.8.3).
SIF = gzip.decompress(
    base64.b64decode(
        "H4sIAAAAAAACA+3XvUrEUBAG0ImIxRZiYSmoWEviPoE/oGxhJVjYiMKqwRghawQLwc5GK/EFBLGRxUfzEcyatdBaxOIcGL7Lvc0dppqlxbQe"
        "VOlhXqb98nKhqsvlQV4e18VBlV9cdWKnt7m/vbbV24hsJbJuPB4N5x5e15/vZm+fXqbn9+6HyWk0vjKNVjbOmGnj7Wyc123uTgQAAADwRyZX"
        "I5KkOTT1/nlz0z5MxfdF/eei/9+Mehh9NesaKgAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAL/upF8U550PAyDp6QaAAAA="
    )
)


def hadolint() -> str | None:
    """The linter beside this Python or in PATH."""
    beside = Path(sys.executable).with_name("hadolint")
    return str(beside) if beside.exists() else shutil.which("hadolint")


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Put a program in front of PATH that notes its arguments and some of its environment, then runs a bash text."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def install(name: str, body: str = "") -> Path:
        calls = tmp_path / f"{name}.calls"
        note = (
            "import json, os, sys; kept = {k: v for k, v in os.environ.items() if k.startswith(('ENROOT', 'APPTAINER'))};"
            f"open({str(calls)!r}, 'a').write(json.dumps([sys.argv[1:], kept]) + chr(10))"
        )
        (folder / name).write_text(f'#!/bin/bash\n{sys.executable} -c {quoted(note)} "$@"\n{body}\n')
        (folder / name).chmod(0o755)
        return calls

    return install


def quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def calls_of(path: Path) -> list[list[str]]:
    """The command lines that a recording program noted."""
    return [json.loads(line)[0] for line in path.read_text().splitlines()] if path.exists() else []


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.endswith(".tmp"))


# --- config ---


def test_every_image_of_the_facts_is_there_and_every_dockerfile_is_used():
    assert len(IMAGES.images) == 13
    used = {image.source.dockerfile for image in IMAGES.images.values() if image.source.kind == "build"}
    controller = "containers/controller.Dockerfile"  # built by hand (docs/install.md): no stage trains in it
    assert used | {controller} == {str(path.relative_to(ROOT)) for path in DOCKERFILES}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("{purpose: x, source: {kind: pull, reference: nvcr.io/a}}", r":3: images.x.source.reference: string should"),
        ("{purpose: x, source: {kind: pull, reference: 'nvcr.io/a:$(id)'}}", r":3: images.x.source.reference"),
        (
            "{purpose: x, source: {kind: pul, reference: nvcr.io/a:1}}",
            r":3: images.x.source.kind: 'pul' is not known; did",
        ),
        ("{purpose: x, source: {reference: nvcr.io/a:1}}", r":3: images.x.source: needs a kind: pull, build or git"),
        (
            "{purpose: x, source: {kind: pull, referense: nvcr.io/a:1}}",
            r"referense: unknown key; did you mean reference",
        ),
        ("{source: {kind: pull, reference: nvcr.io/a:1}}", r":3: images.x.purpose: is missing"),
        (
            "{purpose: x, source: {kind: build, dockerfile: ../../etc/passwd, base: nvcr.io/a:1, tag: a:1}}",
            r":3: images.x.source.dockerfile",
        ),
        (
            "{purpose: x, source: {kind: git, repository: https://h/r.git, commit: main, dockerfile: D, tag: a:1}}",
            r":3: images.x.source.commit",
        ),
        (
            "{purpose: x, releases: [v0.7.0, v0.7.1], source: {kind: pull, reference: 'nvcr.io/a:1'}}",
            r":3: images.x.releases: envs/nemo-rl.yaml has no release v0.7.1; did you mean v0.7.0\?",
        ),
        (
            "{purpose: x, source: {kind: git, repository: 'ext::sh -c id', commit: main, dockerfile: D, tag: a:1}}",
            r":3: images.x.source.repository",
        ),
    ],
)
def test_a_mistake_is_named_with_file_line_and_key(tmp_path, wrong, message):
    path = tmp_path / "images.yaml"
    path.write_text(f"# comment\nimages:\n  x: {wrong}\n")
    with pytest.raises(UserError, match=rf"images.yaml.*{message}"):
        load_images(path)


def test_a_name_that_could_leave_the_folder_is_refused(tmp_path):
    path = tmp_path / "images.yaml"
    path.write_text("images:\n  ../x: {purpose: x, source: {kind: pull, reference: nvcr.io/a:1}}\n")
    with pytest.raises(UserError, match=r"images.yaml:2: images\.\.\./x"):
        load_images(path)


def test_the_documents_table_is_the_configs():
    document = (ROOT / "docs/images.md").read_text()
    assert document == with_table(document, IMAGES), "run: python -m scripts.images.table"


# --- Dockerfiles ---


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_the_dockerfiles_are_clean_for_hadolint(path):
    if not (linter := hadolint()):
        pytest.skip("hadolint is not installed (make setup)")
    done = subprocess.run([linter, str(path)], cwd=ROOT, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout


def test_hadolint_finds_what_is_wrong(tmp_path):
    """The linter that lets ours pass does complain."""
    if not (linter := hadolint()):
        pytest.skip("hadolint is not installed (make setup)")
    (tmp_path / "Dockerfile").write_text("FROM ubuntu\nRUN cd /x && pip install y\n")
    assert subprocess.run([linter, tmp_path / "Dockerfile"], cwd=ROOT, capture_output=True, check=False).returncode


def arguments_of(path: Path) -> dict[str, str]:
    return dict(re.findall(r"^ARG (\w+)=(\S+)$", path.read_text(), re.MULTILINE))


@pytest.mark.parametrize("name", [name for name, image in IMAGES.images.items() if image.source.kind == "build"])
def test_the_configs_arguments_are_the_dockerfiles_own_defaults(name):
    """One truth: a build by hand with `docker build` gives the same image, and no argument is a misspelt one."""
    source = IMAGES.images[name].source
    defaults = arguments_of(ROOT / source.dockerfile)
    assert defaults["BASE_IMAGE"] == source.base
    assert source.arguments.items() <= defaults.items()


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


def test_the_prefetching_script_overrides_the_judges_vllm_with_the_images_own(tmp_path, program):
    """The RUN script itself, with a stand-in for uv that makes one environment and shows the override."""
    calls = program("uv", GYM.format(vllm="0.20.0"))
    arch = os.uname().machine
    done = run_script(ROOT / "containers/prefetched-venvs.Dockerfile", tmp_path, WHEEL_ARCH=arch)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "vllm @ https://github.com/vllm-project/vllm/releases/download/v0.20.0/"
        f"vllm-0.20.0-cp38-abi3-manylinux_2_35_{arch}.whl\n"
    )
    assert calls_of(calls)[0][-1] == "examples/nemo_gym/prefetch_super_all_envs.yaml"


@pytest.mark.parametrize(
    ("uv", "variables", "message"),
    [
        (GYM.format(vllm="0.17.0"), {}, "another vLLM than 0.20.0"),
        ("exit 1", {}, "uv run"),
        ("true", {}, "test -n ''"),
        (GYM.format(vllm="0.20.0"), {"WHEEL_ARCH": "riscv"}, "WHEEL_ARCH=riscv, but this is"),
    ],
)
def test_a_prefetch_that_went_wrong_ends_the_build(tmp_path, program, uv, variables, message):
    program("uv", uv)
    (tmp_path / "venvs").mkdir()
    variables = {"WHEEL_ARCH": os.uname().machine} | variables
    done = run_script(ROOT / "containers/prefetched-venvs.Dockerfile", tmp_path, **variables)
    assert done.returncode != 0
    assert message in done.stderr


@pytest.mark.parametrize(("index", "ends_well"), [("cu129", True), ("cu126", False)])
def test_the_swe_script_takes_the_releases_own_pytorch_index(tmp_path, program, index, ends_well):
    program("uv", GYM.format(vllm="0.13.0").removesuffix('; cat "$UV_OVERRIDE"'))
    (tmp_path / "pyproject.toml").write_text(f'[[tool.uv.index]]\nname = "pytorch-{index}"\n')
    done = run_script(ROOT / "containers/super-v3-swe.Dockerfile", tmp_path)
    assert (done.returncode == 0) is ends_well, done.stderr
    assert ends_well or "pyproject.toml has no index pytorch-cu129" in done.stderr


# --- build ---


DOCKER = """
while [ $# -gt 0 ]; do
    if [ "$1" = --metadata-file ]; then echo '{{"containerimage.digest": "{digest}"}}' > "$2"; fi
    if [ "$1" = imagetools ]; then echo '{{"digest": "{found}"}}'; fi
    if [ "$1" = image ]; then echo '{found}'; fi
    shift
done
"""


def images(registry: str | None = None, **source: object) -> Images:
    defaults = {"kind": "build", "dockerfile": "containers/omni.Dockerfile", "base": "nvcr.io/a/b:1", "tag": "a:1"}
    described = {"x": {"purpose": "", "source": defaults | source}}
    return Images.model_validate({"registry": registry, "images": described})


@pytest.mark.parametrize(("registry", "tag", "how"), [(None, "a:1", "--load"), ("r.org/t", "r.org/t/a:1", "--push")])
def test_a_build_is_recorded_by_digest(program, registry, tag, how):
    """docker is a recording program; whether BuildKit accepts the command line is not shown."""
    calls = program("docker", DOCKER.format(digest=DIGEST, found=DIGEST))
    record = build_image(images(registry, arguments={"A": "$(touch/x)"}), "x", ROOT)
    command = next(call for call in calls_of(calls) if call[:2] == ["buildx", "build"])
    assert command[command.index("--tag") + 1] == tag
    assert how in command and {"--build-arg", "BASE_IMAGE=nvcr.io/a/b:1", "A=$(touch/x)"} <= set(command)
    assert not Path(command[-1]).exists(), "the empty context is gone"
    assert record == {
        "image": "x",
        "tag": tag,
        "stored": "registry" if registry else "daemon",
        "digest": DIGEST,
        "base": "nvcr.io/a/b:1",
        "arguments": {"BASE_IMAGE": "nvcr.io/a/b:1", "A": "$(touch/x)"},
        "dockerfile": "containers/omni.Dockerfile",
        "dockerfile_sha256": hashlib.sha256((ROOT / "containers/omni.Dockerfile").read_bytes()).hexdigest(),
    }


@pytest.mark.parametrize("registry", [None, "r.org/t"])
def test_another_image_under_the_name_is_an_error(program, registry):
    program("docker", DOCKER.format(digest=DIGEST, found="sha256:other"))
    with pytest.raises(UserError, match=r"was built as sha256:aaa.*but sha256:other is there"):
        build_image(images(registry), "x", ROOT)


def test_a_failed_build_leaves_no_record(program, tmp_path):
    program("docker", 'case "$2" in build) exit 3;; esac')
    done = programs.run("scripts.images.build", "--name", "omni3-rl", "--output", tmp_path / "o.json")
    assert done.returncode == 1
    assert done.stderr.startswith("error: docker buildx failed with status 3; its output says why.")
    assert not (tmp_path / "o.json").exists()


def test_missing_programs_say_what_to_do(monkeypatch, tmp_path, program):
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("docker", "enroot", "apptainer", "git"):
        with pytest.raises(UserError, match=rf"{name}: not found in PATH; .*install it"):
            require(name)


@pytest.mark.parametrize(("which", "message"), [("version", "has no buildx plugin"), ("inspect", "no builder answers")])
def test_a_docker_that_cannot_build_is_named_before_the_build(program, which, message):
    program("docker", f'if [ "$2" = {which} ]; then exit 1; fi')
    with pytest.raises(UserError, match=message):
        require_buildx()


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A real repository with two commits, to which git is led when it is asked for https://git.example/r.git."""
    folder = tmp_path / "repository"
    environment = os.environ | {
        f"GIT_{who}_{what}": "x@y" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    }
    git = lambda *command: subprocess.run(  # noqa: E731
        ["git", "-C", str(folder), *command], env=environment, text=True, capture_output=True, check=True
    ).stdout.strip()
    folder.mkdir()
    git("init", "--quiet")
    git("config", "uploadpack.allowAnySHA1InWant", "true")
    commits = []
    for text in ("FROM a:1\n", "FROM a:2\n"):
        (folder / "Dockerfile").write_text(text)
        git("add", ".")
        git("commit", "--quiet", "--message", "x")
        commits.append(git("rev-parse", "HEAD"))
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", f"url.file://{folder}.insteadOf")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "https://git.example/r.git")
    return commits


def test_another_repositorys_dockerfile_is_taken_at_its_commit(repository, program):
    """git is real, docker a recording program: it copies the Dockerfile that it is given."""
    calls = program("docker", DOCKER.format(digest=DIGEST, found=DIGEST))
    source = {
        "kind": "git",
        "repository": "https://git.example/r.git",
        "commit": repository[0],
        "dockerfile": "Dockerfile",
        "target": "release",
    }
    described = {"x": {"purpose": "", "source": source | {"tag": "a:1"}}}
    record = build_image(Images.model_validate({"images": described}), "x", ROOT)
    assert (record["commit"], record["target"]) == (repository[0], "release")
    assert any("--target=release" in call for call in calls_of(calls))
    assert record["dockerfile_sha256"] == hashlib.sha256(b"FROM a:1\n").hexdigest(), "not the newest commit's"


def test_a_commit_that_is_not_there_is_named(repository, tmp_path):
    with pytest.raises(UserError, match=r"has it the commit 0000"):
        clone("https://git.example/r.git", "0" * 40, tmp_path / "clone")


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


@pytest.mark.parametrize("with_unsquashfs", [True, False])
def test_a_whole_sqsh_passes_and_one_cut_short_does_not(sqsh, monkeypatch, with_unsquashfs):
    if not with_unsquashfs:
        monkeypatch.setenv("PATH", "")
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


@pytest.mark.parametrize(
    ("reference", "uri"),
    [
        ("nvcr.io/nvidia/nemo-rl:v0.7.0", "docker://nvcr.io#nvidia/nemo-rl:v0.7.0"),
        ("docker.io/anyscale/ray:2.49.2-py312", "docker://anyscale/ray:2.49.2-py312"),
        ("registry.example.org:5000/team/a:1", "docker://registry.example.org:5000#team/a:1"),
    ],
)
def test_enroots_own_names(reference, uri):
    assert enroot_uri(reference) == uri


ENROOT = """
if [ "$1" = digest ]; then echo {digest}; exit; fi
touch "$ENROOT_TEMP_PATH/layer"
cp {image} "$3"
"""


def test_an_import_uses_the_folders_it_is_given_and_empties_the_temporary_one(sqsh, program, tmp_path):
    """enroot is a recording program that copies a real .sqsh; the real one is in the test after the next."""
    calls = program("enroot", ENROOT.format(digest=DIGEST, image=sqsh))
    output = tmp_path / "images/x.sqsh"
    record = import_image("docker://r.org#a:1", output, tmp_path / "cache", tmp_path / "temp")
    assert record["digest"] == DIGEST
    assert record["sha256"] == hashlib.sha256(sqsh.read_bytes()).hexdigest()
    assert output.read_bytes() == sqsh.read_bytes()
    assert list((tmp_path / "temp").iterdir()) == []
    assert [call[0] for call in calls_of(calls)] == ["digest", "import", "digest"]
    _, environment = json.loads(calls.read_text().splitlines()[1])
    assert environment["ENROOT_CACHE_PATH"] == str(tmp_path / "cache")
    assert environment["ENROOT_TEMP_PATH"].startswith(str(tmp_path / "temp"))


@pytest.mark.parametrize(
    ("enroot", "digest", "message"),
    [
        ('if [ "$1" = import ]; then echo half > "$3"; exit 1; fi', None, "enroot import failed with status 1"),
        ('if [ "$1" = import ]; then echo half > "$3"; fi', None, "not a squashfs image"),
        ('if [ "$1" = digest ]; then date +%N; else cp {image} "$3"; fi', None, "written anew while it was imported"),
        (ENROOT.replace("{digest}", "sha256:other"), DIGEST, "the registry has sha256:other, but sha256:aaa"),
        ("true", None, "no such file"),
    ],
)
def test_an_import_that_went_wrong_leaves_what_was_there(sqsh, program, tmp_path, enroot, digest, message):
    program("enroot", enroot.replace("{image}", str(sqsh)))
    output = tmp_path / "x.sqsh"
    output.write_text("the old one")
    with pytest.raises(UserError, match=message):
        import_image("docker://r.org#a:1", output, None, tmp_path / "temp", digest)
    assert output.read_text() == "the old one"
    assert leftovers(tmp_path) == []


def test_a_sqsh_is_compared_with_its_record(sqsh, tmp_path):
    record = tmp_path / "real.sqsh.json"
    content = sqsh.read_bytes()
    record.write_text(json.dumps({"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}))
    check(sqsh, record)
    sqsh.write_bytes(content[:200_000] + bytes([content[200_000] ^ 1]) + content[200_001:])
    with pytest.raises(UserError, match=r"is not what .* describes"):
        check(sqsh, record)


@pytest.mark.parametrize(
    ("registry", "held", "found"),
    [
        (None, DIGEST, ("dockerd://a:1", DIGEST)),
        ("r.org/t", "", ("docker://r.org#t/a:1", DIGEST)),
        (None, "other", None),
    ],
)
def test_a_built_image_is_imported_from_where_its_record_says(program, tmp_path, registry, held, found):
    program("docker", f"echo {held}")
    described, record = images(registry), tmp_path / "x.json"
    stored = "registry" if registry else "daemon"
    record.write_text(json.dumps({"tag": described.full_tag("x"), "stored": stored, "digest": DIGEST}))
    if found:
        assert find_image(described, "x", record) == found
    else:
        with pytest.raises(UserError, match="Docker has not the image that"):
            find_image(described, "x", record)


def blob(content: bytes, kind: str) -> dict:
    return {"mediaType": kind, "size": len(content), "digest": f"sha256:{hashlib.sha256(content).hexdigest()}"}


class Registry(http.server.BaseHTTPRequestHandler):
    """A registry that holds one image of one layer."""

    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as archive:
        entry = tarfile.TarInfo("hello.txt")
        entry.size = 5
        archive.addfile(entry, io.BytesIO(b"hello"))
    layer = gzip.compress(tar.getvalue(), mtime=0)
    config = json.dumps({"architecture": "amd64", "os": "linux", "config": {}, "rootfs": {"type": "layers"}}).encode()
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
            "config": blob(config, "application/vnd.docker.container.image.v1+json"),
            "layers": [blob(layer, "application/vnd.docker.image.rootfs.diff.tar.gzip")],
        }
    ).encode()
    digest = f"sha256:{hashlib.sha256(manifest).hexdigest()}"

    def do_GET(self) -> None:
        held = {hashlib.sha256(content).hexdigest(): content for content in (self.layer, self.config)}
        content = self.manifest if "/manifests/" in self.path else held.get(self.path.rpartition(":")[2])
        self.send_response(200 if content else 404)
        if content is self.manifest:
            self.send_header("Content-Type", "application/vnd.docker.distribution.manifest.v2+json")
            self.send_header("Docker-Content-Digest", self.digest)
        self.send_header("Content-Length", str(len(content or b"")))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content or b"")

    do_HEAD = do_GET

    def log_message(self, *arguments: object) -> None:
        pass


def test_a_real_enroot_imports_from_a_registry(tmp_path, monkeypatch):
    """The whole import: enroot, mksquashfs and a registry of this test's own, over HTTP on this machine."""
    if not shutil.which("enroot") or os.uname().machine != "x86_64":
        pytest.skip("enroot is not installed")
    monkeypatch.setenv("ENROOT_ALLOW_HTTP", "1")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Registry)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        uri = f"docker://127.0.0.1:{server.server_port}#team/tiny:1"
        record = import_image(uri, tmp_path / "x.sqsh", tmp_path / "cache", tmp_path / "temp")
        with pytest.raises(UserError, match=r"but sha256:aaaa.* was built"):
            import_image(uri, tmp_path / "y.sqsh", tmp_path / "cache", tmp_path / "temp", DIGEST)
        with pytest.raises(UserError, match="enroot import failed"):
            import_image("docker://127.0.0.1:1#team/tiny:1", tmp_path / "z.sqsh", tmp_path / "cache", tmp_path / "temp")
    finally:
        server.shutdown()
    assert record["digest"] == Registry.digest
    listed = subprocess.run(
        ["unsquashfs", "-l", tmp_path / "x.sqsh"], text=True, capture_output=True, check=True
    ).stdout
    assert "squashfs-root/hello.txt" in listed
    assert list((tmp_path / "temp").iterdir()) == []
    assert not (tmp_path / "y.sqsh").exists() and not (tmp_path / "z.sqsh").exists() and leftovers(tmp_path) == []


# --- .sif ---

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
    return {
        "responses_create_params": {"input": [], "metadata": metadata},
        "agent_ref": {"type": "responses_api_agents", "name": agent},
    }


@pytest.fixture
def split(tmp_path):
    def write(*rows: dict) -> Path:
        path = tmp_path / "train-split.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


@pytest.mark.parametrize(("instance", "expected"), SOURCES.items(), ids=["Verified", "SWE-Gym", "R2E-Gym"])
def test_the_image_of_an_instance(instance, expected):
    assert image_of(swe_row(*instance), Path("rows"), 1) == TaskImage(*expected)


@pytest.mark.parametrize(("instance", "expected"), SOURCES.items(), ids=["Verified", "SWE-Gym", "R2E-Gym"])
def test_gym_finds_each_file_by_its_exact_name(instance, expected):
    """Gym's lookup: the id as it is, then __ as _1776_ and _s_, each also in lower case, in three name patterns."""
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
    assert [image.file for image in images_of([path, path])] == [SOURCES["astropy__astropy-12907", VERIFIED][0]]


def without(key: str) -> dict:
    row = swe_row()
    del row["responses_create_params"]["metadata"][key]
    return row


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (without("instance_id"), r"train-split.jsonl:2: no responses_create_params.metadata.instance_id"),
        (without("dataset_name"), r"train-split.jsonl:2: no responses_create_params.metadata.dataset_name"),
        ({"agent_ref": {"name": "swe_agents_train"}}, r"train-split.jsonl:2: no responses_create_params.metadata"),
        (swe_row(dataset="nv-internal-1"), r"train-split.jsonl:2: dataset_name 'nv-internal-1' is none of"),
        (swe_row("../../etc/x__y-1"), r"train-split.jsonl:2: instance_id '../../etc/x__y-1' is not like"),
        (swe_row("a__b"), r"train-split.jsonl:2: instance_id 'a__b' is not like"),
        ({}, r"train-split.jsonl:2: no agent_ref.name"),
    ],
)
def test_a_row_that_names_no_image_is_an_error_with_its_line(split, row, message):
    with pytest.raises(UserError, match=message):
        images_of([split(swe_row(), row)])


def test_a_blend_without_swe_rows_is_an_error(split):
    with pytest.raises(UserError, match="no task image is needed; is this the swe2 blend"):
        images_of([split(swe_row(agent="mcqa_simple_agent"))])


def test_a_whole_sif_passes_and_one_cut_short_does_not(tmp_path):
    path = tmp_path / "x.sif"
    path.write_bytes(SIF)
    verify_sif(path)
    path.write_bytes(SIF[:-1])
    with pytest.raises(UserError, match="cut short"):
        verify_sif(path)
    path.write_bytes(b"x" * 200)
    with pytest.raises(UserError, match="not a SIF image"):
        verify_sif(path)


class Fetcher:
    """scripts.images.sif run as a program on a split, with a recording program for apptainer."""

    def __init__(self, tmp_path: Path, rows: Path, apptainer: Path) -> None:
        self.directory, self.temp, self.rows, self.calls_file = tmp_path / "sif", tmp_path / "temp", rows, apptainer
        self.command = [sys.executable, "-m", "scripts.images.sif", "--rows", str(rows), "--directory"]
        self.command += [str(self.directory), "--temp", str(self.temp), "--pause", "0.01"]

    def run(self, *more: str) -> subprocess.CompletedProcess:
        return programs.run(*self.command[2:], *more)

    def files(self) -> list[str]:
        return sorted(path.name for path in self.directory.iterdir())

    def calls(self) -> list[list[str]]:
        return calls_of(self.calls_file)


@pytest.fixture
def fetcher(tmp_path, split, program):
    """The three rows of SOURCES; apptainer makes a real SIF file unless the given bash text ends it before."""

    def make(before: str = "") -> Fetcher:
        (tmp_path / "real.sif").write_bytes(SIF)
        body = f'touch "$APPTAINER_CACHEDIR/layer" "$APPTAINER_TMPDIR/layer"\n{before}\ncp {tmp_path}/real.sif "$2"'
        return Fetcher(tmp_path, split(*(swe_row(*instance) for instance in SOURCES)), program("apptainer", body))

    return make


def test_exactly_the_named_images_are_fetched_and_recorded(fetcher):
    fetch = fetcher()
    done = fetch.run()
    assert done.returncode == 0, done.stderr
    files = [file for file, _ in SOURCES.values()]
    assert fetch.files() == sorted([*files, *(f"{file}.sha256" for file in files), "record.json"])
    assert sorted(call[2] for call in fetch.calls()) == sorted(source for _, source in SOURCES.values())
    assert list(fetch.temp.iterdir()) == []
    record = json.loads((fetch.directory / "record.json").read_text())
    assert record["images"][0] == {
        "file": "r2egym_aiohttp_final_0af3c1.sif",
        "source": "docker://namanjain12/aiohttp_final:0af3c1",
        "bytes": len(SIF),
        "sha256": hashlib.sha256(SIF).hexdigest(),
    }
    assert (
        subprocess.run(
            ["sha256sum", "--check", "--quiet", *(f"{file}.sha256" for file in files)], cwd=fetch.directory, check=False
        ).returncode
        == 0
    )


def test_listing_and_checking_fetch_nothing(fetcher):
    fetch = fetcher()
    assert fetch.run("--list").stdout.splitlines() == sorted("\t".join(pair) for pair in SOURCES.values())
    done = fetch.run("--check")
    assert done.returncode == 1
    assert all(f"{file}: missing ({source})" in done.stderr for file, source in SOURCES.values())
    assert fetch.calls() == [] and not fetch.directory.exists()


def test_what_is_there_is_kept_and_a_changed_byte_is_found(fetcher):
    fetch = fetcher()
    fetch.run()
    before = len(fetch.calls())
    assert fetch.run().returncode == 0 and fetch.run("--check").returncode == 0
    assert len(fetch.calls()) == before, "nothing was fetched again"
    path = fetch.directory / SOURCES["astropy__astropy-12907", VERIFIED][0]
    path.write_bytes(SIF[:-1] + b"!")
    done = fetch.run("--check")
    assert done.returncode == 1
    assert "1 of 3 images are missing or damaged" in done.stderr and path.name in done.stderr
    path.write_bytes(SIF[:-1])
    done = fetch.run()
    assert done.returncode == 1 and "cut short" in done.stderr
    assert path.exists(), "a damaged file is a person's to delete"


def test_one_that_cannot_be_had_is_named_and_the_others_are_kept(fetcher):
    fetch = fetcher('case "$3" in *monai*) echo "FATAL: manifest unknown" >&2; exit 255;; esac')
    done = fetch.run()
    assert done.returncode == 1
    assert "1 of 3 images are missing or damaged" in done.stderr
    assert "docker://xingyaoww/sweb.eval.x86_64.project-monai_s_monai-3690: apptainer build failed" in done.stderr
    assert "manifest unknown" in done.stderr
    assert len([file for file in fetch.files() if file.endswith(".sif")]) == 2
    assert not (fetch.directory / "record.json").exists()
    assert len(fetch.calls()) == 3, "what will never be there is asked for once"
    assert leftovers(fetch.directory) == [] and list(fetch.temp.iterdir()) == []


def test_a_refusal_that_passes_is_waited_out_and_one_that_does_not_ends(fetcher, tmp_path):
    refused = 'case "$3" in *astropy*) if [ "$(grep -c astropy {calls})" -lt {times} ]; then echo toomanyrequests; exit 1; fi;; esac'
    calls = tmp_path / "apptainer.calls"
    fetch = fetcher(refused.format(calls=calls, times=3))
    assert fetch.run().returncode == 0
    assert len(fetch.calls()) == 5, "the two refused once more each, the others once"
    fetch = fetcher(refused.format(calls=calls, times=100))
    shutil.rmtree(fetch.directory)
    calls.unlink()
    done = fetch.run("--attempts", "2")
    assert done.returncode == 1 and "toomanyrequests" in done.stderr
    assert len(fetch.calls()) == 4


def test_no_more_run_at_a_time_than_asked_for(fetcher, tmp_path):
    """Each run notes how many run beside it."""
    busy = f"mkdir -p {tmp_path}/busy; touch {tmp_path}/busy/$$; sleep 0.3; ls {tmp_path}/busy | wc -l >> {tmp_path}/counts; rm {tmp_path}/busy/$$"
    assert fetcher(busy).run("--jobs", "2").returncode == 0
    assert max(map(int, (tmp_path / "counts").read_text().split())) == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopping_leaves_nothing_half_made(fetcher, number):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in a shell's background inherit that it is ignored
    fetch = fetcher('echo half > "$2"; exec sleep 60')
    process = subprocess.Popen(fetch.command, cwd=ROOT, text=True, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 20
    while len(fetch.calls()) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.2)
    process.send_signal(number)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "stopped; what is there is kept" in errors and "Traceback" not in errors
    assert fetch.files() == [] and list(fetch.temp.iterdir()) == []


def test_without_apptainer_the_message_says_what_to_do(split, tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "scripts.images.sif",
            "--rows",
            str(split(swe_row())),
            "--directory",
            str(tmp_path / "sif"),
        ],
        cwd=ROOT,
        env=os.environ | {"PATH": str(tmp_path)},
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: apptainer: not found in PATH; a .sif is made where Apptainer is: install it")
    assert not (tmp_path / "sif").exists()


def test_no_secret_of_the_environment_is_written_anywhere(fetcher, monkeypatch):
    monkeypatch.setenv("APPTAINER_DOCKER_PASSWORD", "hunter2")
    fetch = fetcher('case "$3" in *monai*) echo "FATAL: denied" >&2; exit 255;; esac')
    done = fetch.run()
    written = [path.read_bytes() for path in fetch.directory.iterdir()]
    assert not any(b"hunter2" in text for text in [done.stdout.encode(), done.stderr.encode(), *written])
    assert not any("hunter2" in part for call in fetch.calls() for part in call)
