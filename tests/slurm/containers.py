"""NVIDIA's own pyxis and enroot, built from their sources, and a small image for them.

The sources are archives as GitHub makes them (pyxis-*.tar.gz, enroot-*.tar.gz) in the folder that
STAGECOACH_CONTAINER_SOURCES names, or in ../shared/vendor. enroot's submodules are absent there; Debian's packages take
their place. Built once, into build/containers.
"""

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
VARIABLE = "STAGECOACH_CONTAINER_SOURCES"
DATA = "/tmp/enroot"  # noqa: S108 - each host mounts its own there
PACKAGES = {
    "musl-tools": "musl-gcc",
    "libbsd-dev": f"/usr/lib/{platform.machine()}-linux-gnu/libbsd.a",
    "squashfs-tools": "mksquashfs",
    "jq": "jq",
    "parallel": "parallel",
    "busybox-static": "busybox",
    "bash-static": "bash-static",
    "libslurm-dev": "/usr/include/slurm/spank.h",
}
SITE = """\
ENROOT_RUNTIME_PATH {0}/run
ENROOT_DATA_PATH {0}/data
ENROOT_CACHE_PATH {0}/cache
ENROOT_MOUNT_HOME no
ENROOT_RESTRICT_DEV no
ENROOT_ROOTFS_WRITABLE yes
"""
ENVIRONMENT = {"NEMO_RL_VENV_DIR": "/opt/ray_venvs", "IMAGE_SAYS": "image", "LD_LIBRARY_PATH": "/opt/lib"}


@dataclass(frozen=True)
class Containers:
    """What a cluster needs for containers: pyxis' plugin, the folder of enroot's programs."""

    plugin: Path
    programs: Path


def sources() -> dict[str, Path]:
    """Return the archives by project; empty where one is missing."""
    folder = Path(os.environ.get(VARIABLE) or ROOT.parent / "shared/vendor")
    found = {name: max(folder.glob(f"{name}-*.tar.gz"), default=None) for name in ("pyxis", "enroot")}
    return {} if None in found.values() else found


def reason_missing() -> str | None:
    """Why the containers cannot be built here; None if they can."""
    if not sources():
        return f"{VARIABLE} names no folder with pyxis-*.tar.gz and enroot-*.tar.gz"
    absent = [package for package, needed in PACKAGES.items() if not shutil.which(needed, os.F_OK)]
    return f"real containers need packages that are not here: apt-get install {' '.join(absent)}" if absent else None


def build() -> Containers:
    """Return pyxis and enroot, built where they are not yet."""
    archives = sources()
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in archives.values()) + SITE.encode()).hexdigest()
    place = ROOT / "build/containers" / digest[:12]
    place.parent.mkdir(parents=True, exist_ok=True)
    built = Containers(place / "spank_pyxis.so", place / "bin")
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.plugin.exists():
            shutil.rmtree(place, ignore_errors=True)
            for name, archive in archives.items():
                (place / "src" / name).mkdir(parents=True)
                _run("tar", "xf", archive, "--strip-components=1", "-C", place / "src" / name)
            _build_enroot(place / "src/enroot", place)
            _run("make", "-C", place / "src/pyxis")
            shutil.copy(place / "src/pyxis/spank_pyxis.so", built.plugin)
    return built


def _build_enroot(source: Path, place: Path) -> None:
    machine, parts = f"{platform.machine()}-linux-gnu", source / "deps/dist"
    for link, target in {
        "musl/bin/musl-gcc": shutil.which("musl-gcc"),
        "makeself/bin/enroot-makeself": shutil.which("true"),  # for `enroot bundle` alone
        "libbsd/libbsd.a": f"/usr/lib/{machine}/libbsd.a",
        "libbsd/include/bsd": "/usr/include/bsd",
        "linux/include/linux": "/usr/include/linux",
        "linux/include/asm-generic": "/usr/include/asm-generic",
        "linux/include/asm": f"/usr/include/{machine}/asm",
    }.items():
        (parts / link).parent.mkdir(parents=True, exist_ok=True)
        (parts / link).symlink_to(target)
    flags = f"LDFLAGS=-static -L{parts}/libbsd"  # Debian's musl-gcc cannot make static-pie
    _run("make", "-C", source, "--old-file=deps", flags, f"prefix={place}", "install")
    (place / "etc/enroot/hooks.d/10-cgroups.sh").unlink()  # the test hosts have an empty tmpfs in /sys/fs/cgroup
    (place / "etc/enroot/enroot.conf.d/site.conf").write_text(SITE.format(DATA))


def make_image(path: Path, says: str = "image", **variables: str) -> Path:
    """Make a .sqsh file of busybox and bash in less than a second; IMAGE_SAYS and `variables` are its ENV.

    A mount of the machine's /usr hides busybox, and brings the machine's programs.
    """
    root = path.with_suffix(".root")
    for folder in ("usr/bin", "usr/sbin", "usr/lib", "usr/lib64", "etc", "root", "dev", "proc", "sys", "tmp"):
        (root / folder).mkdir(parents=True)
    for link in ("bin", "sbin", "lib", "lib64"):
        (root / link).symlink_to(f"usr/{link}")
    busybox = shutil.copy(shutil.which("busybox"), root / "usr/bin/busybox")
    for name in subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout.split():
        with contextlib.suppress(FileExistsError):
            (root / "usr/bin" / name).symlink_to("busybox")
    shutil.copy(shutil.which("bash-static"), root / "usr/bin/bash")
    told = {"PATH": "/usr/bin:/usr/sbin"} | ENVIRONMENT | {"IMAGE_SAYS": says} | variables
    (root / "etc/environment").write_text("".join(f"{name}={value}\n" for name, value in told.items()))
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\n")
    _run("mksquashfs", root, path, "-all-root", "-noappend", "-quiet")
    shutil.rmtree(root)
    return path


def _run(*command: str | Path) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} ended with {done.returncode}: {done.stdout[-3000:]}")
