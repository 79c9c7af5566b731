# %% [markdown]
# # Time series: blocked validation and intervals over time
#
# We predict the number of sunspots a year ahead from the numbers of five years. The guarantees of `interval` and
# `is_ood` require that validation and test examples are exchangeable. Months are not: the sun is more
# active in some decades than in others. This tutorial shows the consequences, and what helps.

# %%
import matplotlib.pyplot as plt
import torch
from helpers.sunspots import sunspots, trained

from torch_lla_em import LinearisedLaplace

months = sunspots()
past, later = months.between(1749, 1881), months.between(1941, 2014)
validation = months.between(1882, 1941)  # a gap of one year: the horizon of the forecast
la = LinearisedLaplace(trained(past), "regression").fit(past.x, past.y, progress_bar=False)
la.calibrate(validation.x, validation.y)
print(la)

# %% [markdown]
# The validation set is one block of time after the training data, with a gap of a year, the horizon
# of the forecast. Random months would share most of their inputs with training months, and would give no
# information about another century.
#
# ## Calibrate again as time goes on
#
# `calibrate` is one pass over its data and does not change the fit. Every five years we call it with the latest 22
# years, two cycles of the sun, so that the validation examples are like those that follow.


# %%
def covered(block):
    lower, upper = la.predict(block.x).interval(0.9)
    return ((lower <= block.y) & (block.y <= upper))[:, 0].double()


once, rolling = covered(later), []
for year in range(1941, 2014, 5):
    latest, following = months.between(year - 23, year - 1), months.between(year, year + 5)
    la.calibrate(latest.x, latest.y)
    lower, upper = la.predict(following.x).interval(0.9)
    rolling.append((following.year, lower[:, 0], upper[:, 0], covered(following)))
year, lower, upper, inside = map(torch.cat, zip(*rolling, strict=True))
print(f"{'':12}{'calibrated once':>18}{'every five years':>18}")
for first in range(1941, 2013, 12):
    part = (later.year >= first) & (later.year < first + 12)
    print(f"{first} to {first + 11}{once[part].mean():18.1%}{inside[part].mean():18.1%}")
print(f"all         {once.mean():18.1%}{inside.mean():18.1%}")

# %%
figure, axes = plt.subplots(figsize=(9, 3.4))
axes.fill_between(year, 25 * lower.clamp_min(0) ** 2, 25 * upper**2, alpha=0.3, label="90 %")
axes.plot(later.year, 25 * later.y[:, 0] ** 2, "k.", markersize=2, label="sunspots")
axes.set(
    xlabel="year", ylabel="sunspots", title="Intervals of forecasts a year ahead, calibrated anew"
)
axes.legend()

# %% [markdown]
# If `calibrate` is called once, the coverage of 90 % intervals is 77 to 94 % in spans of twelve years, because the
# cycles of the sun differ. Calibrating again raises the coverage from 1977 on, but hardly from 1953 to 1964, whose
# cycle was stronger than those before: no calibration can anticipate what has not been seen.
# For your own series:
#
# - Split by time, with a gap of the horizon between the parts.
# - Calibrate on the latest block, and again whenever new targets are known.
# - Monitor the share of targets inside the intervals; it is the first sign of a change.
# - `predict(x).p_value` is small for inputs that are unlike those of the validation block. A change of
#   the noise alone does not show in the inputs.
