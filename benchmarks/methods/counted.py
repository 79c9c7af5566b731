"""A problem that counts its passes: blocks of columns apart from single ones."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from torch_lla_em.data.batch import Batch
from torch_lla_em.data.loader import Data
from torch_lla_em.jacobian.linear_model import LinearModel
from torch_lla_em.jacobian.network import Network
from torch_lla_em.jacobian.parameters import ParameterLayout, select_parameters
from torch_lla_em.likelihoods import Classification
from torch_lla_em.problem.problem import NoiseFeatures, Problem
from torch_lla_em.solvers import Product


class Counted(Problem):
    """A problem that counts columns of sample passes, and single columns of the mode."""

    def __init__(self, linear_model: LinearModel, likelihood: Classification, data: Data):
        super().__init__(linear_model, likelihood, data)
        self.spent = {"columns": 0.0, "single": 0.0}

    def ggn_product(self, w: Tensor) -> Tensor:
        self._count(len(w))
        return super().ggn_product(w)

    def loss_and_gradient(self, w: Tensor) -> tuple[float, Tensor]:
        self._count(1)
        return super().loss_and_gradient(w)

    def noise_features(
        self, num_samples: int, seed: int, with_squares: bool = True
    ) -> NoiseFeatures:
        self.spent["columns"] += num_samples
        return super().noise_features(num_samples, seed, with_squares)

    def push_forward(
        self, w: Tensor, take: Callable[[Batch, Tensor, Tensor], Any] | None = None
    ) -> list[Any]:
        self._count(len(w))
        return super().push_forward(w, take)

    def minibatch_products(self) -> Iterator[tuple[int, Product]]:
        for rows, product in super().minibatch_products():

            def counted(w: Tensor, rows: int = rows, product: Product = product) -> Tensor:
                self._count(len(w), rows / self.data.facts.num_rows)
                return product(w)

            yield rows, counted

    def _count(self, columns: int, share: float = 1.0) -> None:
        self.spent["single" if columns == 1 else "columns"] += columns * share


def problem_of(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> Counted:
    """Return the classification problem of a network, with nothing spent yet."""
    network = Network(model)
    layout = ParameterLayout.of(network.module, select_parameters(network.module))
    data = Data(batches, network.device)
    return Counted(LinearModel(network, layout), Classification(), data)
