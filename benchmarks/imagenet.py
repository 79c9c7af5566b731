"""ResNet-50 on ImageNet.

    python benchmarks/imagenet.py --data-dir data/imagenet --weights resnet50.pth
    python benchmarks/imagenet.py --synthetic --train-size 2 --held-out 2 --test-size 4 --epochs 2 \\
        --learning-rate 0.01 --batch-size 2 --num-samples 2 --parameters last_layer --priors plain

The first reads image folders, data/imagenet/train/<class> and data/imagenet/val/<class>, and
the weights of torchvision's resnet50 from a file; nothing is downloaded. Without --weights it
trains the network first, which is a project of its own. The second needs no file: made-up
images of 224 × 224 pixels, a thousand classes, so few that one core takes them in minutes: to
see that it runs. --image-size makes them smaller. Columns and options as in mnist.py.
"""

from dataclasses import replace
from functools import partial

import torch
from methods import images, ladder
from methods.training import Recipe, Rung, cropped_and_flipped
from torchvision.models import resnet50

RUNG = Rung(
    name="imagenet",
    source=images.Source((3, 224, 224), 1000, images.imagenet),
    networks={"resnet50": resnet50},
    recipe=Recipe(
        partial(torch.optim.SGD, momentum=0.9, nesterov=True, weight_decay=1e-4),
        0.1,
        epochs=90,
        batch_size=64,
        augment=cropped_and_flipped,
    ),
    shifts=[],
    mean=(0.485, 0.456, 0.406),
    deviation=(0.229, 0.224, 0.225),
    sizes=images.Sizes(32, 16, 32),
    num_samples=8,
)


def main(arguments: list[str] | None = None) -> None:
    parser = ladder.options(RUNG, __doc__)
    parser.add_argument("--image-size", type=int, default=224)
    args = parser.parse_args(arguments)
    shape = 3, args.image_size, args.image_size
    ladder.climb(replace(RUNG, source=RUNG.source._replace(shape=shape)), args)


if __name__ == "__main__":
    main()
