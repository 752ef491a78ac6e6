"""The rule engine on a large fleet: what a tick costs, beside Prometheus itself."""
