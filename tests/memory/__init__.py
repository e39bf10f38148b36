"""Pools: what every ledger and allocator must do, whoever made it."""
