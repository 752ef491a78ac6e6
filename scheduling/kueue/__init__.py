"""Kubernetes with Kueue: the policy as Kueue's objects, jobs, and the controller of leaving."""
