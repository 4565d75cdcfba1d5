#!/bin/bash
#SBATCH --job-name=stagecoach --nodes=1 --cpus-per-task=2 --mem=4G --requeue --signal=B:USR1@180
#SBATCH --output=stagecoach-%j.log --open-mode=append
# Snakemake itself as a Slurm job, in the project's folder: sbatch --time=2-0 profiles/slurm/controller.sh [words of snakemake]
# Before the time limit it goes back into the queue. The chain's jobs go on meanwhile, and the next allocation finds them.
job=$SLURM_JOB_ID allocation=${SLURM_RESTART_COUNT:-0}
for name in "${!SLURM_@}"; do # jobs that are submitted from here inherit nothing of this one
    [ "$name" = SLURM_CONF ] || unset "$name"
done
end() { # at once: Snakemake would wait for its jobs
    kill -KILL $(pgrep -P "$snakemake") "$snakemake"
}
trap end TERM
trap 'end; scontrol requeue "$job"; sleep 600' USR1
[ "$allocation" = 0 ] || snakemake --unlock # the lock of the allocation before, perhaps on another host
snakemake --profile profiles/slurm "$@" &
snakemake=$!
wait "$snakemake"
