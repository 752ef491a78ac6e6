"""`python -m gpuwarden`, the same as the `gpuwarden` command."""

from gpuwarden.cli import main

main()
