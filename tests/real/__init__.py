"""The torch pool, and what it may take of a machine."""
