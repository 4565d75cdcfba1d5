"""Where enroot unpacks images, and how an image is told from another import."""

import os
import shutil
import subprocess

import pytest

from scripts.backends.nemo_rl.runtime import (
    MARKED,
    Place,
    lacks_of,
    mark_check,
    mark_of,
    places_of,
    refuse_little_room,
)
from scripts.errors import UserError

PLACE = Place("node7", "/raid/enroot", "xfs", 5 << 30, is_writable=True)


def test_what_the_nodes_tell_is_read_among_slurms_lines():
    told = "srun: job 7 queued\nnode7\t/raid/enroot\txfs\t5368709120\tyes\nnode8\t/home/a\tnfs\t7\tno\n"
    assert places_of(told) == [PLACE, Place("node8", "/home/a", "nfs", 7, is_writable=False)]


def test_a_shared_folder_and_a_root_that_cannot_be_written_are_doubtful():
    assert list(lacks_of(PLACE)) == []
    (shared,) = lacks_of(PLACE._replace(kind="nfs4", folder="/home/a"))
    assert "ENROOT_DATA_PATH is /home/a on nfs4" in shared
    (readonly,) = lacks_of(PLACE._replace(is_writable=False))
    assert "ENROOT_ROOTFS_WRITABLE is no" in readonly


def test_a_host_needs_twice_an_images_bytes(tmp_path):
    image = tmp_path / "image.sqsh"
    image.touch()
    os.truncate(image, PLACE.free // 2)
    refuse_little_room(PLACE, str(image))
    os.truncate(image, PLACE.free // 2 + 1)
    with pytest.raises(UserError, match=r"node7: /raid/enroot, .* has 5.4 GB free, and .*image.sqsh takes 5.4 GB"):
        refuse_little_room(PLACE, str(image))
    refuse_little_room(PLACE, "registry.example.org/team/image:1")


@pytest.mark.skipif(not shutil.which("mksquashfs"), reason="needs squashfs-tools")
def test_an_image_is_told_from_another_import_of_the_same_content(tmp_path):
    marks = []
    for seconds, text in ((1, "A=1\n"), (2, "A=1\n"), (2, "A=2\n")):
        file = tmp_path / f"root{len(marks)}" / MARKED
        file.parent.mkdir(parents=True)
        file.write_text(text)
        os.utime(file, (seconds, seconds))
        image = tmp_path / f"{len(marks)}.sqsh"
        subprocess.run(["mksquashfs", file.parents[1], image, "-quiet"], check=True, capture_output=True)
        marks.append(mark_of(str(image)))
    assert len({*marks}) == 3 and all(marks)
    root = tmp_path / "root0"
    for mark, status in ((marks[0], 0), (marks[1], 1), (marks[2], 1)):
        text = mark_check(mark, "it's.sqsh").replace(f"/{MARKED}", str(root / MARKED))
        done = subprocess.run(
            ["bash", "-c", f'fail() {{ echo "$1"; exit 1; }}\n{text}'], capture_output=True, text=True, check=False
        )
        assert (done.returncode, "another image than it's.sqsh" in done.stdout) == (status, status == 1)
    assert mark_of(str(tmp_path / "none.sqsh")) is None and mark_of("registry.example.org/a:1") is None
