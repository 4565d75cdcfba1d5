"""A stand-in for NeMo-RL's run_eval.py: its files and its last line, of made-up answers."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from nemo_rl import config
from omegaconf import OmegaConf

SAMPLES, RIGHT = 7, 3


def main() -> None:
    """Evaluate as the command line says."""
    options = sys.argv[1:]
    place = options.index("--config")
    settings = OmegaConf.merge(config.load(Path(options[place + 1]), []), OmegaConf.from_dotlist(options[place + 2 :]))
    if not Path(settings.generation.model_name, "config.json").is_file():
        raise OSError(f"{settings.generation.model_name} is no model")
    folder = Path(settings.eval.save_path)
    folder.mkdir(parents=True)
    said = {"model_name": settings.generation.model_name, "dataset_name": settings.data.dataset_name}
    (folder / "config.json").write_text(json.dumps(said | {"temperature": settings.generation.temperature}))
    samples = [{"reward": float(number < RIGHT), "sample_index": number} for number in range(SAMPLES)]
    (folder / "evaluation_data.json").write_text(json.dumps({"evaluation_data": samples}))
    print(f"\n{'=' * 60}\nscore={RIGHT / SAMPLES:.4f} ({float(RIGHT)}/{SAMPLES})\n{'=' * 60}\n")


if __name__ == "__main__":
    main()
