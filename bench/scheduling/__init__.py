"""A simulated month of a fleet, under several policies: `python -m bench.scheduling`."""
