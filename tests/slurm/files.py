"""The files of a cluster that has never run: Slurm's configuration, the hosts' names, a key, pretended GPUs."""

import contextlib
import ipaddress
import os
import random
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

from tests.slurm.containers import DATA
from tests.slurm.processes import PATH, ClusterError

TEMPLATE = Path(__file__).with_name("slurm.conf")
PLUGIN = Path(__file__).with_name("pyxis.c")
LONGEST = 64  # with it slurmstepd's sockets still have names


def write(
    directory: Path,
    hosts: list[str],
    gpus: int,
    image: dict[str, str] | None,
    options: dict[str, Any],
    typed: bool,
    plugstack: str,
) -> None:
    """Empty the directory and fill it; what slurmstepd loads for containers, if wanted, is compiled here.

    `image` is what the double's image has in its environment; None: `plugstack` is the line of another plugin.
    `typed` GPUs are h100 beside nics.
    """
    own = directory / "cluster"  # what lies beside it may be removed
    if len(os.fsencode(directory)) > LONGEST:
        raise ClusterError(f"{directory} is too long for the names of sockets; give the cluster a shorter one")
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    if not own.exists() and any(directory.iterdir()):
        raise ClusterError(f"{directory} holds other files; give the cluster a directory of its own")
    own.touch()
    for old in set(directory.iterdir()) - {own}:
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    for part in ("etc", "state", "gpu", *(f"{host}/{part}" for host in hosts for part in ("spool", "ray", "enroot"))):
        (directory / part).mkdir(parents=True)
    for place in ("/tmp/ray", DATA):  # noqa: S108 - where every host mounts its own
        Path(place).mkdir(exist_ok=True)

    choice = random.Random(str(directory))
    network = _free_network(choice)
    places = {host: str(network[10 + number]) for number, host in enumerate(hosts, 1)}
    machine, gateway = socket.gethostname().split(".")[0], str(network[1])
    devices = [directory / f"gpu/nvidia{number}" for number in range(gpus)]
    for device in devices:
        device.symlink_to("/dev/null")
    kind, others = (" Type=h100", "Name=nic Count=2\n") if typed else ("", "")
    (directory / "etc/gres.conf").write_text("".join(f"Name=gpu{kind} File={device}\n" for device in devices) + others)
    (directory / "etc/cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    if plugstack:
        (directory / "etc/plugstack.conf").write_text(plugstack)
    if image is not None:
        plugin = directory / "pyxis.so"
        subprocess.run(["gcc", "-Wall", "-shared", "-fPIC", "-o", plugin, PLUGIN], check=True)
        record = directory / "containers.jsonl"
        record.touch()
        # Ray counts GPUs by NVIDIA's library, absent here; and the home with its token is not mounted in a container.
        seen = {"RAY_OVERRIDE_RESOURCES": f'{{"GPU":{gpus}}}', "RAY_AUTH_MODE": "disabled"} | image
        told = " ".join(f"env={name}={value}" for name, value in seen.items())
        (directory / "etc/plugstack.conf").write_text(f"required {plugin} record={record} {told}\n")
    (directory / "etc/slurm.conf").write_text(
        TEMPLATE.read_text().format(
            **options,
            directory=directory,
            machine=machine,
            gateway=gateway,
            port=_free_port(choice),
            gres=f" Gres={f'gpu:h100:{gpus},nic:2' if typed else f'gpu:{gpus}'}" if gpus else "",
            nodes="\n".join(f"NodeName={host} NodeAddr={address}" for host, address in places.items()),
        )
    )
    names = {"localhost": "127.0.0.1", f"machine {machine}": gateway} | places
    (directory / "hosts").write_text("".join(f"{address} {name}\n" for name, address in names.items()))
    (directory / "munge.key").touch(mode=0o600)
    (directory / "munge.key").write_bytes(os.urandom(128))


def addresses(directory: Path) -> dict[str, str]:
    """The addresses of the hosts, and of the machine as "machine"."""
    lines = (line.split() for line in (directory / "hosts").read_text().splitlines())
    return {name: address for address, name, *_ in lines}


def _free_network(choice: random.Random) -> ipaddress.IPv4Network:
    """A 10.x.y.0/24 that no route of the machine touches, but for one to all of 10.0.0.0."""
    command = ("ip", "-4", "route", "show", "table", "all")
    routes = subprocess.run(command, env=os.environ | {"PATH": PATH}, capture_output=True, text=True, check=True).stdout
    words = [word for line in routes.splitlines() for word in line.split()[:2] if word[0].isdigit()]
    used = [network for word in words if (network := ipaddress.IPv4Network(word, strict=False)).prefixlen > 8]
    while True:
        network = ipaddress.IPv4Network(f"10.{choice.randrange(256)}.{choice.randrange(256)}.0/24")
        if not any(network.overlaps(other) for other in used):
            return network


def _free_port(choice: random.Random) -> int:
    """A port below those that the kernel gives out."""
    while True:
        port = choice.randrange(10000, 30000)
        with socket.socket() as attempt, contextlib.suppress(OSError):
            attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            attempt.bind(("", port))
            return port
