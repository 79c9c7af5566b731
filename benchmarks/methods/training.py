"""The network of a rung: trained, or read from a file."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm

from methods import ranks
from methods.images import Sizes, Source
from methods.shifts import Shift


class Recipe(NamedTuple):
    """How a network is trained."""

    optimiser: Callable[..., torch.optim.Optimizer]
    learning_rate: float
    """At its peak, a third of the way."""

    epochs: int
    batch_size: int
    augment: Callable[[Tensor], Tensor] = lambda x: x


@dataclass(frozen=True)
class Rung:
    """One step of the ladder: data, networks, how they are trained, and shifts."""

    name: str
    source: Source
    networks: dict[str, Callable[[], nn.Module]]
    recipe: Recipe
    shifts: list[Shift]
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    """Of pixels in [0, 1], by channel."""

    sizes: Sizes
    """Of synthetic data where nothing else is asked for."""

    num_samples: int = 32


class Normalised(nn.Module):
    """A network on images in [0, 1]."""

    def __init__(self, body: nn.Module, mean: tuple[float, ...], deviation: tuple[float, ...]):
        super().__init__()
        self.body = body
        for name, values in (("mean", mean), ("deviation", deviation)):
            self.register_buffer(name, torch.tensor(values).view(-1, 1, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.body((x - self.mean) / self.deviation)


def network_of(
    rung: Rung, args: argparse.Namespace, data: Dataset, device: torch.device
) -> nn.Module:
    """Return the network from ``--weights``, from the checkpoint's folder, or trained."""
    kept = args.checkpoint and args.checkpoint / "network.pt"
    file = args.weights or (kept if kept and kept.exists() else None)
    if file is not None:
        network = fresh(rung, args, device)
        read_weights(network.body, file)
    elif ranks.is_first():
        network = train(rung, args, data, device, args.seed)
        if kept:
            kept.parent.mkdir(parents=True, exist_ok=True)
            torch.save(network.body.state_dict(), kept)
    else:
        network = fresh(rung, args, device)
    return ranks.as_first(network.eval())


def fresh(rung: Rung, args: argparse.Namespace, device: torch.device) -> Normalised:
    """Return an untrained network."""
    body = rung.networks[args.network]()
    return Normalised(body, rung.mean, rung.deviation).to(device)


def train(
    rung: Rung, args: argparse.Namespace, data: Dataset, device: torch.device, seed: int
) -> nn.Module:
    """Return a network trained on one cycle of the learning rate, in eval mode."""
    torch.manual_seed(seed)
    network, recipe = fresh(rung, args, device).train(), rung.recipe
    whole = (
        len(data) >= args.batch_size
    )  # a last batch of one image has no variance to normalise by
    loader = DataLoader(
        data, args.batch_size, shuffle=True, drop_last=whole, num_workers=args.workers
    )
    optimiser = recipe.optimiser(network.parameters(), lr=args.learning_rate)
    steps = max(1, args.epochs * len(loader))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, args.learning_rate, steps)
    for _ in tqdm(range(args.epochs), "Training", disable=not ranks.is_first()):
        for x, y in loader:
            optimiser.zero_grad()
            functional.cross_entropy(network(recipe.augment(x.to(device))), y.to(device)).backward()
            optimiser.step()
            schedule.step()
    average_statistics(network, loader)
    return network.eval()


def average_statistics(network: nn.Module, loader: DataLoader) -> None:
    """Set the running statistics of normalisation to averages over one pass.

    After a short training they still remember how the network began.
    """
    norms = [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
    device = next(network.parameters()).device
    with torch.no_grad():
        for x, _ in loader if norms else ():
            network(x.to(device))


def read_weights(body: nn.Module, file) -> None:
    """Load a state_dict, alone or under a name, with or without the prefix of parallel training."""
    if not file.exists():
        raise SystemExit(
            f"There is no file {file}: --weights takes a state_dict that torch.save wrote."
        )
    state = torch.load(file, map_location="cpu", weights_only=True)
    for name in ("state_dict", "model", "net"):
        state = state[name] if isinstance(state.get(name), dict) else state
    state = {name.removeprefix("module."): tensor for name, tensor in state.items()}
    try:
        body.load_state_dict(state)
    except RuntimeError as error:
        lines = str(error).splitlines()
        raise SystemExit(f"{file} does not fit the network: {' '.join(lines)[:400]}") from None


def cropped_and_flipped(x: Tensor) -> Tensor:
    """Return images moved by up to an eighth and mirrored at random, each on its own."""
    margin = x.shape[-1] // 8
    padded = functional.pad(x, (margin,) * 4)
    corners = torch.randint(2 * margin + 1, (len(x), 2)).tolist()
    height, width = x.shape[2:]
    moved = [image[:, i : i + height, j : j + width] for image, (i, j) in zip(padded, corners)]
    mirrored = torch.rand(len(x), 1, 1, 1, device=x.device) < 0.5
    x = torch.stack(moved)
    return torch.where(mirrored, x.flip(-1), x)
