"""Several processes that do the work of one command: `--nproc`, and torchrun."""
