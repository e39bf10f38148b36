# %% [markdown]
# # Page size and rounding
#
# A request holds whole pages, so part of its last page is empty. How much does that cost at pages of 1 to 256 tokens, when
# all lengths are equal, as in a benchmark, and when they are spread, as in production?
#
# 256 requests arrive at once. *In phase* each has a prompt of 512 tokens and generates 100; *spread* has the same means,
# uniform from 257 to 767 and from 51 to 149.

# %%
import json

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from IPython.display import Markdown

import pagestorm as ps

plt.style.use("print.mplstyle")

REQUESTS, PROMPT, OUTPUT = 256, 512, 100
PAGES = [2**k for k in range(9)]
ENOUGH_TOKENS = 2**19
LENGTHS = {
    "in phase": {"input_tokens": PROMPT, "output_tokens": OUTPUT},
    "spread": {
        "input_tokens": {"dist": "uniform", "low": 257, "high": 767},
        "output_tokens": {"dist": "uniform", "low": 51, "high": 149},
    },
}
MARKERS = {"in phase": "o", "spread": "s"}


def simulate(
    lengths: str, page: int, pool_tokens: int = ENOUGH_TOKENS, step: bool = False, **more: object
) -> ps.Result:
    """The burst on a pool of so many tokens in pages of `page`."""
    engine = {
        "kind": "sglang",
        "page_size": page,
        "max_total_tokens": pool_tokens,
        "max_running_requests": REQUESTS,
        "max_prefill_tokens": ENOUGH_TOKENS,
        "chunked_prefill_size": -1,
        "schedule_conservativeness": 0.1,
        "disable_radix_cache": True,
    }
    workload = {
        "num_requests": REQUESTS,
        "arrivals": {"process": "burst"},
        "max_new_tokens": 160,
        **LENGTHS[lengths],
        **more,
    }
    scenario = ps.from_mapping({"schema": 1, "name": "burst", "seed": 1, "engine": engine, "workload": workload})
    return ps.run(scenario, step=step)


def peak_tokens(result: ps.Result) -> int:
    """Most slots that were taken at once, full or empty."""
    return result.summary["peak_used_pages"] * result.scenario.engine.page_size


# %% [markdown]
# ## What rounding costs
#
# The peak of a pool that is never short, less the same peak at page 1, where nothing is rounded, over the requests that
# ran. If the last page of a request is as likely to end anywhere, it is half empty: (page - 1) / 2 slots.

# %%
cost = pd.DataFrame(
    {
        name: [(peak_tokens(simulate(name, p)) - peak_tokens(simulate(name, 1))) / REQUESTS for p in PAGES]
        for name in LENGTHS
    },
    index=pd.Index(PAGES, name="page (tokens)"),
)
cost["(page - 1) / 2"] = [(p - 1) / 2 for p in PAGES]
cost.round(1)

# %% [markdown]
# In phase, the same number belongs to all 256 requests: nothing or nearly a whole page each, as the length happens to
# fall. Moving the prompt by one token at a time shows it at page 64.

# %%
SHOWN_PAGE = 64
prompts = np.arange(PROMPT - 72, PROMPT + 73, 3)
by_prompt = pd.DataFrame(
    [[peak_tokens(simulate("in phase", p, input_tokens=int(prompt))) for p in (SHOWN_PAGE, 1)] for prompt in prompts],
    index=prompts,
    columns=["paged", "plain"],
)
by_prompt_cost = (by_prompt.paged - by_prompt.plain) / REQUESTS

figure, axes = plt.subplots()
axes.plot(by_prompt_cost.index, by_prompt_cost, marker="o", markersize=3.5, label="in phase")
axes.axhline(cost.spread[SHOWN_PAGE], color="#d55e00", linestyle="--", label="spread, mean prompt 512")
axes.set(
    xlabel="prompt of every request (tokens)",
    ylabel="empty slots per request",
    ylim=(0, SHOWN_PAGE * 1.25),
    title=f"Page {SHOWN_PAGE}: equal lengths waste nothing or nearly a page",
)
axes.legend(loc="upper right", ncols=2)
plt.show()

# %% [markdown]
# ## When pages are asked for
#
# The same number of pages is opened in the end, but not at the same time. Page 16, every decode step on its own
# (`step=True`, so that none is leapt over).

# %%
OPENED_PAGE = 16
stepped = {name: simulate(name, OPENED_PAGE, step=True) for name in LENGTHS}
opened = {}
for name, result in stepped.items():
    prefilled = result.events[result.events.kind == "prefill"].step.max()
    timeline = result.timeline[(result.timeline.step > prefilled) & (result.timeline.running == REQUESTS)]
    decoding = timeline.drop_duplicates("step", keep="last")
    taken = decoding.set_index("step").uncached_pages.diff().dropna()
    opened[name] = taken.reset_index(drop=True)

figure, axes = plt.subplots()
axes.bar(opened["in phase"].index, opened["in phase"], width=0.9, label="in phase")
axes.plot(opened["spread"].index, opened["spread"], color="#d55e00", label="spread")
axes.set(
    xlabel="decode step while all 256 run",
    ylabel="pages opened in the step",
    ylim=(0, REQUESTS * 1.2),
    title=f"Page {OPENED_PAGE}: all at once, or a few in every step",
)
axes.legend(loc="upper right", ncols=2)
plt.show()

# %% [markdown]
# ## What it takes to hold
#
# The smallest pool on which the burst runs at once and nothing is retracted, found by halving.

# %%
GRAIN_TOKENS = 256


def holds(name: str, page: int, pool_tokens: int) -> bool:
    """Whether everybody runs at once and nobody is retracted."""
    summary = simulate(name, page, pool_tokens).summary
    return summary["retractions"] == 0 and summary["peak_running"] == REQUESTS


def smallest_pool_tokens(name: str, page: int) -> int:
    """To `GRAIN_TOKENS`."""
    short, enough = REQUESTS * 256, REQUESTS * 1536
    while enough - short > GRAIN_TOKENS:
        middle = (short + enough) // 2 // GRAIN_TOKENS * GRAIN_TOKENS
        short, enough = (short, middle) if holds(name, page, middle) else (middle, enough)
    return enough


needed = pd.DataFrame({name: [smallest_pool_tokens(name, p) for p in PAGES] for name in LENGTHS}, index=PAGES)

figure, axes = plt.subplots()
for name in LENGTHS:
    axes.plot(needed.index, needed[name] / 1000, marker=MARKERS[name], label=name)
axes.set(
    xlabel="page (tokens)",
    ylabel="smallest pool that holds\n(thousand tokens)",
    xscale="log",
    ylim=(0, 1.1 * needed.max().max() / 1000),
    title="Up to pages of 32 the page size hardly matters",
)
axes.set_xticks(PAGES, labels=[str(p) for p in PAGES])
axes.minorticks_off()
axes.legend(loc="lower right")
plt.show()

# %% [markdown]
# ## What gives way when it does not
#
# One pool for every page size, a little larger than what page 1 needs in phase.

# %%
POOL_TOKENS = int(needed["in phase"][1] * 1.03) // 256 * 256
rows = []
for name in LENGTHS:
    for page in PAGES:
        result = simulate(name, page, POOL_TOKENS)
        bursts = result.events[(result.events.kind == "retract") & (result.events.detail != "")]
        worst = max((json.loads(d) for d in bursts.detail), key=lambda d: d["asked_pages"], default=None)
        rows.append(
            {
                "lengths": name,
                "page": page,
                "retractions": result.summary["retractions"],
                "asked (pages)": worst["asked_pages"] if worst else 0,
                "free (pages)": worst["free_pages"] if worst else 0,
                "free (tokens)": worst["free_pages"] * page if worst else 0,
            }
        )
fixed = pd.DataFrame(rows).set_index(["lengths", "page"])
fixed

# %%
law = cost["(page - 1) / 2"]
off_law = (cost.spread - law).abs().max()
sawtooth_low, sawtooth_high = by_prompt_cost.min(), by_prompt_cost.max()
growth = needed / needed.loc[1] - 1
in_phase, spread = fixed.loc["in phase"], fixed.loc["spread"]
first_bad = int(in_phase.index[in_phase.retractions > 0].min())
first_row = in_phase.loc[first_bad]

Markdown(f"""
## Conclusion

- With spread lengths rounding costs (page - 1) / 2 slots a request, at every page size here to within {off_law:.1f}
  slots: {cost.spread[16]:.1f} at page 16, {cost.spread[64]:.1f} at page 64, {cost.spread[256]:.0f} at page 256.
- In phase it is the luck of the length: at page {SHOWN_PAGE} from {sawtooth_low:.0f} to {sawtooth_high:.0f} empty slots,
  the same for everybody. A benchmark of equal prompts can look free of rounding or pay twice the usual price.
- At page {OPENED_PAGE} the requests in phase open {int(opened["in phase"].max())} pages in one step and none in the
  {OPENED_PAGE - 1} that follow; spread, it is {opened["spread"].mean():.1f} in a step on average and never more than
  {int(opened["spread"].max())}.
- The pool that holds the spread burst grows by {growth.spread[16]:.1%} from page 1 to 16, {growth.spread[64]:.1%} to 64
  and {growth.spread[256]:.0%} to 256; in phase by {growth["in phase"][16]:.1%}, {growth["in phase"][64]:.1%} and
  {growth["in phase"][256]:.0%}.
- On a pool of {POOL_TOKENS:,} tokens the burst in phase first retracts at page {first_bad}: one step asks for
  {first_row["asked (pages)"]} pages and {first_row["free (pages)"]} are free, although those are
  {first_row["free (tokens)"]:,} tokens for {REQUESTS} requests that write one each. Count pages, not tokens.
""")
