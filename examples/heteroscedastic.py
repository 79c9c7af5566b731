# %% [markdown]
# # Heteroscedastic noise: prices of diamonds
#
# Small diamonds have similar prices, and large ones do not. A regression with one noise level has
# intervals that are too wide for the former and too narrow for the latter, although their
# coverage is right on average. A network that also predicts the noise has intervals of the right width for both.

# %%
import matplotlib.pyplot as plt
from helpers.diamonds import prices, trained
from torch import nn

from torch_lla_em import LinearisedLaplace

data = prices()  # carat, and price in thousands of dollars
constant = LinearisedLaplace(trained(*data.train, nn.MSELoss(), outputs=1), "regression")
constant.fit(*data.train, progress_bar=False).calibrate(*data.validation)
x, y = (part[:5000] for part in data.test)
print(constant.check(x, y))

# %% [markdown]
# `check` counts how many test prices are inside the 90 % intervals, for quarters of the diamonds by
# the predicted price ("predicted mean"). The coverage differs between quarters. `check` also tests whether the size of
# residuals depends on the inputs ("size of residuals"), and the last line recommends what to do if it does.
#
# ## Predict the noise
#
# The network returns a mean and a log variance, is trained by the Gaussian negative log-likelihood, and is
# fitted with the likelihood "heteroscedastic". EM then learns no noise level.

# %%


def nll(outputs, y):
    return nn.functional.gaussian_nll_loss(outputs[:, :1], y, outputs[:, 1:].exp())


noisy = LinearisedLaplace(trained(*data.train, nll, outputs=2), "heteroscedastic")
noisy.fit(*data.train, progress_bar=False).calibrate(*data.validation)
print(noisy.check(x, y))
for name, la in {"one noise level": constant, "noise of x": noisy}.items():
    print(f"test NLL, {name}: {-la.predict(x).log_prob(y).mean():.3f}")

# %%
figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
order, few = x[:, 0].argsort(), slice(0, 1000)
titles = "one noise level", "noise of x"
for axes, la, title in zip(panels, (constant, noisy), titles, strict=True):
    lower, upper = la.predict(x[order]).interval(0.9)
    axes.fill_between(x[order, 0], lower[:, 0], upper[:, 0], alpha=0.3, label="90 %")
    axes.plot(x[few, 0], y[few, 0], "k.", markersize=1.5, label="diamonds")
    axes.set(xlabel="carat, standardised", title=title)
panels[0].set_ylabel("price, 1000 dollars")
panels[0].legend()
figure.tight_layout()

# %% [markdown]
# `la.predict(x).aleatoric` is the noise variance, and `.epistemic` the variance that more data would
# reduce. If you cannot train such a network, give the groups that you know to `calibrate`:
# [guarantees for each class or group](../calibration.md#guarantees-for-each-class-or-group).
