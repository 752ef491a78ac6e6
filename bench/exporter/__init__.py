"""The exporter beside nvitop-exporter, on the same simulated driver."""
