"""Helpers of the tests. This package is imported before torch, which reads the number of threads once."""

import os

# Several ranks share the cores, and a child that is forked while OpenMP has threads waits for them forever.
os.environ.setdefault("OMP_NUM_THREADS", "1")
