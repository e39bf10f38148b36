"""What a scenario is: frozen records with the keys, units, defaults and bounds of a scenario file.

Nothing here reads a file or fills in a default that depends on something else; `load` and `defaults` do. A None
means "left out".
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct, field

MAX_TOKENS = 2**40
MAX_REQUESTS = 10**9
MAX_CONCURRENCY = 10**6
MAX_PAGE_SIZE = 2**16
MAX_TP_SIZE = 1024
MAX_BYTES = 2**60
MAX_SEED = 2**63 - 1
MAX_SECONDS = 1e9
MAX_RATE_PER_S = 1e9
MAX_EXPLICIT_REQUESTS = 16_000
MAX_HISTOGRAM_BINS = 20_000

ENGINE_MAX_NEW_TOKENS = 128
"""What SGLang generates when a request does not say (sglang 0.5.23, `sampling/sampling_params.py`)."""

FAULTS = {
    "no_output_clip": "max_new_tokens is not clipped to the pool on arrival, so a lone request can outgrow it",
    "kv_length_off_by_one": "with overlap the decode check takes lengths one token short, so it looks for a page one "
    "step after it is opened (sgl-project/sglang#7411)",
}
"""The historical faults that `engine.emulate` can name, each with what it does."""

Tokens = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
Seconds = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
Rate = Annotated[float, Meta(gt=0, le=MAX_RATE_PER_S)]
FilePath = Annotated[str, Meta(min_length=1, max_length=4096)]


class Part(Struct, frozen=True, forbid_unknown_fields=True):
    """A mapping in a scenario file: immutable, and a key that it does not know is an error."""


class SglangFlags(Part, frozen=True, kw_only=True, tag_field="kind", tag="sglang"):
    """SGLang; keys are its own flags in snake_case, with its own defaults."""

    page_size: Annotated[
        int,
        Meta(ge=1, le=MAX_PAGE_SIZE, description="Tokens in a page of the KV pool.", examples=[64]),
    ] = 1
    max_total_tokens: Annotated[
        int,
        Meta(
            ge=1,
            le=MAX_TOKENS,
            description="Size of the KV pool in tokens; the engine rounds it down to whole pages. "
            "Sizing the pool from model and hardware is not supported yet, so it must be given.",
            examples=[131072],
        ),
    ]
    max_running_requests: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_REQUESTS)] | None,
        Meta(
            description="Most requests that run at once, at most half the pool's tokens. "
            "Left out: min(clamp(int(pool / context_length x 512), 2048, 4096), pool // 2).",
            examples=[256],
        ),
    ] = None
    chunked_prefill_size: Annotated[
        Annotated[int, Meta(ge=-1, le=MAX_TOKENS)] | None,
        Meta(
            description="Most prompt tokens computed in one prefill pass, a multiple of page_size; -1 turns chunking "
            "off. Left out: by GPU memory as the engine does, 8192 without hardware.",
            examples=[8192],
        ),
    ] = None
    schedule_conservativeness: Annotated[
        float,
        Meta(
            ge=0,
            le=1e6,
            description="Scales the initial new-token ratio: larger reserves more and retracts less.",
            examples=[1.0],
        ),
    ] = 1.0
    init_new_token_ratio: Annotated[
        float,
        Meta(ge=0, le=1e6, description="SGLANG_INIT_NEW_TOKEN_RATIO: the ratio at start, times conservativeness."),
    ] = 0.7
    min_new_token_ratio_factor: Annotated[
        float,
        Meta(
            ge=0,
            le=1e6,
            description="SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR: the floor of the ratio, as a share of its start.",
        ),
    ] = 0.14
    new_token_ratio_decay_steps: Annotated[
        int,
        Meta(ge=1, le=10**9, description="SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS: decode steps from start to floor."),
    ] = 600
    disable_radix_cache: Annotated[
        bool,
        Meta(description="Must be true for now: the prefix cache is not built yet.", examples=[True]),
    ] = False
    schedule_policy: Annotated[Literal["fcfs"], Meta(description="Order of the waiting queue.")] = "fcfs"
    retraction_policy: Annotated[Literal["length"], Meta(description="Which requests are retracted first.")] = "length"
    max_prefill_tokens: Annotated[
        int,
        Meta(ge=1, le=MAX_TOKENS, description="Prompt tokens after which a prefill batch takes nobody more."),
    ] = 16384
    disable_overlap_schedule: Annotated[
        bool,
        Meta(description="true: plan a pass only after the results of the one before it are processed."),
    ] = False
    context_length: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | None,
        Meta(
            description="Longest sequence in tokens. Left out: the model's own, or the pool without a model.",
            examples=[8192],
        ),
    ] = None
    max_queued_requests: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_REQUESTS)] | None,
        Meta(description="Longest waiting queue; beyond it requests are refused. Left out: no limit.", examples=[512]),
    ] = None
    decode_check: Annotated[
        Literal["pages", "tokens", "none"],
        Meta(
            description="What guards a decode step: pages (the engine's own check), tokens (an old bug that forgets "
            "that a page is taken whole) or none.",
        ),
    ] = "pages"
    emulate: Annotated[
        tuple[Literal["no_output_clip", "kv_length_off_by_one"], ...],
        Meta(
            max_length=16,
            description="Historical faults to bring back. "
            + " ".join(f"{name}: {what}." for name, what in FAULTS.items()),
            examples=[["no_output_clip"]],
        ),
    ] = ()

    @property
    def pool_pages(self) -> int:
        """Whole pages in the pool."""
        return self.max_total_tokens // self.page_size

    @property
    def pool_tokens(self) -> int:
        """Size of the pool in tokens, rounded down to whole pages as the engine does."""
        return self.pool_pages * self.page_size


class VllmFlags(Part, frozen=True, kw_only=True, tag_field="kind", tag="vllm"):
    """vLLM; keys are its own flags in snake_case, with the defaults of its server."""

    block_size: Annotated[
        int,
        Meta(ge=1, le=MAX_PAGE_SIZE, description="Tokens in a block of the KV pool.", examples=[16]),
    ] = 16
    num_gpu_blocks_override: Annotated[
        int,
        Meta(
            ge=2,
            le=MAX_TOKENS,
            description="Blocks in the KV pool, the null block included. Sizing the pool from model and hardware is "
            "not supported yet, so it must be given.",
            examples=[18724],
        ),
    ]
    max_num_seqs: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_REQUESTS)] | None,
        Meta(
            description="Most requests that run at once. Left out: by GPU memory, 256 without hardware.", examples=[128]
        ),
    ] = None
    max_num_batched_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | None,
        Meta(description="Tokens of one pass, prompts and decodes. Left out: by GPU memory, 2048 without hardware."),
    ] = None
    max_model_len: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | None,
        Meta(description="Longest sequence in tokens. Left out: the model's own, or the pool without a model."),
    ] = None
    enable_prefix_caching: Annotated[bool, Meta(description="Keep the blocks of finished text for later hits.")] = True
    watermark: Annotated[
        float,
        Meta(
            ge=0,
            le=0.999,
            description="Share of the blocks kept free when something is admitted beside running requests.",
        ),
    ] = 0.0
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"], Meta(description="Order of the waiting queue, and who is preempted.")
    ] = "fcfs"
    async_scheduling: Annotated[
        Literal[False],
        Meta(description="Must be false for now: only the synchronous scheduler is followed.", examples=[False]),
    ] = False
    enable_chunked_prefill: Annotated[bool, Meta(description="Cut prompts that do not fit into a pass.")] = True
    long_prefill_token_threshold: Annotated[
        int, Meta(ge=0, le=MAX_TOKENS, description="Most prompt tokens of one request in a pass; 0 for no cap.")
    ] = 0
    scheduler_reserve_full_isl: Annotated[
        bool, Meta(description="Admit a prompt only when it fits whole, not just its first chunk.")
    ] = True
    num_lookahead_tokens: Annotated[
        int, Meta(ge=0, le=1024, description="Slots held past the scheduled tokens for a drafter.")
    ] = 0

    @property
    def page_size(self) -> int:
        """A block, under the name that every engine shares."""
        return self.block_size

    @property
    def pool_pages(self) -> int:
        """Blocks that can be handed out: all but the null block."""
        return self.num_gpu_blocks_override - 1

    @property
    def pool_tokens(self) -> int:
        """Blocks x block size, the null block included, as the engine reports it."""
        return self.num_gpu_blocks_override * self.block_size


Engine = SglangFlags | VllmFlags


def kind_of(engine: Engine) -> str:
    """sglang or vllm."""
    return "vllm" if isinstance(engine, VllmFlags) else "sglang"


class Hardware(Part, frozen=True, kw_only=True):
    """The accelerators of one server."""

    gpu: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=200,
            description="A GPU of `pagestorm catalog gpus`; case, spaces and hyphens do not matter, no form factor "
            "means SXM.",
            examples=["H100-80GB"],
        ),
    ]
    tp_size: Annotated[int, Meta(ge=1, le=MAX_TP_SIZE, description="Tensor-parallel ranks.", examples=[1])] = 1
    host_memory_bytes: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_BYTES)] | None,
        Meta(description="Memory of the host, in bytes.", examples=[549755813888]),
    ] = None


class Linear(Part, frozen=True, kw_only=True, tag_field="kind", tag="linear"):
    """Step time as a sum of four terms; see `pagestorm.steptime.linear`."""

    base_s: Annotated[Seconds, Meta(description="Seconds of every pass.", examples=[0.01])] = 0.01
    per_request_s: Annotated[Seconds, Meta(description="Seconds for each request in a pass.", examples=[1e-4])] = 1e-4
    per_context_token_s: Annotated[
        Seconds,
        Meta(description="Seconds for each token of KV that a pass reads.", examples=[2e-7]),
    ] = 2e-7
    per_prefill_token_s: Annotated[
        Seconds,
        Meta(description="Seconds for each prompt token that a prefill pass computes.", examples=[2e-5]),
    ] = 2e-5


class Roofline(Part, frozen=True, kw_only=True, tag_field="kind", tag="roofline"):
    """Step time from facts of model and GPU, both of which must be given; see `pagestorm.steptime.roofline`."""


StepTime = Linear | Roofline


class Burst(Part, frozen=True, kw_only=True, tag_field="process", tag="burst"):
    """Every request arrives at time zero."""


class Constant(Part, frozen=True, kw_only=True, tag_field="process", tag="constant"):
    """Arrivals at equal distances, the first at time zero."""

    rate_per_s: Annotated[Rate, Meta(description="Requests a second.", examples=[20])]


class Poisson(Part, frozen=True, kw_only=True, tag_field="process", tag="poisson"):
    """Exponential times between arrivals."""

    rate_per_s: Annotated[Rate, Meta(description="Mean requests a second.", examples=[20])]


class Gamma(Part, frozen=True, kw_only=True, tag_field="process", tag="gamma"):
    """Gamma-distributed times between arrivals: cv 1 is poisson, above it arrivals bunch."""

    rate_per_s: Annotated[Rate, Meta(description="Mean requests a second.", examples=[20])]
    cv: Annotated[
        float,
        Meta(
            ge=0.01,
            le=100,
            description="Standard deviation of the times between arrivals over their mean.",
            examples=[2.0],
        ),
    ]


class ClosedLoop(Part, frozen=True, kw_only=True, tag_field="process", tag="closed_loop"):
    """A fixed number of requests is out at once; the next arrives the instant one finishes."""

    concurrency: Annotated[int, Meta(ge=1, le=MAX_CONCURRENCY, description="Requests out at once.", examples=[128])]


class TraceArrivals(Part, frozen=True, kw_only=True, tag_field="process", tag="trace"):
    """The arrival times of `workload.trace`, counted from its first row."""


Arrivals = Burst | Constant | Poisson | Gamma | ClosedLoop | TraceArrivals


class Uniform(Part, frozen=True, kw_only=True, tag_field="dist", tag="uniform"):
    """Every whole number from low to high, both included, equally likely."""

    low: Annotated[Tokens, Meta(description="Smallest value, in tokens.", examples=[200])]
    high: Annotated[Tokens, Meta(description="Largest value, in tokens.", examples=[1600])]


class Lognormal(Part, frozen=True, kw_only=True, tag_field="dist", tag="lognormal"):
    """exp(N(mu, sigma)), rounded to whole tokens and clipped to low..high. Give median (exp(mu)) or mean, one of them.

    The mean is that of the distribution before clipping: mu = ln(mean) - sigma**2 / 2.
    """

    median: Annotated[
        Annotated[float, Meta(gt=0, le=MAX_TOKENS)] | None,
        Meta(description="Median in tokens.", examples=[400]),
    ] = None
    mean: Annotated[
        Annotated[float, Meta(gt=0, le=MAX_TOKENS)] | None,
        Meta(description="Mean in tokens.", examples=[600]),
    ] = None
    sigma: Annotated[
        float,
        Meta(ge=0, le=10, description="Standard deviation of the logarithm.", examples=[0.8]),
    ]
    low: Annotated[Tokens, Meta(description="Smaller values become this.", examples=[1])] = 1
    high: Annotated[Tokens | None, Meta(description="Larger values become this.", examples=[8192])] = None


class Zipf(Part, frozen=True, kw_only=True, tag_field="dist", tag="zipf"):
    """Whole numbers from low to high, the k-th of them with probability proportional to k**-alpha."""

    alpha: Annotated[float, Meta(ge=0, le=20, description="Exponent; 0 is uniform.", examples=[1.1])]
    low: Annotated[Tokens, Meta(description="Smallest and most likely value, in tokens.", examples=[1])] = 1
    high: Annotated[Tokens, Meta(description="Largest value, in tokens.", examples=[8192])]


class Histogram(Part, frozen=True, kw_only=True, tag_field="dist", tag="histogram"):
    """Values with weights, given here or as a CSV file with the columns tokens and weight."""

    values: Annotated[
        Annotated[tuple[Tokens, ...], Meta(min_length=1, max_length=MAX_HISTOGRAM_BINS)] | None,
        Meta(description="Values in tokens.", examples=[[100, 1000]]),
    ] = None
    weights: Annotated[
        Annotated[
            tuple[Annotated[float, Meta(ge=0, le=1e18)], ...],
            Meta(min_length=1, max_length=MAX_HISTOGRAM_BINS),
        ]
        | None,
        Meta(description="One weight a value, in any unit. Left out: all the same.", examples=[[3, 1]]),
    ] = None
    path: Annotated[
        FilePath | None,
        Meta(description="CSV file instead of values, relative to the scenario file.", examples=["lengths.csv"]),
    ] = None


class TraceLengths(Part, frozen=True, kw_only=True, tag_field="dist", tag="trace"):
    """The lengths of `workload.trace`, row by row."""


Lengths = Tokens | Uniform | Lognormal | Zipf | Histogram | TraceLengths
MaxNewTokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | Literal["engine"]


class ExplicitRequest(Part, frozen=True, kw_only=True):
    """One request written out. Its number is its place in the list, from 0."""

    at_s: Annotated[
        Seconds | None,
        Meta(description="When it arrives, in seconds; left out in a closed loop.", examples=[0.0]),
    ] = None
    input_tokens: Annotated[Tokens, Meta(description="Length of the prompt.", examples=[163])]
    output_tokens: Annotated[Tokens, Meta(description="What it will really generate.", examples=[80])]
    max_new_tokens: Annotated[
        MaxNewTokens | None,
        Meta(
            description="What it asks for. Left out: the workload's, then its own output_tokens; `engine`: the "
            "engine's default.",
            examples=[80],
        ),
    ] = None
    ignore_eos: Annotated[
        bool | None,
        Meta(description="It generates all it asks for. Left out: the workload's.", examples=[False]),
    ] = None
    priority: Annotated[
        int, Meta(ge=-(2**31), le=2**31, description="Smaller is served earlier, under scheduling_policy: priority.")
    ] = 0
    prefix: Annotated[
        tuple[tuple[Annotated[int, Meta(ge=0, le=MAX_REQUESTS)], Tokens], ...],
        Meta(
            max_length=64,
            description="Runs [group, tokens]: the prompt starts with the first tokens of that group's text.",
            examples=[[[2, 64]]],
        ),
    ] = ()


class Trace(Part, frozen=True, kw_only=True):
    """A recorded workload, read row by row."""

    format: Annotated[
        Literal["azure", "mooncake"],
        Meta(description="azure: CSV of TIMESTAMP,ContextTokens,GeneratedTokens; mooncake: JSON lines."),
    ]
    path: Annotated[FilePath, Meta(description="The file, relative to the scenario file.", examples=["trace.csv"])]


class Workload(Part, frozen=True, kw_only=True):
    """What arrives: drawn from distributions, written out as `requests`, or read from a `trace`."""

    num_requests: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_REQUESTS)] | None,
        Meta(
            description="How many requests. Left out: all that `requests` lists or the trace holds.",
            examples=[2000],
        ),
    ] = None
    arrivals: Annotated[
        Arrivals | None,
        Meta(description="When requests arrive.", examples=[{"process": "poisson", "rate_per_s": 20}]),
    ] = None
    input_tokens: Annotated[
        Lengths | None,
        Meta(
            description="Length of the prompts: a number or a distribution.",
            examples=[{"dist": "uniform", "low": 200, "high": 1600}],
        ),
    ] = None
    output_tokens: Annotated[
        Lengths | None,
        Meta(
            description="What requests will really generate: a number or a distribution.",
            examples=[{"dist": "uniform", "low": 10, "high": 450}],
        ),
    ] = None
    max_new_tokens: Annotated[
        MaxNewTokens | None,
        Meta(
            description="What requests ask for. Left out: the request's own output_tokens; `engine`: the engine's "
            f"default ({ENGINE_MAX_NEW_TOKENS}).",
            examples=[512],
        ),
    ] = None
    ignore_eos: Annotated[
        bool,
        Meta(description="Requests generate all that they ask for; no stop token ends them early."),
    ] = False
    requests: Annotated[
        Annotated[tuple[ExplicitRequest, ...], Meta(min_length=1, max_length=MAX_EXPLICIT_REQUESTS)] | None,
        Meta(
            description="Requests written out, instead of the distributions.",
            examples=[[{"at_s": 0.0, "input_tokens": 163, "output_tokens": 80}]],
        ),
    ] = None
    trace: Annotated[
        Trace | None,
        Meta(
            description="A recorded workload; arrivals, input_tokens and output_tokens come from it unless they are "
            "given.",
            examples=[{"format": "azure", "path": "trace.csv"}],
        ),
    ] = None


class Bounds(Part, frozen=True, kw_only=True):
    """Both ends are included."""

    min: Annotated[int | float | None, Meta(description="Smallest value that holds.", examples=[1])] = None
    max: Annotated[int | float | None, Meta(description="Largest value that holds.", examples=[10])] = None


Expectation = bool | int | float | str | Bounds | None
PoolName = Literal["sim", "counting", "paged", "torch"]
Against = Literal["step", "torch", "sglang", "vllm"]
"""Whom `pagestorm fuzz` compares with."""


class Reproduces(Part, frozen=True, kw_only=True):
    """What a saved reproducer shows. Pagestorm writes it; `pagestorm replay` reads it."""

    kind: Annotated[str, Meta(min_length=1, max_length=100, description="Which fault.", examples=["Divergence"])]
    message: Annotated[str, Meta(max_length=10_000, description="What was said about it.", examples=["3 is not 4"])]
    pools: Annotated[
        tuple[Annotated[str, Meta(min_length=1, max_length=100)], ...],
        Meta(min_length=1, max_length=8, description="Pools that ran, by their resolved names.", examples=[["paged"]]),
    ]
    step: Annotated[bool, Meta(description="Whether leaping was forbidden.")] = False
    against: Annotated[
        Against | None,
        Meta(description="Whom `pagestorm fuzz` compared with: stepping, the torch pool, or the real engine."),
    ] = None


class Scenario(Part, frozen=True, kw_only=True):
    """One question to Pagestorm: an engine, what arrives, and which pools to drive."""

    schema: Annotated[Literal[1], Meta(description="Version of this format.")] = 1
    name: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=120,
            pattern=r"^[^\s./\\][^/\\\x00-\x1f\x7f-\x9f]*$",
            description="Short name; no slash, no leading dot.",
            examples=["my-first-run"],
        ),
    ]
    about: Annotated[str, Meta(max_length=10_000, description="One line on what this shows.")] = ""
    seed: Annotated[
        int,
        Meta(ge=0, le=MAX_SEED, description="Seed of every random draw.", examples=[7]),
    ] = 0
    engine: Annotated[
        Engine,
        Meta(examples=[{"kind": "sglang", "page_size": 64, "max_total_tokens": 131072, "disable_radix_cache": True}]),
    ]
    model: Annotated[
        Annotated[str, Meta(min_length=1, max_length=4096)] | None,
        Meta(description="A model of `pagestorm catalog models`.", examples=["Llama-3.1-8B"]),
    ] = None
    hardware: Annotated[Hardware | None, Meta(examples=[{"gpu": "H100-80GB"}])] = None
    steptime: Annotated[
        StepTime | None,
        Meta(
            description="How long a pass takes. Left out: roofline when model and hardware are both given, else "
            "linear with its defaults.",
            examples=[{"kind": "linear", "base_s": 0.01}],
        ),
    ] = None
    workload: Annotated[
        Workload,
        Meta(
            examples=[
                {"num_requests": 100, "arrivals": {"process": "burst"}, "input_tokens": 512, "output_tokens": 128}
            ],
        ),
    ]
    pools: Annotated[
        tuple[PoolName, ...],
        Meta(
            min_length=1,
            max_length=8,
            description="Pools to drive; with more than one, in lockstep. sim is counting when alone and paged beside "
            "another.",
            examples=[["sim", "torch"]],
        ),
    ] = ("sim",)
    expect: Annotated[
        dict[str, Expectation],
        Meta(
            max_length=200,
            description="What the summary must say: a number, {min, max}, a text, true, false or null under a key of "
            "summary.json.",
            examples=[{"outcome": "completed", "retractions": {"min": 1}}],
        ),
    ] = field(default_factory=dict)
    reproduces: Annotated[
        Reproduces | None,
        Meta(description="In a saved reproducer: the fault that this scenario shows. Not for hand-written files."),
    ] = None
