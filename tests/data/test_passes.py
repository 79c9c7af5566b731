"""What is compared from pass to pass, and at a restart: rows of one shape, padded text, objects."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from torch_lla_em.data.identity import Identity, contents
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


def read(loader, passes=1, known=None):
    """Data that have been read so often, after those of an earlier run."""
    data = Data(loader, CPU)
    if known is not None:
        data.restore(known.facts())
    for _ in range(passes):
        list(data)
    return data


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["list", "loader", "shuffled"])
def test_other_inputs_are_refused(form, kind):
    def loader(seed):
        dataset, make = rows(seed), collate(form)
        if kind == "list":
            return list(Loader(dataset, make))
        return DataLoader(dataset, 5, shuffle=kind == "shuffled", collate_fn=make)

    known = read(loader(0))
    with pytest.raises(ValueError, match="of other data"):
        read(loader(1), known=known)
    read(loader(0), known=known)


@pytest.mark.parametrize("form", FORMS)
def test_shuffled_rows_are_no_other_data(form):
    make, known = collate(form), None
    for seed, passes in enumerate([2, 4, 1]):
        known = read(Loader(rows(0), make, shuffled=seed), passes, known)


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


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("form", FORMS)
def test_batches_in_another_order_are_no_change(form):
    batches, draw = list(Loader(rows(0), collate(form))), random.Random(0)

    class Shuffled:
        def __iter__(self):
            yield from draw.sample(batches, len(batches))

    data = Data(Shuffled(), CPU)
    for _ in range(300):  # some of which repeat the first
        list(data)


def test_the_sums_of_a_pass_do_not_depend_on_its_batches():
    def of(parts, in_order=True):
        identity, start = Identity(in_order), 0
        for x in parts:
            identity.add((x,), torch.arange(start, start + len(x)))
            start += len(x)
        return identity

    x = torch.randn(6, 2, dtype=torch.float64)
    assert of(x.split(2)).agrees(of(x.split(3)))
    assert not of(x.split(2)).agrees(of(x.flip(0).split(2)))
    assert of(x.split(2)).agrees(of(x.flip(0).split(2), in_order=False))
    assert not of([x, x[:, :1]]).agrees(of([x, x[:, 1:]]))
    state = of([x, x[:, :1]]).state()
    assert Identity.from_state(state).agrees(of([x, x[:, :1]]))


def test_contents_are_found_wherever_they_are():
    class Holder:
        def __init__(self):
            self.inside = {"a": torch.ones(2), "itself": self, "name": "x"}
            self.array, self.words = np.ones((3, 2))[::-1], ["a", "b"]

        def to(self, device):
            return self

    found = list(contents((torch.ones(4, 1), Holder(), np.ones(2), "text", torch.ones(()))))
    assert [(len(tensor), is_row) for tensor, is_row in found] == [
        (4, True),
        (2, False),
        (3, False),
        (2, False),
        (2, True),
        (1, False),
    ]
    words = [tensor for tensor, _ in contents((["a", "b"], ["a", "c"]))]
    assert words[0][0] == words[1][0] and words[0][1] != words[1][1]
    assert [len(tensor) for tensor, _ in contents(torch.eye(3).to_sparse())] == [2, 3]
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 1), torch.ones(2, 1)])
    assert [is_row for _, is_row in contents(packed)] == [False, False]
    assert list(contents(torch.ones(2, 2, device="meta"))) == []
