"""Backend `nemo_rl`: NeMo-RL in its containers under Slurm.

To read it in order:

- ``training``, ``settings``: what a recipe may say of a stage; ``releases``: what each release of NeMo-RL is made of.
- ``runtime``: where a stage's programs run: release, checkout, image, mounts, variables.
- ``command``, ``hydra``: the driver's command; ``cluster``: ray.sub, which runs it; ``train``: a start and its watch.
- ``demonstrations``: what SFT makes of rows.
- ``metrics``, ``checkpoints``, ``outcome``, ``reach``: its steps, its checkpoints, why it ended, how far it gets.
- ``export``, ``megatron``, ``megatron_python``, ``safetensors``: checkpoints in Hugging Face's format, or as they are.
- ``score``, ``trajectories``, ``benchmarks``: held-out scores and benchmarks of an export.
- ``checks``: what is found beforehand; ``upstream``: a recipe beside its release; ``table``: docs/recipes.md.
- ``backend``: what the rest of Stagecoach asks for (scripts.backends.protocol).
"""
