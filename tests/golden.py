"""Write the golden digests of the shipped scenarios: python tests/golden.py. Say why in CHANGELOG.md."""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "sim"), str(ROOT / "real")]


def main() -> None:
    import pagestorm as ps

    path = ROOT / "tests" / "golden.json"
    golden = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for scenario in sorted((ROOT / "scenarios").glob("*.yaml")):
        try:
            loaded = ps.load(scenario)
        except ps.ScenarioError as error:
            print(f"{scenario.stem}: left as it is: {error}", file=sys.stderr)
            continue
        golden[scenario.stem] = ps.run(loaded, ["sim"], tables=False).summary["events_digest"]
    path.write_text(json.dumps(dict(sorted(golden.items())), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
