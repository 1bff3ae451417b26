"""What the tests share. It comes before torch, which reads the number of threads once."""

import os

# Several ranks at once use the cores, and a child that is forked beside the threads of OpenMP waits for them forever.
os.environ.setdefault("OMP_NUM_THREADS", "1")
