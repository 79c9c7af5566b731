"""Segmentation by a small U-Net: the network and its posterior over the last layer.

    python benchmarks/segmentation.py    # 200 images of 128 × 128, 8 classes: two minutes

The images show squares and discs with stripes and noise; the label of every pixel is the kind of
its shape. The script uses one thread. "NLL" is that of single test pixels under their own
probabilities, by the network and by the posterior as fitted. "trainings" are the processor seconds
of the fit divided by those of the training. "error" is the numerical error of the samples in
posterior standard deviations. Lines go to results/segmentation.jsonl.

Expected: the NLL falls from .21 to .15, and the fit takes about two trainings.
"""

import argparse
import time
from collections.abc import Iterable, Sequence

import torch
from methods import markdown
from methods.learning import descend
from methods.networks import UNet
from methods.provenance import begin, provenance, script_parser
from torch import Tensor, nn
from torch.nn.functional import nll_loss

from torch_lla_em import Classification, LinearisedLaplace

CLASSES, SHAPES, BATCH = 8, 6, 5


def scenes(images: int, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return images of shapes, (images, 1, size, size), and the kind of every pixel."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    x = torch.zeros(images, size, size)
    y = torch.zeros(images, size, size, dtype=torch.long)
    for image, kinds in zip(x, y, strict=True):
        for _ in range(SHAPES):
            kind = int(torch.randint(1, CLASSES, (1,), generator=generator))
            row, column, radius = torch.rand(3, generator=generator).tolist()
            down, right = rows - row * size, columns - column * size
            reach = size * (0.08 + 0.1 * radius)
            inside = down**2 + right**2 < reach**2
            if kind % 2:
                inside = (down.abs() < reach) & (right.abs() < reach)
            along = columns if kind > 3 else rows
            image[inside] = kind / 7 + 0.3 * (0.25 * (kind + 1) * along[inside]).sin()
            kinds[inside] = kind
    noise = torch.randn(images, size, size, generator=generator)
    return (x + 0.25 * noise)[:, None], y


def trained(x: Tensor, y: Tensor, epochs: int) -> tuple[UNet, float]:
    """Return a U-Net after some epochs of Adam, and their processor seconds."""
    torch.manual_seed(0)
    network = UNet()
    network.leave = nn.Conv2d(8, CLASSES, 1)
    optimiser = torch.optim.Adam(network.parameters(), 5e-3)
    began = time.process_time()
    descend(network, (x, y), epochs, optimiser, BATCH)
    return network, time.process_time() - began


def batches(x: Tensor, y: Tensor) -> Sequence[tuple[Tensor, Tensor]]:
    return list(zip(x.split(BATCH), y.split(BATCH), strict=True))


def nll(log_probs: Iterable[Tensor], y: Tensor) -> float:
    """Return the mean negative log-likelihood of a single pixel, given log-probabilities (B, C, H, W)."""
    each = [
        nll_loss(part, own, reduction="sum")
        for part, own in zip(log_probs, y.split(BATCH), strict=True)
    ]
    return sum(each).item() / y.numel()


def measured(args: argparse.Namespace) -> dict:
    """Return the figures of a fit."""
    x, y = scenes(args.images, args.size, 0)
    test = scenes(max(2, args.images // 10), args.size, 1)
    network, training = trained(x, y, args.epochs)
    options = {"class_dim": 1, "num_samples": args.num_samples, "parameters": "last_layer"}
    la = LinearisedLaplace(network, Classification(), **options)
    began = time.process_time()
    la.fit(batches(x, y), progress_bar=False)
    seconds = time.process_time() - began
    with torch.no_grad():
        plain = [network(a).log_softmax(1) for a, _ in batches(*test)]
    ours = [la.predict(a).log_probs for a, _ in batches(*test)]
    return {
        "layers": "last layer",
        "images": f"{args.images} × {args.size} × {args.size}",
        "weights": la.w_lin.numel(),
        "network": nll(plain, test[1]),
        "posterior": nll(ours, test[1]),
        "seconds": seconds,
        "trainings": seconds / training,
        "error": la.accuracy.error,
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = script_parser(__doc__, "segmentation")
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--num-samples", type=int, default=16)
    parser.add_argument("--tiny", action="store_true", help="a few images, as in the tests")
    args = begin(parser, argv)
    if args.tiny:
        args.images, args.size, args.epochs, args.num_samples = 4, 32, 2, 2
    if not args.report:
        markdown.append(args.out, [measured(args)], provenance(("torch",)))
    shown = "network", "posterior", "seconds", "trainings", "error"
    print(markdown.table(markdown.read(args.out), ("images", "layers"), shown))


if __name__ == "__main__":
    main()
