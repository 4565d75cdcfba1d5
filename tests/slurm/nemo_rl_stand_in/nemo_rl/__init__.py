"""What the stand-ins of NeMo-RL's programs share."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
RELEASE = (ROOT / "RELEASE").read_text().strip() if (ROOT / "RELEASE").exists() else "v0.7.0"
