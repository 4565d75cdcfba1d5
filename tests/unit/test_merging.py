"""Merges against the formulas of their papers, equal to the bit in every process; parts that do not fit are refused."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from scripts.backends.merge.merging import MergeSettings, Merging, misfit
from scripts.errors import UserError
from scripts.files import read_json
from scripts.recipe.expand import expand
from scripts.stage.progress import read_log
from scripts.stage.rundir import FILES
from scripts.stage.training_folder import TrainingFolder
from tests.conftest import ROOT
from tests.pretrained import save_pretrained
from tests.trials import break_weight

pytestmark = pytest.mark.skipif(find_spec("mergekit") is None, reason="envs/trl.txt is not installed")
SHARES = [0.5, 0.3, 0.2]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Path]:
    """A base and three models in bfloat16 that depart from it, in shards of 20 KB."""
    folders = [tmp_path_factory.mktemp("models") / name for name in ("base", "a", "b", "c")]
    for number, folder in enumerate(folders):
        save_pretrained("qwen3", folder, max_shard_size="20KB")
        draws = torch.Generator().manual_seed(number)
        for shard in folder.glob("*.safetensors"):
            weights = {
                name: (tensor + number * 0.02 * torch.randn(tensor.shape, generator=draws)).bfloat16()
                for name, tensor in sorted(load_file(shard).items())
            }
            save_file(weights, shard, metadata={"format": "pt"})
    return folders


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def exact_of(folders: list[Path]) -> dict[str, list[torch.Tensor]]:
    loaded = [weights_of(folder) for folder in folders]
    return {name: [weights[name].double() for weights in loaded] for name in loaded[0]}


def linear(base, parts):
    return sum(share * part for share, part in zip(SHARES, parts, strict=True))


def slerp(base, parts):
    """The arc between directions, for lengths as they are (Shoemake 1985)."""
    first, second = parts
    cosine = (first / first.norm() * second / second.norm()).sum()
    if cosine.abs() > 0.9995:
        return 0.7 * first + 0.3 * second
    angle = cosine.acos()
    return ((0.7 * angle).sin() * first + (0.3 * angle).sin() * second) / angle.sin()


def ties(base, parts):
    """Trim to the largest 40 %, elect signs by mass, mean of those that agree (arXiv:2306.01708, algorithm 1)."""
    trimmed = []
    for part in parts:
        change = part - base
        kept = max(1, int(0.4 * change.numel()))
        places = change.abs().flatten().argsort(descending=True)[:kept]
        mask = torch.zeros(change.numel(), dtype=torch.float64).index_fill_(0, places, 1).reshape(change.shape)
        trimmed.append(change * mask)
    weighted = torch.stack([share * change for share, change in zip(SHARES, trimmed, strict=True)])
    elected = torch.where(weighted.sum(0) >= 0, 1.0, -1.0)
    agree = weighted.sign() == elected
    weights = torch.tensor(SHARES, dtype=torch.float64).reshape(-1, *[1] * base.dim())
    mass = (agree * weights).sum(0)
    return base + (weighted * agree).sum(0) / torch.where(mass == 0, 1.0, mass)


def write(folders: list[Path], merging: Merging, out: Path, shares: list[float] = SHARES, seed: int = 0) -> Path:
    from scripts.backends.merge.merge_weights import write_merge

    out.mkdir()
    write_merge(folders[1:], shares, folders[:1] if merging.has_base else [], merging, seed, out)
    return out


@pytest.mark.parametrize(
    ("merging", "formula", "count"),
    [
        ({"merge_method": "linear"}, linear, 3),
        ({"merge_method": "slerp"}, slerp, 2),
        ({"merge_method": "ties", "density": 0.4}, ties, 3),
    ],
)
def test_merged_weights_are_the_papers_formula_rounded_once(models, tmp_path, merging, formula, count):
    used, shares = models[: count + 1], SHARES if count == 3 else [0.7, 0.3]
    found = weights_of(write(used, Merging(**merging), tmp_path / "out", shares))
    exact = exact_of(used)
    assert found.keys() == exact.keys()
    assert not misfit(models[1], tmp_path / "out")
    for name, (base, *parts) in exact.items():
        wanted = formula(base, parts)
        assert found[name].dtype == torch.bfloat16
        apart = (found[name].double() - wanted).abs()
        bound = wanted.abs() * 2**-8 + 1e-6  # half a unit in the last place, and float32's own error
        if formula is ties:  # equal magnitudes at the edge of the trimmed may fall on either side
            assert (apart > bound).double().mean() < 0.01, name
        else:
            assert (apart <= bound).all(), name


def test_dare_drops_the_rest_by_the_seed_and_keeps_the_size_of_changes(models, tmp_path):
    """A drop rate of 1 - density, and changes scaled up (arXiv:2311.03099); mergekit keeps their absolute sum."""
    used = models[:3]
    merging = Merging(merge_method="dare_linear", density=0.25)
    found = weights_of(write(used, merging, tmp_path / "one", [1.0, 0.0]))
    other = weights_of(write(used, merging, tmp_path / "two", [1.0, 0.0], seed=1))
    kept, compared, same = 0, 0, 0
    for name, (base, part, _) in exact_of(used).items():
        change, exact = found[name].double() - base, part - base
        drawn = change.abs() > 0.5 * exact.abs()
        drawn &= exact != 0
        kept, compared = kept + int(drawn.sum()), compared + int((exact != 0).sum())
        same += int((drawn == (((other[name].double() - base).abs() > 0.5 * exact.abs()) & (exact != 0))).sum())
        if exact.numel() > 500:
            assert float(change.abs().sum()) == pytest.approx(float(exact.abs().sum()), rel=0.02), name
    assert kept / compared == pytest.approx(0.25, abs=0.01)
    assert same / compared == pytest.approx(0.25**2 + 0.75**2, abs=0.02)


PROGRAM = """
import sys; from pathlib import Path
from scripts.backends.merge.merging import Merging; from scripts.backends.merge.merge_weights import write_merge
out, base, *parts = map(Path, sys.argv[1:]); out.mkdir()
write_merge(parts, [0.5, 0.3, 0.2], [base], Merging(merge_method="dare_ties", density=0.5), 3, out)
"""


@pytest.mark.slow
def test_two_processes_write_equal_files_shards_included(models, tmp_path):
    hashes = []
    for salt in ("1", "2"):
        out = tmp_path / salt
        subprocess.run(
            [sys.executable, "-c", PROGRAM, out, *models],
            check=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": salt},
        )
        hashes.append({path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in out.iterdir()})
    assert hashes[0] == hashes[1]
    assert sorted(hashes[0]) == sorted(path.name for path in models[1].iterdir())
    assert sum(name.endswith(".safetensors") for name in hashes[0]) > 2


def reshaped(folder: Path) -> None:
    path = next(path for path in sorted(folder.glob("*.safetensors")) if "model.norm.weight" in load_file(path))
    save_file(load_file(path) | {"model.norm.weight": torch.zeros(33)}, path)


def renamed(folder: Path) -> None:
    weights = weights_of(folder)
    for path in folder.glob("model*"):
        path.unlink()
    weights["model.last.weight"] = weights.pop("model.norm.weight")
    save_file(weights, folder / "model.safetensors")


def in_eight_bits(folder: Path) -> None:
    path = min(folder.glob("*.safetensors"))
    save_file({name: tensor.to(torch.float8_e4m3fn) for name, tensor in load_file(path).items()}, path)


def other_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")


def other_vocabulary(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_text(path.read_text(encoding="utf-8").replace("<|reserved|>", "<|private|>"), encoding="utf-8")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (reshaped, r"model.norm.weight is \[32\] in {a}, but \[33\] in {b}; only one shape"),
        (renamed, r"model.last.weight is missing in {a}, but \[32\] in {b}; only one shape"),
        (in_eight_bits, r".* has the type F8_E4M3 in {b}; merge the weights from before"),
        (other_template, r"{b} has another chat format than {a}: the chat template \(line 1 was"),
        (other_vocabulary, r"{b} has another chat format than {a}: the vocabulary \(.*'<|private|>' was None"),
    ],
)
def test_a_misfit_names_the_first_difference_and_both_folders(models, tmp_path, change, says):
    a, b = models[1], shutil.copytree(models[2], tmp_path / "other")
    assert misfit(a, b) is None
    change(b)
    found = misfit(b, a) if change is in_eight_bits else misfit(a, b)
    assert re.match(says.format(a=re.escape(str(a)), b=re.escape(str(b))), found), found


def config_of(**values) -> MergeSettings:
    return MergeSettings.of_config({"algorithm": "merge", "seed": 0, "release": {}} | values)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"merge": {"a": 0.5, "b": 0.4}}, "the shares sum to 0.9; they are shares of 1"),
        ({"merge": {"a": 0.5, "b": 0.50001}}, "the shares sum to 1.00001"),
        ({"merge": {"a": 1.5, "b": -0.5}}, "less than or equal to 1"),
        ({"merge": {"a": 1.0}}, "at least 2 items"),
        (
            {"merge": {"a": 0.4, "b": 0.3, "c": 0.3}, "merging": {"merge_method": "slerp"}},
            "slerp merges two parts, not 3; take linear, or merge merges",
        ),
        ({"merge": {"a": 0.5, "b": 0.5}, "merging": {"merge_method": "ties"}}, "ties needs density, the share"),
        ({"merge": {"a": 0.5, "b": 0.5}, "merging": {"density": 0.5}}, "density is of ties and dare; linear merges"),
    ],
)
def test_shares_are_of_one_and_a_method_has_its_own_settings(values, says):
    with pytest.raises(ValidationError, match=says):
        config_of(**values)


def test_parts_are_merged_in_the_order_of_a_stored_config():
    assert config_of(merge={"b": 0.7, "a": 0.3}).parts == {"merge.a": 0.3, "merge.b": 0.7}
    thirds = config_of(merge={"a": 0.333333, "b": 0.333333, "c": 0.333334})
    assert (thirds.planned_step(None), thirds.kind, thirds.rows_per_step) == (1, None, 0)
    assert thirds.samples_per_step == 1, "the seconds of another merge tell of this one"


def test_shares_by_a_grid_are_a_sweep():
    grid = [{"merge.rl": share / 4, "merge.sft": 1 - share / 4} for share in range(1, 4)]
    for points, names in (
        (grid, [f"soup.rl-{share}.sft-{1 - share}" for share in (0.25, 0.5, 0.75)]),
        ([{"merge": {"rl": 0.5, "sft": 0.5}}, {"merge": {"rl": 0.2, "sft": 0.8}}], None),
    ):
        stages = {"sft": {}, "rl": {}, "soup": {"algorithm": "merge", "sweep": points}}
        made = expand({"stages": stages})
        variants = list(made["sweeps"]["soup"])
        assert len({*variants}) == len(points) and names in (None, variants)
        for variant, point in zip(variants, points, strict=True):
            shares = config_of(merge=made["stages"][variant]["merge"]).merge
            assert shares == point.get("merge", {key.removeprefix("merge."): value for key, value in point.items()})


def test_a_part_whose_weights_are_no_numbers_is_named_and_nothing_is_sealed(models, tmp_path):
    from scripts.backends.merge.merge_weights import merge_exports

    broken = shutil.copytree(models[2], tmp_path / "broken")
    shard = next(path for path in sorted(broken.glob("*.safetensors")) if "model.norm.weight" in load_file(path))
    break_weight(shard, "model.norm.weight")
    shares = {"algorithm": "merge", "seed": 0, "release": {}, "merge": {"a": 0.5, "b": 0.5}}
    exports = {"merge.a": models[1], "merge.b": broken}
    config = MergeSettings.of_config(shares)
    stage = SimpleNamespace(name="soup", config=config, role_exports=exports, parent_export=None)
    run = tmp_path / "run"
    run.mkdir()
    with pytest.raises(UserError, match=rf"^soup: b \({broken}\): weights are no numbers: model.norm.weight"):
        merge_exports(stage, TrainingFolder(run), 1)
    assert [*run.iterdir()] == []


KILLED = """
import os, signal, sys; from pathlib import Path; from types import SimpleNamespace
from scripts.backends.merge import merge_weights; from scripts.backends.merge.merging import MergeSettings
from scripts.stage.training_folder import TrainingFolder
run, a, b, shards = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
save, written = merge_weights.save_file, []
def saved(*arguments, **options):
    save(*arguments, **options)
    written.append(1)
    if len(written) == shards:
        os.kill(os.getpid(), signal.SIGKILL)
merge_weights.save_file = saved
config = MergeSettings.of_config({"algorithm": "merge", "seed": 0, "release": {}, "merge": {"a": 0.5, "b": 0.5}})
roles = {"merge.a": a, "merge.b": b}
stage = SimpleNamespace(name="soup", config=config, role_exports=roles, parent_export=None)
merge_weights.merge_exports(stage, TrainingFolder(run), 1)
"""


@pytest.mark.slow
def test_a_killed_merge_leaves_no_checkpoint_and_is_made_again_to_the_bit(models, tmp_path):
    def merge(run: Path, shards: int) -> int:
        run.mkdir(exist_ok=True)
        command = [sys.executable, "-c", KILLED, run, *models[1:3], str(shards)]
        return subprocess.run(command, check=False, cwd=ROOT, env=os.environ).returncode

    assert merge(tmp_path / "straight", 0) == 0
    assert merge(tmp_path / "killed", 3) == -9
    assert TrainingFolder(tmp_path / "killed").newest_checkpoint() is None
    assert merge(tmp_path / "killed", 0) == 0
    first, second = (TrainingFolder(tmp_path / run).newest_checkpoint() for run in ("straight", "killed"))
    assert (first.step, read_json(first.path / FILES)) == (1, read_json(second.path / FILES))
    left = sorted(path.name for path in (tmp_path / "killed").iterdir())
    assert left == ["checkpoints", "metrics.jsonl"]
    assert [entry["step"] for entry in read_log(tmp_path / "killed/metrics.jsonl")] == [1]
