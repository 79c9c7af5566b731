"""Error bars for a reconstructed image: one datum, and 10⁴ or more outputs.

    python benchmarks/tomography.py

measures a phantom of 112 × 112 pixels along parallel rays at 30 angles, with noise, fits a
small U-Net to these measurements alone (a deep image prior whose input is the filtered
back-projection), and then the posterior of its weights under y = A f + noise. λ and σ are
learnt by EM; the variance of every pixel is compared with the error of the reconstruction,
beside one constant variance and Monte Carlo dropout. Five angles in between are held out:
they set the variances' scale without a look at the true image, and the picture shows these.
Records go to results/tomography.jsonl, the picture to results/tomography.png. Expect a
correlation of 0.6 between error and predicted deviation, and about twenty minutes on one core.
"""

import argparse
import copy
import logging
from math import log, pi
from pathlib import Path
from typing import NamedTuple

import matplotlib
import torch
from methods import markdown
from methods.image_scores import Reconstruction, constant, scores
from methods.measure import Meter
from methods.provenance import provenance
from methods.radon import Radon, phantom
from methods.unet import UNet
from torch import Tensor, nn
from tqdm.auto import tqdm

from torch_lla_em import LinearisedLaplace, LinearOperatorRegression, Prediction

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLUMNS = "psnr", "nll", "nll_scaled", "patch_nll", "pearson", "spearman", "coverage", "mean_sd"


class Scan(NamedTuple):
    """A phantom and what is measured of it."""

    image: Tensor
    """(1, 1, size, size)."""

    radon: Radon
    held_out: Radon
    y: Tensor
    y_held_out: Tensor
    sigma: float
    """The noise's standard deviation."""


def scan(size: int, angles: int, noise: float) -> Scan:
    """Measure the phantom; the noise is this part of the mean absolute measurement."""
    image, generator = phantom(size), torch.Generator().manual_seed(0)
    turns = torch.arange(angles) * pi / angles
    between = (turns + pi / (2 * angles))[:: max(1, angles // 5)]
    devices = Radon(size, turns), Radon(size, between)
    clean = [device.forward(image) for device in devices]
    sigma = noise * clean[0].abs().mean().item()
    noisy = [y + sigma * torch.randn(y.shape, generator=generator) for y in clean]
    return Scan(image, *devices, *noisy, sigma)


def reconstruct(data: Scan, network: nn.Module, args: argparse.Namespace) -> nn.Module:
    """Train the network so that its image explains the measurements and varies little."""
    x = data.radon.filtered_back_projection(data.y)
    optimiser = torch.optim.Adam(network.parameters(), args.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, args.steps)
    for _ in tqdm(range(args.steps), "Training"):
        optimiser.zero_grad()
        image = network(x)
        misfit = (data.radon.forward(image) - data.y).square().mean() / data.sigma**2
        variation = image.diff(dim=2).abs().mean() + image.diff(dim=3).abs().mean()
        (misfit + args.total_variation * variation).backward()
        optimiser.step()
        schedule.step()
    return network.eval()


def held_out_scale(data: Scan, drawn: Reconstruction, sigma: Tensor) -> float:
    """Return the scale of the variance that the held-out angles like best."""
    shape = tuple(data.image.shape[1:])
    likelihood = LinearOperatorRegression(data.held_out.forward, shape, sigma)
    y = data.y_held_out.to(drawn.mean)

    def log_prob(scale: float) -> float:
        prediction = Prediction(likelihood, drawn.mean, scale**0.5 * drawn.deviations[:, None])
        return prediction.log_prob(y).sum().item() - 2 * log(scale) ** 2

    return max((10 ** (exponent / 40) for exponent in range(-160, 81)), key=log_prob)


def scaled(drawn: Reconstruction, scale: float) -> Reconstruction:
    return drawn._replace(deviations=scale**0.5 * drawn.deviations)


def posterior(
    data: Scan, network: nn.Module, args: argparse.Namespace, prior: str
) -> tuple[dict[str, Reconstruction], dict]:
    """Return reconstructions with deviations, as fitted and calibrated, and what they cost."""
    # the spread of G's eigenvalues is more than single precision holds
    network = copy.deepcopy(network).double()
    x, y = data.radon.filtered_back_projection(data.y).double(), data.y.double()
    shape = tuple(data.image.shape[1:])
    la = LinearisedLaplace(
        network,
        LinearOperatorRegression(data.radon.forward, shape, data.sigma),
        prior="layerwise" if prior == "layerwise" else "scalar",
        g_prior=prior == "g-prior",
        num_samples=args.num_samples,
        tolerance=args.tolerance,
        seed=args.seed,
    )
    with Meter() as clock:
        la.fit([(x, y)])
    prediction = la.predict(x)
    drawn = Reconstruction(prediction.mean.float(), prediction.deviations[:, 0].float())
    tau = held_out_scale(data, drawn, la.sigma_noise)
    found = {f"ours: {prior}": drawn, f"ours: {prior}, held-out angles": scaled(drawn, tau)}
    last = la.history[-1]
    cost = {
        "fit_seconds": clock.seconds,
        "megabytes": clock.megabytes,
        "passes": last["data_passes"],
        "em_steps": len(la.history),
        "precision": la.prior_precision.tolist(),
        "learnt_sigma": la.sigma_noise.item(),
        "gamma": la.effective_dim.sum().item(),
        "certificate": la.certificate.max().item(),
        "tau": tau,
    }
    return found, cost


def dropout(data: Scan, args: argparse.Namespace) -> Reconstruction:
    """Return the images of a network that was trained with dropout, under its masks."""
    torch.manual_seed(args.seed)
    network = reconstruct(data, UNet(args.channels, args.dropout), args).train()
    x = data.radon.filtered_back_projection(data.y)
    with torch.no_grad():
        images = torch.cat([network(x) for _ in range(args.num_samples)])
    return Reconstruction(images.mean(0, keepdim=True), images - images.mean(0))


def draw(truth: Tensor, found: dict[str, Reconstruction], path: Path) -> None:
    """Draw phantom, reconstruction, error and predicted deviations."""
    first = next(iter(found.values()))
    error = (truth - first.mean)[0, 0].abs()
    panels = [("phantom", truth[0, 0], 1.0), ("reconstruction", first.mean[0, 0], 1.0)]
    top = error.flatten().quantile(0.995).item()
    panels.append(("|error|", error, top))
    for name, drawn in found.items():
        sd = drawn.deviations.square().mean(0)[0].sqrt()
        panels.append((f"sd, {name.partition(',')[0]}", sd, min(top, sd.max().item())))
    figure, axes = plt.subplots(1, len(panels), figsize=(3.1 * len(panels), 3.2))
    for axis, (name, image, high) in zip(axes, panels):
        kind = "grey" if high == 1.0 else "viridis"
        shown = axis.imshow(image.numpy(), cmap=kind, vmin=0, vmax=high)
        figure.colorbar(shown, ax=axis, fraction=0.046)
        axis.set_title(name, fontsize=9)
        axis.axis("off")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=112, help="pixels a side, a multiple of 4")
    parser.add_argument("--angles", type=int, default=30)
    parser.add_argument("--noise", type=float, default=0.05, help="part of the mean measurement")
    parser.add_argument("--channels", type=int, nargs=3, default=(8, 16, 16))
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--total-variation", type=float, default=15.0)
    parser.add_argument("--dropout", type=float, default=0.05)
    parser.add_argument("--num-samples", type=int, default=64)
    parser.add_argument("--tolerance", type=float, default=0.05)
    choices = ["plain", "g-prior", "layerwise"]
    parser.add_argument("--priors", nargs="+", choices=choices, default=choices[:2])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--picture", type=Path, default=Path("results/tomography.png"))
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.getLogger("torch_lla_em").setLevel(logging.ERROR)
    origin = provenance(("torch", "matplotlib"))
    data = scan(args.size, args.angles, args.noise)
    torch.manual_seed(args.seed)
    with Meter() as training:
        network = reconstruct(data, UNet(args.channels), args)
    x = data.radon.filtered_back_projection(data.y)
    with torch.no_grad():
        mean = network(x)
    common = {
        "task": "tomography",
        "size": args.size,
        "outputs": data.image.numel(),
        "measurements": data.radon.num_measurements,
        "weights": sum(p.numel() for p in network.parameters()),
        "num_samples": args.num_samples,
        "sigma": data.sigma,
        "seed": args.seed,
        "train_seconds": training.seconds,
    }
    error = (data.image - mean).square().mean().item()
    zero = torch.zeros(args.num_samples, *mean.shape[1:])
    found = {
        "filtered back-projection": Reconstruction(x, zero),
        "constant sd, the true error's": constant(mean, error, args.num_samples),
    }
    costs: dict[str, dict] = {}
    for prior in args.priors:
        ours, costs[f"ours: {prior}"] = posterior(data, network, args, prior)
        found |= ours
    with Meter() as clock:
        drawn = dropout(data, args)
    tau = held_out_scale(data, drawn, torch.tensor(data.sigma))
    found |= {"MC dropout": drawn, "MC dropout, held-out angles": scaled(drawn, tau)}
    costs["MC dropout"] = {"fit_seconds": clock.seconds, "tau": tau}
    records = []
    for name, drawn in found.items():
        record = common | {"row": name} | scores(drawn, data.image) | costs.get(name, {})
        if name == "filtered back-projection":
            record = {key: value for key, value in record.items() if key not in COLUMNS[1:]}
        records.append(record | origin)
    print("\n" + markdown.table(records, ["row"], COLUMNS))
    for name, cost in costs.items():
        print(name, cost)
    markdown.append(args.out / "tomography.jsonl", records)
    shown = [name for name in found if name.endswith("held-out angles")]
    draw(data.image, {name: found[name] for name in shown}, args.picture)


if __name__ == "__main__":
    main()
