#!/usr/bin/env bash
# Fine-tunes on 2 nodes with 4 ranks each. Submit it in the clone with
#   sbatch examples/slurm.sh --steps 2000
# whose arguments are finetune.py's; submit it again to go on after the last checkpoint, also with
# other numbers of nodes and ranks.
#SBATCH --job-name=finetune
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=2
#SBATCH --time=01:00:00
set -euo pipefail

# Where the ranks meet, in torch's own variables. shardstep's C++ programs find it by themselves.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK

# Every node must see this directory: each rank writes its own part of a checkpoint.
runs=${RUNS:-$SLURM_SUBMIT_DIR/runs}

srun --kill-on-bad-exit=1 bash -c '
  export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID
  exec python examples/finetune.py "$@"' finetune --runs "$runs" "$@"
