"""Which CPUs compute in bfloat16: those that torch's oneDNN does."""

from dataclasses import dataclass
from typing import Any

import pytest

from scripts.model import bfloat16
from scripts.model.bfloat16 import computes_bfloat16, type_to_score
from scripts.recipe.load import load_recipe
from scripts.recipe.resolve import resolve_stage, training_config
from tests.conftest import SHORT

X86 = "model name\t: AMD EPYC\nflags\t\t: fpu avx2 {}\nvmx flags\t: avx512bw avx512dq avx512vl\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd {}\n"


@pytest.mark.parametrize(
    ("text", "computes"),
    [
        (X86.format("avx512f avx512dq avx512bw avx512vl"), True),
        (X86.format("avx512f"), False),
        (X86.format("f16c"), False),
        (ARM.format("i8mm bf16"), True),
        (ARM.format("sve"), False),
        ("", False),
    ],
)
def test_the_instructions_of_a_cpu_tell(tmp_path, text, computes):
    (tmp_path / "cpuinfo").write_text(text)
    assert computes_bfloat16("cpu", tmp_path / "cpuinfo") is computes


def test_a_machine_whose_cpu_is_not_described_computes_in_float32_and_a_gpu_in_bfloat16(tmp_path):
    assert computes_bfloat16("cpu", tmp_path / "none") is False
    assert computes_bfloat16("cuda", tmp_path / "none") is True


def test_torch_says_the_same_of_this_cpu():
    torch = pytest.importorskip("torch")
    assert computes_bfloat16("cpu") == torch.ops.mkldnn._is_mkldnn_bf16_supported()


@dataclass(frozen=True)
class Job:
    """What of a job decides the precision."""

    config: Any
    stage: str = "sft"
    accelerator: str = "cpu"


@pytest.mark.slow
@pytest.mark.parametrize(("is_fast", "computed"), [(True, "bfloat16"), (False, "float32")])
def test_a_slow_cpu_trains_in_float32_and_says_so(monkeypatch, capsys, is_fast, computed):
    setup = pytest.importorskip("scripts.backends.trl.setup")
    values = resolve_stage(load_recipe(SHORT), "sft").values()
    values["policy"]["precision"] = "bfloat16"
    job = Job(training_config(values))
    monkeypatch.setattr(setup, "computes_bfloat16", lambda device: is_fast)
    assert setup.in_fast_precision(job).config.policy.precision == computed
    assert job.config.policy.precision == "bfloat16"
    assert ("sft: computes in float32" in capsys.readouterr().out) != is_fast


@pytest.mark.parametrize(
    ("config", "is_fast", "dtype"),
    [("{}", True, "auto"), ("{}", False, "float32"), ('{"quantization_config": {}}', False, "auto")],
)
def test_a_slow_cpu_scores_in_float32_what_is_not_quantised(tmp_path, monkeypatch, config, is_fast, dtype):
    monkeypatch.setattr(bfloat16, "computes_bfloat16", lambda device: is_fast)
    (tmp_path / "config.json").write_text(config)
    assert type_to_score(tmp_path, "cpu") == dtype
