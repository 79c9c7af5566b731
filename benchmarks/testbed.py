"""The classification problems of the Neural Testbed, where the true probabilities are known.

    python benchmarks/testbed.py                        # 33 problems, one seed: 15 minutes of one core
    python benchmarks/testbed.py --inputs 2 --ratios 1 10 --agents network ours
    python benchmarks/testbed.py --report               # the summary of results/testbed.jsonl

Osband et al., "The Neural Testbed: Evaluating Joint Predictions" (NeurIPS 2022). Labels come from a random ReLU network with
two hidden layers of 50 units, whose logits are divided by a temperature, at Gaussian inputs. Agents know the number of inputs
and examples and the temperature, by which the weight decay of their networks is set, as there. An agent is a set of functions;
its score is the KL divergence of its predictions from the true probabilities: of one label (τ = 1), and of ten labels at two
inputs at once (τ = 10), for which an agent has to represent how the errors of two predictions are
correlated. The summary has sums over problems, relative to those of the single network. All
problems of the paper except those with 100,000 examples are run.
"""

import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from methods import markdown
from methods.metrics import equal_functions
from methods.provenance import begin, provenance, script_parser
from torch import Tensor, nn
from torch.nn import functional as F

from torch_lla_em import LinearisedLaplace

UNITS, STEPS, BATCH, TESTED, LABELS = 50, 1000, 100, 1000, 10
RATIOS = (1, 10, 100, 1000)
LARGEST = 20_000
TEMPERATURES = (0.01, 0.1, 0.5)
DRAWS, DROPPED = 100, 0.05

Functions = Callable[[Tensor], Tensor]
"""Inputs (n, D) -> outputs of every function of an agent, (S, n, 2)."""

Agents = Iterator[tuple[str, Functions, float]]
"""Names of agents, their functions, and CPU seconds."""


class Problem(NamedTuple):
    """Training data, and labels at test inputs with their true log-probabilities."""

    x: Tensor
    y: Tensor
    temperature: float

    singles: tuple[Tensor, Tensor, Tensor]
    """Inputs (n, D), labels (n,), and their log-probabilities, (n,)."""

    pairs: tuple[Tensor, Tensor, Tensor, Tensor]
    """Inputs (n, 2, D), at which of the two a label is drawn (n, 10), labels, and the sums of their
    log-probabilities, (n,)."""


def initial(inputs: int, members: int, generator: torch.Generator) -> list[Tensor]:
    """Return weights and biases of a batch of networks: truncated normal weights, biases of 0."""
    found = []
    for n, m in ((inputs, UNITS), (UNITS, UNITS), (UNITS, 2)):
        weights = torch.empty(members, n, m)
        nn.init.trunc_normal_(
            weights, std=n**-0.5, a=-2 * n**-0.5, b=2 * n**-0.5, generator=generator
        )
        found += [weights, torch.zeros(members, 1, m)]
    return found


def with_biases(weights: list[Tensor], generator: torch.Generator) -> list[Tensor]:
    """Return networks with random biases in the first layer, as the truth and prior functions have."""
    scale = weights[0].shape[1] ** -0.5
    return [weights[0], scale * torch.randn(weights[1].shape, generator=generator), *weights[2:]]


def outputs(weights: list[Tensor], x: Tensor, kept: list[Tensor] | None = None) -> Tensor:
    """Return the outputs of a batch of networks, (members, n, 2); ``kept`` are masks of dropout."""
    h = x.expand(len(weights[0]), *x.shape[-2:])
    for i in (0, 2):
        h = torch.baddbmm(weights[i + 1], h, weights[i]).relu()
        if kept is not None:
            h = h * kept[i // 2]
    return torch.baddbmm(weights[5], h, weights[4])


def problem(inputs: int, ratio: int, temperature: float, seed: int) -> Problem:
    """Return a random problem."""
    code = 1_000_003 * seed + 10_007 * inputs + 101 * ratio + round(100 * temperature)
    g = torch.Generator().manual_seed(code)
    truth = with_biases(initial(inputs, 1, g), g)

    def log_probs(x: Tensor) -> Tensor:
        return (outputs(truth, x)[0].double() / temperature).log_softmax(-1)

    def drawn(x: Tensor) -> tuple[Tensor, Tensor]:
        known = log_probs(x)
        y = torch.multinomial(known.exp(), 1, generator=g)
        return y[:, 0], known.gather(1, y)[:, 0]

    x = torch.randn(inputs * ratio, inputs, generator=g)
    y, _ = drawn(x)
    single = torch.randn(TESTED, inputs, generator=g)
    pair = torch.randn(TESTED, 2, inputs, generator=g)
    which = torch.randint(2, (TESTED, LABELS), generator=g)
    of_pair, known = drawn(pair[torch.arange(TESTED)[:, None], which].flatten(0, 1))
    of_pair, known = of_pair.view(TESTED, LABELS), known.view(TESTED, LABELS).sum(1)
    return Problem(x, y, temperature, (single, *drawn(single)), (pair, which, of_pair, known))


def scores(functions: Functions, task: Problem) -> dict[str, float]:
    """Return the KL divergences of single labels and of ten labels at two inputs."""
    x, y, known = task.singles
    single = functions(x).double().log_softmax(-1)
    single = single.gather(2, y.expand(len(single), -1)[..., None])[..., 0]
    pairs, which, labels, joint = task.pairs
    both = functions(pairs.flatten(0, 1)).double().log_softmax(-1).unflatten(1, (-1, 2))
    each = both[:, torch.arange(len(pairs))[:, None], which, labels].sum(-1)
    return {
        "τ = 1": (known - single.logsumexp(0) + math.log(len(single))).mean().item(),
        "τ = 10": (joint - each.logsumexp(0) + math.log(len(each))).mean().item(),
    }


def trained(
    task: Problem,
    members: int,
    generator: torch.Generator,
    prior: list[Tensor] | None = None,
    dropout: float = 0.0,
) -> list[Tensor]:
    """Return the weights of networks, trained together; ``prior`` are networks that are added to them."""
    D, N, scale = task.x.shape[1], len(task.x), 3 / math.sqrt(task.temperature)
    weights = [w.requires_grad_() for w in initial(D, members, generator)]
    decay = 0.5 * math.sqrt(task.temperature) * D / N
    optimiser = torch.optim.Adam(weights, 1e-3)
    for _ in range(STEPS):
        rows = torch.randint(N, (BATCH,), generator=generator) if N > BATCH else slice(None)
        x, y = task.x[rows], task.y[rows]
        kept = masks(len(x), dropout, generator, members) if dropout else None
        f = outputs(weights, x, kept)
        if prior is not None:
            f = f + scale * outputs(prior, x)
        loss = F.cross_entropy(f.flatten(0, 1), y.repeat(members), reduction="sum") / len(y)
        loss = loss + decay * sum(w.square().sum() for w in weights)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return [w.detach() for w in weights]


def masks(rows: int, rate: float, generator: torch.Generator, members: int = 1) -> list[Tensor]:
    """Return masks of dropout for the two hidden layers."""
    shape = members, rows, UNITS
    return [(torch.rand(shape, generator=generator) >= rate) / (1 - rate) for _ in range(2)]


def network(weights: list[Tensor], member: int = 0) -> nn.Sequential:
    """Return one of a batch of networks as a module."""
    net = nn.Sequential(
        *(nn.Linear(weights[0].shape[1], UNITS), nn.ReLU()),
        *(nn.Linear(UNITS, UNITS), nn.ReLU(), nn.Linear(UNITS, 2)),
    )
    with torch.no_grad():
        for layer, w, b in zip(net[::2], weights[::2], weights[1::2], strict=True):
            layer.weight.copy_(w[member].T)
            layer.bias.copy_(b[member, 0])
    return net.eval()


def ensembles(
    task: Problem, generator: torch.Generator, sizes: dict[str, int], priors: bool = False
) -> Agents:
    """The first of as many networks as the largest ensemble has."""
    most, clock, prior = max(sizes.values()), time.process_time(), None
    if priors:
        prior = with_biases(initial(task.x.shape[1], most, generator), generator)
    weights = trained(task, most, generator, prior)
    seconds = time.process_time() - clock

    def functions(size: int, x: Tensor) -> Tensor:
        found = outputs([w[:size] for w in weights], x)
        if prior is not None:
            scale = 3 / math.sqrt(task.temperature)
            found = found + scale * outputs([w[:size] for w in prior], x)
        return found

    for name, size in sizes.items():
        yield name, partial(functions, size), seconds * size / most


def dropout(task: Problem, generator: torch.Generator, names: dict[str, None]) -> Agents:
    clock = time.process_time()
    weights = trained(task, 1, generator, dropout=DROPPED)
    several = [w.expand(DRAWS, -1, -1) for w in weights]
    kept = masks(1, DROPPED, generator, DRAWS)  # one mask for all inputs: a draw is a function
    yield "MC dropout", lambda x: outputs(several, x, kept), time.process_time() - clock


def laplace_torch(task: Problem, generator: torch.Generator, names: dict[str, None]) -> Agents:
    """Kronecker factors of all layers, the prior by the marginal likelihood; linearised functions."""
    from laplace import Laplace

    clock = time.process_time()
    net = network(trained(task, 1, generator))
    la = Laplace(net, "classification", subset_of_weights="all", hessian_structure="kron")
    data = torch.utils.data.TensorDataset(task.x, task.y)
    la.fit(torch.utils.data.DataLoader(data, batch_size=500))
    la.optimize_prior_precision(method="marglik")
    w = la.sample(DRAWS, generator=generator) - la.mean

    def functions(x: Tensor) -> Tensor:
        parts = []
        for rows in x.split(200):
            J, f = la.backend.jacobians(rows)
            parts.append(f.detach() + torch.einsum("ncp,sp->snc", J.detach(), w))
        return torch.cat(parts, 1)

    yield "laplace-torch", functions, time.process_time() - clock


def ours(task: Problem, generator: torch.Generator, names: dict[str, None]) -> Agents:
    clock = time.process_time()
    la = LinearisedLaplace(network(trained(task, 1, generator)), "classification")
    la.fit(task.x, task.y, progress_bar=False)
    seconds = time.process_time() - clock
    yield "ours", lambda x: equal_functions(la.predict(x)), seconds


_PRIORS = {"30 with prior functions": 30, "100 with prior functions": 100}
FAMILIES: tuple[tuple[Callable[..., Agents], dict], ...] = (
    (ensembles, {"network": 1}),
    (ensembles, {"ensemble of 30": 30, "ensemble of 100": 100}),
    (partial(ensembles, priors=True), _PRIORS),
    (dropout, {"MC dropout": None}),
    (laplace_torch, {"laplace-torch": None}),
    (ours, {"ours": None}),
)
"""Agents that share their networks."""

AGENTS = [name for _, names in FAMILIES for name in names]


def measured(
    agents: list[str], inputs: int, ratio: int, temperature: float, seed: int
) -> Iterator[dict]:
    """Yield the record of every agent on one problem; the single network is the same for all."""
    task = problem(inputs, ratio, temperature, seed)
    for make, names in FAMILIES:
        asked = {name: option for name, option in names.items() if name in agents}
        if not asked:
            continue
        for name, functions, seconds in make(task, torch.Generator().manual_seed(seed), asked):
            clock = time.process_time()
            with torch.no_grad():
                found = scores(functions, task)
            seconds += time.process_time() - clock
            yield {"agent": name, "examples": len(task.x)} | found | {"seconds": seconds}


def summary(records: list[dict]) -> str:
    """Return a table of sums over the problems that all agents have, relative to the single network's."""
    by_agent: dict[str, dict[tuple, dict]] = {}
    for r in records:
        case = r["inputs"], r["ratio"], r["temperature"], r["seed"]
        by_agent.setdefault(r["agent"], {})[case] = r
    common, found = set.intersection(*(set(of) for of in by_agent.values())), []
    columns = {"τ = 1": "KL, one label", "τ = 10": "KL, ten labels at two inputs"}
    columns |= {"seconds": "CPU, s"}
    for agent in (name for name in AGENTS if name in by_agent):
        sums = {
            key: [sum(by_agent[a][case][key] for case in common) for a in (agent, "network")]
            for key in columns
        }
        line = {key: own / base for key, (own, base) in sums.items()}
        found.append({"agent": agent} | line | {"seconds": sums["seconds"][0]})
    best = dict.fromkeys(("τ = 1", "τ = 10"), "min")
    return markdown.table(found, {"agent": "agent"}, columns, best, 3)


def main(arguments: list[str] | None = None) -> None:
    parser = script_parser(__doc__, "testbed")
    parser.add_argument("--inputs", nargs="+", type=int, default=(2, 10, 100))
    parser.add_argument("--ratios", nargs="+", type=int, default=RATIOS, help="examples per input")
    parser.add_argument("--temperatures", nargs="+", type=float, default=TEMPERATURES)
    parser.add_argument("--agents", nargs="+", choices=AGENTS, default=list(AGENTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=(0,))
    args = begin(parser, arguments)
    cases = [
        {"inputs": D, "ratio": ratio, "temperature": T, "seed": seed}
        for seed in args.seeds
        for D in args.inputs
        for ratio in args.ratios
        for T in args.temperatures
        if D * ratio <= LARGEST
    ]
    origin = provenance(("torch", "laplace-torch"))
    agents = [*dict.fromkeys(("network", *args.agents))]  # the reference of the summary
    cases = () if args.report else cases
    found = markdown.resume(args.out, cases, partial(measured, agents), origin)
    print("\n" + summary(found))


if __name__ == "__main__":
    main()
