"""The kinds of chains that are struck: what trains, and where."""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from runpy import run_path

import yaml

from scripts.recipe.expand import expand

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
COPIED = ("Snakefile", "demo", "rules", "scripts", "config", "envs", "profiles", "docs")
RUN = "struck"
SAVE_PERIOD = 3
CLUSTER_SITE = {
    "name": "test",
    "threads": 1,
    "slurm": {
        "partition": "batch",
        "margin": 15,
        "object_store_mb": 100,
        "light": {"cpus": 1, "mem_mb": 2000, "runtime": 10},
    },
}
ON_CLUSTER = (
    *("--profile", "profiles/slurm", "--latency-wait", "5"),
    *("--seconds-between-status-checks", "2", "--slurm-init-seconds-before-status-checks", "2"),
)


def light_recipe(children: int) -> dict:
    """The chain of backend `light`, with so many stages that start from its first."""
    recipe = yaml.safe_load((HERE / "light/recipe.yaml").read_text())
    recipe["stages"] = dict(list(recipe["stages"].items())[: 1 + children])
    used = {stage["blend"] for stage in recipe["stages"].values()}
    recipe["blends"] = {name: blend for name, blend in recipe["blends"].items() if name in used}
    return recipe


def graph_recipe() -> dict:
    """Backend `light`: a base, two branches, a student of both, and a stage that goes on with the first branch."""
    recipe = light_recipe(2)
    base, first, second = recipe["stages"].values()
    teachers = {"one": "first", "two": "second", "start": "base"}
    student = first | {"teachers": teachers, "resources": {"runtime": 90}}
    longer = {key: value for key, value in second.items() if key != "parent"} | {"continues": "first", "steps": 40}
    recipe["stages"] = {"base": base, "first": first, "second": second, "student": student, "longer": longer}
    return recipe


def trl_recipe(stages: tuple[str, ...] = ("sft", "rlvr1", "rlhf")) -> dict:
    """The tests' short chain with a checkpoint every three steps."""
    recipe = yaml.safe_load((ROOT / "tests/short.yaml").read_text())
    recipe["stages"] = {name: recipe["stages"][name] for name in stages}
    recipe["blends"] = {name: recipe["blends"][name] for name in stages}
    recipe["defaults"]["grpo"]["grpo"]["max_num_steps"] = 9
    recipe["defaults"]["grpo"]["checkpointing"] = {"save_period": SAVE_PERIOD}
    recipe["stages"]["sft"]["checkpointing"] = {"save_period": SAVE_PERIOD}
    return recipe


def data_recipe() -> dict:
    """The chain of backend `light` on rows of a folder: a file of several blocks, and two blends composed of files."""
    tools, recipe = tools_recipe(), light_recipe(2)
    blend = tools["blends"]["demonstrations"]
    several = blend | {"file": "*/demonstrations.jsonl"}
    recipe["blends"] = {
        "first": blend | {"file": "demonstrations.jsonl"},
        "second": several | {"shuffle": True, "test": 40},
        "third": several | {"deduplicate": "prompt"},
    }
    return recipe | {key: tools[key] for key in ("source", "environments", "model")}


def tools_recipe() -> dict:
    """SFT and GRPO with a tool, cut to a few steps."""
    recipe = yaml.safe_load((ROOT / "config/recipes/tiny-tools.yaml").read_text())
    recipe["source"]["path"] = "rows"
    sft, rlvr = recipe["stages"].values()
    sft["sft"], rlvr["gate"] = {"max_num_steps": 9}, []
    rlvr["grpo"] = {"num_prompts_per_step": 2, "num_generations_per_prompt": 4, "max_num_steps": 9}
    for stage in (sft, rlvr):
        stage["checkpointing"]["save_period"] = SAVE_PERIOD
    return recipe


def sweep_recipe() -> dict:
    """The tests' short SFT in two variants, and a stage that starts from the better."""
    recipe = trl_recipe(("sft", "rlvr1"))
    sft = recipe["stages"]["sft"]
    sft["sft"] = {"max_num_steps": 9}
    recipe["stages"] = {
        "sft": sft | {"sweep": {"policy.optimizer.lr": [1.0e-2, 2.0e-2]}},
        "rlvr1": recipe["stages"]["rlvr1"] | {"parent": {"stage": "sft", "best": "held_out_mean"}},
    }
    return recipe


def distillation_recipe() -> dict:
    """A teacher by GRPO, its distillation with the start into the start, and a merge of teacher and student."""
    recipe = trl_recipe(("sft", "rlvr1"))
    sft, teacher = recipe["stages"]["sft"], recipe["stages"]["rlvr1"]
    sft["sft"] = {"max_num_steps": 6}
    grpo = recipe["defaults"]["grpo"]
    student = {
        "algorithm": "distillation",
        "parent": "sft",
        "blend": "rlvr1",
        "teachers": {"math": "teacher", "start": "sft"},
        "distillation": {
            "of": {"math_with_judge_simple_agent": "math"},
            "default": "start",
            "num_prompts_per_step": 8,
            "max_num_steps": 9,
        },
        **{key: grpo[key] for key in ("policy", "checkpointing")},
    }
    merge = {"algorithm": "merge", "merge": {"teacher": 0.5, "student": 0.5}}
    recipe["stages"] = {"sft": sft, "teacher": teacher, "student": student, "merge": merge}
    return recipe


@dataclass(frozen=True)
class Kind:
    """A chain, and how often what is struck in it.

    `aim`: how often a start of a program is to be struck, `aims`: by the first word of its name. `at_random`: the share
    of the calls of Snakemake with strikes at random times, which lie `seconds` apart. `repeats`: starts of a training
    that are struck in one call of Snakemake, at most. `by_call`: the share of the planned strikes that strace makes, at
    the n-th call of the kernel. `files` of rows lie in a folder. All `runs` are asked for at once.
    """

    says: str
    recipe: dict
    slurm: bool = False
    nodes: int = 1
    aim: float = 0.75
    aims: dict[str, float] = field(default_factory=dict)
    at_random: float = 0.2
    seconds: tuple[float, float] = (1, 6)
    repeats: int = 5
    by_call: float = 0.7
    files: int = 0
    runs: tuple[str, ...] = (RUN,)

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages of its chain."""
        return tuple(expand(self.recipe)["stages"])

    @property
    def arguments(self) -> tuple[str, ...]:
        """What Snakemake is told besides its targets."""
        return ("--keep-going", *(ON_CLUSTER if self.slurm else ()))

    def prepare(self, root: Path, repository: Path) -> None:
        """A copy of the repository (or of another copy) with the kind's recipe and site, and what strikes in it."""
        root.mkdir(parents=True)
        for part in COPIED:
            source = repository / part
            (shutil.copytree if source.is_dir() else shutil.copy2)(source, root / part)
        shutil.copytree(HERE / "light", root / "scripts/backends/light", dirs_exist_ok=True)
        shutil.copy(HERE / "sitecustomize.py", root)
        for seed in range(self.files):
            run_path(str(ROOT / "config/environments/calculator_rows.py"))["write_rows"](root / f"rows/{seed}", seed)
        for name in ("demonstrations", "products") if self.files else ():
            parts = sorted((root / "rows").glob(f"*/{name}.jsonl"))
            (root / f"rows/{name}.jsonl").write_bytes(b"".join(part.read_bytes() for part in parts))
        stages = {name: {"nodes": self.nodes} for name in self.stages} if self.nodes > 1 else {}
        (root / "config/recipes/struck.yaml").write_text(yaml.safe_dump(self.recipe, sort_keys=False))
        (root / "config/sites/test.yaml").write_text(yaml.safe_dump(CLUSTER_SITE | {"stages": stages}))
        site = "test" if self.slurm else "laptop"
        (root / "config/config.yaml").write_text(
            f"recipe: config/recipes/struck.yaml\nsite: config/sites/{site}.yaml\nrun: {RUN}\n"
        )


SELDOM = {"snakemake": 0.25, "demo.synthesize": 0.5}
TRAINED = {"train.run": 0.9}
KINDS = {
    "light": Kind("a training without torch, on this machine", light_recipe(6), aims=SELDOM | TRAINED),
    "graph": Kind("light, with teachers and a training that goes on", graph_recipe(), aims=SELDOM | TRAINED),
    "trl": Kind("trl, on this machine", trl_recipe(), aims=SELDOM | TRAINED, seconds=(2, 12)),
    "slurm": Kind(
        "a training without torch, Slurm jobs on three hosts", light_recipe(2), slurm=True, aims=SELDOM, seconds=(2, 12)
    ),
    "ranks": Kind(
        "trl, each stage on two hosts of Slurm by Ray",
        trl_recipe(("sft", "rlvr1")),
        slurm=True,
        nodes=2,
        aim=0.3,
        aims=SELDOM | {"ray": 0.6, "backends.trl.driver": 0.6, "train.run": 0.6},
        at_random=0.4,
        seconds=(5, 30),
        repeats=2,
        by_call=0,
    ),
    "data": Kind(
        "rows of a folder, filled and checked by several workers; light", data_recipe(), aims=SELDOM, files=12
    ),
    "tools": Kind("trl, GRPO with a tool", tools_recipe(), aims=SELDOM | TRAINED, seconds=(2, 12), files=1),
    "distillation": Kind(
        "trl, distillation and a merge", distillation_recipe(), aims=SELDOM | TRAINED, seconds=(2, 12)
    ),
    "sweep": Kind("trl, two variants and a choice", sweep_recipe(), aims=SELDOM | TRAINED, seconds=(2, 12)),
    "twins": Kind(
        "light, two runs at once that ask for the same trainings", light_recipe(2), aims=SELDOM, runs=(RUN, "twin")
    ),
}
