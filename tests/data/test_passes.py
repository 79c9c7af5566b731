"""What is compared from pass to pass: rows of one shape, padded text, objects."""

import random

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from torch_lla_em.data.identity import Identity
from torch_lla_em.data.loader import Data

CPU = torch.device("cpu")


class Graphs:
    """Nodes of several graphs, which move themselves."""

    def __init__(self, nodes, sizes):
        self.nodes = {"x": nodes, "graph": torch.arange(len(sizes)).repeat_interleave(sizes)}
        self.counts, self.whole = sizes.numpy(), self

    def to(self, device, **_):
        return self


def rows(seed, count=24):
    """Sentences of several lengths, and their classes, which are always the same."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [2 + row * 5 % 7 for row in range(count)]
    return [
        (torch.randint(2, 20, (length,), generator=generator), row % 3)
        for row, length in enumerate(lengths)
    ]


def collate(form, pad=1):
    def batch(rows):
        sentences, classes = [row[0] for row in rows], torch.tensor([row[1] for row in rows])
        x = pad_sequence(sentences, batch_first=True, padding_value=pad)
        if form == "padded text":
            return x, classes
        if form == "token targets":
            return x, torch.where(x > 1, x % 3, -100)
        if form == "sentences":
            return ["abcdefghij"[int(s[0]) % 10] * len(s) for s in sentences], classes
        sizes = torch.tensor([len(s) for s in sentences])
        nodes = torch.cat(sentences)[:, None] * torch.ones(4)
        return Graphs(nodes / 20, sizes), classes

    return batch


class Loader:
    """A loader of one's own."""

    def __init__(self, rows, make, shuffled=None):
        self.rows, self.make = rows, make
        self.random = None if shuffled is None else random.Random(shuffled)

    def __iter__(self):
        order = list(range(len(self.rows)))
        if self.random is not None:
            self.random.shuffle(order)
        for start in range(0, len(order), 5):
            yield self.make([self.rows[row] for row in order[start : start + 5]])


FORMS = ["padded text", "token targets", "objects", "sentences"]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pad", [0, 1])
@pytest.mark.parametrize("most", [3, 9])  # nearly all rows of one length, as after truncation
def test_no_order_is_taken_for_a_change(form, pad, most):
    cut = [(sentence[:most], label) for sentence, label in rows(0, 40)]
    for seed in range(10):
        data = Data(Loader(cut, collate(form, pad), shuffled=seed), CPU)
        for _ in range(12):
            list(data)


def test_the_sums_of_a_pass_do_not_depend_on_its_batches():
    def of(parts):
        identity = Identity()
        for x in parts:
            identity.add((x,))
        return identity

    x = torch.randn(6, 2, dtype=torch.float64)
    assert of(x.split(2)).agrees(of(x.flip(0).split(3)))
    assert not of(x.split(2)).agrees(of((x + 1).split(2)))
    state = of([x, x[:, :1]]).state()
    assert Identity.from_state(state).agrees(of([x, x[:, :1]]))
