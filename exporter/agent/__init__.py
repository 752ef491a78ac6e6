"""The node agent: ends processes when the engine, authorised by its signature, tells it to.

It parses no file that a user wrote, resolves every process itself, and may refuse.
"""
