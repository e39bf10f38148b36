"""Whole processes on one workload: `pagestorm run` on the counting pool, and NVIDIA's AISimulate beside it.

Closed loop of 128 clients, input 922, output 230, a pool of 16,000 tokens at page 1 and at page 16. AISimulate runs
where PAGESTORM_AISIMULATE names its executable. Every process is timed from its start to its end, the peer between
ours, and the best of the repetitions counts.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.table import Row

PAGES = (1, 16)
REPEATS = 3
POOL_TOKENS = 16_000

SCENARIO = """\
schema: 1
name: closed-loop-{requests}-page-{page}
engine:
  kind: sglang
  page_size: {page}
  max_total_tokens: {pool}
  max_running_requests: 128
  disable_radix_cache: true
workload:
  num_requests: {requests}
  arrivals: {{process: closed_loop, concurrency: 128}}
  input_tokens: 922
  output_tokens: 230
"""

PEER = """\
traffic:
  source: {{type: synthetic, input_tokens: 922, output_tokens: 230}}
  load: {{type: concurrency, concurrency: 128}}
  stop: {{requests: {requests}}}
engine:
  mode: aggregated
  model: Qwen/Qwen3-32B-FP8
  hardware: h200_sxm
  backend: sglang
  workers:
    aggregated:
      kv_cache:
        block_size: {page}
        capacity: {{type: fixed, blocks: {blocks}}}
"""


def timed(command: list[str]) -> tuple[float, float]:
    """Seconds from start to end, and the peak memory of the process in MiB."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    if status:
        raise SystemExit(f"{command[0]} failed with status {status}: {' '.join(command)}")
    return seconds, used.ru_maxrss / 1024


def rows(requests: tuple[int, ...] = (20_000, 100_000)) -> list[Row]:
    """One row a size and page: ours, the peer's where it is here, and the ratio of requests per second."""
    peer = os.environ.get("PAGESTORM_AISIMULATE")
    found: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for count in requests:
            for page in PAGES:
                found.append(_row(Path(folder), count, page, peer))
    return found


def _row(folder: Path, count: int, page: int, peer: str | None) -> Row:
    scenario, config = folder / "scenario.yaml", folder / "peer.yaml"
    scenario.write_text(SCENARIO.format(requests=count, page=page, pool=POOL_TOKENS), encoding="utf-8")
    config.write_text(PEER.format(requests=count, page=page, blocks=POOL_TOKENS // page), encoding="utf-8")
    ours = [sys.executable, "-m", "pagestorm", "run", str(scenario), "--json", "--events", "none"]
    theirs = [peer or "", "predict", "-c", str(config), "--output-dir", str(folder / "peer"), "--overwrite"]
    repeats = REPEATS if count <= 100_000 else 1
    best, peer_best = (float("inf"), 0.0), (float("inf"), 0.0)
    for _ in range(repeats):
        best = min(best, timed(ours))
        if peer:
            peer_best = min(peer_best, timed(theirs))
    row: dict[str, object] = {
        "requests": count,
        "page": page,
        "pagestorm_s": best[0],
        "pagestorm_requests_per_s": count / best[0],
        "pagestorm_mib": best[1],
    }
    if peer:
        row |= {
            "aisimulate_s": peer_best[0],
            "aisimulate_requests_per_s": count / peer_best[0],
            "aisimulate_mib": peer_best[1],
            "ratio": peer_best[0] / best[0],
        }
    return row


def flatness() -> list[Row]:
    """Time for each simulated request from 20,000 to 1,000,000 requests, start-up included, and the peak memory."""
    found: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for count in (20_000, 100_000, 1_000_000):
            row = _row(Path(folder), count, 16, None)
            found.append({**row, "us_a_request": row["pagestorm_s"] / count * 1e6})
    return found
