"""Passes over a loader: batches that are joined, kept and numbered, and examples that are compared."""

import random
import warnings
from dataclasses import dataclass

import pytest
import simulated_gpu
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.testing import assert_close
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler, TensorDataset

from torch_lla_em.data.identity import Identity
from torch_lla_em.data.loader import BatchCache, Data

CPU = torch.device("cpu")


def rows(count=23, width=2):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, width, generator=generator), torch.arange(count) % 3


def one_by_one(x, y):
    return list(zip(x.split(1), y.split(1)))


def listed(x, y):
    return list(zip(x.split(5), y.split(5)))


def shuffled(x, y):
    return DataLoader(TensorDataset(x, y), 5, shuffle=True)


def joined(loader, at_most=10, target_fn=None):
    data = Data(loader, CPU, target_fn)
    data.merge_rows = at_most
    return data, list(data)


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
    sizes = [4, 4, 4, 9, 1, 1]
    _, batches = joined(list(zip(*(part.split(sizes) for part in rows()))))
    assert [len(batch.rows) for batch in batches] == [8, 4, 10, 1]
    assert [batch.index for batch in batches] == ["0 to 1", 2, "3 to 4", 5]
    data, batches = joined(one_by_one(*rows()), at_most=0)
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
    _, batches = joined(loader, target_fn=target_fn)
    assert [len(batch.rows) for batch in batches] == [1] * len(loader)


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
    data.merge_rows = at_most
    with simulated_gpu.watched() as seen:
        assert_close(data.first().inputs.cpu(), rows()[0][: max(2, size)])  # which is read once
        for _ in range(4):
            found = torch.cat([batch.inputs + 0 for batch in data])
            assert torch.equal(found.cpu(), rows()[0])
        assert data.cache is not None and loader.reads == 2
    assert not any(what == "race" for what, _ in seen)


def test_datasets_and_pairs_are_loaders():
    x, y = rows()

    class Rows(Dataset):
        def __len__(self):
            return 23

        def __getitem__(self, row):
            return x[row], int(y[row])

    arrays = x.numpy(), y.numpy()
    for loader in [(x, y), [x, y], {"x": x, "labels": y}, TensorDataset(x, y), Rows(), arrays]:
        data = Data(loader, CPU)
        assert torch.equal(torch.cat([batch.targets for batch in data]), y), loader
        assert data.facts.num_rows == 23
    with pytest.raises(TypeError, match="No targets"):
        list(Data([x, y[:3]], CPU))


@pytest.mark.parametrize("sampler", [None, SubsetRandomSampler(range(3, 20))])
@pytest.mark.parametrize("size, drop_last", [(4, False), (23, False), (3, True)])
def test_shuffled_loaders_come_in_the_order_of_their_dataset(sampler, size, drop_last):
    x, y = rows()
    before = torch.get_rng_state()
    order = {"sampler": sampler, "shuffle": sampler is None or None, "drop_last": drop_last}
    data = Data(DataLoader(TensorDataset(x, y), size, **order), CPU)
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
    def without_third(examples):
        return torch.utils.data.default_collate(examples[:2] + examples[3:])

    data = Data(DataLoader(TensorDataset(*rows()), 4, True, collate_fn=without_third), CPU)
    assert torch.cat([batch.rows for batch in data]).tolist() == list(range(17))
    with pytest.raises(ValueError, match="Batch 0 has 3 examples, but was collated from 4"):
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


def after_first_batch(change):
    """Another thing done to all rows but those of the first batch."""
    x, y = rows(24, 3)
    x[5:], y[5:] = change(x[5:].clone(), y[5:].clone())
    return x, y


OTHERS = {
    "labels exchanged": lambda x, y: (x, y.flip(0)),
    "labels of equal rows": lambda x, y: (x, y.roll(1)),
    "columns exchanged": lambda x, y: (torch.stack([x[:, 0], *x[:, 1:].flip(0).T], 1), y),
    "two signs": lambda x, y: (x * torch.tensor([-1.0, -1.0, 1.0]), y),
    "the last bit": lambda x, y: (torch.nextafter(x, x + 1), y),
}


@pytest.mark.parametrize("loader", [listed, shuffled])
def test_a_checkpoint_of_other_pairs_is_refused(loader):
    first, again = Data(loader(*rows(24, 3)), CPU), Data(loader(*rows(24, 3)), CPU)
    list(first)
    again.restore(first.state())
    list(again)
    for other in OTHERS.values():
        changed = Data(loader(*after_first_batch(other)), CPU)
        changed.restore(first.state())
        with pytest.raises(ValueError, match="belongs to other data"):
            list(changed)


def beside_a_huge_column(x, y):
    return torch.cat([1.7e9 + x[:, :1], x[:, 1:] + 1e-3 * torch.randn(len(x), 2)], 1), y


@pytest.mark.parametrize(
    "change, match",
    [
        (
            lambda x, y: (x, y[torch.randperm(len(y))]),
            "returned different data.*augmentation.*pass a",
        ),
        (beside_a_huge_column, "returned different data"),
        (lambda x, y: (x[:-1], y[:-1]), "re-iterable"),
    ],
    ids=["pairs", "beside a huge column", "fewer"],
)
def test_data_that_change_from_pass_to_pass_are_refused(change, match):
    class Changing:
        passes = 0

        def __iter__(self):
            self.passes += 1
            own = rows(24, 3)
            return iter(listed(*(own if self.passes == 1 else change(*own))))

    data = Data(Changing(), CPU)
    list(data)
    with pytest.raises(ValueError, match=match):
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
    x, y = rows(24)
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


def sentences(most):
    """Sentences of several lengths up to the most allowed, and their classes."""
    generator = torch.Generator().manual_seed(0)
    lengths = [min(2 + row * 5 % 7, most) for row in range(40)]
    words = [torch.randint(2, 20, (length,), generator=generator) for length in lengths]
    return [(sentence, row % 3) for row, sentence in enumerate(words)]


def collate(form, pad, examples):
    words, classes = [row[0] for row in examples], torch.tensor([row[1] for row in examples])
    x = pad_sequence(words, batch_first=True, padding_value=pad)
    if form == "padded text":
        return x, classes
    if form == "token targets":
        return x, torch.where(x > 1, x % 3, -100)
    if form == "sentences":
        return ["abcdefghij"[int(s[0]) % 10] * len(s) for s in words], classes
    return Graph(torch.cat(words)[:, None] * torch.ones(4)), classes


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("form", ["padded text", "token targets", "objects", "sentences"])
@pytest.mark.parametrize("pad, most", [(0, 3), (1, 3), (1, 9)])  # 3: nearly all of one length
def test_no_order_is_taken_for_a_change(form, pad, most):
    known = sentences(most)

    class InAnyOrder:
        def __iter__(self):
            order = drawn.sample(known, len(known))
            for start in range(0, len(order), 5):
                yield collate(form, pad, order[start : start + 5])

    for seed in range(4):
        data, drawn = Data(InAnyOrder(), CPU), random.Random(seed)
        for _ in range(6):
            list(data)
