#!/bin/bash
# A stand-in for NeMo-RL's run_in_allocation.sh: the same variables in, the same files below LOG_DIR, the same fatal lines and
# ends. Unlike the real one, this starts no Ray for a replica, balances by balance.py, and looks every second.
set -euo pipefail

die() { echo "[FATAL] $*" >&2 && exit 1; }
for name in SLURM_JOB_ID SLURM_HET_SIZE SLURM_JOB_NODELIST_HET_GROUP_{0,1} SLURM_JOB_ACCOUNT SLURM_JOB_PARTITION SLURM_SUBMIT_DIR \
    BASE_LOG_DIR CONTAINER MOUNTS COMMAND EXTERNAL_VLLM_POOLS EXTERNAL_VLLM_TOOLS_DIR_HOST EXTERNAL_VLLM_SHARED_ROOT RAY_SUB; do
    [ -n "${!name:-}" ] || die "$name is required"
done
[ "$SLURM_HET_SIZE" = 2 ] || die "Expected two hetgroups, not $SLURM_HET_SIZE"
tools=$EXTERNAL_VLLM_TOOLS_DIR_HOST logs=$BASE_LOG_DIR/$SLURM_JOB_ID${SLURM_RESTART_COUNT:+-$SLURM_RESTART_COUNT}-logs
for path in "$BASE_LOG_DIR" "$tools"; do
    [[ $path == "$EXTERNAL_VLLM_SHARED_ROOT"/* ]] || die "$path lies outside $EXTERNAL_VLLM_SHARED_ROOT"
done
of() { local name=$1_$2 && echo "${!name?}"; }
mapfile -t training < <(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_0" | sort)
mapfile -t judging < <(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_1" | sort)

needed=0
for pool in $EXTERNAL_VLLM_POOLS; do
    for part in MODEL CONTAINER VLLM_PYTHON REPLICAS TENSOR_PARALLEL_SIZE LB_PORT URL_PLACEHOLDER; do
        [ -n "$(of "$pool" $part)" ] || die "${pool}_$part is required"
    done
    [ $(($(of "$pool" TENSOR_PARALLEL_SIZE) % GPUS_PER_NODE)) = 0 ] || die "$pool: a replica has whole nodes"
    [[ $COMMAND == *"$(of "$pool" URL_PLACEHOLDER)"* ]] || die "the driver is not told of $pool"
    needed=$((needed + $(of "$pool" REPLICAS) * $(of "$pool" TENSOR_PARALLEL_SIZE) / GPUS_PER_NODE))
done
[ ${#judging[@]} = $needed ] || die "hetgroup 1 has ${#judging[@]} nodes, expected $needed"

steps=() labels=() ray=
end() {
    status=$?
    trap - EXIT TERM
    touch "$logs/ENDED"
    kill $ray "${steps[@]}" 2> /dev/null || true
    wait || true
    exit $status
}
trap end EXIT
trap 'exit 143' TERM
check() {
    for place in "${!steps[@]}"; do
        kill -0 "${steps[$place]}" 2> /dev/null || die "${labels[$place]} exited unexpectedly"
    done
}

serve() { # pool, replica, log: a server, and its line in the registry once it is healthy
    local name=$1_VLLM_PYTHON model=$1_MODEL port=8000 line arguments=() id=$SLURM_JOB_ID-${1,,}-$2
    local said=$1_VLLM_ARGS stated=$1_ENV_VARS served=$1_SERVED_MODEL_NAME size=$1_TENSOR_PARALLEL_SIZE
    while IFS= read -r line; do [ -z "$line" ] || export "$line"; done <<< "${!stated}"
    while IFS= read -r line; do [ -z "$line" ] || arguments+=("$line"); done <<< "${!said}"
    "${!name}" "$tools/serve_vllm_on_ray.py" serve "${!model}" --tensor-parallel-size "${!size}" \
        --distributed-executor-backend ray --port $port --served-model-name "${!served}" "${arguments[@]}" > "$3" 2>&1 &
    until curl -sf "http://$HOST_ADDRESS:$port/health" > /dev/null; do
        kill -0 $! 2> /dev/null || { echo "[$id] ERROR: vLLM exited before becoming healthy" >&2 && exit 1; }
        sleep 0.5
    done
    echo "http://$HOST_ADDRESS:$port" >> "$REGISTRY"
    wait $! || echo "[$id] ERROR: vLLM exited with status $?" >&2
    exit 1
}

address() { getent ahostsv4 "$1" | awk 'NR == 1 {print $1}'; }

place=0
mkdir -p "$logs"
for pool in $EXTERNAL_VLLM_POOLS; do
    folder=$logs/external_${pool,,} size=$(($(of "$pool" TENSOR_PARALLEL_SIZE) / GPUS_PER_NODE))
    mkdir -p "$folder/state"
    export REGISTRY=$folder/state/registry
    : > "$REGISTRY"
    for ((replica = 0; replica < $(of "$pool" REPLICAS); replica++)); do
        nodes=("${judging[@]:place:size}")
        place=$((place + size))
        echo "[INFO] $(of "$pool" DISPLAY_NAME) replica $replica: $(IFS=, && echo "${nodes[*]}")"
        HOST_ADDRESS=$(address "${nodes[0]}") srun --het-group=1 --no-container-mount-home --overlap --kill-on-bad-exit=1 \
            --mpi=pmix --container-image="$(of "$pool" CONTAINER)" --gres="gpu:$GPUS_PER_NODE" \
            --container-mounts="$EXTERNAL_VLLM_SHARED_ROOT:$EXTERNAL_VLLM_SHARED_ROOT" --nodes="$size" --ntasks="$size" \
            --ntasks-per-node=1 --nodelist="$(IFS=, && echo "${nodes[*]}")" --output="$folder/replica_${replica}_%t.log" bash -c \
            "tools=$tools; $(declare -f serve); [ \$SLURM_PROCID != 0 ] && exec sleep infinity; serve $pool $replica $folder/vllm_$replica.log" &
        steps+=($!)
        labels+=("$(of "$pool" DISPLAY_NAME) replica $replica")
    done
    srun --het-group=0 --no-container-mount-home --overlap --mpi=pmix --container-image="$CONTAINER" --container-mounts="$MOUNTS" \
        --container-name="external-vllm-lb-${pool,,}-$SLURM_JOB_ID" --nodelist="${training[0]}" --nodes=1 --ntasks=1 \
        --output="$folder/load_balancer.log" python "$tools/balance.py" "$(of "$pool" LB_PORT)" "$REGISTRY" &
    steps+=($!)
    labels+=("$(of "$pool" DISPLAY_NAME) load balancer")
done

for pool in $EXTERNAL_VLLM_POOLS; do
    folder=$logs/external_${pool,,} url=http://$(address "${training[0]}"):$(of "$pool" LB_PORT)/v1
    until [ "$(wc -l < "$folder/state/registry")" = "$(of "$pool" REPLICAS)" ] && curl -sf "$url/models" > /dev/null; do
        check
        [ $SECONDS -lt "${STARTUP_TIMEOUT:-3600}" ] || die "Timed out waiting for all external vLLM pools"
        sleep 1
        echo "[INFO] $(of "$pool" DISPLAY_NAME) ready: $(wc -l < "$folder/state/registry")/$(of "$pool" REPLICAS)"
    done
    COMMAND=${COMMAND//$(of "$pool" URL_PLACEHOLDER)/$url}
done
export COMMAND

echo "[INFO] all pools answer"
SLURM_JOB_NODELIST=$SLURM_JOB_NODELIST_HET_GROUP_0 SLURM_JOB_NUM_NODES=${#training[@]} bash "$RAY_SUB" &
ray=$!
while kill -0 $ray 2> /dev/null; do
    check
    sleep 1
done
wait $ray && ray= || { status=$? ray= && exit $status; }
