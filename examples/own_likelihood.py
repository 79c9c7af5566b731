# %% [markdown]
# # A likelihood of your own
#
# How many of the 32 pixels of a digit's lower half are inked, seen its upper half? That is a count
# out of a known number: binomial, which the library does not have. Three methods make it so.

# %%
import os

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import softplus

from torch_lla_em import Likelihood, LinearisedLaplace

TINY = "TINY" in os.environ  # for the tests: a few steps, a few samples
torch.manual_seed(0)
images = torch.tensor(load_digits().images, dtype=torch.float32)
x = images[:, :4].flatten(1) / 16
y = (images[:, 4:] > 7).flatten(1).sum(1, keepdim=True).float()
shuffled = torch.randperm(len(x))
train, held_out, test = shuffled[:800], shuffled[800:1000], shuffled[1000:]

# %% [markdown]
# ## The likelihood
#
# `log_prob` sums over outputs and returns one number a row. `hessian_sqrt_product` multiplies noise by
# a root of the Hessian of −log p in f; it must not depend on y. `mean` is the link. The gradient and the
# Hessian follow by differentiation; every fit compares all of them with derivatives of `log_prob` on the
# first batch. What else is defined unlocks more: `variance` the split of uncertainty, `sample` draws of y.

# %%


class Binomial(Likelihood):
    """Counts out of ``total``, with logits f; one count an output."""

    elementwise = True  # y has an axis of its own for the outputs, as f has
    monotone = True  # so that intervals follow from those of f

    def __init__(self, total: int):
        self.total = total

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        n = torch.tensor(self.total + 1.0)
        ways = n.lgamma() - (y + 1).lgamma() - (n - y).lgamma()
        return (ways + y * f - self.total * softplus(f)).sum(-1)

    def hessian_sqrt_product(self, f: Tensor, noise: Tensor) -> Tensor:
        return (self.total * f.sigmoid() * (-f).sigmoid()).sqrt() * noise

    def mean(self, f: Tensor) -> Tensor:
        return self.total * f.sigmoid()

    def variance(self, f: Tensor) -> Tensor:
        return self.total * f.sigmoid() * (-f).sigmoid()

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        chance = f.sigmoid().expand(self.total, *f.shape)
        return torch.bernoulli(chance, generator=generator).sum(0)


# %% [markdown]
# Is the root right? S Sᵀ has to be the Hessian; for one output that is the square of S.

# %%
likelihood = Binomial(32)
f, count = torch.tensor([[0.3]]), torch.tensor([[11.0]])
hessian = torch.func.hessian(lambda f: -likelihood.log_prob(f, count).sum())(f)
root = likelihood.hessian_sqrt_product(f, torch.ones(1, 1))
print(f"Hessian {hessian.item():.5f}, square of the root {root.item() ** 2:.5f}")

# %% [markdown]
# ## Train with it, fit with it

# %%
model = nn.Sequential(nn.Linear(32, 40), nn.Tanh(), nn.Linear(40, 1))
optimiser = torch.optim.Adam(model.parameters(), 1e-2, weight_decay=1e-4)
for _ in range(20 if TINY else 400):
    optimiser.zero_grad()
    (-likelihood.log_prob(model(x[train]), y[train]).mean()).backward()
    optimiser.step()

la = LinearisedLaplace(model, likelihood, num_samples=4 if TINY else 32)
la.fit(x[train], y[train], progress_bar=False)
la.calibrate(x[held_out], y[held_out])
print(la)

# %% [markdown]
# ## Is the binomial right?
#
# Draw counts from the prediction, and see how often the true count lies between their quantiles.

# %%
generator = torch.Generator().manual_seed(0)
prediction = la.predict(x[test])
functions = prediction.functions
draws = likelihood.sample(functions, generator)
for level in (0.5, 0.9):
    low, high = (draws.quantile(q, 0) for q in (0.5 - level / 2, 0.5 + level / 2))
    held = ((y[test] >= low) & (y[test] <= high)).float().mean()
    print(f"intervals of {level:.0%} hold {held:.0%} of {len(test)} counts")
plain = likelihood.log_prob(model(x[test]).detach(), y[test]).mean()
print(f"NLL: network {-plain:.3f}, posterior {-prediction.log_prob(y[test]).mean():.3f}")

figure, axes = plt.subplots(figsize=(5, 3.4))
low, high = draws.quantile(0.05, 0)[:, 0], draws.quantile(0.95, 0)[:, 0]
order = prediction.expectation[:, 0].argsort()
axes.fill_between(range(len(test)), low[order], high[order], alpha=0.3, label="90 %")
axes.plot(prediction.expectation[order, 0], label="expected")
axes.plot(y[test][order, 0], "k.", markersize=2, label="count")
axes.set(xlabel="test images, by expectation", ylabel="inked pixels of 32")
axes.legend()

# %% [markdown]
# The intervals hold more than they were asked to: the pixels of a digit are no independent draws, and
# counts vary less than a binomial says. That is the likelihood's doing and not the posterior's, and such a
# check is how one finds out. There was nothing to be gained by averaging here either, and `calibrate`
# said so: 800 rows know 1,361 weights of a smooth function well.
