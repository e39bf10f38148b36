"""Without torch, the tests of the torch pool cannot even be loaded; `test_torch_is_here` says so."""

from __future__ import annotations

import importlib.util

collect_ignore = [] if importlib.util.find_spec("torch") else ["test_budget.py", "test_pool.py"]
