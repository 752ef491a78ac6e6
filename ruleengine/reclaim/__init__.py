"""How jobs are ended, by the platform that owns them."""
