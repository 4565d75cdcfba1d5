"""A model in memory takes over another's weights."""

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402

from scripts.model.loading import fill_model, load_model  # noqa: E402
from tests.pretrained import save_pretrained  # noqa: E402


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
def test_a_model_takes_over_the_weights_of_another_of_its_shape(tmp_path, architecture):
    first, second = tmp_path / "first", tmp_path / "second"
    for place in (first, second):
        save_pretrained(architecture, place, max_shard_size="50KB")
    for shard in second.glob("*.safetensors"):
        save_file({name: 2 * tensor for name, tensor in load_file(shard).items()}, shard, {"format": "pt"})
    model = load_model(first).requires_grad_(False)
    assert fill_model(model, first, second)
    wanted = load_model(second).state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())


def test_a_model_of_another_shape_or_with_other_names_in_its_files_is_left_as_it_is(tmp_path):
    first, wider = tmp_path / "first", tmp_path / "wider"
    save_pretrained("qwen3", first)
    save_pretrained("qwen3", wider, head_dim=32)
    model = load_model(first).requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert not fill_model(model, first, wider)
    (file,) = first.glob("*.safetensors")
    tensors = load_file(file)
    tensors.pop("model.norm.weight")
    save_file(tensors, file, {"format": "pt"})
    assert not fill_model(model, first, first), "a tensor is not in the file"
    save_file(tensors | {"model.other.weight": torch.ones(2)}, file, {"format": "pt"})
    assert not fill_model(model, first, first)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
