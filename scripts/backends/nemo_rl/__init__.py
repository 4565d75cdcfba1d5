"""Backend `nemo_rl`: NeMo-RL in containers under Slurm.

Reading order: ``training`` and ``settings`` (a stage in a recipe), ``releases``, ``runtime`` (where programs run),
``command`` with ``hydra`` (the driver's command), ``cluster`` (ray.sub), ``train`` (a start and its watch),
``demonstrations`` (rows of SFT), ``metrics``, ``checkpoints``, ``outcome``, ``reach``, ``export``, ``score`` with
``trajectories``, ``checks`` with ``upstream`` (preflight and doctor), ``backend`` (scripts.backends.protocol).
"""
