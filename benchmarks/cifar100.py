"""ResNet-18 on CIFAR-100, under five corruptions at severities 1 to 5.

    python benchmarks/cifar100.py --data-dir data --num-samples 8
    python benchmarks/cifar100.py --synthetic --train-size 16 --test-size 12 --epochs 8 \\
        --learning-rate 0.02 --batch-size 8 --num-samples 32 --parameters last_layer --priors plain

The first reads data/cifar-100-python; nothing is downloaded, and it wants a GPU. The second
needs no file: made-up images of the same shape, a hundred classes, so few that one core takes
them in some minutes and accuracy stays at chance. Samples of a last layer cost next to nothing
and share one Krylov space: more of them need fewer passes. The network has a stem of
3 × 3 for small images. Noise, blur, contrast, brightness and pixelation are the script's own,
not the files of CIFAR-100-C. Columns and options as in mnist.py.
"""

from functools import partial

import torch
from methods import images, ladder
from methods.networks import resnet18
from methods.shifts import corruptions
from methods.training import Recipe, Rung, cropped_and_flipped

RUNG = Rung(
    name="cifar100",
    source=images.Source((3, 32, 32), 100, images.cifar100),
    networks={"resnet18": partial(resnet18, 100)},
    recipe=Recipe(
        partial(torch.optim.SGD, momentum=0.9, nesterov=True, weight_decay=5e-4),
        0.1,
        epochs=100,
        batch_size=128,
        augment=cropped_and_flipped,
    ),
    shifts=corruptions(),
    mean=(0.51, 0.49, 0.44),
    deviation=(0.27, 0.26, 0.28),
    sizes=images.Sizes(512, 128, 256),
    num_samples=8,
)


def main(arguments: list[str] | None = None) -> None:
    ladder.climb(RUNG, ladder.options(RUNG, __doc__).parse_args(arguments))


if __name__ == "__main__":
    main()
