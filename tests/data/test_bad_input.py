"""Every wrong input ends in an error that says what is wrong and what to do."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from torch_lla_em import Adapter, BlockCG, Compute, LinearisedLaplace, Regression
from torch_lla_em.solvers import Newton


def network(outputs=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, outputs))


X = torch.linspace(-1, 1, 20).view(10, 2)
LABELS = torch.arange(10) % 3
REAL = torch.linspace(-1, 1, 10).view(10, 1)


def fit(likelihood, loader, outputs=3, **options):
    keys = "em_steps", "prior_precision", "update", "checkpoint", "shard", "validation", "targets"
    fit_options = {key: options.pop(key) for key in keys if key in options}
    model = network(outputs)
    before = copy.deepcopy(model.state_dict())
    try:
        la = LinearisedLaplace(model, likelihood, **{"num_samples": 2, **options})
        return la.fit(loader, progress_bar=False, **fit_options)
    finally:
        for name, tensor in model.state_dict().items():
            assert_close(tensor, before[name], rtol=0, atol=0, equal_nan=True)


HALVES = [(X[:5], LABELS[:5]), (X[5:], LABELS[5:])]
HOW_TO_CHOOSE = "names from model.named_parameters.., a list of them"
OPTIONS = [
    ({"g_prior": False}, 'write prior="isotropic"'),
    ({"sigma_noise": 1.0}, r"pass the likelihood Regression\(sigma_noise\)"),
    ({"temperature": 0.5}, "pass weights=1 / temperature to fit"),
    ({"num_sample": 3}, "unexpected keyword argument 'num_sample'"),
    ({"likelihood": "softmax"}, "choose one of"),
    ({"prior": "kron"}, "scalar"),
    ({"em_steps": -1}, "em_steps"),
    ({"checkpoint": "run"}, r"compute=Compute\(checkpoint=folder\)"),
    ({"prior_precision": 1e-300}, "from 1e-20 to 1e.20"),
    ({"em_steps": 0}, "pass prior_precision"),
    ({"update": "em"}, "no argument 'update' any more: the steps are those of MacKay"),
    ({"shard": "auto"}, r"Compute\(shard=None\)"),
    ({"prior_precision": torch.ones(2)}, "one precision"),
    ({"prior_precision": torch.ones(2), "layerwise": True}, "one per tensor"),
    ({"prior": "layerwise g"}, r'Write prior="g", layerwise=True instead'),
    ({"layerwise": True, "curvature": "variational"}, "use layerwise=False"),
    ({"targets": LABELS}, "no argument 'targets' any more: pass them as y"),
]
OF_A_WRONG_TYPE = [
    ({"num_samples": 2.5}, "num_samples must be a whole number"),
    ({"compute": 3}, "a Compute object"),
    ({"adapter": len}, "an Adapter object"),
    ({"parameters": [nn.Parameter(X)]}, HOW_TO_CHOOSE),
    ({"parameters": 3}, HOW_TO_CHOOSE),
    ({"class_dim": None}, "a whole number"),
    ({"prior": 1.0}, "scalar"),
    ({"layerwise": "g"}, "layerwise must be True or False"),
    ({"prior_precision": "1"}, "positive real numbers"),
    ({"validation": 0.2}, r"validation must be None, False, or held-out data.*random_split"),
    ({"validation": True}, "validation must be None, False, or held-out data"),
]
OBJECTS_OF_A_WRONG_TYPE = [
    (Compute, {"solver": "cg"}, "solver must be None, or BlockCG"),
    (Compute, {"solver": Newton()}, "solver must be None, or BlockCG"),
    (Compute, {"keep_data": "yes"}, "keep_data must be True or False"),
    (Compute, {"budget": "1 h"}, "budget must be None, or a number above 0"),
    (Compute, {"checkpoint": 3}, "checkpoint must be None, or the name of a folder"),
    (BlockCG, {"tolerance": "low"}, "tolerance must be a number above 0"),
    (Adapter, {"outputs": 3}, "a function .model, inputs. -> outputs"),
    (Adapter, {"targets": "y"}, "a function batch -> targets"),
    (Regression, {"sigma_noise": 1 + 1j}, "positive real numbers"),
]
OBJECTS = [
    (Compute, {"tolerance": float("nan")}, "tolerance must be None, or a number above 0"),
    (Compute, {"precision": "half"}, "precision"),
    (Compute, {"vectors": "disk"}, "vectors"),
    (Compute, {"budget": 0}, "budget must be None, or a number above 0"),
    (Regression, {"sigma_noise": float("nan")}, "positive real numbers"),
]


@pytest.mark.parametrize("options, message", OPTIONS + OF_A_WRONG_TYPE)
def test_bad_options_are_refused(options, message):
    """Those of the posterior, and of its fit."""
    kinds = TypeError if (options, message) in OF_A_WRONG_TYPE else (TypeError, ValueError)
    with pytest.raises(kinds, match=message):
        fit(loader=[(X, LABELS)], **{"likelihood": "classification", **options})


def test_data_by_their_former_name_are_refused():
    la = LinearisedLaplace(network(), "classification")
    with pytest.raises(TypeError, match="no argument 'loader' any more: pass it as x"):
        la.fit(loader=[(X, LABELS)])
    with pytest.raises(TypeError, match="fit needs training data"):
        la.fit()


@pytest.mark.parametrize("kind, options, message", OBJECTS + OBJECTS_OF_A_WRONG_TYPE)
def test_bad_options_of_objects_are_refused(kind, options, message):
    error = TypeError if (kind, options, message) in OBJECTS_OF_A_WRONG_TYPE else ValueError
    with pytest.raises(error, match=message):
        kind(**options)


class Once:
    """An object whose iterator is used up after one pass."""

    def __init__(self, batches):
        self.batches = iter(batches)

    def __iter__(self):
        return self.batches


class Table:
    """What pandas and polars have in common."""

    def __init__(self, array):
        self.array, self.ndim = array, array.ndim

    def __len__(self):
        return len(self.array)

    def to_numpy(self, dtype=None):
        return self.array


FRAME = Table(X.numpy())
UNUSABLE = {
    "lists": ((X.tolist(), LABELS.tolist()), TypeError, r"Pass arrays or lists as torch.tensor\(x\)"),
    "a table": ((FRAME, LABELS), TypeError, "to_numpy"),
    "no targets": (([(X, None)],), TypeError, "targets are a NoneType"),
    "inputs alone": (([X],), TypeError, r"construct the posterior with adapter=.* fit\(x, y\)"),
    "words as targets": ((X, ["cat"] * 10), TypeError, "class indices"),
    "weights": (([(X, LABELS, torch.ones(10))],), TypeError, r"lambda batch: batch\[1\]"),
    "used up": ((), ValueError, "make the loader re-iterable"),
    "one-hot": ((X, nn.functional.one_hot(LABELS)), ValueError, r"y.argmax\(-1\)"),
    "one-hot floats": ((X, nn.functional.one_hot(LABELS).float()), TypeError, r"y.argmax\(-1\)"),
    "label of nobody": ((X, torch.where(LABELS < 2, LABELS, 255)), ValueError, r"If a number marks missing labels.*Classification\(ignore_index="),
    "generator": (((b for b in []),), ValueError, "exhausted"),
    "empty": (([],), ValueError, "empty"),
    "empty batch": (([(X[:0], LABELS[:0])],), ValueError, "empty"),
    "two batches without targets": (([X, LABELS[:3]],), TypeError, "No targets"),
    "no labels": (([{"x": X}],), TypeError, "Adapter"),
    "a list of examples": (([*zip(X, LABELS, strict=True)],), TypeError, r"DataLoader\(dataset, batch_size"),
    "another dtype": ((X.double(), LABELS), TypeError, r"weights torch.float32 .*to\(torch.float32"),
    "other length": (([(X, LABELS[:3])],), ValueError, "10 inputs but 3 targets"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNUSABLE)
def test_data_that_no_fit_takes_are_refused(case):
    data, error, message = UNUSABLE[case]
    data = (Once([(X, LABELS)]),) if case == "used up" else data
    la = LinearisedLaplace(network(), "classification", num_samples=2)
    with pytest.raises(error, match=message):
        la.fit(*data, progress_bar=False)


def test_targets_that_are_missing_name_their_batch():
    missing = REAL.clone()
    missing[1] = torch.nan
    with pytest.raises(ValueError, match="Batch 0 to 1.*NaN"):
        fit("regression", [(X, REAL), (X, missing)], 1)


def test_networks_of_one_collection_need_an_adapter():
    class Joined(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network()

        def forward(self, parts):
            return self.inner(torch.cat(list(parts.values()), 1))

    x = {"a": X[:, :1], "b": X[:, 1:]}
    with pytest.raises(TypeError, match="in one dict.*lambda model, inputs: model.inputs"):
        LinearisedLaplace(Joined(), "classification", num_samples=2).fit([(x, LABELS)])
    options = {"num_samples": 2, "adapter": Adapter(lambda model, inputs: model(inputs))}
    la = LinearisedLaplace(Joined(), "classification", **options).fit([(x, LABELS)])
    assert_close(la(x), fit("classification", [(X, LABELS)], em_steps=20)(X))


OF_OTHER_TYPES = [LABELS.to(torch.int8), LABELS.to(torch.uint16), Table(LABELS.numpy())]


@pytest.mark.parametrize("y", OF_OTHER_TYPES, ids=["int8", "uint16", "a table"])
def test_labels_may_be_small_integers_or_a_column_of_a_table(y):
    whole = fit("classification", (X, LABELS))
    for data in ((X, y), [(X, y)]):
        la = fit("classification", data)
        assert_close(la(X), whole(X))
        for method in ("log_prob", "joint_log_prob"):
            due = getattr(whole.predict(X), method)(LABELS)
            assert_close(getattr(la.predict(X), method)(y), due)


def test_questions_about_one_example_or_other_inputs_name_the_remedy(tmp_path):
    la = fit("classification", (X, LABELS))
    la.save(tmp_path / "la.pt")
    for each in (la, LinearisedLaplace.load(tmp_path / "la.pt", network())):  # not probed yet
        for error, message, x in (
            (ValueError, r"pass x\[None\]", X[0]),
            (TypeError, r"Pass arrays or lists as torch.tensor\(x\)", X.tolist()),
            (TypeError, r"torch.stack\(x\)", list(X)),
            (TypeError, "to_numpy", FRAME),
            (TypeError, "weights torch.float32 .* dtype of the training data", X.double()),
        ):
            with pytest.raises(error, match=message):
                each(x)


def test_bad_questions_are_refused():
    la = fit("classification", [(X, LABELS)], em_steps=2)
    several = r"several in one tuple, la.*\(\(a, b\)\)"
    for error, message, call in (
        (TypeError, "other by name.* all inputs by name", lambda: la(X, other=X)),
        *((TypeError, several, lambda c=c: c(X, X)) for c in (la, la.predict, la.predictions)),
        (TypeError, "la needs inputs of the model", la),
        (ValueError, "n must be a whole number of 1 or more", lambda: la.predict(X).sample(0)),
        (ValueError, "network", lambda: la.predict(X, mean="mode")),
    ):
        with pytest.raises(error, match=message):
            call()


def test_several_inputs_may_have_weights():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network()

        def forward(self, a, b):
            return self.inner(a + b)

    options = {"em_steps": 2, "progress_bar": False, "weights": torch.arange(10.0)}
    found = LinearisedLaplace(Sum(), "classification", num_samples=2).fit((X, X), LABELS, **options)
    whole = LinearisedLaplace(network(), "classification", num_samples=2)
    assert_close(found((X, X)), whole.fit(2 * X, LABELS, **options)(2 * X))


def test_networks_and_data_that_were_made_in_inference_mode():
    with torch.inference_mode():
        model, x, y = network(), X.clone(), LABELS.clone()
        la = LinearisedLaplace(model, "classification", num_samples=2)
        found = la.fit(x, y, progress_bar=False, em_steps=2)(x)
    assert_close(found, fit("classification", (X, LABELS), em_steps=2)(X))


def test_the_first_prediction_may_be_of_one_example_or_of_none(tmp_path):
    la = fit("classification", (X, LABELS))
    la.save(tmp_path / "la.pt")
    for rows in (1, 0):
        loaded = LinearisedLaplace.load(tmp_path / "la.pt", network())
        assert_close(loaded(X[:rows]), la(X[:rows]))
        assert loaded.functional_samples(X[:0]).shape == loaded.predict(X[:0]).samples.shape
        assert not rows or loaded._linear_model.factored == la._linear_model.factored != ()
