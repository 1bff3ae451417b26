#!/usr/bin/env bash
#SBATCH --job-name=glm
#SBATCH --requeue
#SBATCH --signal=USR1@300
#SBATCH --open-mode=append
#
# Train under SLURM, from the checkout. Arguments go to pretrain_glm.py, resources to sbatch:
#
#     sbatch --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=8 --time=24:00:00 \
#         scripts/slurm_train.sh --config configs/glm-base.yaml run.directory=runs/base ...
#
# LAUNCHER     srun (default: one process per rank, started by SLURM), deepspeed or torchrun (one launcher per node)
# LOGS         directory of the logs, default logs: LOGS/JOB/attempt-0.node-0.log, one file per attempt and node
# CHAIN=yes    for `sbatch --array=1-10%1`: each task continues the run and the last ends the array; nothing is requeued
# MAX_FAILURES failures in a row after which the job is not requeued, default 5
# SETUP        a file that is sourced first: modules, variables, and two arrays, launch_prefix and srun_options, as in
#                  module load cuda
#                  launch_prefix=(apptainer exec --nv glm.sif)   # before every rank or launcher
#                  srun_options=(--cpu-bind=none --mpi=none)     # added to those of this script
# PYTHON       the interpreter, within the container if there is one; default .venv/bin/python
#
# In an array without CHAIN every task is a separate run; %a in an argument is the task's number.
# 300 seconds before the time limit all ranks save and end, and the job is queued again. See docs/launchers.md.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?start with sbatch, from the checkout}"

refuse() {
    echo "error: $1" >&2
    exit 2
}

launch_prefix=() srun_options=()
if [[ -n ${SETUP:-} ]]; then
    [[ -f $SETUP ]] || refuse "SETUP is $SETUP, which is no file; give one that sets modules and launch_prefix=(...)."
    # shellcheck source=/dev/null
    source "$SETUP"
fi
source scripts/cluster_environment.sh

launcher=${LAUNCHER:-srun}
# Ranks on each node, such as 8(x2), however they were asked for: --ntasks-per-node, or --ntasks for all.
tasks=${SLURM_TASKS_PER_NODE:-1}
ranks_per_node=${tasks%%(*}
[[ $ranks_per_node =~ ^[0-9]+$ ]] ||
    refuse "the nodes have $tasks ranks; every node must have as many: give --ntasks-per-node instead of --ntasks."
if ((${SLURM_GPUS_ON_NODE:-0} > ranks_per_node)); then
    echo "warning: a node has $SLURM_GPUS_ON_NODE GPUs and $ranks_per_node rank(s), which use one each; see --ntasks-per-node." >&2
fi
cpus_per_rank=${SLURM_CPUS_PER_TASK:-1}
logs=$(realpath -m "${LOGS:-logs}")/$SLURM_JOB_ID
attempt=$logs/attempt-${SLURM_RESTART_COUNT:-0}
mkdir -p "$logs"

export GLM_STATUS_FILE=$attempt.status # how the run ended, in its own words: launchers change exit statuses
rm -f "$GLM_STATUS_FILE"

# This script runs on the first node, where rank 0 will listen.
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${MASTER_ADDR:-${nodes%%$'\n'*}}
if [[ -z ${MASTER_PORT:-} ]]; then # assigned before it is exported: export would hide that Python has failed
    MASTER_PORT=$("${launch_prefix[@]}" "$python" -c 'import sys
from megatron_lite.parallel.launch import free_slurm_port
print(free_slurm_port(int(sys.argv[1])))' "$SLURM_JOB_ID") ||
        refuse "$python does not run this program; set PYTHON, or launch_prefix in the file SETUP, or make .venv."
fi
export MASTER_PORT

arguments=("${@//%a/${SLURM_ARRAY_TASK_ID:-}}")
# One rank that fails ends the step, wherever the others wait. %n: a log for each node.
step=(srun --kill-on-bad-exit=1 --output="$attempt.node-%n.log" "${srun_options[@]}")
case $launcher in
    srun)
        step+=(--cpus-per-task="$cpus_per_rank" "${launch_prefix[@]}" "$python" pretrain_glm.py "${arguments[@]}")
        ;;
    deepspeed | torchrun)
        export NUM_NODES=$SLURM_JOB_NUM_NODES RANKS_PER_NODE=$ranks_per_node HOSTFILE=$logs/hostfile
        sed "s/\$/ slots=$ranks_per_node/" <<<"$nodes" >"$HOSTFILE"
        # The launcher of a node needs the cores of all its ranks.
        step+=(--ntasks="$NUM_NODES" --ntasks-per-node=1 --cpus-per-task=$((cpus_per_rank * ranks_per_node)))
        # shellcheck disable=SC2016 # SLURM_NODEID is the step's, not ours
        step+=("${launch_prefix[@]}" bash -c 'NODE_RANK=$SLURM_NODEID exec bash scripts/launch_node.sh "$@"' -- "$launcher" "${arguments[@]}")
        ;;
    *)
        refuse "LAUNCHER is $launcher; it must be srun, deepspeed or torchrun."
        ;;
esac

echo "$(date '+%F %T') job $SLURM_JOB_ID on ${nodes//$'\n'/ }: logs in $attempt.node-*.log"
status=0
"${step[@]}" || status=$?
if [[ -s $GLM_STATUS_FILE ]]; then
    status=$(<"$GLM_STATUS_FILE")
elif ((status == 0)); then
    status=1 # no rank reported its end: the launcher itself was killed
fi
echo "$(date '+%F %T') ended with status $status"

requeue() { # not a job that was cancelled meanwhile
    [[ ${CHAIN:-no} == yes ]] && return
    if [[ $(squeue --noheader --job "$SLURM_JOB_ID" --format=%T) == RUNNING ]]; then
        scontrol requeue "$SLURM_JOB_ID"
    fi
}

end_chain() { # nothing is left to do for the tasks behind this one, or they would fail as well
    [[ ${CHAIN:-no} == yes ]] || return 0
    scancel --state=PENDING "$SLURM_ARRAY_JOB_ID"
}

case $status in # data_utils/common/errors.py: ExitStatus
    0) end_chain ;;
    75)
        rm -f "$logs/failures"
        requeue
        ;;
    2 | 76 | 77) end_chain ;; # a mistake, the file STOP, unsound numbers: these need a person
    *)
        echo "$attempt $status" >>"$logs/failures"
        if (($(wc -l <"$logs/failures") < ${MAX_FAILURES:-5})); then requeue; else echo 'too many failures in a row'; fi
        ;;
esac
exit "$status"
