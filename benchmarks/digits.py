"""Error bars for a digits classifier, from training to pictures, in under a minute.

    python benchmarks/digits.py

trains a small convolutional network on scikit-learn's handwritten digits (they come with
the package), fits ``LinearisedLaplace``, and prints a table against the network itself and
against temperature scaling; pictures go to ``results/digits/``, and with ``--readme`` the
table into the README. Expect, once calibrated, a
joint NLL of six tenths of the network's, and shifted digits told from clean ones more often.
"""

import argparse
import json
import time
from pathlib import Path
from typing import NamedTuple

import matplotlib
import torch
from methods import markdown
from methods.metrics import Classes, auroc
from methods.peers import Predictor, of_ours
from methods.provenance import provenance
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from torch_lla_em import SGD, BlockCG, BlockKrylov, FunctionSpace, LinearisedLaplace

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SOLVERS = {"krylov": BlockKrylov, "cg": BlockCG, "sgd": SGD, "function_space": FunctionSpace}
SCORES = {
    "accuracy": "accuracy",
    "NLL": "nll",
    "ECE": "ece",
    "Brier": "brier",
    "joint NLL": "joint_dyadic",
}


class Split(NamedTuple):
    """Images (N, 1, 8, 8) in [0, 1] and their labels."""

    x: Tensor
    y: Tensor


def load(device: torch.device) -> tuple[Split, Split, Split]:
    """Return 1000 digits to train on, 300 to calibrate on and 497 to test on."""
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    y = torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order].to(device), y[order].to(device)
    return Split(x[:1000], y[:1000]), Split(x[1000:1300], y[1000:1300]), Split(x[1300:], y[1300:])


def train(data: Split, seed: int, epochs: int = 100) -> nn.Module:
    """Return a network of 6,170 weights that knows its training digits by heart."""
    torch.manual_seed(seed)
    network = nn.Sequential(
        *(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(12, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(96, 32), nn.ReLU(), nn.Linear(32, 10)),
    ).to(data.x.device)
    optimiser = torch.optim.Adam(network.parameters(), lr=3e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(data.x), device=data.x.device).split(100):
            optimiser.zero_grad()
            functional.cross_entropy(network(data.x[batch]), data.y[batch]).backward()
            optimiser.step()
    return network.eval()


def best_temperature(logits: Tensor, y: Tensor) -> float:
    """Return the temperature that a held-out set likes best."""
    grid = torch.logspace(-1, 1.5, 251).tolist()
    return min(grid, key=lambda t: functional.cross_entropy(logits / t, y).item())


def shifts(x: Tensor) -> dict[str, Tensor]:
    """Return the images turned by 90°, under noise, and with their pixels shuffled."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(x.shape, generator=generator).to(x)
    order = torch.randperm(64, generator=generator).to(x.device)
    return {
        "rotated": x.rot90(dims=(2, 3)),
        "noised": x + 0.5 * noise,
        "shuffled": x.flatten(1)[:, order].view_as(x),
    }


def evaluate(method: Predictor, test: Split) -> dict[str, float]:
    """Return a row of the table; the last three columns are AUROC of clean against shifted."""
    clean = method(test.x)
    scores = clean.scores(test.y)
    row = {name: scores[key] for name, key in SCORES.items()}
    for name, x in shifts(test.x).items():
        row[name] = auroc(clean.unfamiliarity.cpu(), method(x).unfamiliarity.cpu())
    return row


def of_network(network: nn.Module, temperature: float) -> Predictor:
    """Return the method that trusts the network, at a temperature."""
    return torch.no_grad()(lambda x: Classes.of(network(x)[None] / temperature))


def draw_reliability(axes, outputs: dict[str, Tensor], y: Tensor) -> None:
    """Draw accuracy over confidence in ten bins, for each method's probabilities (N, 10)."""
    axes.plot([0, 1], [0, 1], color="grey", linewidth=1)
    for name, probs in outputs.items():
        confidence, predicted = probs.max(-1)
        bins = (confidence * 10).long().clamp(max=9)
        filled = [b for b in range(10) if (bins == b).sum() >= 5]
        points = [
            (confidence[bins == b].mean().item(), (predicted == y)[bins == b].float().mean().item())
            for b in filled
        ]
        axes.plot(*zip(*points), marker="o", label=name)
    axes.set(xlabel="confidence", ylabel="accuracy", title="Reliability")
    axes.legend(fontsize=8)


def draw_trace(axes, la: LinearisedLaplace) -> None:
    """Draw λ and γ over the steps of EM."""
    steps = [record["step"] for record in la.history]
    axes.plot(steps, [record["prior_precision"] for record in la.history], "o-", color="C0")
    axes.set(xlabel="EM step", xticks=steps, title="EM")
    axes.set_ylabel("prior precision λ", color="C0")
    other = axes.twinx()
    gamma = [record["effective_dim"] for record in la.history]
    error = [record["effective_dim_error"] for record in la.history]
    other.errorbar(steps, gamma, error, fmt="s-", color="C1")
    other.set_ylabel("effective dimension γ", color="C1")


def draw_digits(la: LinearisedLaplace, test: Split, path: Path) -> None:
    """Draw the test digits that the posterior is most and least certain of."""
    prediction = la.predict(test.x)
    order = prediction.epistemic.argsort(descending=True)
    figure, axes = plt.subplots(2, 8, figsize=(9, 2.9))
    for row, chosen, word in ((0, order[:8], "least certain"), (1, order[-8:], "most certain")):
        for axis, i in zip(axes[row], chosen.tolist()):
            axis.imshow(1 - test.x[i, 0].cpu(), cmap="grey", vmin=0, vmax=1)
            probability, label = prediction.probs[i].max(-1)
            axis.set_title(f"{label} ({probability:.0%}), is {test.y[i]}", fontsize=8)
            axis.axis("off")
        axes[row, 0].text(-3, 3.5, word, rotation=90, va="center", ha="center")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def write_results(lines: list[dict], options: argparse.Namespace) -> None:
    """Write one JSON line a method, with what it was measured on; into the README where asked."""
    stamp = provenance(("torch", "torchmetrics", "scikit-learn")) | {"seed": options.seed}
    if options.device != "cpu":
        stamp["machine"] = torch.cuda.get_device_name()
    with open(options.out / "digits.jsonl", "w") as file:
        file.writelines(json.dumps(line | stamp) + "\n" for line in lines)
    if options.readme:
        import report

        report.main([str(options.out / "digits.jsonl")])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-samples", type=int, default=32)
    parser.add_argument("--solver", choices=SOLVERS, help="default: chosen by the library")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("results/digits"))
    parser.add_argument("--readme", action="store_true", help="keep the table, and show it there")
    options = parser.parse_args()
    if options.device == "cpu":
        torch.set_num_threads(1)  # kernels this small lose by sharing
    begin = time.perf_counter()
    training, held_out, test = load(torch.device(options.device))
    network = train(training, options.seed)
    print(f"Trained in {time.perf_counter() - begin:.1f} s on {options.device}.")

    begin = time.perf_counter()
    loader = list(zip(training.x.split(250), training.y.split(250)))
    la = LinearisedLaplace(
        network,
        "classification",
        num_samples=options.num_samples,
        solver=SOLVERS[options.solver]() if options.solver else None,
        seed=options.seed,
    ).fit(loader)
    evidence = la.log_marginal_likelihood()
    print(
        f"Fitted in {time.perf_counter() - begin:.1f} s: λ = {la.prior_precision:.4g}, γ = "
        f"{la.effective_dim:.1f} ± {la.effective_dim_error:.1f} of {la.w_lin.numel()} weights, "
        f"log evidence {evidence.value:.1f} ± {evidence.standard_error:.1f}, "
        f"{la.history[-1]['columns']:.0f} columns through the data."
    )
    with torch.no_grad():
        temperature = best_temperature(network(held_out.x), held_out.y)
    methods = {
        "network (MAP)": of_network(network, 1.0),
        f"temperature {temperature:.2f}": of_network(network, temperature),
        "linearised Laplace": of_ours(la),
        "linearised Laplace, linear mean": of_ours(la, "linear"),
    }
    rows = {name: evaluate(method, test) for name, method in methods.items()}
    reliability = {name: method(test.x).log_probs.exp() for name, method in methods.items()}
    la.calibrate([held_out])
    calibrated = "linearised Laplace, calibrated"
    print(f"Calibrated: {la.mean} mean times {la.mean_factor:.2f}, τ = {la.posterior_scale:.2g}.")
    rows[calibrated] = evaluate(of_ours(la), test)
    reliability[calibrated] = la(test.x)
    lines = [{"method": name, **row} for name, row in rows.items()]
    print("\n" + markdown.table(lines, ["method"], list(rows[calibrated])))

    options.out.mkdir(parents=True, exist_ok=True)
    write_results(lines, options)
    figure, axes = plt.subplots(1, 2, figsize=(10, 4))
    draw_reliability(axes[0], reliability, test.y)
    draw_trace(axes[1], la)
    figure.tight_layout()
    figure.savefig(options.out / "reliability_and_em.png", dpi=120)
    draw_digits(la, test, options.out / "digits.png")
    print(f"\nPictures and the table are in {options.out}/.")


if __name__ == "__main__":
    main()
