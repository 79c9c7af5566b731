# %% [markdown]
# # Class balance: rare classes and class weights
#
# 3 % of 53,940 diamonds have the cut "Fair" and 40 % are "Ideal". On such imbalanced data a network
# and its prediction sets can be right on average and wrong for rare classes. `la.check` shows it,
# `groups="classes"` gives every class its guarantee, and `weights` moves the predictions.

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
# The sets contain the cut of 90 % of all diamonds, and of fewer in some classes: the guarantee is one
# of the average. `print(la.check(x, y))` shows this table with further groups, and what to do.
#
# ## Sets that hold for each class
#
# With `groups="classes"` the quantile of each class comes from its own validation examples.

# %%
print(f"validation examples of each cut: {data.validation[1].bincount().tolist()}")
la.calibrate(*data.validation, groups="classes")
by_class(la.check(x, y, level=0.9))

# %% [markdown]
# The coverage of each class is at least the level on average over validation sets. That of a single
# validation set scatters by √(0.9 · 0.1 / n), where n is half the number of validation examples of the
# class, since the other half fits the numbers: about 5 % for the rare class. Every class needs 18
# validation examples at a level of 0.9.
#
# ## Class weights
#
# Weights of the examples make rare classes count more, in the training of the network and in `fit`.
# Probabilities are then those of a population in which all classes are as frequent. That finds
# more of the rare class, and gives worse probabilities for the population at hand.

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
# With weights more of the cuts "Fair" are found, and the NLL of all diamonds is higher. `calibrate` on
# unweighted data brings back little of it: use weights for decisions, and no weights for probabilities.
