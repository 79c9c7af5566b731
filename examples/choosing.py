# %% [markdown]
# # Choosing a prior, and choosing a network
#
# Two questions that look alike. On *one* network, which prior or likelihood? The evidence answers, with
# the training data alone. *Which* network? The evidence cannot answer that: the features of every network
# were learnt from the very targets that it would explain. A validation set can.

# %%
import os

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_breast_cancer
from torch import nn

from torch_lla_em import LinearisedLaplace, compare, plot_curve

TINY = "TINY" in os.environ  # for the tests: a few steps, a few samples
K = 4 if TINY else 32
x, y = load_breast_cancer(return_X_y=True)
x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(y)
shuffled = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
train, held_out, test = shuffled[:200], shuffled[200:300], shuffled[300:]
x = (x - x[train].mean(0)) / x[train].std(0)


def trained(width, epochs):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, width), nn.Tanh(), nn.Linear(width, 2))
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(10 if TINY else epochs):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x[train]), y[train]).backward()
        optimiser.step()
    return model


# %% [markdown]
# ## Priors, by evidence
#
# One network, three priors. `log_marginal_likelihood` comes with its Monte Carlo error, so that one sees
# whether a difference means anything.

# %%
model = trained(20, 60)
priors = {
    "g-prior, one precision": {},
    "plain, one precision": {"g_prior": False},
    "g-prior, a precision a tensor": {"prior": "layerwise"},
}
fits = {}
for name, options in priors.items():
    # the evidence of all three by the same method: a layerwise prior has no variational bound
    la = LinearisedLaplace(model, "classification", num_samples=K, curvature="network", **options)
    fits[name] = la.fit(x[train], y[train], progress_bar=False)
    evidence = la.log_marginal_likelihood()
    print(f"{name:30}log evidence {evidence.value:7.1f} ± {evidence.standard_error:.1f}", end="")
    print(f", γ {la.effective_dim.sum():.1f}")

# %% [markdown]
# With a precision for each tensor, the precision of one may grow without bound, which prunes the tensor;
# here `fit` warns that one does. With one precision, the whole curve over λ follows without another pass over the data. EM stops at its
# maximum.

# %%
la = fits["g-prior, one precision"]
curve = la.curve(torch.logspace(-1, 1, 41) * la.prior_precision.item())
axes = plot_curve(curve)
figure = plt.gcf()
figure.set_size_inches(8, 3.2)
figure.tight_layout()

# %% [markdown]
# ## Networks, by a validation set
#
# Four networks, from one that has hardly learnt to one that has overfitted the training set. `compare`
# puts their posteriors into one table. All of them see the same examples, so the standard errors of the
# differences are paired, and much smaller than those of each NLL.

# %%
networks = {
    "5 epochs": (20, 5),
    "60 epochs": (20, 60),
    "2000 epochs": (20, 2000),
    "wide": (200, 60),
}
posteriors = {}
for name, (width, epochs) in networks.items():
    la = LinearisedLaplace(trained(width, epochs), "classification", num_samples=K)
    posteriors[name] = la.fit(x[train], y[train], progress_bar=False)
print(compare(posteriors, x[held_out], y[held_out]))

# %% [markdown]
# The NLL ranks networks with their posteriors, one example at a time; the held-out evidence ranks joint
# predictions of ten examples; the network NLL ranks the networks alone. Hardly trained or trained too
# long, a network predicts much better with its posterior than alone.
#
# The same table on the test set, which no choice above has used:

# %%
print(compare(posteriors, x[test], y[test]))
