"""A smoke test on language: the next character of Python's help pages, by a small transformer.

    python benchmarks/language.py       # less than a minute of one core; nothing is downloaded

The data are windows of 24 characters from ``pydoc_data.topics`` of the standard library; of every
ten pages eight are for training, one for validation and one for the test. The script prints the
test NLL in nats of the network, of the network with a temperature, and of the posterior over the
last layer, as fitted and calibrated. Expect 2.63, 2.55, 2.56 and 2.51. As fitted, the posterior has
a temperature from a posterior of all parameters; without it the NLL is 2.71, because its features
were learnt from the same windows. This takes three to five times as long as the training, and
the rest of the fit as long as the training.
"""

import time
from pydoc_data.topics import topics

import torch
from methods.learning import best_temperature, descend
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


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train, held_out, (x, y) = map(windows, COUNTS)
    network, clock = Transformer(), time.process_time()
    descend(network, train, EPOCHS, torch.optim.Adam(network.parameters(), 3e-3), 64)
    trained = time.process_time() - clock
    with torch.no_grad():
        f, T = network(x), best_temperature(network(held_out[0]), held_out[1])
    found = {"network": F.cross_entropy(f, y), "temperature": F.cross_entropy(f / T, y)}
    la = LinearisedLaplace(network, "classification", parameters="last_layer", num_samples=8)
    la.fit(*train, progress_bar=False)
    fitted = time.process_time() - clock - trained
    found["last layer, as fitted"] = -la.predict(x).log_prob(y).mean()
    found["last layer, calibrated"] = -la.calibrate(*held_out).predict(x).log_prob(y).mean()
    print(*(f"{name}: {nll.item():.3f}" for name, nll in found.items()), sep="\n")
    print(f"CPU seconds: training {trained:.1f}, fit {fitted:.1f}; temperature {T:.2f}")


if __name__ == "__main__":
    main()
