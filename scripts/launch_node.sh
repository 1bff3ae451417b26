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

refuse() {
    echo "error: $1 (see the top of scripts/launch_node.sh)." >&2
    exit 2
}

require() { # VARIABLE MEANING
    [[ -n ${!1:-} ]] || refuse "$1 is not set; it is the $2"
}

launcher=${1:-}
shift || true
case $launcher in
    deepspeed) require HOSTFILE 'file with a line "NAME slots=RANKS" for each node' ;;
    torchrun)
        require NUM_NODES 'number of nodes'
        require RANKS_PER_NODE 'number of ranks on each node'
        ;;
    *) refuse "the launcher is '$launcher'; it must be deepspeed or torchrun" ;;
esac
require NODE_RANK 'number of this node, from 0'
require MASTER_ADDR 'address of node 0'
require MASTER_PORT 'number of a free port there'
command -v "$python" >/dev/null || refuse "there is no Python at $python; set PYTHON, or make .venv with scripts/test.sh"

# SLURM signals every process of a step. An ignored signal stays ignored after exec; the ranks set their own handlers.
trap '' USR1
case $launcher in
    deepspeed)
        exec "$python" -m deepspeed.launcher.runner --hostfile "$HOSTFILE" --no_ssh --node_rank "$NODE_RANK" \
            --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" pretrain_glm.py "$@"
        ;;
    torchrun)
        exec "$python" -m torch.distributed.run --nnodes "$NUM_NODES" --node-rank "$NODE_RANK" \
            --nproc-per-node "$RANKS_PER_NODE" --master-addr "$MASTER_ADDR" \
            --master-port "$MASTER_PORT" pretrain_glm.py "$@"
        ;;
esac
