"""Batches as users have them: their forms, their order in every pass, and data that change."""

import random
import re
from collections import UserDict, namedtuple
from dataclasses import asdict, dataclass

import pytest
import simulated_gpu
import torch
from models import Centred
from tiny import batched
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.testing import assert_close
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from torch_lla_em import Adapter, LinearisedLaplace
from torch_lla_em.data import Batch, Data, Identity
from torch_lla_em.runtime import Group

CPU = torch.device("cpu")
Pair = namedtuple("Pair", "image label")


class Mean(nn.Module):
    """A network of one input, by whichever name."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3)).double()

    def forward(self, image, offset=None, **ignored):
        return self.layers(image if offset is None else image + offset)


def fitted(loader, model=None, em_steps=0, **options):
    la = LinearisedLaplace(model or Mean(), "classification", num_samples=2, **options)
    return la.fit(loader, em_steps=em_steps, prior_precision=10.0, progress_bar=False)


def rows(count=12, width=2):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, width, dtype=torch.float64, generator=generator)
    return x, torch.arange(count) % 3


def loaded(x, y, size=5, **options):
    return DataLoader(TensorDataset(x, y), size, **options)


def by(targets, outputs=None):
    return {"adapter": Adapter(outputs, targets)}


def joined(loader, at_most=10, target_fn=None):
    data = Data(loader, CPU, target_fn)
    data.store(0.0, at_most)
    return data, list(data)


FORMS = {
    "several": (lambda x, y: (x, torch.zeros_like(x), y), {}),
    "list": (lambda x, y: [x, y], {}),
    "numpy": (lambda x, y: (x.numpy(), y.numpy()), {}),
    "dict": (lambda x, y: {"image": x, "labels": y}, {}),
    "other keys": (lambda x, y: {"image": x, "label": y}, by(lambda b: b["label"])),
    "label first": (lambda x, y: (y, x), by(lambda b: b[0])),
    "one-hot": (lambda x, y: (x, functional.one_hot(y, 3)), by(lambda b: b[1].argmax(1))),
    "UserDict": (lambda x, y: UserDict(image=x.numpy(), labels=y.numpy()), {}),
    "namedtuple": (Pair, {}),
    "namedtuple by name": (Pair, by(lambda b: b.label, lambda model, b: model(b.image))),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_batch_gives_the_same_posterior(form):
    """Joined to larger batches, each example has its number and targets."""
    make, options = FORMS[form]
    (x, y), expected = rows(), fitted(batched(7, *rows()))
    la = fitted([make(*batch) for batch in batched(7, x, y)], **options)
    assert la.num_data == 12
    assert_close((la.w_samples, la.w_lin), (expected.w_samples, expected.w_lin))
    target_fn = options["adapter"].targets if options else None
    _, batches = joined([make(*batch) for batch in batched(1, x, y)], target_fn=target_fn)
    assert [batch.index for batch in batches] == ["0 to 9", "10 to 11"]
    assert torch.cat([batch.rows for batch in batches]).tolist() == list(range(12))
    assert torch.equal(torch.cat([batch.targets for batch in batches]), y)


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.head = nn.GRU(1, 2), nn.Linear(2, 2)

    def forward(self, packed):
        return self.head(self.rnn(packed)[1][0])


class Graphs(nn.Module):
    """Sums nodes into graphs; there happen to be as many nodes as graphs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(2, 2)

    def forward(self, nodes, graph):
        return self.layer(nodes.new_zeros(40, 2).index_add(0, graph, nodes))


@pytest.mark.filterwarnings("ignore:The prior precision reached a bound")
def test_inputs_that_are_no_rows_of_tensors():
    """Sentences go by rows; packed sequences, and batches that cannot be split, stay whole."""
    words = {"good": [1.0, 0.0], "bad": [0.0, 1.0]}

    def read(model, sentences):
        return model(torch.tensor([words[s] for s in sentences], dtype=torch.float64))

    y = torch.arange(40) % 2
    la = fitted([(["good", "bad"] * 20, y)], adapter=Adapter(outputs=read))
    assert la.num_data == 40 and la(["good"]).shape == (1, 3)
    pieces = [torch.randn(2 + n % 3, 1) for n in range(40)]
    packed = nn.utils.rnn.pack_sequence(pieces, enforce_sorted=False)
    assert fitted([(packed, y)], Packed(), em_steps=1)(packed).shape == (40, 2)
    nodes, graph = torch.randn(40, 2), torch.randint(0, 40, (40,))
    assert fitted([(nodes, graph, y)], Graphs(), em_steps=1).num_data == 40


def test_causal_labels_are_shifted():
    tokens = torch.tensor([[5, 6, 7, 0], [8, 9, 3, 4]])
    batch = {"input_ids": tokens, "labels": tokens.masked_fill(tokens == 0, -100)}
    with pytest.raises(ValueError, match="Pass the label after each token") as caught:
        list(Data([batch], CPU))
    own = eval(re.search(r"lambda .*\)(?=\))", str(caught.value))[0])  # the remedy that it names
    assert own(batch).tolist() == [[6, 7, -100, -100], [9, 3, 4, -100]]
    (found,) = Data([batch], CPU, own)
    assert torch.equal(found.targets, own(batch))
    batch["labels"][0, 0] = 1
    assert len(list(Data([batch], CPU))) == 1


@pytest.mark.parametrize("merged", [True, False])
def test_examples_without_a_label_are_not_counted(merged):
    x, y = rows()
    y = torch.where(torch.arange(12) < 5, -100, y)
    assert fitted(batched(12 if merged else 5, x, y), em_steps=1).num_data == 7
    sites = torch.stack([y, y.roll(1)], 1)
    maps = LinearisedLaplace(nn.Conv1d(1, 3, 1), "classification", num_samples=2, class_dim=1)
    maps.fit([(torch.randn(12, 1, 2), sites)], em_steps=1, progress_bar=False)
    assert maps.num_data == 8


@pytest.mark.parametrize("kind", ["batch norm", "own", "running"])
def test_examples_that_influence_each_other_are_told(kind):
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4, track_running_stats=kind == "running").double()
    model = nn.Sequential(nn.Linear(2, 4), norm, nn.Linear(4, 3)).double()
    model = Centred(nn.Linear(2, 3)).double() if kind == "own" else model
    x, y = rows()
    x, y = x.repeat(100, 1), y.repeat(100)  # half of which have nearly the statistics of all
    la = fitted([(x, y)], model, em_steps=1)
    told = [words for words in la.messages if "other examples in its batch" in words]
    assert len(told) == (kind in ("batch norm", "own"))


# loaders


def test_datasets_and_pairs_are_loaders():
    x, y = rows()
    arrays = x.numpy(), y.numpy()
    for loader in [(x, y), [x, y], {"x": x, "labels": y}, TensorDataset(x, y), arrays]:
        data = Data(loader, CPU)
        assert torch.equal(torch.cat([batch.targets for batch in data]), y), loader
        assert data.facts.num_rows == 12


SAMPLERS = [WeightedRandomSampler(torch.ones(12), 12), RandomSampler(range(12), num_samples=6)]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_samplers_that_draw_other_examples_are_refused(sampler):
    with pytest.raises(ValueError, match=r"a sampler that draws other.*weights=\.\.\."):
        fitted(loaded(*rows(), sampler=sampler))


class Ranks(Group):
    """One of several processes, which reads only."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size


@pytest.mark.parametrize("size", [2, 3, 13])
def test_ranks_share_tensors_by_examples(size):
    """Of R ranks, rank r has every R-th example from r on; batches are cut where there are fewer than R."""
    x, y = rows()
    for rank in range(size):
        own = [*range(rank, 12, size)]
        if not own:
            continue
        (part,) = Data([(x, y)], CPU, group=Ranks(rank, size))
        assert part.rows.tolist() == own
        assert torch.equal(part.inputs, x[own]) and torch.equal(part.targets, y[own])
    found = [part.rows.tolist() for part in Data(batched(7, x, y), CPU, group=Ranks(1, size))]
    whole = [[*range(7, 12)]]
    assert found == (whole if size == 2 else [[*range(1, 7, size)], [*range(8, 12, size)]])


def test_batches_are_joined_as_far_as_they_fit():
    sizes = [4, 4, 0, 4, 9, 1, 1]
    data, batches = joined(batched(sizes, *rows(23)))
    assert [len(batch.rows) for batch in batches] == [8, 4, 10, 1]
    assert [batch.index for batch in batches] == ["0 to 1", 3, "4 to 5", 6]
    assert len(list(data.batches(in_step=True))) == 6  # steps stay the loader's
    assert data.num_steps == 6


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


# the order of passes, and batches that are kept


PARTS = {
    None: slice(23),
    SubsetRandomSampler(range(3, 20)): slice(3, 20),
    RandomSampler(range(9)): slice(9),
    SequentialSampler(range(9)): slice(9),
}


@pytest.mark.parametrize("sampler", PARTS)
@pytest.mark.parametrize("size, drop_last", [(4, False), (23, False), (3, True)])
def test_shuffled_loaders_come_in_the_order_of_their_dataset(sampler, size, drop_last):
    x, y = rows(23)
    before, expected = torch.get_rng_state(), x[PARTS[sampler]]
    order = {"sampler": sampler, "shuffle": sampler is None or None, "drop_last": drop_last}
    data = Data(loaded(x, y, size, **order), CPU)
    for _ in range(2):
        found = torch.cat([batch.inputs for batch in data])
        assert torch.equal(found, expected[: len(expected) // size * size if drop_last else None])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("shuffle", [True, False])
def test_minibatches_of_a_loader_that_shuffles_are_random(shuffle):
    x, y = rows(23)
    data = Data(loaded(x, y, 4, shuffle=shuffle), CPU)
    list(data)
    passes = []
    for _ in range(2):
        batches = list(data.batches(in_step=True))
        numbers = torch.cat([batch.rows for batch in batches])
        assert torch.equal(torch.cat([batch.inputs for batch in batches]), x[numbers])
        assert numbers.sort()[0].tolist() == list(range(23)) and len(batches) == 6
        passes.append(numbers.tolist())
    assert data.keeps_order and (passes[0] != passes[1]) == shuffle
    assert not shuffle or passes[0] != sorted(passes[0])


def test_a_collate_function_may_leave_out_examples():
    def without_third(examples):
        return torch.utils.data.default_collate(examples[:2] + examples[3:])

    data = Data(loaded(*rows(23), 4, shuffle=True, collate_fn=without_third), CPU)
    assert torch.cat([batch.rows for batch in data]).tolist() == list(range(17))
    with pytest.raises(ValueError, match="Batch 0 has 3 examples, but was collated from 4"):
        list(data.batches(in_step=True))


class Refilling:
    """A loader that fills the same memory again with every batch."""

    def __init__(self, x, y, size=1):
        self.batches, self.reads = batched(size, x, y), 0
        self.x, self.y = x[:size].clone(), y[:size].clone()

    def __iter__(self):
        self.reads += 1
        for x, y in self.batches:
            self.x[: len(x)], self.y[: len(y)] = x, y
            yield self.x[: len(x)], self.y[: len(y)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("at_most", [0, 10])
@pytest.mark.parametrize("room", [0.0, 250.0, 1e9])
def test_memory_that_is_filled_again_is_copied(device, at_most, room):
    """The first batch, and of those of all passes the first that fit into memory."""
    loader = Refilling(*rows(23), 5)
    if device == "cuda":
        loader.x, loader.y = loader.x.pin_memory(), loader.y.pin_memory()
    data = Data(loader, torch.device(device))
    data.store(room, at_most)
    with simulated_gpu.watched() as seen:
        assert_close(data.first().inputs.cpu(), rows(23)[0][:5])
        for _ in range(4):
            found = torch.cat([batch.inputs + 0 for batch in data])
            assert torch.equal(found.cpu(), rows(23)[0])
    assert not any(what == "race" for what, _ in seen)
    assert loader.reads == (2 if room > 1e3 else 5)
    assert (data.kept is not None) == (room > 1000.0)


# data that change


def changed_after_first_batch(change):
    """Another thing done to all rows but those of the first batch."""
    x, y = rows(24, 3)
    x[5:], y[5:] = change(x[5:].clone(), y[5:].clone())
    return x, y


OTHERS = {
    "labels exchanged": lambda x, y: (x, y.flip(0)),
    "labels of equal rows": lambda x, y: (x, y.roll(1)),
    "columns exchanged": lambda x, y: (torch.stack([x[:, 0], *x[:, 1:].flip(0).T], 1), y),
    "the last bit": lambda x, y: (torch.nextafter(x, x + 1), y),
    "beside a huge column": lambda x, y: (torch.cat([1.7e9 + x[:, :1], x[:, 1:] + 1e-3], 1), y),
}


class Changing:
    """A loader of other data in every pass but the first."""

    def __init__(self, change):
        self.change, self.passes = change, 0

    def __iter__(self):
        self.passes += 1
        own = rows(24, 3)
        return iter(batched(5, *(own if self.passes == 1 else self.change(*own))))


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_data_that_change_are_refused(change):
    """From pass to pass, and from a checkpoint to its continuation."""
    data = Data(Changing(lambda *_: changed_after_first_batch(change)), CPU)
    list(data)
    with pytest.raises(ValueError, match="returned different data.*augmentation.*pass a"):
        list(data)
    for load in (lambda x, y: batched(5, x, y), lambda x, y: loaded(x, y, shuffle=True)):
        first, same = Data(load(*rows(24, 3)), CPU), Data(load(*rows(24, 3)), CPU)
        list(first)
        same.restore(first.state())
        list(same)
        other = Data(load(*changed_after_first_batch(change)), CPU)
        other.restore(first.state())
        with pytest.raises(ValueError, match="belongs to other data"):
            other.confirm()
    data = Data(Changing(lambda x, y: (x[:-1], y[:-1])), CPU)
    list(data)
    with pytest.raises(ValueError, match="re-iterable"):
        list(data)


def test_random_augmentation_is_found_at_the_first_batch_of_the_first_pass():
    class Augmented(TensorDataset):
        def __getitem__(self, index):
            read.append(index)
            x, y = super().__getitem__(index)
            return x + torch.rand_like(x), y

    read = []
    for options in ({}, {"shuffle": True}):
        data = Data(DataLoader(Augmented(*rows()), 5, **options), CPU)
        data.first(), read.clear()
        with pytest.raises(ValueError, match="random augmentation"):
            list(data)
        assert len(read) == 5


TYPES = "bool", "uint8", "bfloat16", "float64", "complex64"


def identity_of(x, rows=None):
    identity, rows = Identity(), torch.arange(len(x)) if rows is None else rows
    identity.add(Batch(0, rows, x[rows], torch.zeros(len(rows))))
    return identity


@pytest.mark.parametrize("dtype", [getattr(torch, kind) for kind in TYPES])
@pytest.mark.parametrize("width", [1, 3])
def test_every_type_is_compared_by_its_bytes(dtype, width):
    x = (torch.randn(40, 1 + width) * 100).to(dtype)[:, 1:]
    known = identity_of(x)
    assert known.agrees(identity_of(x.flip(0)))
    assert (known.ordered == identity_of(x.flip(0)).ordered) == torch.equal(x, x.flip(0))
    assert known.least == identity_of(functional.pad(x, (0, 5))).least  # also where zeros pad them
    other = x.clone()
    other[7] = ~x[7] if dtype == torch.bool else x[7] + 1
    assert not known.agrees(identity_of(other))
    parts = [identity_of(x, torch.arange(rank, 40, 2)) for rank in range(2)]
    assert Identity.of([Identity(**asdict(part)) for part in parts]) == known
    assert not Identity.of([*parts, parts[1]]).agrees(known)


def test_other_weights_are_other_data_of_the_same_examples():
    (x, y), w = rows(), torch.rand(12)
    every = [Identity() for _ in "ab"]
    for identity, weights in zip(every, (w, w.roll(1)), strict=True):
        identity.add(Batch(0, torch.arange(12), x, y, weights=weights))
    assert not every[0].agrees(every[1]) and every[0].least == every[1].least


# what loaders make of sentences
COLLATED = {
    "padded text": lambda words, y: (pad_sequence(words, True, 1), y),
    "padded by zeros": lambda words, y: (pad_sequence(words, True), y),
    "token targets": lambda words, y: (
        (x := pad_sequence(words, True)),
        torch.where(x > 1, 1, -100),
    ),
    "sentences": lambda words, y: (["abcdefghij"[int(s[0]) % 10] * len(s) for s in words], y),
    "objects": lambda words, y: (Graph(torch.cat(words)[:, None] * torch.ones(4)), y),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("form", COLLATED)
def test_no_order_is_taken_for_a_change(form):
    for seed, most in ((0, 3), (1, 9), (2, 9)):  # 3: nearly all of one length
        drawn, numbers = random.Random(seed), torch.Generator().manual_seed(0)
        lengths = [min(2 + row * 5 % 7, most) for row in range(40)]
        known = [(torch.randint(2, 20, (n,), generator=numbers), n % 3) for n in lengths]

        class InAnyOrder:
            def __iter__(self, known=known, drawn=drawn):
                order = drawn.sample(known, 40)
                for start in range(0, 40, 5):
                    words, y = zip(*order[start : start + 5], strict=True)
                    yield COLLATED[form](words, torch.tensor(y))

        data = Data(InAnyOrder(), CPU)
        data.first()
        for _ in range(4):
            list(data)
        assert not data.keeps_order
