"""Products with J of the layers people use, against plain reverse mode.

Networks of which all weights have factors are in ``jacobian/test_factored``.
"""

import logging
import warnings

import pytest
import torch
from jacobians import Calls, X, check, linear_model, mlp, prepared, products
from tiny import draw
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

IDS = torch.tensor([[0, 1, 2, 0], [3, 3, 0, 0]])
FALLBACK = "ignore:There is a performance drop because we have not yet implemented:UserWarning"


def build(forward, **layers):
    return prepared(Calls(forward, **layers))


def two_layers(forward=lambda m, x: m.b(m.a(x).tanh())):
    return build(forward, a=nn.Linear(3, 3), b=nn.Linear(3, 2))


def embedded(head=None, forward=lambda m, ids: m.head(m.embed(ids).tanh().mean(1)), **options):
    return build(forward, embed=nn.Embedding(5, 3, **options), head=head or nn.Linear(3, 2))


def tied(model):
    model.head.weight = model.embed.weight
    return model


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_layers(kind):
    for both in (False, True):
        rnn = kind(3, 2, 2, batch_first=True, bidirectional=both, dropout=0.5)
        head = nn.Linear(2 + 2 * both, 2)
        model = build(lambda m, x: m.head(m.rnn(x)[0][:, -1]), rnn=rnn, head=head)
        flat_weights = model.rnn._flat_weights
        assert check(model.train(), draw(2, 3, 3)).path.forward
        assert model.rnn._flat_weights is flat_weights


def added_in_place(m, x):
    h = m.a(x)
    h += x
    h[:, 0] = h[:, 1] * 2
    return m.b(h.relu_())


def assembled_in_place(m, x):
    h = m.a(x)
    out = x.new_zeros(len(x), 4)
    out[:, :3] = h
    out[:, 3] = h.prod(1)
    return out


def encoder_with_padding():
    layer = nn.TransformerEncoderLayer(4, 2, 5, batch_first=True, norm_first=True)
    model = build(
        lambda m, x, mask: m.head(m.encoder(x, src_key_padding_mask=mask)[:, 0]),
        encoder=nn.TransformerEncoder(layer, 2),
        head=nn.Linear(4, 2),
    )
    mask = torch.tensor([[False, False, True], [False, False, False]])
    return model, {"x": draw(2, 3, 4), "mask": mask}


def transposed_weight():
    model = mlp()
    model[0].weight = nn.Parameter(draw(3, 4).T)
    return model


def force(m, x):
    """The derivative of a network in its inputs, as of an energy."""
    return torch.func.vmap(torch.func.grad(lambda x: m.b(m.a(x).tanh()).sum()))(x)


def spectrum(m, x):
    return m.b(torch.view_as_real(torch.fft.fft(m.a(x))).square().sum(-1))


OF_TWO_LAYERS = {
    "residual added in place": added_in_place,
    "outputs assembled in place": assembled_in_place,
    "gated linear unit": lambda m, x: F.glu(m.b(m.a(x))),
    "detach": lambda m, x: m.b(m.a(x) * m.a(x).detach()),
    "checkpointing": lambda m, x: m.b(checkpoint(m.a, x, use_reentrant=False).tanh()),
    "a branch on the data": lambda m, x: m.b(m.a(x)) * (2 if m.a(x).sum().item() > 0 else 3),
    "function with all derivatives": lambda m, x: m.b(FullSquare.apply(m.a(x))),
    "derivative inside": force,
    "Fourier transform": spectrum,
    "unused parameter": lambda m, x: m.a(x),
    "random numbers": lambda m, x: m.b(m.a(x)) + 0 * torch.rand(2),
}


def one_layer_under_two_names():
    layer = nn.Linear(3, 3)
    return build(lambda m, x: m.head(m.b(m.a(x).tanh())), a=layer, b=layer, head=nn.Linear(3, 2))


CONVS = {"a": nn.Conv2d(1, 2, 3, padding=1), "b": nn.Conv2d(2, 3, 1)}
FORWARD = {
    **{name: lambda f=f: (two_layers(f), X) for name, f in OF_TWO_LAYERS.items()},
    "embedding": lambda: (embedded(), IDS),
    "padding_idx": lambda: (embedded(padding_idx=0), IDS),
    "padding_idx from the end": lambda: (embedded(padding_idx=-5), IDS),
    "large max_norm": lambda: (embedded(max_norm=100.0), IDS),
    "sparse gradients": lambda: (embedded(sparse=True), IDS),
    "tied embedding": lambda: (tied(embedded(nn.Linear(3, 5, bias=False))), IDS),
    "tied last layer": lambda: (tied(embedded(nn.Linear(3, 5, bias=False))), IDS, "last_layer"),
    "outputs of a sequence": lambda: (
        embedded(forward=lambda m, ids: m.head(m.embed(ids).tanh())),
        IDS,
    ),
    "transformer encoder with padding": encoder_with_padding,
    "maps of classes": lambda: (
        build(lambda m, x: m.b(m.a(x).tanh()), **CONVS),
        *(draw(2, 1, 3, 3), None, None, 1),
    ),
    "orthogonal weights": lambda: (mlp(parametrizations.orthogonal(nn.Linear(2, 2))).double(), X),
    "transposed weight": lambda: (transposed_weight(), X),
    "one layer under two names": lambda: (one_layer_under_two_names(), X),
}


@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.filterwarnings(FALLBACK, "ignore:enable_nested_tensor is True:UserWarning")
def test_forward_mode_is_used_for(name):
    model, *arguments = FORWARD[name]()
    assert check(model, *arguments).path.forward
    assert all(layer.sparse == (name == "sparse gradients") for layer in embeddings(model))


def embeddings(model):
    return [layer for layer in model.modules() if isinstance(layer, nn.Embedding)]


def functional_padding(m, ids):
    return m.head(F.embedding(ids, m.embed.weight, padding_idx=0).sin().mean(1))


def gated_without_gradient(m, x):
    with torch.no_grad():
        gate = m.a(x).sigmoid()
    return m.b(m.a(x) * gate)


class Square(torch.autograd.Function):
    """Without setup_context, jvp or vmap, as most such functions are."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx, u):
        return 2 * u * ctx.saved_tensors[0]


DISAGREES = "disagrees with backward"
REVERSE = {
    "tied padding_idx": (
        lambda: (tied(embedded(nn.Linear(3, 5), padding_idx=0)), IDS),
        "tied padding_idx",
    ),
    "functional padding_idx": (lambda: (embedded(forward=functional_padding), IDS), DISAGREES),
    "no_grad inside": (lambda: (two_layers(gated_without_gradient), X), DISAGREES),
    "a user's function": (lambda: (two_layers(lambda m, x: Square.apply(m.a(x))), X), "fails in"),
}


@pytest.mark.parametrize("name", REVERSE)
def test_reverse_mode_is_used_for(name):
    made, words = REVERSE[name]
    report = check(*made())
    assert not report.path.forward and words in report.forward


def test_max_norm_shortens_a_copy_of_the_weights():
    model = embedded(max_norm=0.5)
    linear, before = linear_model(model), model.embed.weight.clone()
    report = linear.probe(IDS)
    w, u = torch.ones(2, linear.layout.size).double(), torch.ones(2, 2, 2).double()
    _, Jw, total = products(linear, IDS, w, u)
    assert report.path.forward and torch.equal(model.embed.weight, before)
    assert_close((Jw * u).sum((1, 2)), (total * w).sum(1))


NORMS = [
    nn.BatchNorm2d(4),
    nn.BatchNorm2d(4, track_running_stats=False),
    nn.SyncBatchNorm(4),
    nn.GroupNorm(2, 4),
    nn.LayerNorm((4, 3, 3)),
    nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
    nn.RMSNorm(3),
]


@pytest.mark.parametrize("norm", NORMS, ids=lambda layer: str(layer).replace(", ", ","))
@pytest.mark.parametrize("selection", [None, "all"])
def test_normalisation(norm, selection):
    model = build(
        lambda m, x: m.head(m.norm(m.conv(x)).relu().mean((2, 3))),
        conv=nn.Conv2d(1, 4, 3, padding=1),
        norm=norm,
        head=nn.Linear(4, 2),
    )
    model.train()(draw(4, 1, 3, 3))  # statistics that are not their initial values
    assert check(model, draw(2, 1, 3, 3), selection).path.forward


ACTIVATIONS = [
    *(nn.ReLU(True), nn.LeakyReLU(inplace=True), nn.SiLU(True), nn.Hardswish(True)),
    *(nn.ELU(inplace=True), nn.Dropout(inplace=True), nn.AlphaDropout(), nn.RReLU()),
    *(nn.PReLU(), nn.GELU(), nn.Hardsigmoid(), nn.Softplus()),
]


def test_activations_and_dropout():
    for activation in ACTIVATIONS:
        model = nn.Sequential(nn.Linear(3, 4), activation, nn.Linear(4, 2)).double()
        assert check(model.train(), X).path.forward, activation


def test_buffers_that_every_forward_pass_changes():
    def forward(m, x):
        h = m.a(x)
        m.count += 1
        m.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
        m.last = h.detach()
        m.plain.add_(1)
        return h * (m.mean + m.count + m.plain)

    model = build(forward, a=nn.Linear(3, 3), plain=torch.zeros(1))
    model.register_buffer("count", torch.zeros(()))
    model.register_buffer("mean", torch.zeros(3).double())
    model.register_buffer("last", torch.zeros(0))
    assert check(model, X).path.forward  # and the buffers are as before
    assert model.plain == 0


@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm"])
@pytest.mark.parametrize("by_hooks", [False, True])
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
def test_normalised_weights(name, by_hooks):
    model = two_layers()
    for layer in (model.a,) if by_hooks else (model.a, model.b):
        getattr(nn.utils if by_hooks else parametrizations, name)(layer)
    if by_hooks:
        with torch.no_grad():
            model.a.weight = model.a.weight.detach()  # the reference cannot copy a graph
    report = check(model.train(), X)
    assert report.path.forward == (name == "spectral_norm")
    if not by_hooks and name == "weight_norm":
        assert "fails in 'a.parametrizations.weight.0' (_WeightNorm)" in report.forward
        assert check(model, X, "last_layer").adjoint_error < 1e-12


class Scales(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.scale, self.shift = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(0.5))
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return (0.5 * self.scale + 1.0) * self.layer(x * self.scale) + self.shift


class ScaledMatrix(Scales):
    def forward(self, x):
        return self.layer(x) @ (0.5 * self.scale).expand(2, 2) + self.shift


@pytest.mark.parametrize("kind", [Scales, ScaledMatrix])
def test_zero_dimensional_parameters(kind):
    model, x = kind(), draw(4, 3)
    single = linear_model(model)
    report = single.probe(x.float())
    # in float32 the tangent of 0.5 * scale is float64, which a matrix product does not accept
    assert report.path.forward == (kind is Scales)
    w, u = torch.ones(2, single.layout.size), torch.ones(2, 4, 2)
    rough = products(single, x.float(), w, u)
    assert all(t.dtype is torch.float32 for t in rough)
    assert check(model.double(), x).path.forward
    for a, b in zip(rough, products(linear_model(model), x, w.double(), u.double())):
        assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


class UnbatchedSquare(Square):
    @staticmethod
    def backward(ctx, u):
        u.sum().item()  # which vmap does not allow
        return 2 * u * ctx.saved_tensors[0]


class OnceSquare(Square):
    backward = staticmethod(torch.autograd.function.once_differentiable(Square.backward))


class UnbatchedForward(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x**2

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, u):
        return 2 * u * ctx.saved_tensors[0]

    @staticmethod
    def jvp(ctx, tangent):
        return 2 * tangent * ctx.saved_tensors[0]


class FullSquare(UnbatchedForward):
    generate_vmap_rule = True


class WrongBatch(torch.autograd.Function):
    """The identity for one column, but not for several at once."""

    @staticmethod
    def forward(u):
        return u.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def vmap(info, in_dims, u):
        return 3 * u, in_dims[0]


class WronglyBatchedForward(FullSquare):
    @staticmethod
    def jvp(ctx, tangent):
        return 2 * WrongBatch.apply(tangent) * ctx.saved_tensors[0]


def test_functions_that_vmap_gets_wrong_run_column_by_column(caplog):
    caplog.set_level(logging.INFO, logger="torch_lla_em")

    def report(function):
        return check(build(lambda m, x: function.apply(m.a(x)), a=nn.Linear(3, 2)), X)

    assert report(UnbatchedSquare).unbatched
    for function in (UnbatchedForward, WronglyBatchedForward):
        found = report(function)
        assert found.unbatched and found.path.forward
    for entry in caplog.records:
        assert entry.levelname == "WARNING" and "columns run one by one" in entry.message


def test_a_function_with_one_derivative_raises():
    class Block(nn.Module):
        def forward(self, x):
            return OnceSquare.apply(x)

    model = nn.Sequential(nn.Linear(3, 2), nn.Sequential(Block(), nn.Linear(2, 2))).double()
    with pytest.raises(NotImplementedError) as caught:
        linear_model(model).probe(X)
    # once_differentiable cuts the graph without an error; the adjoint test finds it
    assert "by forward mode it fails in '1.0' (Block)" in str(caught.value)
    assert DISAGREES in str(caught.value)


def test_large_batches_hide_no_part_of_the_jacobian():
    gated = build(gated_without_gradient, a=nn.Linear(2, 100), b=nn.Linear(100, 1000))
    assert not linear_model(gated).probe(draw(64, 2)).path.forward
    partly = build(
        lambda m, x: m.a(x) + OnceSquare.apply(m.b(x)), a=nn.Linear(3, 5), b=nn.Linear(3, 5)
    )
    with pytest.raises(NotImplementedError):
        linear_model(partly).probe(draw(512, 3))


def test_autocast_inside_forward():
    def forward(m, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = m.a(x)
        return m.b(h.float().tanh())

    assert linear_model(two_layers(forward).float()).probe(X.float()).adjoint_error < 0.03


def test_backward_hooks_of_the_user():
    model = two_layers()
    model.a.register_full_backward_hook(lambda *_: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(model, X)
