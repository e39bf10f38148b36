# %% [markdown]
# # Retraction dynamics
#
# Admission reserves memory for what running requests will still generate: what each may at most, times the *new-token
# ratio*. The ratio starts at 0.7 x conservativeness, falls a little with every decode step down to 14 % of that, and a
# retraction sets it anew from what the remaining requests have generated. Where requests generate about as much as they
# ask for, that makes a sawtooth. The shipped scenario `retraction-sawtooth` has such a load: outputs of 480 to 600 tokens
# where 600 are asked for. Beside it stands a load of outputs of 120 to 240, a third of what is asked for.

# %%
import json

import matplotlib.pyplot as plt
import pandas as pd
from IPython.display import Markdown

import pagestorm as ps

plt.style.use("print.mplstyle")

LOADS = {
    "use all they ask for": [],
    "use a third": [
        "workload.output_tokens={dist: uniform, low: 120, high: 240}",
        "workload.arrivals.rate_per_s=30",
        "workload.num_requests=1600",
    ],
}
MARKERS = {"use all they ask for": "o", "use a third": "s"}


def scenario(load: str = "use all they ask for", conservativeness: float = 1.0, seed: int = 1) -> ps.Scenario:
    """The shipped scenario under another setting."""
    changes = [f"engine.schedule_conservativeness={conservativeness}", f"seed={seed}"]
    return ps.load("retraction-sawtooth", [*LOADS[load], *changes])


def bursts_of(result: ps.Result) -> pd.DataFrame:
    """The first victim of each burst of retractions, with what the decode check saw."""
    first = result.events[(result.events.kind == "retract") & (result.events.detail != "")]
    return first.join(pd.DataFrame([json.loads(d) for d in first.detail], index=first.index)[["ratio"]])


# %% [markdown]
# ## The sawtooth
#
# Ratio, pool and the bursts of retractions of the shipped scenario.

# %%
result = ps.run(scenario())
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
flat = timeline.drop_duplicates("step", keep="first")
fall = -flat.new_token_ratio.diff() / flat.step.diff()
measured = fall[fall > 1e-9]
start, floor = 0.7, result.summary["new_token_ratio_min"]
gaps = bursts.step.diff().dropna()
apart = gaps[gaps > 100]
pd.Series(
    {
        "start of the ratio": start,
        "floor": floor,
        "fall a decode step, by the rule": (start - floor) / 600,
        "fall a decode step, most often": measured.round(6).mode()[0],
        "bursts": len(bursts),
        "passes between groups of bursts, median": apart.median(),
        "ratio at the bursts, lowest": bursts.ratio.min(),
    }
).round(6)

# %% [markdown]
# ## Conservativeness
#
# Three seeds for each setting and load.

# %%
SETTINGS = [0.1, 0.3, 0.5, 0.7, 1.0, 1.43]
SEEDS = range(3)
KEYS = ["retractions", "recomputed_tokens", "goodput_requests_per_s", "mean_running", "ttft_s_p50"]


def row(load: str, conservativeness: float, seed: int) -> dict[str, object]:
    """What one run comes to."""
    summary = ps.run(scenario(load, conservativeness, seed), tables=False, events=False).summary
    return {"load": load, "conservativeness": conservativeness, **{key: summary[key] for key in KEYS}}


runs = pd.DataFrame([row(load, c, seed) for load in LOADS for c in SETTINGS for seed in SEEDS])
mean = runs.groupby(["load", "conservativeness"]).mean()
mean.round(2)

# %%
figure, panels = plt.subplots(1, 2, figsize=(6.5, 3.2))
for load in LOADS:
    of_it = mean.loc[load]
    panels[0].plot(of_it.index, of_it.retractions, marker=MARKERS[load], label=load)
    panels[1].plot(of_it.index, of_it.goodput_requests_per_s, marker=MARKERS[load], label=load)
panels[0].set(ylabel="retractions", xlabel="conservativeness", ylim=(0, 260), title="Retractions")
panels[1].set(ylabel="requests finished per second", xlabel="conservativeness", ylim=(0, None), title="Throughput")
panels[0].legend(loc="upper left")
plt.show()

# %% [markdown]
# For the load that uses what it asks for, *more* conservativeness means *more* retractions. The ratio's path says why: a
# retraction lifts it to the same height whatever the setting, and from there it falls by (start - floor) / 600 a step,
# which the setting scales. A small one leaves the ratio high for thousands of steps.

# %%
shown = (0.1, 1.0)
paths = {c: ps.run(scenario(conservativeness=c)) for c in shown}
figure, rows = plt.subplots(len(shown), 1, figsize=(6.5, 3.8), sharex=True, sharey=True)
for axes, (c, path) in zip(rows, paths.items(), strict=True):
    of_it = bursts_of(path)
    axes.plot(path.timeline.time_ns / 1e9, path.timeline.new_token_ratio, color="#009e73")
    axes.plot(of_it.time_ns / 1e9, of_it.ratio, "v", color="#d55e00")
    axes.set_title(f"conservativeness {c}: {path.summary['retractions']} retractions")
    axes.set(ylabel="new-token ratio", ylim=(0, 1))
rows[-1].set_xlabel("simulated time (s)")
plt.show()

# %%
full, third = mean.loc["use all they ask for"], mean.loc["use a third"]
low, high = shown
steps = {c: (min(0.7 * c, 1.0) * 0.86) / 600 for c in shown}
most = third.retractions.idxmax()
goes = f"rises to {third.retractions[most]:.0f} at {most} and then falls to {third.retractions[high]:.0f} at {high}"
assert full.retractions[high] > full.retractions[low]
assert third.retractions[most] > max(third.retractions[low], third.retractions[high])
assert full.goodput_requests_per_s[high] > full.goodput_requests_per_s[low]

Markdown(f"""
## Conclusion

- The ratio falls by {measured.round(6).mode()[0]:.6f} in each decode step, from 0.7 to its floor of {floor:.3f} in 600
  steps; groups of retractions come {apart.median():.0f} passes apart.
- Where requests use all that they ask for, raising conservativeness from {low} to {high} takes retractions from
  {full.retractions[low]:.0f} to {full.retractions[high]:.0f}. The first retraction lifts the ratio by itself; from then
  on the setting decides how fast it falls: {steps[low]:.6f} a step at {low}, {steps[high]:.6f} at {high}.
- Where they use a third, the count is {third.retractions[low]:.0f} at {low}, {goes}: a reserve that starts high enough
  is never used up. The setting does what its name says only from there on.
- Retractions are not the damage. In the first load {high} finishes {full.goodput_requests_per_s[high]:.2f} requests a
  second and {low} finishes {full.goodput_requests_per_s[low]:.2f}, because {full.mean_running[high]:.1f} run at once
  instead of {full.mean_running[low]:.1f}; half of the first tokens come within {full.ttft_s_p50[high]:.0f} s instead of
  {full.ttft_s_p50[low]:.0f} s.
""")
