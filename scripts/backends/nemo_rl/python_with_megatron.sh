venv="${NEMO_RL_VENV_DIR:-/opt/ray_venvs}/nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker"
if [ -x "$venv/bin/python" ]; then
  export VIRTUAL_ENV="$venv" PATH="$venv/bin:$PATH"
  exec "$venv/bin/python" "$@"
elif command -v uv > /dev/null; then
  echo "$venv is not in this image, so uv builds it, for which it needs a network" >&2
  exec uv run --extra mcore python "$@"
fi
echo "error: this image has neither $venv nor uv, so no Python with Megatron; build it with nemo_rl/utils/prefetch_venvs.py, as upstream's Dockerfile does" >&2
exit 1
