"""Batches as users have them: their forms, and loaders that cannot work."""

from collections import UserDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from models import Centred
from torch import nn
from torch.nn import functional
from torch.testing import assert_close
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

from torch_lla_em import LinearisedLaplace
from torch_lla_em.data.batch import next_tokens
from torch_lla_em.data.loader import Data
from torch_lla_em.data.reading import Reader

CPU = torch.device("cpu")
Pair = namedtuple("Pair", "image label")


@dataclass
class Sample:
    image: torch.Tensor
    label: torch.Tensor
    source: str = "camera"


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


def case():
    x = torch.randn(12, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return x, torch.arange(12) % 3


def batches(make):
    x, y = case()
    return [make(x[:7], y[:7]), make(x[7:], y[7:])]


def image_of(model, batch):
    return model(batch.image)


FORMS = {
    "list": (lambda x, y: [x, y], {}),
    "three": (lambda x, y: (x, torch.zeros_like(x), y), {}),
    "numpy": (lambda x, y: (x.numpy(), y.numpy()), {}),
    "dict": (lambda x, y: {"image": x, "labels": y}, {}),
    "other keys": (lambda x, y: {"image": x, "label": y}, {"target_fn": lambda b: b["label"]}),
    "label first": (lambda x, y: (y, x), {"target_fn": lambda b: b[0]}),
    "one-hot": (
        lambda x, y: (x, functional.one_hot(y, 3)),
        {"target_fn": lambda b: b[1].argmax(1)},
    ),
    "UserDict": (lambda x, y: UserDict(image=x, labels=y), {}),
    "namedtuple": (Pair, {}),
    "namedtuple by name": (Pair, {"forward_fn": image_of, "target_fn": lambda b: b.label}),
    "dataclass": (Sample, {"forward_fn": image_of, "target_fn": lambda b: b.label}),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_batch_gives_the_same_posterior(form):
    make, options = FORMS[form]
    expected = fitted(batches(lambda x, y: (x, y)))
    la = fitted(batches(make), **options)
    assert la.num_data == 12
    assert_close(la.w_samples, expected.w_samples)
    assert_close(la.w_lin, expected.w_lin)


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
    la = fitted([(["good", "bad"] * 20, y)], forward_fn=read)
    assert la.num_data == 40 and la(["good"]).shape == (1, 3)
    pieces = [torch.randn(2 + n % 3, 1) for n in range(40)]
    packed = nn.utils.rnn.pack_sequence(pieces, enforce_sorted=False)
    assert fitted([(packed, y)], Packed(), em_steps=1)(packed).shape == (40, 2)
    nodes, graph = torch.randn(40, 2), torch.randint(0, 40, (40,))
    assert fitted([(nodes, graph, y)], Graphs(), em_steps=1).num_data == 40


@pytest.mark.cuda
def test_pinned_inputs_move_to_the_network():
    x, y = case()
    loader = DataLoader(TensorDataset(x, y), batch_size=5, pin_memory=True)
    la = LinearisedLaplace(Mean().cuda(), "classification", num_samples=2)
    la.fit(loader, em_steps=0, prior_precision=10.0, progress_bar=False)
    assert la.w_lin.is_cuda
    assert la(x).is_cuda
    here = fitted(list(zip(x.split(5), y.split(5))))  # s² of the g-prior goes by batches
    assert_close(la.w_lin.cpu(), here.w_lin, rtol=1e-3, atol=1e-4)
    assert torch.isfinite(la.joint_log_prob(x, y))
    assert la.calibrate(loader).posterior_scale.is_cuda


def test_causal_labels_are_shifted():
    tokens = torch.tensor([[5, 6, 7, 0], [8, 9, 3, 4]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    expected = torch.tensor([[6, 7, -100, -100], [9, 3, 4, -100]])
    assert torch.equal(next_tokens({"input_ids": tokens, "attention_mask": mask}), expected)
    labels = tokens.masked_fill(tokens == 0, -100)
    assert torch.equal(next_tokens({"labels": labels})[0], torch.tensor([6, 7, -100, -100]))
    with pytest.raises(ValueError, match="next_tokens"):
        list(Data([{"input_ids": tokens, "labels": labels}], CPU))
    other = labels.clone()
    other[0, 0] = 1
    assert len(list(Data([{"input_ids": tokens, "labels": other}], CPU))) == 1


@pytest.mark.parametrize(
    "loader, error, message",
    [
        ((b for b in []), ValueError, "exhausted"),
        (iter([]), ValueError, "exhausted"),
        (3, TypeError, "cannot be iterated"),
        ([], ValueError, "empty"),
        ([torch.zeros(3)], TypeError, "target_fn"),
        ([{"x": torch.zeros(3)}], TypeError, "target_fn"),
        ([(torch.zeros(3), torch.tensor(1))], ValueError, "single number"),
        ([(torch.zeros(3), torch.zeros(2))], ValueError, "3 inputs but 2 targets"),
    ],
)
def test_loaders_that_cannot_work_are_refused(loader, error, message):
    with pytest.raises(error, match=message):
        list(Data(loader, CPU))


@pytest.mark.parametrize("draws", ["weighted", "fewer"])
def test_samplers_that_draw_other_examples_are_refused(draws):
    weighted = torch.utils.data.WeightedRandomSampler(torch.ones(12), 12)
    fewer = torch.utils.data.RandomSampler(range(12), num_samples=6)
    sampler = weighted if draws == "weighted" else fewer
    loader = DataLoader(TensorDataset(*case()), 5, sampler=sampler)
    with pytest.raises(ValueError, match=rf"{type(sampler).__name__} drew other.*weights=\.\.\."):
        fitted(loader)


@pytest.mark.parametrize("kind", ["batch norm", "own", "running"])
def test_examples_that_influence_each_other_are_told(kind):
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4, track_running_stats=kind == "running").double()
    model = nn.Sequential(nn.Linear(2, 4), norm, nn.Linear(4, 3)).double()
    model = Centred(nn.Linear(2, 3)).double() if kind == "own" else model
    x, y = case()
    x, y = x.repeat(100, 1), y.repeat(100)  # half of which have nearly the statistics of all
    la = LinearisedLaplace(model, "classification", num_samples=2)
    la.fit(x, y, em_steps=1, progress_bar=False)
    told = [words for words in la.messages if "other examples in its batch" in words]
    assert len(told) == (kind in ("batch norm", "own"))
    assert ("BatchNorm1d '1'" in "".join(told)) == (kind == "batch norm")


@pytest.mark.parametrize("merged", [True, False])
def test_examples_without_a_label_are_not_counted(merged):
    x, y = case()
    y = torch.where(torch.arange(12) < 5, -100, y)
    la = LinearisedLaplace(Mean(), "classification", num_samples=2)
    loader = [(x, y)] if merged else list(zip(x.split(5), y.split(5)))
    assert la.fit(loader, em_steps=1, progress_bar=False).num_data == 7
    sites = torch.stack([y, y.roll(1)], 1)
    maps = LinearisedLaplace(nn.Conv1d(1, 3, 1), "classification", num_samples=2, class_dim=1)
    maps.fit([(torch.randn(12, 1, 2), sites)], em_steps=1, progress_bar=False)
    assert maps.num_data == 8


class Streamed(IterableDataset):
    """Rows of a stream, of which workers take their share, or all of them."""

    def __init__(self, shared):
        self.shared = shared

    def __iter__(self):
        worker = get_worker_info()
        own = slice(worker.id, None, worker.num_workers) if worker and self.shared else slice(None)
        x, y = case()
        yield from zip(x[own], y[own])


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_that_all_yield_all_examples_are_refused(workers):
    shared = Data(DataLoader(Streamed(True), 2, num_workers=workers), CPU)
    assert len(list(shared)) == len(list(shared))
    data = Data(DataLoader(Streamed(False), 2, num_workers=workers), CPU)
    if workers == 1:
        assert sum(len(batch.rows) for batch in data) == 12
        return
    with pytest.raises(ValueError, match=f"Each of the {workers} workers.*get_worker_info"):
        list(data)


@pytest.mark.parametrize("size", [2, 3, 13])
def test_ranks_share_tensors_by_examples(size):
    """Of R ranks, rank r has every R-th example from r on; batches are cut where there are fewer than R."""
    x, y = case()
    for rank in range(size):
        parts = list(Reader([(x, y)], CPU, num_ranks=size).begin(rank, None))
        own = list(range(rank, 12, size))
        assert [part.rows.tolist() for part in parts] == ([own] if own else [])
        for part in parts:
            assert torch.equal(part.inputs, x[own]) and torch.equal(part.targets, y[own])
    halves = Reader([(x[:7], y[:7]), (x[7:], y[7:])], CPU, num_ranks=size)
    cut = [[*range(1, 7, size)], [*range(8, 12, size)]]
    rows = [part.rows.tolist() for part in halves.begin(1, None)]
    assert rows == ([[*range(7, 12)]] if size == 2 else cut)
