# Sourced by slurm_train.sh and launch_node.sh: the environment of every rank, in one file. Variables that are set stay as they are.

# Threads of one rank: the cores that SLURM gives it. More threads than cores slow every rank down.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}

# A rank that dies in native code prints its stack; lines appear when they are printed.
export PYTHONFAULTHANDLER=1 PYTHONUNBUFFERED=1

# The tokenizer library's threads do not survive a fork, and warn about it at length.
export TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false}

# NCCL: warnings name a broken link or a wrong interface. INFO shows what it chose.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}

# Set these for your network, if NCCL or gloo choose the wrong interface or adapter (names as `ip addr`, `ibv_devices`):
#   NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0 NCCL_IB_HCA=mlx5

# The interpreter: PYTHON, or the environment that scripts/setup_environment.sh makes.
python=${PYTHON:-.venv/bin/python}
