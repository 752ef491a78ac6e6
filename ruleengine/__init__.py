"""One per cluster: judges jobs by rules that operators write, and acts in measured steps."""
