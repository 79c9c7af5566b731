# %% [markdown]
# # A table, and intervals for its predictions
#
# Ten measurements of 442 patients, and how far their diabetes had gone a year later. A prediction
# needs an interval; there are too few rows to waste many of them on finding out how wide it is.

# %%
import os

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_diabetes
from torch import nn

from torch_lla_em import LinearisedLaplace

TINY = "TINY" in os.environ  # for the tests: a few steps, a few samples
torch.manual_seed(0)
x, y = (torch.tensor(part, dtype=torch.float32) for part in load_diabetes(return_X_y=True))
shuffled = torch.randperm(len(x))
train, test = shuffled[:300], shuffled[300:]
x = (x - x[train].mean(0)) / x[train].std(0)
centre, unit = y[train].mean(), y[train].std()
y = ((y - centre) / unit)[:, None]  # the network's outputs have a column: so have the targets

model = nn.Sequential(nn.Linear(10, 50), nn.Tanh(), nn.Linear(50, 1))
optimiser = torch.optim.Adam(model.parameters(), 1e-2, weight_decay=1e-2)
for _ in range(20 if TINY else 300):
    optimiser.zero_grad()
    nn.functional.mse_loss(model(x[train]), y[train]).backward()
    optimiser.step()

# %% [markdown]
# ## Fit
#
# EM learns the noise σ along with the prior: nothing is held out, and nothing is to be tuned. σ is in
# the units of the targets, here standard deviations.

# %%
la = LinearisedLaplace(model, "regression", num_samples=4 if TINY else 64)
la.fit(x[train], y[train], progress_bar=False)
print(la)

# %% [markdown]
# ## Intervals
#
# `la(x)` returns mean and variance, and the variance includes the noise. `la.predict(x)` keeps the two
# apart: `.epistemic` is what more data would take away, `.aleatoric` the noise, and
# `.credible_interval` holds both.

# %%
prediction = la.predict(x[test])
lower, upper = prediction.credible_interval(0.9)
print(prediction)
for n in test[:3]:
    low, high = la.predict(x[n : n + 1]).credible_interval(0.9)
    print(f"truth {y[n, 0] * unit + centre:5.0f}, ", end="")
    print(f"90 % interval {low.item() * unit + centre:5.0f} to {high.item() * unit + centre:5.0f}")

# %% [markdown]
# ## Do they hold what they promise?
#
# Beside the posterior stands what one would do without it: the network's prediction plus and minus
# the standard deviation of its *training* residuals, which the network has made small.

# %%
levels = torch.linspace(0.05, 0.95, 19)
residuals = (y[train] - model(x[train])).detach().std()


def coverage(bounds):
    return torch.stack(
        [((y[test] > low) & (y[test] < high)).float().mean() for low, high in bounds]
    )


ours = coverage([prediction.credible_interval(level.item()) for level in levels])
normal = torch.distributions.Normal(model(x[test]).detach(), residuals)
naive = coverage([(normal.icdf((1 - level) / 2), normal.icdf((1 + level) / 2)) for level in levels])
print(f"intervals of 90 % hold {ours[-2]:.0%} (posterior), {naive[-2]:.0%} (training residuals)")
print(f"NLL: {-prediction.log_prob(y[test]).mean():.3f} (posterior), ", end="")
print(f"{-normal.log_prob(y[test]).mean():.3f} (training residuals)")

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6))
left.plot(levels, ours, "o-", label="posterior")
left.plot(levels, naive, "s--", label="training residuals")
left.plot([0, 1], [0, 1], "k:")
left.set(xlabel="asked for", ylabel="held on test rows", title="Coverage of intervals")
left.legend()
order = prediction.mean[:, 0].argsort()
middle = prediction.mean[order, 0]
right.fill_between(range(len(test)), lower[order, 0], upper[order, 0], alpha=0.3, label="90 %")
right.plot(middle, label="mean")
right.plot(y[test][order, 0], "k.", markersize=3, label="truth")
right.set(xlabel="test rows, by prediction", ylabel="standardised target", title="Intervals")
right.legend()
figure.tight_layout()

# %% [markdown]
# The posterior's intervals are a little too narrow still: σ is learnt from rows that the network was
# fitted to. `la.calibrate(loader)` with held-out rows would widen it.
#
# ## Far from the data
#
# A patient is some three units from the centre. Further out the noise stays what it was, and the
# epistemic part grows.

# %%
direction = nn.functional.normalize(torch.randn(10), dim=0)
for distance in (0, 3, 10, 30):
    far = la.predict(distance * direction[None])
    print(f"distance {distance:3}: noise {far.aleatoric.sqrt().item():.2f}, ", end="")
    print(f"epistemic deviation {far.epistemic.sqrt().item():.2f}")
