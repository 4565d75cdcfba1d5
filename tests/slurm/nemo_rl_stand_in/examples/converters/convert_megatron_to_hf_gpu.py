"""The converter that torchrun starts; in the super-v3 branch its name ends otherwise."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from nemo_rl.convert import main

if __name__ == "__main__":
    main(parallel=True)
