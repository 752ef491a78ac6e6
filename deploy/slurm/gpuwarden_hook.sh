#!/bin/sh
# Slurm's prolog and epilog: runs gpuwarden_hook.py, which lies beside it, and ends with 0 whatever becomes of it.
# A prolog or epilog that fails drains the node: none may fail since Python is missing, too old (3.7 or later is
# needed) or stuck. What went wrong is in syslog: journalctl -t gpuwarden-hook.
hook="${0%/*}/gpuwarden_hook.py"
timeout -k 5 120 /usr/bin/python3 -I "$hook" </dev/null ||
    timeout 5 logger -t gpuwarden-hook "job ${SLURM_JOB_ID:-?}: not looked at: $hook ended with $?"
exit 0
