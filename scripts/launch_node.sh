#!/usr/bin/env bash
# Start the ranks of one node with deepspeed or torchrun, to be run once on every node, from the checkout: by
# slurm_train.sh, or by hand on a cluster without SLURM. Neither ssh nor a scheduler is needed.
#
#     NODE_RANK=0 NUM_NODES=2 RANKS_PER_NODE=8 MASTER_ADDR=node1 MASTER_PORT=15000 \
#         bash scripts/launch_node.sh torchrun --config configs/glm-base.yaml run.directory=runs/base
#
#     ... HOSTFILE=hosts bash scripts/launch_node.sh deepspeed ...     hosts: a line `NAME slots=RANKS` for each node
#
# SIGUSR1 to the processes of a node makes all ranks save and end; the launchers ignore it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/cluster_environment.sh

launcher=${1:?give deepspeed or torchrun, then the arguments of pretrain_glm.py}
shift
: "${NODE_RANK:?number of this node, from 0}" "${MASTER_ADDR:?address of node 0}" "${MASTER_PORT:?a free port there}"

# SLURM signals every process of a step. An ignored signal stays ignored after exec; the ranks set their own handlers.
trap '' USR1
case $launcher in
    deepspeed)
        : "${HOSTFILE:?a file with a line \"NAME slots=RANKS\" for each node}"
        exec "$python" -m deepspeed.launcher.runner --hostfile "$HOSTFILE" --no_ssh --node_rank "$NODE_RANK" \
            --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" pretrain_glm.py "$@"
        ;;
    torchrun)
        exec "$python" -m torch.distributed.run --nnodes "${NUM_NODES:?number of nodes}" --node-rank "$NODE_RANK" \
            --nproc-per-node "${RANKS_PER_NODE:?ranks on each node}" --master-addr "$MASTER_ADDR" \
            --master-port "$MASTER_PORT" pretrain_glm.py "$@"
        ;;
    *)
        echo "error: launcher $launcher; it must be deepspeed or torchrun." >&2
        exit 2
        ;;
esac
