"""Rows are told from others by all of their bytes, on one rank and on several."""

import random
import warnings

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset

from torch_lla_em.data.identity import Identity
from torch_lla_em.data.loader import Data

CPU = torch.device("cpu")


def rows(count=24):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 3, generator=generator), torch.arange(count) % 3


def listed(x, y):
    return list(zip(x.split(5), y.split(5)))


def shuffled(x, y):
    return DataLoader(TensorDataset(x, y), 5, shuffle=True)


def after_first_batch(change):
    """Another thing done to all rows but those of the first batch."""

    def changed(x, y):
        (x, y), later = (x.clone(), y.clone()), slice(5, None)
        x[later], y[later] = change(x[later], y[later])
        return x, y

    return changed


OTHERS = {
    "labels exchanged": lambda x, y: (x, y.flip(0)),
    "labels of equal rows": lambda x, y: (x, y.roll(1)),
    "columns exchanged between rows": lambda x, y: (
        torch.stack([x[:, 0], *x[:, 1:].flip(0).T], 1),
        y,
    ),
    "two signs": lambda x, y: (x * torch.tensor([-1.0, -1.0, 1.0]), y),
    "the last bit": lambda x, y: (torch.nextafter(x, x + 1), y),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("loader", [listed, shuffled])
def test_a_checkpoint_of_other_pairs_is_refused(loader, other):
    first, again = Data(loader(*rows()), CPU), Data(loader(*rows()), CPU)
    list(first)
    again.restore(first.state())
    list(again)
    changed = Data(loader(*after_first_batch(other)(*rows())), CPU)
    changed.restore(first.state())
    with pytest.raises(ValueError, match="belongs to other data"):
        list(changed)


CHANGES = {
    "pairs": lambda x, y: (x, y[torch.randperm(len(y))]),
    "beside a huge column": lambda x, y: (
        torch.cat([1.7e9 + x[:, :1], x[:, 1:] + 1e-3 * torch.randn(len(x), 2)], 1),
        y,
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_data_that_change_from_pass_to_pass_are_refused(change):
    class Changing:
        def __iter__(self):
            return iter(listed(*change(*rows())))

    data = Data(Changing(), CPU)
    list(data)
    with pytest.raises(ValueError, match="returned different data.*augmentation.*pass a loader"):
        list(data)


def of(*parts):
    identity = Identity()
    for x in parts:
        identity.add((x,))
    return identity


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int16, torch.bfloat16, torch.float64, torch.complex64]
)
@pytest.mark.parametrize("width", [1, 3, 8])
def test_every_type_is_compared_by_its_bytes(dtype, width):
    x = (torch.randn(40, 1 + width) * 100).to(dtype)[:, 1:]
    assert of(x).agrees(of(x.flip(0)))
    # also where zeros pad them
    assert of(x).state()["_sum"] == of(torch.nn.functional.pad(x, (0, 5))).state()["_sum"]
    other = x.clone()
    other[7] = ~x[7] if dtype == torch.bool else x[7] + 1
    assert not of(x).agrees(of(other))


def test_ranks_together_have_the_identity_of_one_process():
    x, y = rows()
    whole, parts = Identity(), [Identity(), Identity()]
    whole.add((y, x))
    for rank, own in enumerate(parts):
        own.add((y[rank::2], x[rank::2]))
    parts[1] = Identity.from_state(parts[1].state())
    together = Identity.of(parts)
    assert together.agrees(whole) and not Identity.of([*parts, parts[1]]).agrees(whole)
    assert Identity.from_state(of(x, x[:, :1]).state()).agrees(of(x, x[:, :1]))


def test_an_empty_batch_is_no_batch():
    x, y = rows()
    batches = [(x[:0], y[:0]), *listed(x, y)[:2], (x[:0], y[:0]), *listed(x, y)[2:]]
    data = Data(batches, CPU)
    assert data.first().rows.tolist() == [0, 1, 2, 3, 4]
    assert [len(batch.rows) for batch in data] == [5, 5, 5, 5, 4]
    with pytest.raises(ValueError, match="empty"):
        list(Data(batches[:1], CPU))


def test_words_go_with_their_rows():
    words, y = ["a", "b", "c", "d"], torch.arange(4) % 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        known = Data([(words, y)], CPU)
        list(known), list(known)
    exchanged = Data([(["b", "a", "c", "d"], y)], CPU)
    exchanged.restore(known.state())
    with pytest.raises(ValueError, match="other data"):
        list(exchanged)


class Graphs:
    """Nodes of several graphs, which move themselves."""

    def __init__(self, nodes, sizes):
        self.nodes = {"x": nodes, "graph": torch.arange(len(sizes)).repeat_interleave(sizes)}
        self.counts, self.whole = sizes.numpy(), self

    def to(self, device, **_):
        return self


def sentences(most):
    """Sentences of several lengths up to the most allowed, and their classes."""
    generator = torch.Generator().manual_seed(0)
    lengths = [min(2 + row * 5 % 7, most) for row in range(40)]
    words = [torch.randint(2, 20, (length,), generator=generator) for length in lengths]
    return [(sentence, row % 3) for row, sentence in enumerate(words)]


def collate(form, pad, rows):
    words, classes = [row[0] for row in rows], torch.tensor([row[1] for row in rows])
    x = pad_sequence(words, batch_first=True, padding_value=pad)
    if form == "padded text":
        return x, classes
    if form == "token targets":
        return x, torch.where(x > 1, x % 3, -100)
    if form == "sentences":
        return ["abcdefghij"[int(s[0]) % 10] * len(s) for s in words], classes
    sizes = torch.tensor([len(s) for s in words])
    nodes = torch.cat(words)[:, None] * torch.ones(4)
    return Graphs(nodes / 20, sizes), classes


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("form", ["padded text", "token targets", "objects", "sentences"])
@pytest.mark.parametrize("pad", [0, 1])
@pytest.mark.parametrize("most", [3, 9])  # nearly all rows of one length, as after truncation
def test_no_order_is_taken_for_a_change(form, pad, most):
    rows = sentences(most)

    class InAnyOrder:
        def __iter__(self):
            order = drawn.sample(rows, len(rows))
            for start in range(0, len(order), 5):
                yield collate(form, pad, order[start : start + 5])

    for seed in range(4):
        data, drawn = Data(InAnyOrder(), CPU), random.Random(seed)
        for _ in range(6):
            list(data)
