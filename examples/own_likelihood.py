# %% [markdown]
# # Custom likelihoods
#
# We predict how many of the 32 pixels in the lower half of a digit are black, from its upper half.
# The target is a count out of a known total, so the likelihood is binomial. The library has no
# binomial likelihood; we write one with three methods.

# %%
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import softplus

from torch_lla_em import Likelihood, LinearisedLaplace

torch.manual_seed(0)
images = torch.tensor(load_digits().images, dtype=torch.float32)
x = images[:, :4].flatten(1) / 16
y = (images[:, 4:] > 7).flatten(1).sum(1, keepdim=True).float()
shuffled = torch.randperm(len(x))
train, validation, test = shuffled[:800], shuffled[800:1000], shuffled[1000:]

# %% [markdown]
# ## The likelihood
#
# A likelihood needs these methods:
#
# - `log_prob` returns one number per example, summed over the outputs.
# - `hessian_sqrt_product` multiplies random probes by a square root S of the Hessian of the
#   negative log-likelihood with respect to f. S must not depend on y.
# - `mean` is the inverse link function.
#
# The gradient and the Hessian are computed by differentiation. Every fit compares the methods with
# derivatives of `log_prob` on the first batch. Optional methods add features: `variance` adds the aleatoric
# uncertainty, and `sample` adds random targets.

# %%


class Binomial(Likelihood):
    """Counts out of ``total``, with logits f; one count per output."""

    elementwise = True  # y has the same shape as f
    monotone = True  # intervals of the mean follow from intervals of f

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
# S Sᵀ must be the Hessian. For one output this is the square of S:

# %%
likelihood = Binomial(32)
f, count = torch.tensor([[0.3]]), torch.tensor([[11.0]])
hessian = torch.func.hessian(lambda f: -likelihood.log_prob(f, count).sum())(f)
root = likelihood.hessian_sqrt_product(f, torch.ones(1, 1))
print(f"Hessian {hessian.item():.5f}, S² {root.item() ** 2:.5f}")

# %% [markdown]
# ## Train and fit

# %%
model = nn.Sequential(nn.Linear(32, 40), nn.Tanh(), nn.Linear(40, 1))
optimiser = torch.optim.Adam(model.parameters(), 1e-2, weight_decay=1e-4)
for _ in range(400):
    optimiser.zero_grad()
    (-likelihood.log_prob(model(x[train]), y[train]).mean()).backward()
    optimiser.step()

la = LinearisedLaplace(model, likelihood, num_samples=32)
la.fit(x[train], y[train], progress_bar=False)
la.calibrate(x[validation], y[validation])
print(la)

# %% [markdown]
# ## Check the likelihood
#
# We draw counts from the predictions and check how often the true count lies between their
# quantiles.

# %%
generator = torch.Generator().manual_seed(0)
prediction = la.predict(x[test])
draws = prediction.sample(400, generator)
for level in (0.5, 0.9):
    low, high = (draws.quantile(q, 0) for q in (0.5 - level / 2, 0.5 + level / 2))
    held = ((y[test] >= low) & (y[test] <= high)).float().mean()
    print(f"coverage of {level:.0%} intervals: {held:.0%} of {len(test)} counts")
plain = likelihood.log_prob(model(x[test]).detach(), y[test]).mean()
print(f"test NLL: network {-plain:.3f}, posterior {-prediction.log_prob(y[test]).mean():.3f}")

figure, axes = plt.subplots(figsize=(5, 3.4))
low, high = draws.quantile(0.05, 0)[:, 0], draws.quantile(0.95, 0)[:, 0]
order = prediction.expectation[:, 0].argsort()
axes.fill_between(range(len(test)), low[order], high[order], alpha=0.3, label="90 %")
axes.plot(prediction.expectation[order, 0], label="mean")
axes.plot(y[test][order, 0], "k.", markersize=2, label="count")
axes.set(xlabel="test images, by mean", ylabel="black pixels of 32")
axes.legend()

# %% [markdown]
# The intervals cover more than their level: the pixels of a digit are not independent, so counts
# vary less than a binomial distribution. This is a property of the likelihood, not of the
# posterior, and such a check reveals it. The posterior does not improve the NLL here, because 800
# examples determine this smooth function well.
