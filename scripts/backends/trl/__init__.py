"""Backend `trl`: TRL's trainers, on this machine or on the nodes of a Slurm job."""

import logging

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # else it warns of other kernels wherever peft is imported
