"""Timings that anyone can rerun: `make bench`, or `python -m bench NAME`. Ratios are measured in one run."""
