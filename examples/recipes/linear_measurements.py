"""Linear measurements of a network's output, as in tomography: a recipe to copy.

    python examples/recipes/linear_measurements.py

The network returns an image f, and what is observed is y = A f with noise. The likelihood is quadratic in f, so the
posterior of the linear model is exact, and the noise σ is learnt with the prior.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from torch_lla_em import LinearisedLaplace, Regression


class LinearOperatorRegression(Regression):
    """y ~ N(A f, σ²): noisy linear measurements of the outputs, as in tomography; y is (B, M).

    ``Prediction.f_mean``, ``.f_variance`` and ``.samples`` are those of the output f (the image);
    ``.expectation``, ``.predictive_variance``, ``.aleatoric``, ``.epistemic`` and the log
    probabilities are those of y. The root S = Aᵀ/σ needs one random number per measurement, and
    there is one per output. Therefore there can be at most as many measurements as outputs.

    Args:
        operator (callable): The linear map A from n outputs (n, *shape) to A f, shape (n, M). PyTorch
            must be able to differentiate it, as products with Aᵀ are computed by ``torch.func.vjp``.
        shape (tuple of ints): Shape of one output of the network, with the classes last.
        sigma_noise (float, optional): As in ``Regression``, one number for all measurements.
            Default None.

    Raises:
        ValueError: If sigma_noise is not one positive number; in ``fit``, if the operator is not
            linear, or does not fit the outputs or the measurements.
    """

    elementwise = False

    def __init__(
        self,
        operator: Callable[[Tensor], Tensor],
        shape: tuple[int, ...],
        sigma_noise: float | Tensor | None = None,
    ):
        super().__init__(sigma_noise)
        if self.sigma_noise.dim():
            raise ValueError("sigma_noise must be one number for all measurements.")
        self.operator, self.shape = operator, tuple(shape)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        return self._adjoint(super().gradient(f, y))

    def hessian_product(self, f: Tensor, u: Tensor) -> Tensor:
        return self._adjoint(self.mean(u)) / self.sigma_noise.to(u) ** 2

    def hessian_sqrt_product(self, f: Tensor, noise: Tensor) -> Tensor:
        measured = self.mean(f).shape[-1]
        kept = noise.flatten(noise.dim() - len(self.shape))[..., :measured]
        return self._adjoint(kept) / self.sigma_noise.to(noise)

    def mean(self, f: Tensor) -> Tensor:
        leading = f.shape[: f.dim() - len(self.shape)]
        measured: Tensor = self.operator(f.reshape(-1, *self.shape)).unflatten(0, leading)
        return measured

    def check(self, f: Tensor, y: Tensor) -> None:
        if tuple(f.shape[1:]) != self.shape:
            raise ValueError(
                f"The operator takes outputs of shape {self.shape}, but the network's have shape "
                f"{tuple(f.shape[1:])} (classes last): pass that shape to LinearOperatorRegression."
            )
        expected = self._num_measurements(f)
        if y.shape != (len(f), expected):
            raise ValueError(
                f"The measurements have shape {tuple(y.shape)}, but the operator returns "
                f"{(len(f), expected)}: flatten what belongs to one output."
            )
        if expected > f[0].numel():
            raise ValueError(
                f"There are {expected} measurements of {f[0].numel()} outputs, but at most one per "
                'output is possible: let the outputs of an Adapter be A f, with likelihood="regression".'
            )
        if y.is_complex() or not y.isfinite().all():
            raise ValueError("The measurements are complex, NaN or infinite: pass real numbers.")

    def _adjoint(self, v: Tensor) -> Tensor:
        """Return Aᵀ v, shape (..., *shape), for v (..., M)."""
        rows = v.reshape(-1, v.shape[-1])
        transpose = torch.func.vjp(self.operator, v.new_zeros(len(rows), *self.shape))[1]
        outputs: Tensor = transpose(rows)[0].unflatten(0, v.shape[:-1])
        return outputs

    def _num_measurements(self, f: Tensor) -> int:
        """Return M, after a check on a random output that the operator is linear."""
        generator = torch.Generator().manual_seed(0)
        u = torch.randn(1, *self.shape, generator=generator, dtype=f.dtype).to(f.device)
        Au = self.operator(u)
        if Au.dim() != 2:
            raise ValueError(
                f"The operator returns shape {tuple(Au.shape)} for one output: it must return "
                "(n, M) for n outputs."
            )
        if ((u * self._adjoint(Au)).sum() - Au.square().sum()).abs() > 1e-3 * Au.square().sum():
            raise ValueError(
                "The operator is not linear, or not differentiable by PyTorch: ⟨u, Aᵀ A u⟩ and "
                "⟨A u, A u⟩ differ. If it is computed outside of PyTorch, pass the `apply` of a "
                "torch.autograd.Function with setup_context, whose backward returns Aᵀ v."
            )
        return Au.shape[-1]


def main() -> None:
    """Train a network to reproduce 40 measurements of one image, and fit its posterior."""
    torch.manual_seed(0)
    shape, A = (1, 12, 12), torch.randn(40, 144) / 12
    image = torch.zeros(shape)
    image[:, 3:8, 4:9] = 1
    network = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 1, 3, padding=1))
    x, y = torch.randn(1, *shape), image.flatten() @ A.T + 0.05 * torch.randn(1, 40)
    optimiser = torch.optim.Adam(network.parameters(), 1e-2)
    for _ in range(300):
        optimiser.zero_grad()
        (network(x).flatten(1) @ A.T - y).square().mean().backward()
        optimiser.step()
    likelihood = LinearOperatorRegression(lambda f: f.flatten(1) @ A.to(f).T, shape)
    la = LinearisedLaplace(network, likelihood, num_samples=16)
    la.fit([(x, y)], progress_bar=False)
    prediction = la.predict(x)
    print(f"σ {la.sigma_noise.item():.3f}, mean standard deviation of a pixel", end=" ")
    print(
        f"{prediction.f_variance.sqrt().mean().item():.3f}, NLL {-prediction.log_prob(y).sum():.1f}"
    )


if __name__ == "__main__":
    main()
