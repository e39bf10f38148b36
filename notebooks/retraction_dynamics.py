# %% [markdown]
# # Retraction dynamics
#
# Admission reserves memory for what running requests will still generate: what each may at most, times the *new-token
# ratio*. The ratio starts at 0.7 x conservativeness, falls a little with every decode step down to 14 % of that, and a
# retraction sets it anew from what the remaining requests have generated. Where requests generate about as much as they
# ask for, that makes a sawtooth. The shipped scenario `retraction-sawtooth` has such a load; `workload.output_tokens`
# halved makes one that asks for twice what it uses.

# %%
import json

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from IPython.display import Markdown

import pagestorm as ps

plt.style.use("print.mplstyle")

LOADS = {
    "use all they ask for": [],
    "use half": ["workload.output_tokens={dist: uniform, low: 240, high: 300}", "workload.arrivals.rate_per_s=20"],
}
MARKERS = {"use all they ask for": "o", "use half": "s"}


def simulate(load: str = "use all they ask for", conservativeness: float = 1.0, seed: int = 1) -> ps.Result:
    """The shipped scenario under another setting."""
    changes = [f"engine.schedule_conservativeness={conservativeness}", f"seed={seed}"]
    return ps.run(ps.load("retraction-sawtooth", [*LOADS[load], *changes]))


def bursts_of(result: ps.Result) -> pd.DataFrame:
    """The first victim of each burst of retractions, with what the decode check saw."""
    first = result.events[(result.events.kind == "retract") & (result.events.detail != "")]
    return first.join(pd.DataFrame([json.loads(d) for d in first.detail], index=first.index)[["ratio"]])


# %% [markdown]
# ## The sawtooth
#
# Ratio, pool and the bursts of retractions of the shipped scenario.

# %%
result = simulate()
bursts = bursts_of(result)
timeline = result.timeline
time_s = timeline.time_ns / 1e9

figure, (ratio, pool) = plt.subplots(2, 1, figsize=(6.5, 4.4), sharex=True)
ratio.plot(time_s, timeline.new_token_ratio, color="#009e73")
ratio.plot(
    bursts.time_ns / 1e9, bursts.ratio, "v", color="#d55e00", markersize=6, label=f"retractions ({len(bursts)} bursts)"
)
ratio.set(ylabel="new-token ratio", ylim=(0, 1), title="The ratio falls until somebody is retracted")
ratio.legend(loc="upper right")
pool.plot(time_s, timeline.uncached_pages / timeline.pool_pages * 100)
pool.set(ylabel="pool in use (%)", xlabel="simulated time (s)", ylim=(0, 105))
plt.show()

# %% [markdown]
# ## The law, read off the record
#
# Between retractions the ratio falls by (start - floor) / 600 in every decode step. The timeline has ratio and step, so
# the slope can be measured instead of believed.

# %%
flat = timeline.drop_duplicates("step", keep="last")
fall = -flat.new_token_ratio.diff() / flat.step.diff()
at_floor = np.isclose(flat.new_token_ratio, flat.new_token_ratio.min())
measured = fall[(fall > 0) & ~at_floor]
start, floor = 0.7, result.summary["new_token_ratio_min"]
gaps = bursts.step.diff().dropna()
apart = gaps[gaps > 100]
pd.Series(
    {
        "start of the ratio": start,
        "floor": floor,
        "fall a decode step, by the rule": (start - floor) / 600,
        "fall a decode step, most often": measured.round(7).mode()[0],
        "bursts": len(bursts),
        "passes between groups of bursts, median": apart.median(),
        "ratio at the bursts, lowest": bursts.ratio.min(),
    }
).round(6)

# %% [markdown]
# ## Conservativeness
#
# Five seeds for each setting and load.

# %%
SETTINGS = [0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.2, 1.43]
SEEDS = range(5)
KEYS = ["retractions", "recomputed_tokens", "goodput_requests_per_s", "mean_running", "ttft_s_p50"]
runs = pd.DataFrame(
    [
        {"load": load, "conservativeness": c, **{key: simulate(load, c, seed).summary[key] for key in KEYS}}
        for load in LOADS
        for c in SETTINGS
        for seed in SEEDS
    ]
)
mean = runs.groupby(["load", "conservativeness"]).mean()
mean.round(2)

# %%
figure, panels = plt.subplots(1, 2, figsize=(6.5, 3.2))
for load in LOADS:
    of_it = mean.loc[load]
    panels[0].plot(of_it.index, of_it.retractions, marker=MARKERS[load], label=load)
    panels[1].plot(of_it.index, of_it.goodput_requests_per_s, marker=MARKERS[load], label=load)
panels[0].set(ylabel="retractions", xlabel="conservativeness", ylim=(0, None), title="Retractions")
panels[1].set(ylabel="requests finished per second", xlabel="conservativeness", ylim=(0, None), title="Throughput")
panels[1].legend(loc="lower right")
plt.show()

# %% [markdown]
# For the load that uses what it asks for, *more* conservativeness means *more* retractions. The ratio's path says why: a
# retraction lifts it to the same height whatever the setting, and from there it falls by (start - floor) / 600 a step,
# which the setting scales. A small one leaves the ratio high for thousands of steps.

# %%
shown = (0.1, 0.3, 1.0)
paths = {c: simulate(conservativeness=c) for c in shown}
figure, rows = plt.subplots(len(shown), 1, figsize=(6.5, 4.8), sharex=True, sharey=True)
for axes, (c, path) in zip(rows, paths.items(), strict=True):
    of_it = bursts_of(path)
    axes.plot(path.timeline.time_ns / 1e9, path.timeline.new_token_ratio, color="#009e73")
    axes.plot(of_it.time_ns / 1e9, of_it.ratio, "v", color="#d55e00")
    axes.set_title(f"conservativeness {c}: {path.summary['retractions']} retractions")
    axes.set(ylabel="new-token ratio", ylim=(0, 1))
rows[-1].set_xlabel("simulated time (s)")
plt.show()

# %%
full, half = mean.loc["use all they ask for"], mean.loc["use half"]
low, high = SETTINGS[0], 1.0
after = {
    c: p.timeline.new_token_ratio[p.timeline.time_ns > bursts_of(p).time_ns.iloc[0]].mean() for c, p in paths.items()
}
more, less = full.retractions[high] / full.retractions[low], half.retractions[low] / max(half.retractions[high], 1)

Markdown(f"""
## Conclusion

- The ratio falls by {(start - floor) / 600:.6f} in each decode step, from 0.7 to its floor of {floor:.3f} in 600 steps;
  groups of retractions come {apart.median():.0f} passes apart.
- Where requests use all that they ask for, raising conservativeness from {low} to {high} takes retractions from
  {full.retractions[low]:.0f} to {full.retractions[high]:.0f}, {more:.1f} times as many. The first retraction lifts the
  ratio to its height by itself; after that the setting is the speed at which it falls. On average it then stands at
  {after[0.1]:.2f} with 0.1, {after[0.3]:.2f} with 0.3 and {after[1.0]:.2f} with 1.0.
- Where they use half of it, the same change takes retractions from {half.retractions[low]:.0f} to
  {half.retractions[high]:.0f}: there the setting does what its name says.
- Retractions are not the damage. In the first load {high} finishes {full.goodput_requests_per_s[high]:.2f} requests a
  second and {low} finishes {full.goodput_requests_per_s[low]:.2f}, because {full.mean_running[high]:.1f} run at once
  instead of {full.mean_running[low]:.1f}; half of the first tokens come within {full.ttft_s_p50[high]:.0f} s instead of
  {full.ttft_s_p50[low]:.0f} s.
""")
