"""Rows are told from others by all of their bytes, on one rank and on several."""

import json
import pickle
import random
import threading
import warnings

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from torch_lla_em.data.identity import Identity, row_hashes
from torch_lla_em.data.loader import Data
from torch_lla_em.runtime import Group

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
    again.restore(json.loads(json.dumps(first.facts())))
    list(again)
    changed = Data(loader(*after_first_batch(other)(*rows())), CPU)
    changed.restore(first.facts())
    with pytest.raises(ValueError, match="of other data"):
        list(changed)


def test_order_counts_where_a_loader_keeps_it():
    x, y = rows()
    known = Data(listed(x, y), CPU)
    list(known)
    for other, kept in [(listed(x.flip(0), y.flip(0)), True), (shuffled(x, y), False)]:
        data = Data(other, CPU)
        data.restore(known.facts())
        if kept:
            with pytest.raises(ValueError, match="another content or order"):
                list(data)
        else:
            list(data)
    cut_otherwise = Data(list(zip(x.split(7), y.split(7))), CPU)
    cut_otherwise.restore(known.facts())
    list(cut_otherwise)


CHANGES = {
    "pairs": lambda x, y: (x, y[torch.randperm(len(y))]),
    "beside a huge column": lambda x, y: (
        torch.cat([1.7e9 + x[:, :1], x[:, 1:] + 1e-3 * torch.randn(len(x), 2)], 1),
        y,
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_from_pass_to_pass_are_told(change):
    class Changing:
        def __iter__(self):
            return iter(listed(*change(*rows())))

    data = Data(Changing(), CPU)
    list(data)
    with pytest.warns(UserWarning, match="disagree"):
        list(data)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int16, torch.bfloat16, torch.float64, torch.complex64]
)
@pytest.mark.parametrize("width", [1, 3, 8])
def test_every_type_has_numbers_of_its_rows(dtype, width):
    x = (torch.randn(40, 1 + width) * 100).to(dtype)[:, 1:]
    numbers = row_hashes(x)
    assert len(set(numbers.tolist())) == len({tuple(row) for row in x.tolist()})
    assert torch.equal(row_hashes(x.flip(0)), numbers.flip(0))
    # also where words lie otherwise in memory, and where zeros pad them
    assert torch.equal(row_hashes(x[1:]), numbers[1:])
    assert torch.equal(row_hashes(torch.nn.functional.pad(x, (0, 5))), numbers)


def test_wide_rows_are_read_in_the_same_pieces_by_few_and_by_many():
    x = torch.randint(0, 2**31 - 1, (17, 1 << 17), dtype=torch.int32)
    assert torch.equal(row_hashes(x)[:1], row_hashes(x[:1]))
    assert not torch.equal(row_hashes(x.roll(1 << 16, 1)), row_hashes(x))


def test_ranks_together_have_the_identity_of_one_process():
    x, y = rows()
    whole, parts = Identity(), [Identity(), Identity()]
    whole.add((y, x))
    for rank, own in enumerate(parts):
        own.add((y[rank::2], x[rank::2]), torch.arange(24)[rank::2])
    parts[1] = Identity.from_state(json.loads(json.dumps(parts[1].state())))
    together = Identity.of(parts)
    assert together.agrees(whole) and not Identity.of([*parts, parts[1]]).agrees(whole)
    together.in_order = whole.in_order = True
    assert together.agrees(whole)


class Threads(Group):
    """Ranks that are threads."""

    def __init__(self, rank, shared):
        self.rank, self.size, self._shared = rank, shared["barrier"].parties, shared

    def meet(self, subject, value, merge):
        shared = self._shared
        shared["values"][self.rank] = pickle.dumps(value)
        shared["barrier"].wait()
        every = [pickle.loads(value) for value in shared["values"]]
        shared["barrier"].wait()
        return merge(every)


def on_ranks(size, make, passes=2, **how):
    """What each rank saw in each pass, or was told."""
    shared = {"barrier": threading.Barrier(size, timeout=20), "values": [None] * size}
    found = [None] * size

    def run(rank):
        try:
            data = Data(make(rank), CPU, group=Threads(rank, shared))
            found[rank] = (
                [
                    [row for batch in data.batches(**how) for row in batch.rows.tolist()]
                    for _ in range(passes)
                ],
                data,
            )
        except ValueError as error:
            found[rank] = str(error)

    ranks = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return found


def own_order(x, y):
    return random.Random(0).sample(listed(x, y), 5)


class Reading:
    """A loader that cannot be listed."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


LOADERS = {
    "list": listed,
    "dataset": lambda x, y: DataLoader(TensorDataset(x, y), 5),
    "shuffled": shuffled,
    "own": lambda x, y: Reading(own_order(x, y)),
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("loader", [*LOADERS, "sampler"])
@pytest.mark.parametrize("other", [None, *OTHERS, "order"])
def test_every_row_of_a_rank_is_compared(size, loader, other):
    changed = {None: None, "order": lambda x, y: (x.flip(0), y.flip(0))}.get(
        other, OTHERS.get(other)
    )

    def make(rank):
        x, y = rows()
        if changed is not None and rank == size - 1:
            x, y = after_first_batch(changed)(x, y)
        if loader != "sampler":
            return LOADERS[loader](x, y)
        data = TensorDataset(x[:23], y[:23])  # no multiple of 2 or 3: what fills up is left out
        return DataLoader(data, 4, sampler=DistributedSampler(data, size, rank))

    found = on_ranks(size, make)
    if other is not None:
        assert all("sees other data than rank" in told for told in found)
        return
    for number in range(2):
        every = sorted(row for passes, _ in found for row in passes[number])
        assert every == list(range(23 if loader == "sampler" else 24))
    assert all(data.num_rows == len(every) for _, data in found)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_take_steps_together(size):
    found = on_ranks(size, listing, in_step=True)
    assert all(data.num_steps() == -(-5 // size) for _, data in found)
    assert sum(len(passes[1]) for passes, _ in found) == 24


def listing(rank):
    return listed(*rows())


def test_ranks_are_told_of_rows_by_plain_words():
    class Named(torch.utils.data.Dataset):
        def __getitem__(self, key):
            return torch.tensor([float(key[1])]), key[1] % 2

        def __len__(self):
            return 10

    keys = [("row", number) for number in range(10)]
    found = on_ranks(2, lambda rank: DataLoader(Named(), 3, sampler=keys))
    assert sorted(sum((passes[1] for passes, _ in found), [])) == list(range(10))


def test_an_empty_batch_is_no_batch():
    x, y = rows()
    batches = [(x[:0], y[:0]), *listed(x, y)[:2], (x[:0], y[:0]), *listed(x, y)[2:]]
    data = Data(batches, CPU)
    assert data.first().rows.tolist() == [0, 1, 2, 3, 4]
    assert [len(batch.rows) for batch in data] == [5, 5, 5, 5, 4]
    found = on_ranks(2, lambda rank: batches)
    assert sorted(sum((passes[0] for passes, _ in found), [])) == list(range(24))
    with pytest.raises(ValueError, match="empty"):
        list(Data(batches[:1], CPU))


def test_words_go_with_their_rows():
    words, y = ["a", "b", "c", "d"], torch.arange(4) % 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        known = Data([(words, y)], CPU)
        list(known), list(known)
    exchanged = Data(Reading([(["b", "a", "c", "d"], y)]), CPU)
    exchanged.restore(known.facts())
    with pytest.raises(ValueError, match="other data"):
        list(exchanged)


def test_two_changed_signs_do_not_cancel():
    """The highest bits of 64-bit words, whose products with odd factors have an even sum."""
    x = torch.randn(20, 2, dtype=torch.float64)
    assert (row_hashes(x) != row_hashes(-x)).all()
