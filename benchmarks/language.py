"""A smoke test on language: the next character of Python's help pages, by a small transformer.

    python benchmarks/language.py       # less than a minute of one core; nothing is downloaded

The data are windows of 24 characters from ``pydoc_data.topics`` of the standard library; of every ten pages eight are
for training, one for validation and one for the test. Lines have the test NLL in nats of the network, of the network
with a temperature, and of the posterior over the last layer, and the CPU seconds of each step with its predictions.
As fitted, the posterior has a temperature from a posterior of all parameters, which takes three to five times as long
as the training; ``validation=False`` leaves it out. Lines go to results/language.jsonl.

Expected NLLs: 2.63, 2.55, 2.72 without validation, 2.56 as fitted, and 2.51 calibrated.
"""

import time
from collections.abc import Iterator
from pydoc_data.topics import topics

import torch
from methods import markdown
from methods.learning import best_temperature, descend
from methods.provenance import begin, provenance, script_parser
from torch import Tensor, nn
from torch.nn import functional as F

from torch_lla_em import LinearisedLaplace

LENGTH, WIDTH, EPOCHS = 24, 32, 8
COUNTS = {"train": 2000, "held out": 500, "test": 2000}
CHARACTERS = "abcdefghijklmnopqrstuvwxyz .,()'=\""


class Transformer(nn.Module):
    """Two layers over the characters of a window; the last place predicts the next one."""

    def __init__(self):
        super().__init__()
        kinds = len(CHARACTERS) + 1
        self.characters, self.places = nn.Embedding(kinds, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.0, batch_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(WIDTH, kinds)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.characters(x) + self.places.weight)[:, -1])


def windows(name: str) -> tuple[Tensor, Tensor]:
    """Return windows of a share of the pages, and the character after each."""
    own = {"held out": (8,), "test": (9,)}.get(name, range(8))
    pages = [" ".join(topics[page].lower().split()) for page in sorted(topics)]
    text = " ".join(page for number, page in enumerate(pages) if number % 10 in own)
    ids = torch.tensor([CHARACTERS.find(c) % (len(CHARACTERS) + 1) for c in text])
    starts = torch.randint(len(ids) - LENGTH, (COUNTS[name], 1))
    rows = ids[starts + torch.arange(LENGTH + 1)]
    return rows[:, :-1], rows[:, -1]


def measured() -> Iterator[dict]:
    """Yield the test NLLs, and the CPU seconds of training, fit and calibration."""
    torch.manual_seed(0)
    train, held_out, (x, y) = map(windows, COUNTS)
    network, clock = Transformer(), time.process_time()

    def line(row: str, nll: Tensor) -> dict:
        nonlocal clock
        began, clock = clock, time.process_time()
        return {"row": row, "nll": nll.item(), "seconds": clock - began}

    descend(network, train, EPOCHS, torch.optim.Adam(network.parameters(), 3e-3), 64)
    with torch.no_grad():
        f = network(x)
        yield line("network", F.cross_entropy(f, y))
        T = best_temperature(network(held_out[0]), held_out[1])
        yield line("temperature", F.cross_entropy(f / T, y))
    for name, told in {"last layer (validation=False)": False, "last layer": None}.items():
        la = LinearisedLaplace(network, "classification", parameters="last_layer", num_samples=8)
        la.fit(*train, progress_bar=False, validation=told)
        yield line(f"ours, {name}, as fitted", -la.predict(x).log_prob(y).mean())
    la.calibrate(*held_out)
    yield line("ours, last layer, calibrated", -la.predict(x).log_prob(y).mean())


def main(argv: list[str] | None = None) -> None:
    parser = script_parser(__doc__, "language")
    args = begin(parser, argv)
    if not args.report:
        markdown.append(args.out, measured(), provenance(("torch",)))
    print(markdown.table(markdown.read(args.out), ["row"], ("nll", "seconds")))


if __name__ == "__main__":
    main()
