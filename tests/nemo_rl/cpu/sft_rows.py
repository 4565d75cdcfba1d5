"""The tokens of rows, which of them are learnt and whether the row counts, by a release's own run_sft.py.

CONFIG OVERRIDE...: as the driver takes them, in the release's checkout, whose examples are in PYTHONPATH. Prints a line of JSON for each row.
"""

import json
import sys

import absent
import run_sft
from nemo_rl.algorithms.utils import get_tokenizer
from nemo_rl.data.llm_message_utils import add_loss_mask_to_message_log
from nemo_rl.utils.config import load_config, parse_hydra_overrides
from omegaconf import OmegaConf

assert absent
if hasattr(run_sft, "register_omegaconf_resolvers"):
    run_sft.register_omegaconf_resolvers()
config = OmegaConf.to_container(parse_hydra_overrides(load_config(sys.argv[1]), sys.argv[2:]), resolve=True)
if hasattr(run_sft.MasterConfig, "model_validate"):
    config = run_sft.MasterConfig(**config).model_dump()  # what it does not know is dropped here
tokenizer = get_tokenizer(config["policy"]["tokenizer"], **({"get_processor": True} if "vlm" in sys.argv[1] else {}))
seeds = (42,) if "seed" in run_sft.setup_data.__annotations__ else ()
data = run_sft.setup_data(tokenizer, config["data"], *seeds)[0]
for number in range(len(data)):
    try:
        row = data[number]
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        continue
    add_loss_mask_to_message_log([row["message_log"]], ["assistant"], config["sft"].get("only_unmask_final", False))
    ids = [token for message in row["message_log"] for token in message["token_ids"].tolist()]
    mask = [bool(each) for message in row["message_log"] for each in message["token_loss_mask"].tolist()]
    print(json.dumps({"ids": ids, "mask": mask, "counts": row["loss_multiplier"], "length": row["length"]}))
