"""Products with J of the layers people use, against plain reverse mode."""

import logging
import warnings

import pytest
import torch
from jacobians import Calls, check, drawn, linear_model, mlp, prepared, products
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from torch_lla_em.jacobian.probe import NoJacobianError

IDS = torch.tensor([[0, 1, 2, 0], [3, 3, 0, 0]])
FALLBACK = "ignore:There is a performance drop because we have not yet implemented:UserWarning"


def build(forward, **layers):
    return prepared(Calls(forward, **layers))


def two_layers(forward=lambda m, x: m.b(m.a(x).tanh())):
    return build(forward, a=nn.Linear(3, 3), b=nn.Linear(3, 2))


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_layers(kind):
    for both in (False, True):
        rnn = kind(3, 2, 2, batch_first=True, bidirectional=both, dropout=0.5)
        head = nn.Linear(2 + 2 * both, 2)
        model = build(lambda m, x: m.head(m.rnn(x)[0][:, -1]), rnn=rnn, head=head)
        flat_weights = model.rnn._flat_weights
        assert check(model.train(), drawn(2, 3, 3)).path.forward
        assert model.rnn._flat_weights is flat_weights


def lstm_cell(m, x):
    state = None
    for t in range(x.shape[1]):
        state = m.cell(x[:, t], state)
    return m.head(state[0])


def attention(need_weights):
    return build(
        lambda m, x: m.attention(x, x, x, need_weights=need_weights)[0].mean(1),
        attention=nn.MultiheadAttention(4, 2, batch_first=True, dropout=0.5),
    )


class TinyViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(1, 4, 2, 2)
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.position = nn.Parameter(torch.randn(1, 5, 4))
        self.attention, self.norm = nn.MultiheadAttention(4, 2, batch_first=True), nn.LayerNorm(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        x = self.norm(x)
        return self.head((x + self.attention(x, x, x, need_weights=False)[0])[:, 0])


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


def encoder(norm_first, padding):
    layer = nn.TransformerEncoderLayer(4, 2, 5, batch_first=True, norm_first=norm_first)
    model = build(
        lambda m, x, mask=None: m.head(m.encoder(x, src_key_padding_mask=mask)[:, 0]),
        encoder=nn.TransformerEncoder(layer, 2),
        head=nn.Linear(4, 2),
    )
    mask = torch.tensor([[False, False, True], [False, False, False]])
    return model, {"x": drawn(2, 3, 4), **({"mask": mask} if padding else {})}


def maps_of_classes():
    conv = nn.Conv2d(1, 2, 3, padding=1)
    return build(lambda m, x: m.b(m.a(x).tanh()), a=conv, b=nn.Conv2d(2, 3, 1))


def with_tied_layers():
    model = two_layers(lambda m, x: m.b(m.d(m.c(m.a(x).tanh()).tanh())))
    model.c, model.d = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()
    model.d.weight = model.c.weight
    return model


def with_frozen_layer():
    model = mlp()
    model[0].requires_grad_(False)
    return model


def with_dead_units():
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(inplace=True), nn.Linear(6, 3)).double()
    with torch.no_grad():
        model[0].bias[:3] = -100.0
    return model


def with_transposed_weight():
    model = mlp()
    model[0].weight = nn.Parameter(drawn(3, 4).T)
    return model


def with_parameter_of_no_size():
    model = build(lambda m, x: m.a(x) + m.none.sum(), a=nn.Linear(3, 3))
    model.none = nn.Parameter(torch.zeros(0).double())
    return model


def force(m, x):
    """The derivative of a network in its inputs, as of an energy."""
    return torch.func.vmap(torch.func.grad(lambda x: m.b(m.a(x).tanh()).sum()))(x)


def spectrum(m, x):
    return m.b(torch.view_as_real(torch.fft.fft(m.a(x))).square().sum(-1))


def embedded(head=None, forward=lambda m, ids: m.head(m.embed(ids).tanh().mean(1)), **options):
    return build(forward, embed=nn.Embedding(5, 3, **options), head=head or nn.Linear(3, 2))


X = drawn(5, 3)
OF_TWO_LAYERS = {
    "residual added in place": added_in_place,
    "outputs assembled in place": assembled_in_place,
    "gated linear unit": lambda m, x: F.glu(m.b(m.a(x))),
    "detach": lambda m, x: m.b(m.a(x) * m.a(x).detach()),
    "checkpointing": lambda m, x: m.b(checkpoint(m.a, x, use_reentrant=False).tanh()),
    "a branch on the data": lambda m, x: m.b(m.a(x)) * (2 if m.a(x).sum().item() > 0 else 3),
    "one layer twice": lambda m, x: m.b(m.a(m.a(x)).tanh()),
    "function with all derivatives": lambda m, x: m.b(FullSquare.apply(m.a(x))),
    "derivative inside": force,
    "Fourier transform": spectrum,
    "unused parameter": lambda m, x: m.a(x),
}
FORWARD = {
    **{name: lambda f=f: (two_layers(f), X) for name, f in OF_TWO_LAYERS.items()},
    "LSTM cell": lambda: (
        build(lstm_cell, cell=nn.LSTMCell(3, 2), head=nn.Linear(2, 2)),
        drawn(2, 3, 3),
    ),
    "attention": lambda: (attention(False), drawn(2, 3, 4)),
    "attention with weights": lambda: (attention(True), drawn(2, 3, 4)),
    "vision transformer": lambda: (prepared(TinyViT()), drawn(2, 1, 4, 4)),
    "embedding": lambda: (embedded(), IDS),
    "padding_idx": lambda: (embedded(padding_idx=0), IDS),
    "padding_idx from the end": lambda: (embedded(padding_idx=-5), IDS),
    "large max_norm": lambda: (embedded(max_norm=100.0), IDS),
    "outputs of a sequence": lambda: (
        embedded(forward=lambda m, ids: m.head(m.embed(ids).tanh())),
        IDS,
    ),
    "transformer encoder": lambda: encoder(norm_first=False, padding=False),
    "transformer encoder with padding": lambda: encoder(norm_first=True, padding=True),
    "maps of classes": lambda: (maps_of_classes(), drawn(2, 1, 3, 3), None, None, 1),
    "tied layers": lambda: (with_tied_layers(), X),
    "orthogonal weights": lambda: (mlp(parametrizations.orthogonal(nn.Linear(2, 2))).double(), X),
    "frozen layer": lambda: (with_frozen_layer(), X),
    "dead units": lambda: (with_dead_units(), X),
    "transposed weight": lambda: (with_transposed_weight(), X),
    "parameter of no size": lambda: (with_parameter_of_no_size(), X),
}


@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.filterwarnings(FALLBACK, "ignore:enable_nested_tensor is True:UserWarning")
def test_forward_mode_is_used_for(name):
    assert check(*FORWARD[name]()).path.forward


def test_the_last_layer_of_a_vision_transformer():
    assert check(prepared(TinyViT()), drawn(2, 1, 4, 4), "last_layer").factors


def tied(model):
    model.head.weight = model.embed.weight
    return model


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


REVERSE = {
    "tied padding_idx": (
        lambda: (tied(embedded(nn.Linear(3, 5), padding_idx=0)), IDS),
        "tied padding_idx",
    ),
    "functional padding_idx": (
        lambda: (embedded(forward=functional_padding), IDS),
        "disagrees with backward",
    ),
    "no_grad inside": (lambda: (two_layers(gated_without_gradient), X), "disagrees with backward"),
    "a user's function": (lambda: (two_layers(lambda m, x: Square.apply(m.a(x))), X), "fails in"),
}


@pytest.mark.parametrize("name", REVERSE)
def test_reverse_mode_is_used_for(name):
    made, words = REVERSE[name]
    report = check(*made())
    assert not report.path.forward and words in report.forward


def test_padding_rows_have_no_effect():
    linear = linear_model(embedded(padding_idx=0))
    w = torch.zeros(2, linear.layout.size).double()
    w[:, :3] = 1
    _, Jw, total = products(linear, IDS, w, torch.ones(2, 2, 2).double())
    assert not Jw.any() and not total[:, :3].any() and total[:, 3:].any()


def test_sparse_gradients_and_a_copy_for_max_norm():
    model = embedded(sparse=True)
    assert check(model, IDS).path.forward and model.embed.sparse
    model = embedded(max_norm=0.5)
    linear, before = linear_model(model), model.embed.weight.clone()
    report = linear.probe(IDS)
    w, u = torch.ones(2, linear.layout.size).double(), torch.ones(2, 2, 2).double()
    _, Jw, total = products(linear, IDS, w, u)
    assert report.path.forward and torch.equal(model.embed.weight, before)
    assert_close((Jw * u).sum((1, 2)), (total * w).sum(1))


def test_tied_weights_are_one_parameter():
    head = nn.Linear(3, 5, bias=False)
    model = tied(embedded(head))
    assert linear_model(model).layout.size == 15
    assert check(model, IDS).path.forward
    check(model, IDS, "last_layer")


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
    model.train()(drawn(4, 1, 3, 3))  # statistics that are not their initial values
    assert check(model, drawn(2, 1, 3, 3), selection).path.forward
    assert ("norm.weight" in linear_model(model, selection).layout.names) == bool(selection)


ACTIVATIONS = [
    nn.ReLU(True),
    nn.LeakyReLU(inplace=True),
    nn.SiLU(True),
    nn.Hardswish(True),
    nn.ELU(inplace=True),
    nn.Dropout(inplace=True),
    nn.AlphaDropout(),
    nn.RReLU(),
    nn.PReLU(),
    nn.GELU(),
    nn.Hardsigmoid(),
    nn.Softplus(),
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

    model = build(forward, a=nn.Linear(3, 3))
    model.register_buffer("count", torch.zeros(()))
    model.register_buffer("mean", torch.zeros(3).double())
    model.register_buffer("last", torch.zeros(0))
    model.plain = torch.zeros(1)
    assert check(model, X).path.forward
    linear_model(model).probe(X)
    assert model.count == 0 and not model.mean.any() and model.last.numel() == 0
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
    if not by_hooks:
        if name == "weight_norm":
            assert "fails in 'a.parametrizations.weight.0' (_WeightNorm)" in report.forward
        assert check(model, X, "last_layer").adjoint_error < 1e-12


def right_or_refused(model, x):
    """Check where this torch can differentiate Jᵀu in u; expect an error elsewhere."""
    f, chosen = model(x), list(model.parameters())
    u = torch.zeros_like(f, requires_grad=True)
    JTu = torch.autograd.grad(f, chosen, u, create_graph=True, allow_unused=True)
    try:
        torch.autograd.grad(sum(g.sum() for g in JTu if g is not None), u)
    except (RuntimeError, NotImplementedError):
        with pytest.raises(NoJacobianError):
            check(model, x)
        return None
    return check(model, x)


@pytest.mark.filterwarnings(FALLBACK)
def test_grid_sample():
    def forward(m, x):
        theta = m.locate(x.flatten(1)).view(-1, 2, 3)
        grid = F.affine_grid(theta, (len(x), 2, 3, 3), align_corners=False)
        return F.grid_sample(m.conv(x), grid, align_corners=False).sum((2, 3))

    conv = nn.Conv2d(1, 2, 3, padding=1)
    right_or_refused(build(forward, conv=conv, locate=nn.Linear(9, 6)), drawn(2, 1, 3, 3))


def test_distances():
    model = build(lambda m, x: torch.cdist(m.a(x), x), a=nn.Linear(3, 3))
    report = right_or_refused(model, drawn(4, 3))
    if report is not None:  # forward mode is not implemented, and torch says so
        assert report.path.forward or "fails in the model's own forward" in report.forward


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
    model, x = kind(), drawn(4, 3)
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


class WrongBatch(torch.autograd.Function):
    """Right for one column, wrong for several at once."""

    @staticmethod
    def forward(u):
        return u.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, v):
        return v

    @staticmethod
    def vmap(info, in_dims, u):
        return 3 * u, in_dims[0]


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


class WronglyBatchedForward(UnbatchedForward):
    generate_vmap_rule = True

    @staticmethod
    def jvp(ctx, tangent):
        return 2 * WrongBatch.apply(tangent) * ctx.saved_tensors[0]


class OnceSquare(Square):
    backward = staticmethod(torch.autograd.function.once_differentiable(Square.backward))


def test_functions_that_vmap_gets_wrong_run_column_by_column(caplog):
    caplog.set_level(logging.INFO, logger="torch_lla_em")

    def report(function):
        return check(build(lambda m, x: function.apply(m.a(x)), a=nn.Linear(3, 2)), X)

    assert report(UnbatchedSquare).unbatched == ("Jᵀu",)
    unbatched = report(UnbatchedForward)
    assert unbatched.path.jvp_columns == 1 and unbatched.unbatched == ("J w",)
    for entry, product in zip(caplog.records, ("Jᵀu", "J w")):
        assert entry.levelname == "WARNING"
        assert f"the columns of {product} run one by one" in entry.message
    for found in (unbatched, report(WronglyBatchedForward)):
        assert found.path.forward and found.path.jvp_columns == 1


def test_a_function_with_one_derivative_raises():
    class Block(nn.Module):
        def forward(self, x):
            return OnceSquare.apply(x)

    model = nn.Sequential(nn.Linear(3, 2), nn.Sequential(Block(), nn.Linear(2, 2))).double()
    with pytest.raises(NotImplementedError) as caught:
        linear_model(model).probe(X)
    # once_differentiable cuts the graph without an error; the adjoint test finds it
    assert "by forward mode it fails in '1.0' (Block)" in str(caught.value)
    assert "disagrees with backward" in str(caught.value)


def test_autocast_inside_forward():
    def forward(m, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = m.a(x)
        return m.b(h.float().tanh())

    assert linear_model(two_layers(forward).float()).probe(X.float()).adjoint_error < 0.03


def test_hooks_of_the_user():
    model, seen = two_layers(), []
    model.a.register_forward_hook(lambda module, args, output: output * 2)
    model.b.register_forward_pre_hook(lambda *_: seen.append(1))
    check(model, X)
    check(model, X, "last_layer")
    assert seen
    model = two_layers()
    model.a.register_full_backward_hook(lambda *_: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(model, X)
