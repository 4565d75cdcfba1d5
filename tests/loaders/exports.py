"""Exports as the product makes them, of small models with random weights: pretrained, trained, merged, scored."""

from pathlib import Path
from typing import Any

from scripts.files import write_json
from scripts.recipe.model import PretrainedModel
from scripts.stage.publish import export_checkpoint, publish_checkpoint, take_settings
from scripts.stage.training_folder import TrainingFolder
from scripts.train.export import export_pretrained
from tests.stages import checkpoint_record

TEXTS = [
    "What is the larger of the two numbers?",
    " There's  more:\n\n 12 of 340, in all! ünïcode 🙂",
    "<|im_start|>user\nHi<|im_end|>\n",
]
TALK = [{"role": "user", "content": "What is the larger of the two numbers?"}]
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>\n{% endfor %}"


def export_parent(parent: Path, place: Path) -> Path:
    """The export of a pretrained model whose recipe names the tokenizer's missing pad token, and another template."""
    place.mkdir(parents=True)
    template = place / "template.jinja"
    template.write_text(TEMPLATE + "{% if add_generation_prompt %}<|im_start|>{% endif %}")
    model = PretrainedModel(name=str(parent), pad_token="<|reserved|>", chat_template=str(template))
    export_pretrained(model, place / "hf")
    return (place / "hf/model").resolve()


def perturbed(folder: Path, kind: Any = None) -> tuple[Any, Any]:
    """A model of a folder, its weights a little changed as by training, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = (kind or AutoModelForCausalLM).from_pretrained(folder)
    torch.manual_seed(1)
    with torch.no_grad():
        for weights in model.parameters():
            weights.add_(0.01 * torch.randn_like(weights))
    return model, AutoTokenizer.from_pretrained(folder)


def export_trained(model: Any, tokenizer: Any, place: Path, like: Path | None) -> Path:
    """The export of a stage whose trainer saved this model and tokenizer."""
    saved = place / "run/saving"
    saved.mkdir(parents=True)
    model.save_pretrained(saved)
    tokenizer.save_pretrained(saved)
    checkpoint = TrainingFolder(place / "run").seal(saved, 1)
    publish_checkpoint(checkpoint, place / "ckpt", checkpoint_record("sft", 1))
    export_checkpoint(place / "ckpt", place / "hf", like)
    return (place / "hf/model").resolve()


def export_merged(parent: Path, place: Path) -> Path:
    """The export of a stage whose adapters are merged into its parent."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from scripts.model.merge import write_merged

    place.mkdir(parents=True)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(parent),
        LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    torch.manual_seed(2)
    for name, weights in model.named_parameters():
        if "lora_B" in name:
            weights.data.normal_(std=0.02)
    model.save_pretrained(place / "adapter")
    write_merged(parent, place / "adapter", place / "model")
    take_settings(parent, place / "model")
    return place / "model"


def export_scoring(parent: Path, place: Path) -> Path:
    """The export of a reward model: the head of one label that transformers lays over a decoder."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(parent, num_labels=1)
    tokenizer = AutoTokenizer.from_pretrained(parent)
    model.config.pad_token_id = tokenizer.pad_token_id
    return export_trained(model, tokenizer, place, like=parent)


def make_exports(parents: dict[str, Path], place: Path) -> dict[str, Path]:
    """All exports, by name: of each parent up to four kinds."""
    exports = {}
    for name, parent in parents.items():
        own = export_parent(parent, place / name / "pretrained")
        exports[f"{name}, pretrained"] = own
        exports[f"{name}, trained"] = export_trained(*perturbed(own), place / name / "trained", like=own)
        exports[f"{name}, adapters merged"] = export_merged(own, place / name / "merged")
        if "gemma3" not in name:
            exports[f"{name}, reward model"] = export_scoring(own, place / name / "scoring")
    return exports


def write_spec(exports: dict[str, Path], path: Path) -> None:
    """Write what the programs in other environments read."""
    write_json(path, {"exports": {name: str(folder) for name, folder in exports.items()}, "texts": TEXTS, "talk": TALK})
