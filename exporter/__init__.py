"""On each GPU node: NVML and /proc become metrics per GPU, process and job.

The exporter only reads. What may signal is `gpuwarden.exporter.agent`, a process of its own.
"""
