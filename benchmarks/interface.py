"""The prior precision λ that laplace-torch's evidence asks for, beside that of the linear model.

    python benchmarks/interface.py       # a minute of one core

"intervals": eight regressions of one input with 120 examples, which leave a gap, and tanh networks with two hidden
layers of 30 units. 90 % intervals of y around the network's outputs have a coverage at further inputs where the
examples are, in the gap, and outside of them; λ is that of ``integrations.laplace_torch``, γ / ‖w_MAP‖², or of
``LinearisedLaplace``, γ / ‖w_lin‖². "probabilities": four tables with at most 800 examples, networks after early
stopping and after 100 epochs; the test NLL of ``integrations.laplace_torch`` at the λ of the linear model, and at that
of laplace-torch, which repeated fits with γ / ‖w_MAP‖² reach. Lines go to results/interface.jsonl.

Expected: with the λ of the linear model, narrower intervals in the gap and outside, and for most classifiers a lower NLL.
"""

from collections.abc import Iterator

import torch
from methods import markdown, tasks
from methods.learning import descend, train
from methods.provenance import begin, provenance, script_parser
from torch import Tensor, nn
from torch.nn import functional as F

from torch_lla_em import LinearisedLaplace
from torch_lla_em.integrations.laplace_torch import Laplace

CURVES, NAMES, NOISE = 8, ("vehicle", "german", "pima", "contraceptive"), 0.1
PLACES = {"at the examples": (0.5, 2.0), "in the gap": (0.0, 0.5), "outside": (2.0, 3.0)}
"""Ranges of |x|."""

HALF = torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(0.95)).item()
BY_NETWORK, BY_LINEAR = "γ / ‖w_MAP‖²", "γ / ‖w_lin‖²"
STAGES = {"early": "early stopping", "on": "100 epochs"}
NEAR, FITS = 0.02, 20
"""Change of log λ at which fits are no longer repeated, and their largest number."""


def drawn(count: int, place: str) -> Tensor:
    """Return inputs (count, 1) of both signs."""
    low, high = PLACES[place]
    return (low + (high - low) * torch.rand(count, 1)) * (1 - 2 * torch.randint(2, (count, 1)))


def observed(x: Tensor, amplitude: Tensor, frequency: Tensor, phase: Tensor) -> Tensor:
    """Return noisy sums of three waves, (count, 1)."""
    f = (amplitude * (frequency * x + phase).sin()).sum(1, keepdim=True)
    return f + NOISE * torch.randn(f.shape)


def intervals() -> Iterator[dict]:
    """Yield the coverage of intervals by each λ, for every regression."""
    for seed in range(CURVES):
        torch.manual_seed(seed)
        waves = torch.randn(3), 3 * torch.rand(3), 6 * torch.rand(3)
        x = drawn(120, "at the examples")
        y = observed(x, *waves)
        network = tasks.perceptron([1, 30, 30, 1], nn.Tanh)()
        optimiser = torch.optim.Adam(network.parameters(), 1e-2, weight_decay=1e-4)
        descend(network, (x, y), 1_500, optimiser, None, F.mse_loss)
        by_evidence = Laplace(network, "regression", "all", "full")
        by_evidence.fit([(x, y)])
        by_evidence.optimize_prior_precision()
        la = LinearisedLaplace(network, "regression").fit(x, y, progress_bar=False)
        new = {place: drawn(500, place) for place in PLACES}
        known = {place: observed(of_place, *waves) for place, of_place in new.items()}
        for row, posterior in ((BY_NETWORK, by_evidence.posterior), (BY_LINEAR, la)):
            line = {"seed": seed, "row": row, "lambda": posterior.prior_precision.item()}
            for place, of_place in new.items():
                found = posterior.predict(of_place, mean="network")
                z = (known[place] - found.expectation) / found.predictive_variance.sqrt()
                line[place] = (z.abs() < HALF).double().mean().item()
            yield line


def probabilities() -> Iterator[dict]:
    """Yield the test NLL at each λ, for every classifier."""
    for name in NAMES:
        task = tasks.task(name, 0, 800)
        for stage, network in zip(("early", "on"), train(task, 0, 100), strict=True):
            la = Laplace(network, "classification", "all", "full")
            la.fit([tuple(task.train)])
            la.optimize_prior_precision()
            yield {"name": name, "stage": stage, "row": BY_LINEAR} | scored(la, task.test)
            for _ in range(FITS):
                due = la.posterior.effective_dim / la.mean.square().sum()
                change = (due / la.prior_precision.to(due)).log().abs().item()
                if change < NEAR:
                    break
                la.prior_precision = float(due)
                la.fit([tuple(task.train)])
            line = {"name": name, "stage": stage, "row": BY_NETWORK, "change": change}
            yield line | scored(la, task.test)


def scored(la: Laplace, rows: tasks.Rows) -> dict[str, float]:
    """Return λ and the NLL of probabilities."""
    nll = F.nll_loss(la(rows.x).log(), rows.y.long()).item()
    return {"lambda": float(la.prior_precision), "nll": nll}


def of_intervals(lines: list[dict]) -> str:
    """Return the mean coverage at every place, by each λ."""
    regressions = [line for line in lines if "seed" in line]
    places = {place: place for place in PLACES}
    return markdown.table(regressions, {"row": "90 % intervals with"}, places, decimals=2)


def of_probabilities(lines: list[dict]) -> str:
    """Return λ and NLL of every classifier, by each λ."""
    names = {"name": "table", "stage": "network", "row": "λ"}
    classifiers = [line | {"stage": STAGES[line["stage"]]} for line in lines if "name" in line]
    return markdown.table(classifiers, names, {"lambda": "value", "nll": "NLL"})


def main(argv: list[str] | None = None) -> None:
    parser = script_parser(__doc__, "interface")
    parser.add_argument("--quick", action="store_true", help="one regression and one table")
    args = begin(parser, argv)
    if not args.report:
        for part in (intervals(), probabilities()):
            lines = (next(part) for _ in range(2)) if args.quick else part
            markdown.append(args.out, lines, provenance(("torch",)))
    lines = markdown.read(args.out)
    print(of_intervals(lines), of_probabilities(lines), sep="\n\n")


if __name__ == "__main__":
    main()
