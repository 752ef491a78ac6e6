"""What differs from site to site: change it here, and build the boards again."""

from __future__ import annotations

ENGINE = "http://localhost:9837"
"""Where browsers reach the engine's pages, without a slash at the end."""

LOKI = ""
"""Uid of the Loki data source that holds the jobs' output, or empty: then no link leads there."""

LOG_LABEL = "job_id"
"""Label of the Loki streams by which a job's output is found."""

SEVERAL_CLUSTERS = False
"""Whether one Prometheus (or Thanos, or Mimir) answers for several clusters, told apart by the
label `cluster` on every series. Then the boards offer the choice; else the variable is hidden."""
