"""Slurm: what a policy becomes there, how tasks get into its queue, and what it tells of them."""
