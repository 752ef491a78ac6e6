"""Measurements of the trainer, and of what it says of trainings."""
