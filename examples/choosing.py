# %% [markdown]
# # Choosing a prior and a network
#
# Which prior or likelihood suits *one* network? The evidence answers this from the training data
# alone. Which of several *networks* is best? The evidence cannot answer this, because the features
# of each network were learnt from the targets that the evidence would explain. Use a validation
# set. ([Choosing a model](../which_method.md#choosing-a-model) has the background.)

# %%
import torch
from sklearn.datasets import load_breast_cancer
from torch import nn

from torch_lla_em import LinearisedLaplace, compare

K = 32
x, y = load_breast_cancer(return_X_y=True)
x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(y)
shuffled = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
train, validation, test = shuffled[:200], shuffled[200:300], shuffled[300:]
x = (x - x[train].mean(0)) / x[train].std(0)


def trained(width, epochs):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, width), nn.Tanh(), nn.Linear(width, 2))
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(epochs):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x[train]), y[train]).backward()
        optimiser.step()
    return model


# %% [markdown]
# ## Comparing priors by evidence
#
# We fit posteriors with three priors to one network. `log_marginal_likelihood` returns its Monte Carlo
# error as well, so that you can see whether a difference is significant.

# %%
model = trained(20, 60)
priors = {"scaled by the weights": "scalar", "g-prior": "g", "plain": "isotropic"}
for name, prior in priors.items():
    la = LinearisedLaplace(model, "classification", num_samples=K, prior=prior)
    la.fit(x[train], y[train], progress_bar=False)
    evidence = la.log_marginal_likelihood()
    print(f"{name:24}log evidence {evidence.value:7.1f} ± {evidence.standard_error:.1f}", end="")
    print(f", γ {la.effective_dim:.1f}")

# %% [markdown]
# With a layerwise prior the precision of a tensor can grow without bound, which removes the tensor
# from the posterior; `fit` warns if this happens. `la.history` has the precisions of each EM step: here those of
# three of the four tensors become very large.

# %%
layerwise = LinearisedLaplace(model, "classification", num_samples=K, prior="g", layerwise=True)
layerwise.fit(x[train], y[train], progress_bar=False)
steps = [layerwise.history[0]["prior_precision"], layerwise.history[-1]["prior_precision"]]
for (name, _), first, last in zip(model.named_parameters(), *steps, strict=True):
    print(f"{name:12}λ after the first step {first:8.3g}, after the last {last:8.3g}")

# %% [markdown]
# ## Comparing networks on a validation set
#
# We train four networks, from one that is hardly trained to one that has overfitted. `compare`
# evaluates their posteriors on the same examples. The standard errors are those of paired
# differences, so they are much smaller than the standard error of each NLL.

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
print(compare(posteriors, x[validation], y[validation]))

# %% [markdown]
# *NLL* ranks the networks with their posteriors; *network NLL* ranks the networks alone. Networks
# that were trained for too few or too many epochs predict much better with their posterior than alone.
#
# The same table on the test set, which was not used above:

# %%
print(compare(posteriors, x[test], y[test]))
