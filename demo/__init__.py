"""`make demo`: the main job of gpuwarden on one node with four simulated GPUs.

Only the driver is simulated. The processes, signals, trainings, Prometheus, Alertmanager, HTTP,
mail and SQLite are real, and the policy is an ordinary rule file with short windows. Afterwards a
lab box of one card: a preemption by the scheduler's own queue, with its receipts.
"""
