"""The engine of a lab box: one host, one process, whole cards, its own queue."""
