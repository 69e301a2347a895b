#!/bin/bash
# One torchrun on each node:  sbatch docs/slurm.sh --out_dir runs/big --data DIR …
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=32 --time=24:00:00
#SBATCH --signal=TERM@120 --requeue --open-mode=append

FIRST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export ENDPOINT=$FIRST:$((20000 + SLURM_JOB_ID % 10000)) NPROC=${SLURM_GPUS_ON_NODE:-1}

export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110  # seconds to save after SIGTERM, not torchrun's 30

srun bash -c 'exec torchrun --nnodes=$SLURM_NNODES --nproc_per_node=$NPROC --max_restarts=3 \
    --rdzv_backend=c10d --rdzv_endpoint=$ENDPOINT --rdzv_id=$SLURM_JOB_ID \
    --rdzv_conf=is_host=$((SLURM_NODEID==0)) -- train.py --auto_resume "$@"' torchrun "$@"

# If the run has not finished, after SIGTERM or an error, requeue it to continue from the newest
# checkpoint, at most 20 times; scancel ends it.
[ $? -eq 0 ] || [ "${SLURM_RESTART_COUNT:-0}" -ge 20 ] || scontrol requeue "$SLURM_JOB_ID"
