#!/bin/bash
# One torchrun on each host, in the same folder of a shared file system:
#   HOSTS="node1 node2" docs/ssh.sh --out_dir runs/big --data DIR …
# Ctrl-C, or the end of this terminal, lets all of them save and stop.

FIRST=${HOSTS%% *}
for host in $HOSTS; do
    ssh -tt "$host" "cd $PWD && PATH=$PATH torchrun --nproc_per_node=8 \
        --nnodes=$(wc -w <<< "$HOSTS") --rdzv_backend=c10d --rdzv_endpoint=$FIRST:29400 --rdzv_id=train \
        --rdzv_conf=is_host=$([ "$host" = "$FIRST" ] && echo 1 || echo 0) \
        -- train.py --auto-resume $(printf '%q ' "$@")" < /dev/null &
done
trap 'kill -HUP $(jobs -p)' INT TERM HUP
wait
wait
