"""Pictures of what people look at, remade by one command: `python -m tools.pictures`."""
