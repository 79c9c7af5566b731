# %% [markdown]
# # The method on two weights
#
# The network has only two weights, so everything can be computed on a grid and drawn: the exact
# posterior of the linear model, the Gaussian approximation q that the library finds, the path of the prior precision
# λ and of the curvature H (the second derivative of the loss in the outputs), posterior samples, and the error bound. The
# method is written in a few lines of dense algebra, which are compared with the library at each step. Try changes to the method here first.

# %%
import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn

from torch_lla_em import LinearisedLaplace

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.linspace(-3, 3, 40)[:, None]
y = torch.bernoulli(torch.sigmoid(2 * torch.tanh(0.8 * x)))


class Network(nn.Module):
    """f(x) = a tanh(b x)."""

    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.tensor([0.5, 0.5]))

    def forward(self, x):
        a, b = self.weights
        return a * torch.tanh(b * x)


model = Network()
optimiser = torch.optim.LBFGS(model.parameters(), max_iter=200)


def loss():
    optimiser.zero_grad()
    value = nn.functional.binary_cross_entropy_with_logits(model(x), y, reduction="sum")
    value = value + 0.1 * model.weights.square().sum()
    value.backward()
    return value


optimiser.step(loss)
a, b = model.weights.detach()
print(f"trained weights: a = {a:.3f}, b = {b:.3f}")

# %% [markdown]
# ## The linear model and its exact posterior
#
# The features of the linear model h(x) = J(x) w are the network's derivatives with respect to its
# weights, at their trained values. The prior is N(0, I/λ). For a given λ the log posterior is the
# log-likelihood of h plus the log prior; with two weights its normalising constant is a sum over a grid.

# %%
J = torch.stack([torch.tanh(b * x[:, 0]), a * x[:, 0] / torch.cosh(b * x[:, 0]) ** 2], dim=1)
sites = torch.linspace(-8, 14, 300)
grid = torch.cartesian_prod(sites, sites)


def log_joint(w, precision):
    """Return log p(y | J w) + log N(w; 0, I/λ) for weights of shape (..., 2)."""
    log_likelihood = -nn.functional.softplus((1 - 2 * y[:, 0]) * (w @ J.T)).sum(-1)
    log_prior = 0.5 * precision * w.square().sum(-1) - torch.log(precision / (2 * torch.pi))
    return log_likelihood - log_prior


def exact(precision):
    """Return the posterior's probabilities on the grid, and the log evidence."""
    joint = log_joint(grid, precision)
    cell = (sites[1] - sites[0]).log() * 2
    return joint.softmax(0), joint.logsumexp(0) + cell


# %% [markdown]
# ## q, λ and H
#
# q = N(m, Σ) maximises the bound L = E_q[log p(y | J w)] − KL(q ‖ prior). Its gradients with respect to
# m and Σ are expectations of the first two derivatives of the loss (the theorems of Bonnet and Price), so at
# the maximum
#
# - Jᵀ E_q[∇loss] + λ m = 0,
# - Σ⁻¹ = Jᵀ E_q[H] J + λ I: as in Laplace's method, with H averaged over q instead of taken at one point,
# - λ = γ / ‖m‖², with the effective dimension γ = Tr(Σ Jᵀ E_q[H] J) (MacKay's fixed point).
#
# The expectations are over one number per example, h_n ~ N(J_n m, J_n Σ J_nᵀ), so they are computed by
# Gauss–Hermite quadrature here, and by random draws in the library. In each step Newton's method moves m,
# H moves towards its expectation under q, and Σ and λ follow.

# %%
nodes, weights = map(torch.as_tensor, np.polynomial.hermite_e.hermegauss(40))
weights = weights / weights.sum()


def expectations(m, covariance):
    """Return E[∇loss], E[H] and E[loss] of every example under q."""
    mean, sd = J @ m, (J @ covariance * J).sum(1).sqrt()
    h = mean + nodes[:, None] * sd
    p = torch.sigmoid(h)
    losses = nn.functional.softplus((1 - 2 * y[:, 0]) * h)
    return weights @ (p - y[:, 0]), weights @ (p * (1 - p)), (weights @ losses).sum()


def bound(m, covariance, precision):
    """Return L."""
    divergence = precision * (m.square().sum() + covariance.trace()) - 2
    divergence = divergence - 2 * precision.log() - covariance.logdet()
    return -expectations(m, covariance)[2] - 0.5 * divergence


precision, m = torch.tensor(1.0), torch.zeros(2)
H = torch.full((len(x),), 0.25)  # its value at outputs 0
covariance = torch.linalg.inv(J.T @ (H[:, None] * J) + precision * torch.eye(2))
path = []
for _ in range(25):
    path.append([precision, H.mean(), bound(m, covariance, precision)])
    for _ in range(5):
        m = m - covariance @ (J.T @ expectations(m, covariance)[0] + precision * m)
    H = H + 0.7 * (expectations(m, covariance)[1] - H)
    G = J.T @ (H[:, None] * J)
    covariance = torch.linalg.inv(G + precision * torch.eye(2))
    gamma = (covariance @ G).trace()
    precision = gamma / m.square().sum()
path = torch.tensor(path)
print(f"dense:   λ = {precision:.3f}, γ = {gamma:.2f}, m = {m.numpy().round(2)}, ", end="")
print(f"bound {path[-1, 2]:.2f}")

la = LinearisedLaplace(model, "bernoulli", num_samples=512, prior="isotropic")
la.fit(x, y, progress_bar=False)
evidence = la.log_marginal_likelihood()
print(f"library: λ = {la.prior_precision:.3f}, γ = {la.effective_dim:.2f}, ", end="")
print(
    f"m = {la.w_lin.numpy().round(2)}, bound {evidence.value:.2f} ± {evidence.standard_error:.2f}"
)
print(f"exact log evidence at the dense λ: {exact(precision)[1]:.2f}")

figure, axes = plt.subplots(1, 3, figsize=(10, 3))
for axis, values, title in zip(axes, path.T, ("λ", "mean of E[H]", "bound"), strict=True):
    axis.plot(values)
    axis.set(xlabel="step", title=title)
axes[2].axhline(exact(precision)[1], color="k", linestyle=":", label="exact log evidence")
axes[2].legend()
figure.tight_layout()

# %% [markdown]
# The bound is below the exact log evidence, as it must be, and close to it. The library's numbers differ from
# the dense ones by their Monte Carlo error: γ, the expectations and the log determinant are averages over
# samples, because a trace or a determinant for millions of weights cannot be computed.
#
# ## Samples
#
# A posterior sample is the solution of a least-squares problem with random targets, "sample, then
# optimise": with ξ ~ N(0, I) and η = Jᵀ H^½ ε ~ N(0, G), w = (G + λ)⁻¹ (√λ ξ + η) has mean zero and covariance
# (G + λ)⁻¹ (G + λ) (G + λ)⁻¹ = Σ. No matrix of the size of the weights is needed, only a solver that
# multiplies by G.

# %%
xi, epsilon = torch.randn(2000, 2), torch.randn(2000, len(x))
eta = (epsilon * H.sqrt()) @ J
w = (precision.sqrt() * xi + eta) @ covariance
print("covariance of the samples", w.T.cov().numpy().round(2).tolist())
print("covariance of la's samples", la.w_samples.T.cov().numpy().round(2).tolist())
print("Σ                         ", covariance.numpy().round(2).tolist())

density = exact(precision)[0].view(len(sites), len(sites))
figure, axis = plt.subplots(figsize=(5.5, 4))
axis.contourf(sites, sites, density.T, levels=12, cmap="Blues")
circle = torch.linspace(0, 2 * torch.pi, 100)
for radius in (1, 2):
    ring = radius * torch.stack([circle.cos(), circle.sin()], dim=1)
    ring = m + ring @ torch.linalg.cholesky(covariance).T
    axis.plot(*ring.T, "C3", label="q, 1 and 2 standard deviations" if radius == 1 else None)
found = la.w_lin + la.w_samples[:200]
axis.plot(*found.T, "k.", markersize=2, label="samples of the library")
axis.set(xlabel="weight of a", ylabel="weight of b", title="Exact posterior, q and samples")
axis.set(xlim=(-2, 10), ylim=(-3, 5))
axis.legend(loc="upper right", fontsize=8)
figure.tight_layout()

# %% [markdown]
# ## The error bound
#
# A solver stops before it is exact. If r = √λ ξ + η − (G + λ) w is the residual of a sample, its error
# w* − w = Σ r changes the output at any input by at most ‖r‖/√λ posterior standard deviations of that
# output: |J(x) Σ r|² ≤ (J(x) Σ J(x)ᵀ)(rᵀ Σ r) by Cauchy and Schwarz, and Σ is at most I/λ. We check this at a sample
# that gradient descent has not finished.

# %%
b_k = precision.sqrt() * xi[0] + eta[0]
system = G + precision * torch.eye(2)
w_k, inputs = torch.zeros(2), torch.linspace(-10, 10, 400)[:, None]
features = torch.stack(
    [torch.tanh(b * inputs[:, 0]), a * inputs[:, 0] / torch.cosh(b * inputs[:, 0]) ** 2], dim=1
)
sd = (features @ covariance * features).sum(1).sqrt()
for step in range(1, 31):
    w_k = w_k + (b_k - system @ w_k) / torch.linalg.matrix_norm(system, 2)
    if step % 10 == 0:
        residual = b_k - system @ w_k
        error = (features @ (covariance @ residual)).abs() / sd
        limit = residual.norm() / precision.sqrt()
        print(f"after {step} steps: largest error {error.max():.4f}, bound {limit:.4f} sd")
print(f"la's samples: bound {la.certificate.max():.1e} sd")

# %% [markdown]
# ## Solve small, check large, extend
#
# With millions of weights the library runs this EM on a small problem: the linear model restricted to a *span* of
# directions. `e_step` computes mode and samples over the span, `m_step` computes the next λ, and `measured` takes one pass to
# compute the residuals of the whole problem. The residuals bound the error, and are the next directions. Here the span begins
# with one random direction instead of two dozen, so that there is something left to extend.

# %%
from torch_lla_em import Bernoulli, get_sto_samples, linear_problem  # noqa: E402
from torch_lla_em.inference.em import e_step, m_step  # noqa: E402
from torch_lla_em.inference.over_span import OverSpan  # noqa: E402
from torch_lla_em.inference.span import Span  # noqa: E402
from torch_lla_em.problem import towards  # noqa: E402

problem = linear_problem(model, Bernoulli(), x, y, parameters=["weights"])
noise = get_sto_samples(problem, num_samples=64, g_prior=False)
span = Span(problem, noise.prior, noise.xi, memory=1e8)
span.widen(noise.xi[:1])
over = OverSpan(problem, noise, span, moves=True, tolerance=0.03)
q = e_step(over, over.first(1.0))
while True:
    for _ in range(25):  # small
        new_precision, _ = m_step(over, q)  # the rule of λ
        new_H = over.expected.H(
            q.span.problem.loss, q.span.outputs, q.span.problem.deviations
        )  # the rule of H
        q = e_step(over, over.moved(q, new_precision, None, towards(q.span.H, new_H, 0.5)))
    q = over.measured(q)  # large
    print(
        f"{span.size} of 2 directions: λ = {q.precision:.3f}, bound {q.bounds.mean():.2f}, ", end=""
    )
    print(f"error of samples {q.errors[0]:.1e} and mean {q.errors[1]:.1e}")
    if max(q.errors) < 0.03 or not span.widen(q.span.residuals):  # the end
        break
    q = e_step(over, over.widened(q))  # extend

# %% [markdown]
# With one direction, λ differs and the bound is lower, and the residuals show that this solution is inaccurate. With both
# directions, λ is that of the dense algebra.
#
# ## Change it
#
# Each rule is one line of this loop, so try it here first:
#
# - **λ**: replace `m_step(over, q)`. In the library it is `function_space_Mackay_update` in `inference/mackay.py`.
# - **H**: replace `new_H`; `over.first_H(q.span.problem.loss)` keeps it near the network's outputs. In the library it is `H` in
#   `inference/expectations.py`.
# - **The end**: replace the condition. In the library it is `judged` in `inference/schedule.py`, which has the rest of the loop too: when λ
#   is computed again, how far it may change over a small span, and when a step that lowers the bound is undone.
