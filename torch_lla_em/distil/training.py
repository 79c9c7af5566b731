"""How a student is trained on a posterior's predictions."""

from __future__ import annotations

from collections.abc import Iterable
from math import cos, pi
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from torch_lla_em.data import tensors_in
from torch_lla_em.distil.inputs import concatenated, rows_of
from torch_lla_em.distil.progress import DistillationProgress
from torch_lla_em.distil.student import Student
from torch_lla_em.distil.targets import (
    StudentTargets,
    divergence,
    joined,
    log_scores,
    logarithm,
    variance_of,
)

# weight of the squared error of the head, whose targets have variance 1, next to the KL
_OF_HEAD = 0.3
# largest step as a part of the mean size of the network's weights, and the share of all steps over
# which it grows
_STEP, _WARM_UP = 0.03, 0.05
# share of each batch that is drawn from the given inputs alone, which are fewer than the made ones
_GIVEN = 0.5
# largest norm of a gradient
_LARGEST = 1.0


class Block(NamedTuple):
    """Inputs of one shape, with the posterior's predictions."""

    x: Any
    due: StudentTargets
    given: int = 0
    """How many of the first inputs were given; the others were made from them."""

    def part(self, rows: Tensor | slice) -> Block:
        """Return some of the examples."""
        return self._replace(x=rows_of(self.x, rows), due=self.due.part(rows))


class Schedule(NamedTuple):
    """Options of the training."""

    steps: int
    batch_size: int
    lr: float | None
    seed: int
    progress_bar: bool


def blocks_of(blocks: Iterable[Block]) -> list[Block]:
    """Return the examples in as few blocks as possible: one for each shape of inputs."""
    groups: dict[str, list[Block]] = {}
    for block in blocks:
        groups.setdefault(str([t.shape[1:] for t in tensors_in(block.x)]), []).append(block)
    return [_whole(group) for group in groups.values()]


def train(
    student: Student, blocks: list[Block], schedule: Schedule, progress: DistillationProgress
) -> None:
    """Train a student, from the last saved state if there is one.

    Its head is standardised in training, and returns logarithms at the end.
    """
    likelihood, head, n = student.likelihood, student.head, student.form.uncertainties
    logs = [(logarithm(block.due.uncertainty), log_scores(block.due.scores)) for block in blocks]
    moments = [_moments(each) for each in zip(*logs)]
    mean, size = (torch.cat(each) for each in zip(*moments))
    goals = [[_standard(v, *of) for v, of in zip(pair, moments)] for pair in logs]
    weights: list[Tensor] = [p for p in student.network.parameters() if p.requires_grad]
    if not weights:  # a user has frozen the network because its own training is over
        weights = [p.requires_grad_() for p in student.network.parameters()]
    largest = _STEP * _size_of(weights) if schedule.lr is None else schedule.lr
    weights += head.parameters()
    optimiser = torch.optim.Adam(weights, largest, fused=True)
    generator = torch.Generator("cpu").manual_seed(schedule.seed)
    counts = torch.tensor([float(len(block.due.scores)) for block in blocks], device="cpu")
    begin = 0
    if progress.training is not None:
        begin, modules, of_optimiser, drawn = progress.training
        student.load_state_dict(modules)
        optimiser.load_state_dict(of_optimiser)
        generator.set_state(drawn)
    bar = tqdm(range(begin, schedule.steps), "distilling", disable=not schedule.progress_bar)
    for step in bar:
        chosen = int(torch.multinomial(counts, 1, generator=generator))
        size_of_batch = min(schedule.batch_size, int(counts[chosen]))
        draw = _drawn(blocks[chosen], size_of_batch, generator)
        rows = draw.to(mean.device)
        some = blocks[chosen].part(rows)
        f, *found = student.heads(some.x)
        variance = variance_of(likelihood, found[0] * size[:n] + mean[:n])
        loss = divergence(likelihood, f, variance, some.due).mean()
        for z, goal in zip(found, goals[chosen]):
            known = goal[rows]
            loss = loss + _OF_HEAD * (z - known).where(known.isfinite(), 0).square().mean()
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(weights, _LARGEST)
        for group in optimiser.param_groups:
            group["lr"] = largest * _share((step + 1) / schedule.steps)
        optimiser.step()
        if progress.is_due:
            of_optimiser, drawn = optimiser.state_dict(), generator.get_state()
            progress.save(step + 1, student.state_dict(), of_optimiser, drawn)
        if step % 50 == 0:
            bar.set_postfix(loss=f"{loss.item():.3g}", refresh=False)
    with torch.no_grad():
        last: Any = head[-1]
        last.weight.mul_(size[:, None])
        last.bias.mul_(size).add_(mean)
    student.requires_grad_(False)
    optimiser.zero_grad()


def _whole(blocks: list[Block]) -> Block:
    given = sum(b.given for b in blocks)  # those come first
    return Block(concatenated(b.x for b in blocks)[0], joined(b.due for b in blocks), given)


def _drawn(block: Block, count: int, generator: torch.Generator) -> Tensor:
    """Draw the numbers of some inputs: at least a part of them from those that were given."""
    u = torch.rand(count, generator=generator, device="cpu")
    among = torch.full((count,), float(len(block.due.scores)), device="cpu")
    if block.given:
        among[: round(_GIVEN * count)] = float(block.given)
    return (u * among).long()


def _moments(logs: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of each column, over what is known."""
    values = torch.cat([each.flatten(0, -2) for each in logs])
    known = values.isfinite()
    count = known.sum(0).clamp_min(1)
    mean = values.where(known, 0).sum(0) / count
    return mean, ((values - mean).where(known, 0).square().sum(0) / count).sqrt()


def _standard(values: Tensor, mean: Tensor, size: Tensor) -> Tensor:
    return (values - mean) / size.clamp_min(torch.finfo(size.dtype).eps)


def _size_of(weights: list[Tensor]) -> float:
    """Return the median over matrices and kernels of the root mean square of their entries."""
    sizes = [w.detach().square().mean().sqrt() for w in weights if w.dim() > 1]
    return torch.stack(sizes or [w.detach().abs().mean() for w in weights]).median().item()


def _share(progress: float) -> float:
    """Return the step length as a share of the largest one: it grows, then falls like a cosine."""
    return min(1.0, progress / _WARM_UP) * 0.5 * (1 + cos(pi * progress))
