"""In the training's environment: publishes what the training does; saves and leaves when asked."""
