# %% [markdown]
# # Capacity of a pool
#
# How large must a KV pool be for a load, and what happens on the way down? One load, sixteen pool sizes, two settings of
# `--schedule-conservativeness`. A run of eight simulated minutes takes a fraction of a second, so the question can simply
# be tried out.

# %%
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from IPython.display import Markdown

import pagestorm as ps

plt.style.use("print.mplstyle")

RATE_PER_S, REQUESTS, PAGE = 4, 2000, 16
LOAD = {
    "num_requests": REQUESTS,
    "arrivals": {"process": "poisson", "rate_per_s": RATE_PER_S},
    "input_tokens": {"dist": "uniform", "low": 100, "high": 800},
    "output_tokens": {"dist": "uniform", "low": 200, "high": 900},
    "max_new_tokens": 1000,
}
ENOUGH_TOKENS = 2**18


def simulate(pool_tokens: int, conservativeness: float = 1.0) -> ps.Result:
    """The load on a pool of so many tokens."""
    engine = {
        "kind": "sglang",
        "page_size": PAGE,
        "max_total_tokens": pool_tokens,
        "max_running_requests": 512,
        "schedule_conservativeness": conservativeness,
        "disable_radix_cache": True,
    }
    scenario = ps.from_mapping({"schema": 1, "name": "capacity", "seed": 1, "engine": engine, "workload": LOAD})
    return ps.run(scenario, events=False)


# %% [markdown]
# ## What the load wants
#
# First a pool that is never short. How much of it is in use over time is the load's own demand: arrivals times how long
# each request stays times how much it holds. The first and last stretches, where the server fills and drains, are left
# out.

# %%
ample = simulate(ENOUGH_TOKENS)
last_arrival_s = ample.requests.arrive_ns.max() / 1e9
timeline = ample.timeline.assign(time_s=ample.timeline.time_ns / 1e9, used_tokens=ample.timeline.uncached_pages * PAGE)
steady = timeline[timeline.time_s.between(60, last_arrival_s)]
stay_s = np.diff(steady.time_s, append=steady.time_s.iloc[-1])
mean_demand = float(np.average(steady.used_tokens, weights=stay_s))
peak_demand = ample.summary["peak_used_pages"] * PAGE

figure, axes = plt.subplots()
axes.plot(timeline.time_s, timeline.used_tokens / 1000)
axes.axhline(
    mean_demand / 1000, color="#24292f", linestyle="--", linewidth=1.2, label=f"mean: {mean_demand:,.0f} tokens"
)
axes.legend(loc="upper right")
axes.set(
    xlabel="simulated time (s)",
    ylabel="pool in use (thousand tokens)",
    ylim=(0, 1.2 * peak_demand / 1000),
    title=f"{RATE_PER_S} requests/s on an ample pool: the load's own demand",
)
plt.show()

# %% [markdown]
# ## Smaller and smaller
#
# *Prompt answers* are requests whose first token came within two seconds of their arrival:
# what a user calls served. *Goodput* is how many of those there were for each second in which requests arrived.

# %%
PROMPT_S = 2.0
SIZES = [int(tokens) // PAGE * PAGE for tokens in np.geomspace(16_000, 96_000, 16)]


def row(pool_tokens: int, conservativeness: float) -> dict[str, float]:
    """What one run comes to."""
    result = simulate(pool_tokens, conservativeness)
    requests = result.requests
    prompt = (requests.first_token_ns - requests.arrive_ns) / 1e9 <= PROMPT_S
    assert result.summary["finished"] == REQUESTS
    return {
        "conservativeness": conservativeness,
        "pool_tokens": pool_tokens,
        "retractions": result.summary["retractions"],
        "recomputed_tokens": result.summary["recomputed_tokens"],
        "goodput_per_s": prompt.sum() / (requests.arrive_ns.max() / 1e9),
        "ttft_s_p99": result.summary["ttft_s_p99"],
        "mean_running": result.summary["mean_running"],
    }


runs = pd.DataFrame([row(size, c) for c in (0.3, 1.0) for size in SIZES]).set_index(["conservativeness", "pool_tokens"])
runs.loc[1.0].iloc[::3].round(2)

# %%
figure, (above, below) = plt.subplots(2, 1, figsize=(6.5, 5.2), sharex=True)
for conservativeness, marker in ((0.3, "o"), (1.0, "s")):
    of_it = runs.loc[conservativeness]
    label = f"conservativeness {conservativeness}"
    above.plot(of_it.index / 1000, of_it.goodput_per_s, marker=marker, label=label)
    below.plot(of_it.index / 1000, of_it.retractions, marker=marker, label=label)
for axes in (above, below):
    axes.axvspan(mean_demand / 1000, peak_demand / 1000, color="#e6eaee", zorder=0)
    axes.set_ylim(0, None)
above.text(
    np.sqrt(mean_demand * peak_demand) / 1000, 0.3, "mean to peak\ndemand", ha="center", va="center", color="#57606b"
)
above.set(ylabel="goodput (requests/s)", title="The cliff lies where the pool crosses the load's demand")
below.set(ylabel="retractions", xlabel="pool (thousand tokens)", xscale="log")
below.set_title("Retractions do not mark it")
below.set_xticks([16, 24, 32, 48, 64, 96], labels=["16", "24", "32", "48", "64", "96"])
below.minorticks_off()
below.legend(loc="upper right")
plt.show()

# %% [markdown]
# ## Where the cliff is
#
# The smallest pool that gives 99 % of the best goodput, and the largest that gives less than a tenth of it.

# %%
default = runs.loc[1.0]
best = default.goodput_per_s.max()
holds = int(default.index[default.goodput_per_s >= 0.99 * best].min())
gone = int(default.index[default.goodput_per_s < 0.1 * best].max())
retracts_at = {c: int(runs.loc[c].index[runs.loc[c].retractions > 0].max()) for c in (0.3, 1.0)}
most_retractions = int(runs.retractions.max())
most_recomputed = runs.recomputed_tokens.max() / ample.requests.input_tokens.sum()
assert gone < mean_demand < holds

Markdown(f"""
## Conclusion

- The load wants {mean_demand:,.0f} tokens on average and {peak_demand:,} at its peak, when
  {ample.summary["peak_running"]} requests run at once.
- From {holds:,} tokens on, {holds / mean_demand:.2f} times the mean, goodput is within 1 % of the best
  ({best:.1f} requests/s). At {gone:,} tokens, {gone / mean_demand:.2f} times the mean, {default.goodput_per_s[gone] / best:.0%}
  of it is left: the queue grows for as long as requests arrive, and nearly everybody waits longer than
  {PROMPT_S:.0f} s. Between the two lies the cliff, and the mean demand is in the middle of it.
- Retractions do not mark it. The largest pool here that retracts at all has {retracts_at[0.3]:,} tokens at
  conservativeness 0.3 and {retracts_at[1.0]:,} at 1.0; far below the cliff there are {most_retractions} in {REQUESTS:,}
  requests at the most, and {most_recomputed:.1%} of the prompt tokens computed twice. A pool that is too small shows as
  waiting, long before it shows as retraction.
- To size a pool, run the load on one that is ample and take the peak: {peak_demand:,} tokens here.
""")
