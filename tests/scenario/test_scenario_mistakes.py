"""Each mistake a person can make in a scenario is refused with its place, its key and what to write instead."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pagestorm.errors import ScenarioError

Refuse = Callable[..., ScenarioError]

# What is replaced in the plain scenario, by what, and then: line, column, key, and words of the message.
MISTAKES = [
    ("page_size: 64", "page_sise: 64", 4, 3, "engine.page_sise", "did you mean page_size?"),
    ("page_size: 64", "quux: 64", 4, 3, "engine.quux", "the keys here are: kind, page_size"),
    ("page_size: 64", "page_size: 0", 4, 14, "engine.page_size", "at least 1"),
    ("page_size: 64", "page_size: -3", 4, 14, "engine.page_size", "at least 1"),
    ("page_size: 64", "page_size: 65537", 4, 14, "engine.page_size", "at most 65536"),
    ("page_size: 64", "page_size: 1000000000000000000000000000000", 4, 14, "engine.page_size", "at most 65536"),
    ("page_size: 64", "page_size: '64'", 4, 14, "engine.page_size", "without quotes"),
    ("page_size: 64", "page_size: 64.0", 4, 14, "engine.page_size", "write 64"),
    ("page_size: 64", "page_size: true", 4, 14, "engine.page_size", "a whole number, got true"),
    ("page_size: 64", "page_size:", 4, 13, "engine.page_size", "a whole number, got nothing"),
    ("page_size: 64", "page_size: [64]", 4, 14, "engine.page_size", "a whole number, got a list"),
    ("page_size: 64", "page_size: 64\n  context_length: 0", 5, 19, "engine.context_length", "at least 1"),
    ("page_size: 64", "tp_size: 2", 4, 3, "engine.tp_size", "hardware.tp_size"),
    ("max_total_tokens: 131072", "max_total_tokens: 32", 4, 14, "engine.page_size", "larger than the pool of 32"),
    ("  max_total_tokens: 131072\n", "", 3, 1, "engine.max_total_tokens", "sizing the pool"),
    ("disable_radix_cache: true", "disable_radix_cache: yes", 6, 24, "engine.disable_radix_cache", "write true"),
    ("disable_radix_cache: true", "disable_radix_cache: off", 6, 24, "engine.disable_radix_cache", "write false"),
    ("disable_radix_cache: true", "disable_radix_cache: false", 6, 24, "engine.disable_radix_cache", "not built yet"),
    ("  disable_radix_cache: true\n", "", 3, 1, "engine.disable_radix_cache", "not built yet"),
    ("name: plain\n", "", 1, 1, "name", "missing"),
    ("name: plain", "name: a/b", 2, 7, "name", "no slash"),
    ("name: plain", "name: 12", 2, 7, "name", "put it in quotes"),
    ("schema: 1", "schema: 2", 1, 9, "schema", "reads schema: 1"),
    ("process: poisson, ", "", 9, 3, "workload.arrivals.process", "missing"),
    ("process: poisson", "process: poison", 9, 23, "workload.arrivals.process", "did you mean poisson?"),
    ("process: poisson", "process: 3", 9, 23, "workload.arrivals.process", "expected text"),
    ("{process: poisson, rate_per_s: 20}", "poisson", 9, 13, "workload.arrivals", "{process: poisson"),
    (", rate_per_s: 20", "", 9, 3, "workload.arrivals.rate_per_s", "rate_per_s: 20"),
    ("rate_per_s: 20", "rate_per_s: 0", 9, 44, "workload.arrivals.rate_per_s", "more than 0"),
    ("rate_per_s: 20", "rate_per_s: 1e-9", 9, 44, "workload.arrivals.rate_per_s", "lower num_requests"),
    ("rate_per_s: 20", "rate_per_s: 20, cv: 2", 9, 48, "workload.arrivals.cv", "unknown key"),
    ("process: poisson, rate_per_s: 20", "process: gamma, rate_per_s: 20", 9, 3, "workload.arrivals.cv", "missing"),
    (
        "process: poisson, rate_per_s: 20",
        "process: closed_loop, concurrency: 0",
        9,
        49,
        "workload.arrivals.concurrency",
        "at least 1",
    ),
    ("  arrivals: {process: poisson, rate_per_s: 20}\n", "", 7, 1, "workload.arrivals", "{process: burst}"),
    ("low: 200", "low: 2000", 10, 38, "workload.input_tokens.low", "above high 1600"),
    ("output_tokens: 128", "output_tokens: -5", 11, 18, "workload.output_tokens", "at least 1"),
    ("output_tokens: 128", "output_tokens: 1.5", 11, 18, "workload.output_tokens", "a whole number or a mapping"),
    ("  output_tokens: 128\n", "", 7, 1, "workload.output_tokens", "missing"),
    ("output_tokens: 128", "output_tokens: {dist: trace}", 11, 18, "workload.output_tokens", "no trace is given"),
    ("output_tokens: 128", "output_tokens: {dist: norm}", 11, 25, "workload.output_tokens.dist", "unknown value"),
    (
        "output_tokens: 128",
        "output_tokens: {dist: lognormal, sigma: 1}",
        11,
        3,
        "workload.output_tokens.median",
        "one of median and mean",
    ),
    (
        "output_tokens: 128",
        "output_tokens: {dist: lognormal, sigma: 1, median: 4, mean: 5}",
        11,
        54,
        "workload.output_tokens.median",
        "both",
    ),
    (
        "output_tokens: 128",
        "output_tokens: {dist: zipf, alpha: 1, low: 9, high: 8}",
        11,
        46,
        "workload.output_tokens.low",
        "above high 8",
    ),
    (
        "output_tokens: 128",
        "output_tokens: {dist: histogram, values: [1, 2], weights: [1]}",
        11,
        61,
        "workload.output_tokens.weights",
        "1 weights for 2 values",
    ),
    (
        "output_tokens: 128",
        "output_tokens: {dist: histogram, values: [1, 2], weights: [0, 0]}",
        11,
        61,
        "workload.output_tokens.weights",
        "all weights are 0",
    ),
    (
        "output_tokens: 128",
        "output_tokens: {dist: histogram}",
        11,
        3,
        "workload.output_tokens.values",
        "one of values and path",
    ),
    (
        "output_tokens: 128",
        "output_tokens: {dist: histogram, path: none.csv}",
        11,
        42,
        "workload.output_tokens.path",
        "no such file",
    ),
    ("num_requests: 10", "num_requests: 0", 8, 17, "workload.num_requests", "at least 1"),
    ("  num_requests: 10\n", "", 7, 1, "workload.num_requests", "the workload is empty"),
    ("output_tokens: 128", "output_tokens: 128\n  max_new_tokens: all", 12, 19, "workload.max_new_tokens", "engine"),
]


@pytest.mark.parametrize(("old", "new", "line", "column", "key", "words"), MISTAKES, ids=lambda value: str(value)[:40])
def test_a_mistake_is_placed_and_explained(
    plain: str, refused: Refuse, old: str, new: str, line: int, column: int, key: str, words: str
) -> None:
    assert old in plain
    error = refused(plain.replace(old, new))
    assert (error.line, error.column, error.key) == (line, column, key)
    assert words in error.message


# Lines added to the plain scenario, and then as above; the first added line is line 12.
ADDED = [
    ("expect: {outcome: complete}", 12, 19, "expect.outcome", "did you mean completed?"),
    ("expect: {outcome: 3}", 12, 19, "expect.outcome", "no outcome"),
    ("expect: {retraction: 3}", 12, 22, "expect.retraction", "did you mean retractions?"),
    ("expect: {retractions: {min: 3, max: 1}}", 12, 29, "expect.retractions.min", "above max 1"),
    ("expect: {retractions: {}}", 12, 23, "expect.retractions", "give min, max or both"),
    ("expect: {retractions: {minimum: 3}}", 12, 24, "expect.retractions.minimum", "did you mean min?"),
    ("expect: {leaps: 1, retractions: [1]}", 12, 33, "expect.retractions", "got a list"),
    ("pools: sim,torch", 12, 8, "pools", "write [sim, torch]"),
    ("pools: []", 12, 8, "pools", "empty"),
    ("pools: [sim, sim]", 12, 14, "pools.1", "named twice"),
    ("pools: [sim, tourch]", 12, 14, "pools.1", "did you mean torch?"),
    ("model: llama", 12, 8, "model", "did you mean Llama-3.1-8B"),
    ("model: DeepSeek-V2-Lite", 3, 1, "engine.context_length", "does not know the context length"),
    ("hardware: {gpu: A100}", 12, 17, "hardware.gpu", "A100-40GB SXM, A100-80GB SXM"),
    ("hardware: {gpu: H100, tp_size: 0}", 12, 32, "hardware.tp_size", "at least 1"),
    ("hardware: {}", 12, 1, "hardware.gpu", "for example gpu: H100-80GB"),
    ("model: Qwen3-8B\nhardware: {gpu: H100, tp_size: 3}", 13, 32, "hardware.tp_size", "possible: 1, 2, 4"),
    ("steptime: {kind: roofline}", 12, 11, "steptime", "a model and hardware"),
    ("steptime: {kind: line}", 12, 18, "steptime.kind", "did you mean linear?"),
    ("steptime: {kind: linear, base_s: 0, per_request_s: 0}", 12, 34, "steptime.base_s", "would take no time"),
    ("steptime: {kind: linear, base_s: -1}", 12, 34, "steptime.base_s", "at least 0"),
    ("model: Llama-3.1-8B\nhardware: {gpu: A10G}", 13, 17, "hardware.gpu", "steptime: {kind: linear}"),
    ("seed: -1", 12, 7, "seed", "at least 0"),
    ("zzz: 1", 12, 1, "zzz", "the keys here are: schema, name"),
]


@pytest.mark.parametrize(("lines", "line", "column", "key", "words"), ADDED, ids=lambda value: str(value)[:40])
def test_a_mistake_in_an_optional_part_is_placed_and_explained(
    plain: str, refused: Refuse, lines: str, line: int, column: int, key: str, words: str
) -> None:
    error = refused(plain + lines + "\n")
    assert (error.line, error.column, error.key) == (line, column, key)
    assert words in error.message


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("page_size: 64", "gpu_memory_utilization: 0.9", "engine.gpu_memory_utilization"),
        ("page_size: 64", "command: python -m sglang.launch_server", "engine.command"),
        ("page_size: 64", "speculative_num_steps: 3", "engine.speculative_num_steps"),
        ("page_size: 64", "hicache_ratio: 2.0", "engine.hicache_ratio"),
        ("page_size: 64", "enable_hierarchical_cache: false", "engine.enable_hierarchical_cache"),
        ("page_size: 64", "sliding_window_size: 128", "engine.sliding_window_size"),
        ("page_size: 64", "schedule_policy: lpm", "engine.schedule_policy"),
        ("name: plain", "name: plain\nclient: {timeout_s: 60}", "client"),
        ("name: plain", "name: plain\nspeculation: {acceptance: 0.7}", "speculation"),
        ("name: plain", "name: plain\nsteptime: {kind: table}", "steptime.kind"),
        ("name: plain", "name: plain\nmodel: Gemma-3-27B", "model"),
        ("name: plain", "name: plain\nmodel: folder/config.json", "model"),
        ("name: plain", "name: plain\npools: [sim, vllm]", "pools.1"),
        ("num_requests: 10", "prefix: {groups: 8, tokens: 512}", "workload.prefix"),
        ("num_requests: 10", "sessions: {turns: 4}", "workload.sessions"),
        ("num_requests: 10", "trace: {format: burstgpt, path: x.csv}", "workload.trace.format"),
    ],
)
def test_what_comes_later_is_called_known_and_not_a_typo(
    plain: str, refused: Refuse, old: str, new: str, key: str
) -> None:
    error = refused(plain.replace(old, new))
    assert error.key == key
    assert "known, but not supported yet" in error.message
    assert error.line is not None


@pytest.mark.parametrize(("page_size", "chunk", "nearest"), [(64, 100, "64 or 128"), (64, 32, "use 64"), (48, 0, "")])
def test_chunks_that_are_not_whole_pages_are_refused_as_the_engine_does(
    plain: str, refused: Refuse, page_size: int, chunk: int, nearest: str
) -> None:
    given = f"\n  chunked_prefill_size: {chunk}" if chunk else ""
    error = refused(plain.replace("page_size: 64", f"page_size: {page_size}{given}"))
    assert error.key == "engine.chunked_prefill_size"
    assert nearest in error.message


def test_a_context_longer_than_the_model_is_refused_as_the_engine_does(plain: str, refused: Refuse) -> None:
    text = plain.replace("page_size: 64", "context_length: 131073") + "model: Llama-3.1-8B\n"
    error = refused(text)
    assert (error.line, error.key) == (4, "engine.context_length")
    assert "at most 131072" in error.message


REQUESTS = """\
name: written-out
engine: {max_total_tokens: 100, disable_radix_cache: true}
workload:
  requests:
  - {at_s: 1, input_tokens: 3, output_tokens: 4}
  - {at_s: 0.5, input_tokens: 3, output_tokens: 4}
"""


@pytest.mark.parametrize(
    ("old", "new", "line", "key", "words"),
    [
        ("at_s: 1, ", "", 5, "workload.requests.0.at_s", "say when it arrives"),
        ("at_s: 0.5", "at_s: -1", 6, "workload.requests.1.at_s", "at least 0"),
        (
            "input_tokens: 3, output_tokens: 4}\n  -",
            "output_tokens: 4}\n  -",
            5,
            "workload.requests.0.input_tokens",
            "",
        ),
        ("at_s: 1, input_tokens: 3", "at_s: 1, input_token: 3", 5, "workload.requests.0.input_token", "input_tokens?"),
        ("at_s: 1,", "priority: 1,", 5, "workload.requests.0.priority", "not supported yet"),
        ("  requests:", "  num_requests: 3\n  requests:", 4, "workload.num_requests", "more than the 2"),
        ("  requests:", "  input_tokens: 3\n  requests:", 4, "workload.input_tokens", "leave one of them out"),
        ("  requests:", "  arrivals: {process: burst}\n  requests:", 4, "workload.arrivals", "leave arrivals out"),
        (
            "  requests:",
            "  arrivals: {process: closed_loop, concurrency: 1}\n  requests:",
            6,
            "workload.requests.0.at_s",
            "leave at_s out",
        ),
    ],
)
def test_mistakes_in_written_out_requests_name_the_request(
    refused: Refuse, old: str, new: str, line: int, key: str, words: str
) -> None:
    assert old in REQUESTS
    error = refused(REQUESTS.replace(old, new, 1))
    assert (error.line, error.key) == (line, key)
    assert words in error.message


def test_an_empty_list_of_requests_is_an_empty_workload(refused: Refuse) -> None:
    error = refused(REQUESTS[: REQUESTS.index("  requests:")] + "  requests: []\n")
    assert (error.line, error.column, error.key) == (4, 13, "workload.requests")
    assert "empty" in error.message


def test_a_trace_that_nothing_uses_or_that_is_not_there_is_refused(plain: str, refused: Refuse) -> None:
    unused = refused(plain.replace("output_tokens: 128", "output_tokens: 128\n  trace: {format: azure, path: t.csv}"))
    assert unused.key == "workload.trace"
    absent = refused(plain.replace("output_tokens: 128", "trace: {format: azure, path: t.csv}"))
    assert (absent.line, absent.column, absent.key) == (11, 32, "workload.trace.path")
    assert "no such file" in absent.message
    folder = refused(plain.replace("output_tokens: 128", "trace: {format: azure, path: .}"))
    assert "folder" in folder.message


def test_values_in_messages_cannot_steer_a_terminal(plain: str, refused: Refuse) -> None:
    error = refused(plain.replace("process: poisson", r'process: "\e[31mred\n"'))
    assert str(error).isprintable()
    error = refused(plain + r'"\e[31mkey": 1' + "\n")
    assert str(error).isprintable()
