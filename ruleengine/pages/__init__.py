"""The engine's pages: rendered on the server, without scripts."""
