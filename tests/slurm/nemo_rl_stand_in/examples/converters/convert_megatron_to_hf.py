"""The converter of one process, on the CPU."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from nemo_rl.convert import main

if __name__ == "__main__":
    main(parallel=False)
