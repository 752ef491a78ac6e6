"""Dashboards as code. Not shipped: `python -m grafana.build` writes the JSON that is.

Boards are built in Grafana's classic schema: file provisioning takes it in every version from 10
on, and later ones migrate it when they read it.
"""

from __future__ import annotations

import importlib
import warnings

with warnings.catch_warnings():
    # Wherever it is imported first, the SDK recommends the schema that only Grafana 13 takes.
    warnings.filterwarnings("ignore", "Prefer using dashboardv2", DeprecationWarning)
    for _module in ("cog.plugins", "builders.dashboard", "builders.timeseries"):
        importlib.import_module(f"grafana_foundation_sdk.{_module}")
