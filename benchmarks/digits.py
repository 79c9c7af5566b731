"""Uncertainty estimates for a digits classifier, from training to a table and a figure.

    python benchmarks/digits.py

trains a small convolutional network on scikit-learn's handwritten digits (they come with the
package), fits ``LinearisedLaplace``, and prints a table against the network itself and against
temperature scaling, in under a minute. The table and a figure are written to ``results/digits/``. Expect a
joint NLL of six tenths of the network's or less, and a higher AUROC for shifted digits.
"""

import argparse
import time
from pathlib import Path

import matplotlib
import torch
from methods import markdown
from methods.learning import best_temperature, descend
from methods.metrics import Classes, auroc
from methods.networks import convolutional
from methods.peers import Predictor, of_ours
from methods.provenance import provenance
from methods.tasks import Rows
from sklearn.datasets import load_digits
from torch import Tensor, nn

from torch_lla_em import LinearisedLaplace, plot

matplotlib.use("Agg")

SCORES = {
    "accuracy": "accuracy",
    "NLL": "nll",
    "ECE": "ece",
    "Brier": "brier",
    "joint NLL": "joint_dyadic",
}


def load(device: torch.device) -> tuple[Rows, Rows, Rows]:
    """Return 1000 digits to train on, 300 to calibrate on and 497 to test on."""
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    y = torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order].to(device), y[order].to(device)
    return Rows(x[:1000], y[:1000]), Rows(x[1000:1300], y[1000:1300]), Rows(x[1300:], y[1300:])


def train(data: Rows, seed: int, epochs: int = 100) -> nn.Module:
    """Return a network of 6,170 parameters that has overfitted the training digits."""
    torch.manual_seed(seed)
    network = convolutional([1, 12, 24], [96, 32, 10]).to(data.x.device)
    optimiser = torch.optim.Adam(network.parameters(), lr=3e-3)
    return descend(network, data, epochs, optimiser, 100)


def shifts(x: Tensor) -> dict[str, Tensor]:
    """Return the images rotated by 90°, with added noise, and with shuffled pixels."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(x.shape, generator=generator).to(x)
    order = torch.randperm(64, generator=generator).to(x.device)
    return {
        "rotated": x.rot90(dims=(2, 3)),
        "noised": x + 0.5 * noise,
        "shuffled": x.flatten(1)[:, order].view_as(x),
    }


@torch.no_grad()
def evaluate(method: Predictor, test: Rows) -> dict[str, float]:
    """Return a row of the table; the last three columns are AUROC of clean against shifted."""
    clean = method(test.x)
    scores = clean.scores(test.y)
    row = {name: scores[key] for name, key in SCORES.items()}
    for name, x in shifts(test.x).items():
        row[name] = auroc(clean.unfamiliarity.cpu(), method(x).unfamiliarity.cpu())
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-samples", type=int, default=32)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("results/digits"))
    options = parser.parse_args()
    if options.device == "cpu":
        torch.set_num_threads(1)  # kernels this small lose by sharing
    begin = time.perf_counter()
    training, held_out, test = load(torch.device(options.device))
    network = train(training, options.seed)
    print(f"Trained in {time.perf_counter() - begin:.1f} s on {options.device}.")

    begin = time.perf_counter()
    la = LinearisedLaplace(
        network, "classification", num_samples=options.num_samples, seed=options.seed
    ).fit(*training, progress_bar=False)
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
        "network (MAP)": lambda x: Classes.of(network(x)[None]),
        f"temperature {temperature:.2f}": lambda x: Classes.of(network(x)[None] / temperature),
        "linearised Laplace": of_ours(la),
        "linearised Laplace, linear mean": of_ours(la, "linear"),
    }
    rows = {name: evaluate(method, test) for name, method in methods.items()}
    la.calibrate(*held_out)
    calibrated = "linearised Laplace, calibrated"
    print(f"Calibrated: {la.mean} mean, τ = {la.posterior_scale:.2g}.")
    rows[calibrated] = evaluate(of_ours(la, calibrated=True), test)
    lines = [{"method": name, **row} for name, row in rows.items()]
    print("\n" + markdown.table(lines, ["method"], list(rows[calibrated])))

    options.out.mkdir(parents=True, exist_ok=True)
    stamp = provenance(("torch", "torchmetrics", "scikit-learn")) | {"seed": options.seed}
    (options.out / "digits.jsonl").unlink(missing_ok=True)
    markdown.append(options.out / "digits.jsonl", lines, stamp)
    axes = plot.reliability(la, tuple(test))
    axes.figure.savefig(options.out / "digits.png", dpi=120, bbox_inches="tight")
    print(f"\nThe picture and the table are in {options.out}/.")


if __name__ == "__main__":
    main()
