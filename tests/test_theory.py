"""The simulation against laws that hold whatever the engine decides."""

from __future__ import annotations

import math

import pytest

import pagestorm as ps
from pagestorm.scenario import from_mapping


def scenario(**change: object) -> ps.Scenario:
    base: dict[str, object] = {
        "schema": 1,
        "name": "theory",
        "engine": {
            "kind": "sglang",
            "page_size": 16,
            "max_total_tokens": 1 << 20,
            "max_running_requests": 64,
            "disable_radix_cache": True,
        },
        "workload": {
            "num_requests": 3000,
            "arrivals": {"process": "poisson", "rate_per_s": 2.0},
            "input_tokens": 100,
            "output_tokens": 50,
        },
    }
    return from_mapping({**base, **change})


def test_littles_law_holds_for_requests_in_the_system() -> None:
    """Mean number present = arrival rate x mean time present, exactly, over a run that starts and ends empty."""
    result = ps.run(scenario())
    requests = result.requests
    present_ns = (requests.finish_ns - requests.arrive_ns).sum()
    horizon_ns = result.summary["simulated_s"] * 1e9
    rate = len(requests) / horizon_ns
    mean_time_ns = present_ns / len(requests)
    # Area under the number of requests in the system, from arrivals and ends alone.
    times = sorted([(t, 1) for t in requests.arrive_ns] + [(t, -1) for t in requests.finish_ns])
    area, present, last = 0.0, 0, 0
    for time, change in times:
        area += present * (time - last)
        present, last = present + change, time
    assert area / horizon_ns == pytest.approx(rate * mean_time_ns, rel=1e-9)


def test_one_server_with_exponential_work_waits_as_m_m_1_says() -> None:
    """One request at a time, service time proportional to a geometric output: the mean wait nears rho/(1-rho) services.

    Seeded, 6,000 requests: the sampling error of the mean at rho = 0.5 is a few per cent.
    """
    mean_tokens = 200
    step_s = 0.001
    service_s = mean_tokens * step_s
    rho = 0.5
    support = list(range(1, 3000))
    weights = [math.exp(-n / mean_tokens) for n in support]
    result = ps.run(
        scenario(
            seed=3,
            engine={
                "kind": "sglang",
                "max_total_tokens": 1 << 20,
                "max_running_requests": 1,
                "disable_radix_cache": True,
                "disable_overlap_schedule": True,
            },
            steptime={
                "kind": "linear",
                "base_s": step_s,
                "per_request_s": 0.0,
                "per_context_token_s": 0.0,
                "per_prefill_token_s": 0.0,
            },
            workload={
                "num_requests": 6000,
                "arrivals": {"process": "poisson", "rate_per_s": rho / service_s},
                "input_tokens": 10,
                "output_tokens": {"dist": "histogram", "values": support, "weights": weights},
            },
        )
    )
    requests = result.requests
    waited_s = (requests.admit_ns - requests.arrive_ns).mean() / 1e9
    assert waited_s == pytest.approx(service_s * rho / (1 - rho), rel=0.15)


@pytest.mark.parametrize("page_size", [1, 16, 256])
def test_peak_use_of_a_burst_that_fits_is_the_closed_form(page_size: int) -> None:
    """n requests that all end in the same step hold ceil((input + output - 1) / page) pages each just before."""
    n, input_tokens, output_tokens = 20, 333, 77
    result = ps.run(
        scenario(
            engine={
                "kind": "sglang",
                "page_size": page_size,
                "max_total_tokens": 1 << 20,
                "max_running_requests": 64,
                "chunked_prefill_size": -1,
                "disable_radix_cache": True,
            },
            workload={
                "num_requests": n,
                "arrivals": {"process": "burst"},
                "input_tokens": input_tokens,
                "output_tokens": output_tokens,
            },
        )
    )
    assert result.summary["peak_used_pages"] == n * -(-(input_tokens + output_tokens - 1) // page_size)


def test_a_closed_loop_on_a_full_pool_gives_the_throughput_that_the_pool_allows() -> None:
    """With k requests always running and steps of constant time, goodput = k / (output x step)."""
    result = ps.run(
        scenario(
            engine={
                "kind": "sglang",
                "max_total_tokens": 1 << 20,
                "max_running_requests": 8,
                "chunked_prefill_size": -1,
                "disable_radix_cache": True,
            },
            steptime={
                "kind": "linear",
                "base_s": 0.01,
                "per_request_s": 0.0,
                "per_context_token_s": 0.0,
                "per_prefill_token_s": 0.0,
            },
            workload={
                "num_requests": 400,
                "arrivals": {"process": "closed_loop", "concurrency": 32},
                "input_tokens": 10,
                "output_tokens": 500,
            },
        )
    )
    assert result.summary["goodput_requests_per_s"] == pytest.approx(8 / (500 * 0.01), rel=0.02)
