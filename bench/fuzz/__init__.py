"""A target for every parser of what others write: `python -m bench.fuzz`."""
