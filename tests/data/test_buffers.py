"""Batches that are joined or kept are the same rows under the same numbers."""

from dataclasses import dataclass

import pytest
import simulated_gpu
import torch
from torch.testing import assert_close
from torch.utils.data import DataLoader, Dataset, TensorDataset

from torch_lla_em.data.loader import BatchCache, Data

CPU = torch.device("cpu")


def rows(count=23):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 2, generator=generator), torch.arange(count) % 3


def one_by_one(x, y):
    return list(zip(x.split(1), y.split(1)))


def joined(loader, at_most=10, passes=1):
    data = Data(loader, CPU)
    data.merge_rows = at_most
    for _ in range(passes):
        batches = list(data)
    return data, batches


FORMS = {
    "pairs": lambda x, y: (x, y),
    "dicts": lambda x, y: {"x": x, "labels": y},
    "several": lambda x, y: (x, 2 * x, y),
    "nested": lambda x, y: ([x, {"a": x}], y),
    "arrays": lambda x, y: (x.numpy(), y.numpy()),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_joined_rows_are_those_of_the_loader(form):
    loader = [form(*batch) for batch in one_by_one(*rows())]
    whole, (expected,) = joined([form(*rows())], at_most=0)
    data, batches = joined(loader)
    assert [len(batch.rows) for batch in batches] == [10, 10, 3]
    assert [batch.index for batch in batches] == ["0 to 9", "10 to 19", "20 to 22"]
    assert torch.cat([batch.rows for batch in batches]).tolist() == list(range(23))
    assert torch.equal(torch.cat([batch.targets for batch in batches]), expected.targets)
    assert data.identity.agrees(whole.identity)


def test_batches_are_joined_as_far_as_they_fit():
    x, y = rows()
    _, batches = joined(list(zip(x.split([4, 4, 4, 9, 1, 1]), y.split([4, 4, 4, 9, 1, 1]))))
    assert [len(batch.rows) for batch in batches] == [8, 4, 10, 1]
    assert [batch.index for batch in batches] == ["0 to 1", 2, "3 to 4", 5]
    data, batches = joined(one_by_one(x, y), at_most=0)
    assert len(batches) == 23
    data.merge_rows = 10
    assert len(list(data.batches(in_step=True))) == 23  # steps stay the loader's
    assert data.num_steps() == 23


@dataclass
class Graph:
    x: torch.Tensor

    def to(self, device, **_):
        return self


x, y = torch.zeros(1, 2), torch.zeros(1)
APART = {
    "lengths": [(torch.zeros(1, n), y) for n in range(1, 6)],
    "types": [(x.to(dtype), y) for dtype in (torch.half, torch.float, torch.double)],
    "words": [(["a"], y)] * 3,
    "objects": [(Graph(x), y)] * 3,
    "nodes": [(x.new_zeros(2, 2), x, y)] * 3,
    "sparse": [(x.to_sparse(), y)] * 3,
    "numbers": [(torch.tensor(1.0), y)] * 3,
    "keys": [{"x": x, "labels": y}, {"z": x, "labels": y}],
}


@pytest.mark.parametrize("loader", APART.values(), ids=APART)
def test_what_does_not_go_by_rows_is_left_apart(loader):
    target_fn = None if isinstance(loader[0], dict) else lambda batch: batch[-1]
    data = Data(loader, CPU, target_fn)
    data.merge_rows = 10
    assert [len(batch.rows) for batch in data] == [1] * len(loader)


class Refilling:
    """A loader that fills the same memory again with every batch."""

    def __init__(self, x, y, size=1):
        self.batches, self.reads = list(zip(x.split(size), y.split(size))), 0
        self.x, self.y = x[:size].clone(), y[:size].clone()

    def __iter__(self):
        self.reads += 1
        for x, y in self.batches:
            self.x[: len(x)], self.y[: len(y)] = x, y
            yield self.x[: len(x)], self.y[: len(y)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("at_most", [0, 10])
@pytest.mark.parametrize("size", [1, 5])
def test_memory_that_is_filled_again_is_copied(device, at_most, size):
    loader = Refilling(*rows(), size)
    if device == "cuda":
        loader.x, loader.y = loader.x.pin_memory(), loader.y.pin_memory()
    data = Data(loader, torch.device(device))
    data.merge_rows, raced = at_most, simulated_gpu.races()
    for _ in range(4):
        found = torch.cat([batch.inputs + 0 for batch in data])
        assert torch.equal(found.cpu(), rows()[0])
    assert data.cache is not None and loader.reads == 2
    assert simulated_gpu.races() == raced


def test_datasets_and_pairs_are_loaders():
    x, y = rows()

    class Rows(Dataset):
        def __len__(self):
            return 23

        def __getitem__(self, row):
            return x[row], int(y[row])

    for loader in [(x, y), [x, y], {"x": x, "labels": y}, TensorDataset(x, y), Rows()]:
        data = Data(loader, CPU)
        assert torch.equal(torch.cat([batch.targets for batch in data]), y), loader
        assert data.facts.num_rows == 23
    pair = Data((x.numpy(), y.numpy()), CPU)
    assert torch.equal(next(iter(pair)).inputs, x)
    with pytest.raises(TypeError, match="No targets"):
        list(Data([x, y[:3]], CPU))
    with pytest.raises(TypeError, match=r"as \[\(X, y\)\]"):
        Data(3, CPU)


def test_batches_that_were_looked_at_are_not_overwritten():
    loader = Refilling(*rows())
    data = Data(loader, CPU)
    assert_close(data.first().inputs, rows()[0][:2])
    assert_close(torch.cat([batch.inputs + 0 for batch in data]), rows()[0])
    assert loader.reads == 1


@pytest.mark.parametrize("sampler", [None, torch.utils.data.SubsetRandomSampler(range(3, 20))])
@pytest.mark.parametrize("size, drop_last", [(4, False), (23, False), (3, True)])
def test_shuffled_loaders_come_in_the_order_of_their_dataset(sampler, size, drop_last):
    x, y = rows()
    before = torch.get_rng_state()
    order = {"sampler": sampler, "shuffle": sampler is None or None, "drop_last": drop_last}
    loader = DataLoader(TensorDataset(x, y), size, **order)
    data = Data(loader, CPU)
    data.keep = False
    for _ in range(2):
        found = torch.cat([batch.inputs for batch in data])
        expected = x if sampler is None else x[3:20]
        assert torch.equal(found, expected[: len(expected) // size * size if drop_last else None])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("shuffle", [True, False])
def test_minibatches_of_a_loader_that_shuffles_are_random(shuffle):
    x, y = rows()
    data = Data(DataLoader(TensorDataset(x, y), 4, shuffle=shuffle), CPU)
    list(data)
    passes = []
    for _ in range(2):
        batches = list(data.batches(in_step=True))
        numbers = torch.cat([batch.rows for batch in batches])
        assert torch.equal(torch.cat([batch.inputs for batch in batches]), x[numbers])
        assert numbers.sort()[0].tolist() == list(range(23)) and len(batches) == 6
        passes.append(numbers.tolist())
    assert (passes[0] != passes[1]) == shuffle
    assert not shuffle or passes[0] != sorted(passes[0])


def test_a_collate_function_may_leave_out_examples():
    x, y = rows()

    def without_third(examples):
        return torch.utils.data.default_collate(examples[:2] + examples[3:])

    loader = DataLoader(TensorDataset(x, y), 4, shuffle=True, collate_fn=without_third)
    data = Data(loader, CPU)
    assert torch.cat([batch.rows for batch in data]).tolist() == list(range(17))
    with pytest.raises(
        ValueError, match="Batch 0 has 3 examples, but was collated from 4 of the dataset"
    ):
        list(data.batches(in_step=True))


@pytest.mark.parametrize("share, kept", [(0.6, False), (1.1, True)])
@pytest.mark.parametrize("is_list", [True, False])
def test_whether_batches_are_kept_is_decided_once(is_list, share, kept, monkeypatch):
    """Batches above a quarter of the free memory are not copied in vain in every pass."""
    x, y = rows(24)
    memory = [4 * share * (x.nbytes + y.nbytes)]
    monkeypatch.setattr("torch_lla_em.data.loader.free_memory", lambda device: memory[0])
    held, add = [], BatchCache.add
    monkeypatch.setattr(
        BatchCache, "add", lambda self, *args: (add(self, *args), held.append(self.room > 0))
    )
    loader = DataLoader(TensorDataset(x, y), 4)
    data = Data(list(loader) if is_list else loader, CPU)
    for number in range(4):
        assert torch.equal(torch.cat([batch.inputs for batch in data]), x)
        memory[0] *= 10 if number else 1  # what is free after the second pass changes nothing
    assert (data.cache is not None) == kept
    assert sum(held) == (6 if kept else 0)
