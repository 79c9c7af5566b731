"""Products with J of the layers people use, against plain reverse mode."""

import logging
import warnings

import pytest
import torch
from jacobians import check, linear_model, products
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.testing import assert_close

from torch_lla_em.jacobian.probe import NoJacobianError

IDS = torch.tensor([[0, 1, 2, 0], [3, 3, 0, 0]])
FALLBACK = "ignore:There is a performance drop because we have not yet implemented:UserWarning"


def inputs(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Calls(nn.Module):
    """Layers a, b, ..., called by a function."""

    def __init__(self, forward, **layers):
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.call = forward

    def forward(self, *args, **kwargs):
        return self.call(self, *args, **kwargs)


def build(forward, **layers):
    torch.manual_seed(0)
    made = {
        name: layer() if callable(layer) and not isinstance(layer, nn.Module) else layer
        for name, layer in layers.items()
    }
    return Calls(forward, **made).double()


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_layers(kind):
    for bidirectional in (False, True):
        rnn = kind(3, 2, 2, batch_first=True, bidirectional=bidirectional, dropout=0.5)
        head = nn.Linear(4 if bidirectional else 2, 2)
        model = build(lambda m, x: m.head(m.rnn(x)[0][:, -1]), rnn=rnn, head=head)
        flat_weights = model.rnn._flat_weights
        assert check(model.train(), inputs(2, 3, 3)).path.forward
        assert model.rnn._flat_weights is flat_weights


def test_recurrent_cells():
    def forward(m, x):
        state = None
        for t in range(x.shape[1]):
            state = m.cell(x[:, t], state)
        return m.head(state[0])

    model = build(forward, cell=nn.LSTMCell(3, 2), head=nn.Linear(2, 2))
    assert check(model, inputs(2, 3, 3)).path.forward


@pytest.mark.parametrize("need_weights", [False, True])
def test_multihead_attention(need_weights):
    model = build(
        lambda m, x: m.attention(x, x, x, need_weights=need_weights)[0].mean(1),
        attention=nn.MultiheadAttention(4, 2, batch_first=True, dropout=0.5),
    )
    assert check(model, inputs(2, 3, 4)).path.forward


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
def test_transformer_encoder(padding, norm_first):
    layer = nn.TransformerEncoderLayer(4, 2, 5, batch_first=True, norm_first=norm_first)
    model = build(
        lambda m, x, mask=None: m.head(m.encoder(x, src_key_padding_mask=mask)[:, 0]),
        encoder=nn.TransformerEncoder(layer, 2),
        head=nn.Linear(4, 2),
    )
    x = {"x": inputs(2, 3, 4)}
    if padding:
        x["mask"] = torch.tensor([[False, False, True], [False, False, False]])
    assert check(model, x).path.forward


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


def test_vision_transformer():
    torch.manual_seed(0)
    model = TinyViT().double()
    assert check(model, inputs(2, 1, 4, 4)).path.forward
    assert check(model, inputs(2, 1, 4, 4), "last_layer").factors


class TestEmbedding:
    def pooled(self, **options):
        return build(
            lambda m, ids: m.head(torch.tanh(m.embed(ids)).mean(1)),
            embed=nn.Embedding(5, 3, **options),
            head=nn.Linear(3, 2),
        )

    @pytest.mark.parametrize("options", [{}, {"padding_idx": 0}, {"padding_idx": -5}])
    def test_padding_idx(self, options):
        assert check(self.pooled(**options), IDS).path.forward

    def test_padding_row_moves_nothing(self):
        linear = linear_model(self.pooled(padding_idx=0))
        w = torch.zeros(2, linear.layout.size).double()
        w[:, :3] = 1
        _, Jw, total = products(linear, IDS, w, torch.ones(2, 2, 2).double())
        assert not Jw.any() and not total[:, :3].any() and total[:, 3:].any()

    def test_padding_idx_of_tied_weights_takes_reverse_mode(self):
        model = build(
            lambda m, ids: m.head(torch.tanh(m.embed(ids)).mean(1)),
            embed=nn.Embedding(5, 3, padding_idx=0),
            head=nn.Linear(3, 5),
        )
        model.head.weight = model.embed.weight
        report = check(model, IDS)
        assert not report.path.forward and "tied padding_idx" in report.forward
        assert linear_model(model).layout.size == 15 + 5

    def test_functional_padding_idx_takes_reverse_mode(self):
        model = build(
            lambda m, ids: m.head(F.embedding(ids, m.embed.weight, padding_idx=0).sin().mean(1)),
            embed=nn.Embedding(5, 3),
            head=nn.Linear(3, 2),
        )
        report = check(model, IDS)
        assert not report.path.forward and "disagrees with backward" in report.forward

    def test_sparse(self):
        model = self.pooled(sparse=True)
        assert check(model, IDS).path.forward and model.embed.sparse

    def test_max_norm_shrinks_a_copy(self):
        model = self.pooled(max_norm=0.5)
        linear, before = linear_model(model), model.embed.weight.clone()
        report = linear.probe(IDS)
        w, u = torch.ones(2, linear.layout.size).double(), torch.ones(2, 2, 2).double()
        _, Jw, total = products(linear, IDS, w, u)
        assert report.path.forward and torch.equal(model.embed.weight, before)
        assert_close((Jw * u).sum((1, 2)), (total * w).sum(1))
        assert check(self.pooled(max_norm=100.0), IDS).path.forward


def test_tied_weights():
    model = build(
        lambda m, ids: m.head(torch.tanh(m.embed(ids))).mean(1),
        embed=nn.Embedding(5, 3),
        head=nn.Linear(3, 5, bias=False),
    )
    model.head.weight = model.embed.weight
    assert linear_model(model).layout.size == 15
    assert check(model, IDS).path.forward
    check(model, IDS, "last_layer")


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm2d(4),
        nn.BatchNorm2d(4, track_running_stats=False),
        nn.SyncBatchNorm(4),
        nn.GroupNorm(2, 4),
        nn.LayerNorm((4, 3, 3)),
        nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        nn.RMSNorm(3),
    ],
    ids=lambda layer: str(layer).replace(", ", ","),
)
@pytest.mark.parametrize("selection", [None, "all"])
def test_normalisation(norm, selection):
    model = build(
        lambda m, x: m.head(m.norm(m.conv(x)).relu().mean((2, 3))),
        conv=nn.Conv2d(1, 4, 3, padding=1),
        norm=norm,
        head=nn.Linear(4, 2),
    )
    model.train()(inputs(4, 1, 3, 3))  # statistics that are not their initial values
    assert check(model, inputs(2, 1, 3, 3), selection).path.forward
    assert ("norm.weight" in linear_model(model, selection).layout.names) == bool(selection)


@pytest.mark.parametrize(
    "activation",
    [
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
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_activations_and_dropout(activation):
    model = build(
        lambda m, x: m.b(m.a(m.stem(x))), stem=nn.Linear(3, 4), a=activation, b=nn.Linear(4, 2)
    )
    assert check(model.train(), inputs(5, 3)).path.forward


@pytest.mark.filterwarnings(FALLBACK)
def test_gated_linear_unit():
    model = build(lambda m, x: F.glu(m.a(x)), a=nn.Linear(3, 4))
    assert check(model, inputs(5, 3)).path.forward


def test_residual_added_in_place():
    def forward(m, x):
        h = m.a(x)
        h += x
        h[:, 0] = h[:, 1] * 2
        return m.b(h.relu_())

    model = build(forward, a=nn.Linear(3, 3), b=nn.Linear(3, 2))
    assert check(model, inputs(5, 3)).path.forward


def test_outputs_assembled_in_place():
    def forward(m, x):
        h = m.a(x)
        out = x.new_zeros(len(x), 4)
        out[:, :3] = h
        out[:, 3] = h.prod(1)
        return out

    assert check(build(forward, a=nn.Linear(3, 3)), inputs(5, 3)).path.forward


def test_buffers_changed_at_every_forward():
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
    linear = linear_model(model)
    assert check(model, inputs(5, 3)).path.forward
    linear.probe(inputs(5, 3))
    assert model.count == 0 and not model.mean.any() and model.last.numel() == 0
    assert model.plain == 0


@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm"])
def test_parametrisations(name):
    norm = getattr(parametrizations, name)
    model = build(lambda m, x: m.b(m.a(x).tanh()), a=norm(nn.Linear(3, 3)), b=norm(nn.Linear(3, 2)))
    report = check(model.train(), inputs(5, 3))
    assert report.path.forward == (name == "spectral_norm")
    if name == "weight_norm":
        assert "fails in 'a.parametrizations.weight.0' (_WeightNorm)" in report.forward
    assert check(model, inputs(5, 3), "last_layer").adjoint_error < 1e-12


@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm"])
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
def test_norms_by_hooks(name):
    a = nn.Linear(3, 3)
    model = build(lambda m, x: m.b(m.a(x).tanh()), a=a, b=nn.Linear(3, 2))
    getattr(nn.utils, name)(a)
    with torch.no_grad():
        a.weight = a.weight.detach()  # a graph here would not be copied by the reference
    report = check(model, inputs(5, 3))
    assert report.path.forward == (name == "spectral_norm")


def test_no_grad_inside_forward_takes_reverse_mode():
    def forward(m, x):
        with torch.no_grad():
            gate = m.a(x).sigmoid()
        return m.b(m.a(x) * gate)

    report = check(build(forward, a=nn.Linear(3, 3), b=nn.Linear(3, 2)), inputs(5, 3))
    assert not report.path.forward and "disagrees with backward" in report.forward


def test_detach_inside_forward():
    model = build(lambda m, x: m.a(x) * m.a(x).detach(), a=nn.Linear(3, 3))
    assert check(model, inputs(5, 3)).path.forward


def right_or_refused(model, x):
    """Where torch, of whatever version, takes the derivative of Jᵀu in u, check; else see a refusal."""
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
        grid = F.affine_grid(
            m.locate(x.flatten(1)).view(-1, 2, 3), (len(x), 2, 3, 3), align_corners=False
        )
        return F.grid_sample(m.conv(x), grid, align_corners=False).sum((2, 3))

    model = build(forward, conv=nn.Conv2d(1, 2, 3, padding=1), locate=nn.Linear(9, 6))
    right_or_refused(model, inputs(2, 1, 3, 3))


def test_distances():
    model = build(lambda m, x: torch.cdist(m.a(x), x), a=nn.Linear(3, 3))
    report = right_or_refused(model, inputs(4, 3))
    if report is not None:  # forward mode is not written, and torch says so
        assert report.path.forward or "fails in the model's own forward" in report.forward


class Scales(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(0.5))
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return (0.5 * self.scale + 1.0) * self.layer(x * self.scale) + self.shift


class ScaledMatrix(Scales):
    def forward(self, x):
        return self.layer(x) @ (0.5 * self.scale).expand(2, 2) + self.shift


@pytest.mark.parametrize("kind", [Scales, ScaledMatrix])
def test_zero_dimensional_parameters(kind):
    torch.manual_seed(0)
    model = kind()
    x = inputs(4, 3)
    single = linear_model(model)
    report = single.probe(x.float())
    # in float32 the tangent of 0.5 * scale is float64, which a matrix product does not take
    assert report.path.forward == (kind is Scales)
    w, u = torch.ones(2, single.layout.size), torch.ones(2, 4, 2)
    rough = products(single, x.float(), w, u)
    assert all(t.dtype is torch.float32 for t in rough)
    assert check(model.double(), x).path.forward
    exact = products(linear_model(model), x, w.double(), u.double())
    for a, b in zip(rough, exact):
        assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


def test_checkpointing_without_reentry():
    model = build(
        lambda m, x: m.b(torch.utils.checkpoint.checkpoint(m.a, x, use_reentrant=False)),
        a=nn.Sequential(nn.Linear(3, 3), nn.Tanh()),
        b=nn.Linear(3, 2),
    )
    assert check(model, inputs(5, 3)).path.forward


def test_data_dependent_branches():
    model = build(lambda m, x: m.a(x) * (2 if m.a(x).sum().item() > 0 else 3), a=nn.Linear(3, 2))
    assert check(model, inputs(5, 3)).path.forward


class Square(torch.autograd.Function):
    """Without setup_context, jvp or vmap, as most such functions are."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    def backward(ctx, u):
        return 2 * u * ctx.saved_tensors[0]


class UnbatchedSquare(Square):
    @staticmethod
    def backward(ctx, u):
        u.sum().item()  # what vmap does not allow
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


class WronglyBatchedForward(UnbatchedForward):
    generate_vmap_rule = True

    @staticmethod
    def jvp(ctx, tangent):
        return 2 * WrongBatch.apply(tangent) * ctx.saved_tensors[0]


class OnceSquare(Square):
    backward = staticmethod(torch.autograd.function.once_differentiable(Square.backward))


def test_own_function_takes_reverse_mode():
    model = build(lambda m, x: Square.apply(m.a(x)), a=nn.Linear(3, 2))
    report = check(model, inputs(5, 3))
    assert not report.path.forward and "fails in" in report.forward


def test_own_function_that_cannot_be_batched_runs_column_by_column(caplog):
    caplog.set_level(logging.INFO, logger="torch_lla_em")
    model = build(lambda m, x: UnbatchedSquare.apply(m.a(x)), a=nn.Linear(3, 2))
    assert check(model, inputs(5, 3)).unbatched == ("Jᵀu",)
    model = build(lambda m, x: UnbatchedForward.apply(m.a(x)), a=nn.Linear(3, 2))
    report = check(model, inputs(5, 3))
    assert report.path.forward and report.path.jvp_columns == 1 and report.unbatched == ("J w",)
    for entry, product in zip(caplog.records, ("Jᵀu", "J w")):
        assert entry.levelname == "WARNING"
        assert f"the columns of {product} run one by one" in entry.message


def test_own_function_that_is_batched_wrongly_runs_column_by_column():
    model = build(lambda m, x: WronglyBatchedForward.apply(m.a(x)), a=nn.Linear(3, 2))
    report = check(model, inputs(5, 3))
    assert report.path.forward and report.path.jvp_columns == 1


def test_own_function_with_one_derivative_is_refused():
    class Block(nn.Module):
        def forward(self, x):
            return OnceSquare.apply(x)

    model = nn.Sequential(nn.Linear(3, 2), nn.Sequential(Block(), nn.Linear(2, 2))).double()
    with pytest.raises(NotImplementedError) as caught:
        linear_model(model).probe(inputs(5, 3))
    # once_differentiable cuts the graph without an error; the adjoint test sees it
    assert "by forward mode it fails in '1.0' (Block)" in str(caught.value)
    assert "disagrees with backward" in str(caught.value)
    assert ", first in '1.0' (Block)" in str(caught.value)


def test_autocast_inside_forward():
    def forward(m, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = m.a(x)
        return m.b(h.float().tanh())

    torch.manual_seed(0)
    model = Calls(forward, a=nn.Linear(3, 3), b=nn.Linear(3, 2))
    assert linear_model(model).probe(inputs(5, 3).float()).adjoint_error < 0.03


def test_hooks_of_the_user_fire():
    model = build(lambda m, x: m.b(m.a(x).tanh()), a=nn.Linear(3, 3), b=nn.Linear(3, 2))
    seen = []
    model.a.register_forward_hook(lambda module, args, output: output * 2)
    model.b.register_forward_pre_hook(lambda *_: seen.append(1))
    check(model, inputs(5, 3))
    check(model, inputs(5, 3), "last_layer")
    assert seen


def test_backward_hooks_of_the_user():
    model = build(lambda m, x: m.b(m.a(x).tanh()), a=nn.Linear(3, 3), b=nn.Linear(3, 2))
    model.a.register_full_backward_hook(lambda *_: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(model, inputs(5, 3))


def test_sequence_outputs_of_any_rank():
    model = build(
        lambda m, ids: m.head(torch.tanh(m.embed(ids))),
        embed=nn.Embedding(5, 3),
        head=nn.Linear(3, 4),
    )
    assert check(model, IDS).path.forward
    model = build(
        lambda m, x: m.b(torch.tanh(m.a(x))), a=nn.Conv2d(1, 2, 3, padding=1), b=nn.Conv2d(2, 3, 1)
    )
    assert check(model, inputs(2, 1, 3, 3), class_dim=1).path.forward
