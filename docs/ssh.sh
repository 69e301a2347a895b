#!/bin/bash
# One torchrun on each host, in the same folder of a shared file system:
#   HOSTS="node1 node2" docs/ssh.sh --out_dir runs/big --data DIR …
# Ctrl-C, or the end of this terminal, lets all of them save and stop.

FIRST=${HOSTS%% *}
# a host may come back; and two minutes to save, not torchrun's 30 s
TORCH="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 TORCH_ELASTIC_SHUTDOWN_TIMEOUT=120"
for host in $HOSTS; do
    ssh -tt "$host" "cd $(printf %q "$PWD") && PATH=$(printf %q "$PATH") $TORCH torchrun --nproc_per_node=8 --max_restarts=3 \
        --nnodes=$(wc -w <<< "$HOSTS") --rdzv_backend=c10d --rdzv_endpoint=$FIRST:29400 --rdzv_id=train \
        --rdzv_conf=is_host=$([ "$host" = "$FIRST" ] && echo 1 || echo 0) \
        -- train.py --auto_resume $(printf '%q ' "$@")" < /dev/null &
done
trap 'kill -HUP $(jobs -p)' INT TERM HUP
wait  # until it is interrupted by the trap
wait  # until they have saved
