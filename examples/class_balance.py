# %% [markdown]
# # Class balance: rare classes and class weights
#
# 3 % of 53,940 diamonds have the cut "Fair" and 40 % are "Ideal". On such imbalanced data a network
# and its prediction sets can be right on average and wrong for rare classes. `la.check` shows this,
# `groups="classes"` gives a guarantee for every class, and `weights` changes the predictions.

# %%
from helpers.diamonds import CUTS, cuts, trained
from torch import nn

from torch_lla_em import LinearisedLaplace

data = cuts()
model = trained(*data.train, nn.CrossEntropyLoss())
la = LinearisedLaplace(model, "classification").fit(*data.train, progress_bar=False)
la.calibrate(*data.validation)
x, y = (part[:10000] for part in data.test)


def by_class(check):
    for name, group in zip(["all", *CUTS], check.groups, strict=False):
        print(f"{name:12}{group.number:7,}{group.coverage:10.1%}{group.size:7.2f} classes")


by_class(la.check(x, y, level=0.9))

# %% [markdown]
# The sets contain the cut of 90 % of all diamonds, but of less than 90 % in some classes: the guarantee
# holds on average. `print(la.check(x, y))` shows this table with further groups and recommendations.
#
# ## Sets that hold for each class
#
# With `groups="classes"` the quantile of each class comes from its own validation examples.

# %%
print(f"validation examples of each cut: {data.validation[1].bincount().tolist()}")
la.calibrate(*data.validation, groups="classes")
by_class(la.check(x, y, level=0.9))

# %% [markdown]
# The coverage of each class is at least the level on average over validation sets. For a single
# validation set it varies with a standard deviation of √(0.9 · 0.1 / n), about 5 % for the rare class. Here n is half the
# number of validation examples of the class, because the numbers of `calibrate` are fitted to the other half. Every class needs 18
# validation examples at a level of 0.9.
#
# ## Class weights
#
# Weights of the examples make rare classes count more, in the training of the network and in `fit`.
# Probabilities are then those of a population in which all classes are equally frequent. More examples of the
# rare class are found, but the probabilities are worse for the actual population.

# %%
class_weights = len(data.train[1]) / (5 * data.train[1].bincount())
balanced = trained(*data.train, nn.CrossEntropyLoss(class_weights))
weighted = LinearisedLaplace(balanced, "classification")
weighted.fit(*data.train, weights=lambda y: class_weights[y], progress_bar=False)

probs = {
    "network": model(x).detach().softmax(1),
    "posterior": la(x),
    "network, weights": balanced(x).detach().softmax(1),
    "posterior, weights": weighted(x),
    "weights, then calibrated": weighted.calibrate(*data.validation)(x),
}
print(f"{'':26}{'NLL':>7}{'Fair found':>12}{'mean of classes':>17}{'accuracy':>10}")
for name, p in probs.items():
    right = (p.argmax(1) == y).double()
    found = [right[y == k].mean().item() for k in range(5)]
    nll = nn.functional.nll_loss(p.log(), y)
    print(f"{name:26}{nll:7.3f}{found[0]:12.1%}{sum(found) / 5:17.1%}{right.mean():10.1%}")

# %% [markdown]
# With weights more diamonds of the cut "Fair" are found, but the NLL over all diamonds is higher. `calibrate` on
# unweighted data reduces it only a little: use weights for decisions, and no weights for probabilities.
