"""J of the networks people use: by factors, by ``torch.func`` and by reverse mode it is the same; and fits run."""

import warnings

import pytest
import torch
from daily import daily
from jacobians import Calls, X, check, linear_model, mlp, prepared, products
from models import Centred
from tiny import draw
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

IDS = torch.tensor([[0, 1, 2, 0], [3, 3, 0, 0]])
IGNORED = """There is a performance drop:UserWarning
Using padding=.same. with even kernel:UserWarning
enable_nested_tensor is True:UserWarning
`torch.nn.utils.weight_norm` is:FutureWarning
`gradient_checkpointing_enable` is:FutureWarning
`is_gradient_checkpointing` is:FutureWarning"""
pytestmark = [pytest.mark.filterwarnings(f"ignore:{words}") for words in IGNORED.splitlines()]


def build(forward, **layers):
    return prepared(Calls(forward, **layers))


def two_layers(forward=lambda m, x: m.b(m.a(x).tanh())):
    return build(forward, a=nn.Linear(3, 3), b=nn.Linear(3, 2))


def embedded(head=None, forward=lambda m, ids: m.head(m.embed(ids).tanh().mean(1)), **options):
    return build(forward, embed=nn.Embedding(5, 3, **options), head=head or nn.Linear(3, 2))


def tied(bias=False, **options):
    model = embedded(nn.Linear(3, 5, bias=bias), **options)
    model.head.weight = model.embed.weight
    return model


def recurrent(kind, both):
    rnn = kind(3, 2, 2, batch_first=True, bidirectional=both, dropout=0.5)
    head = nn.Linear(2 + 2 * both, 2)
    return build(lambda m, x: m.head(m.rnn(x)[0][:, -1]), rnn=rnn, head=head).train()


def normalised(norm):
    layers = {"conv": nn.Conv2d(1, 4, 3, padding=1), "norm": norm, "head": nn.Linear(4, 2)}
    model = build(lambda m, x: m.head(m.norm(m.conv(x)).relu().mean((2, 3))), **layers)
    model.train()(draw(4, 1, 3, 3))  # statistics that are not their initial values
    return model


def added_in_place(m, x):
    h = m.a(x)
    h += x
    h[:, 0] = h[:, 1] * 2
    return m.b(h.relu_())


def with_padding():
    layer = nn.TransformerEncoderLayer(4, 2, 5, batch_first=True, norm_first=True)
    forward = lambda m, x, mask: m.head(m.encoder(x, src_key_padding_mask=mask)[:, 0])  # noqa: E731
    model = build(forward, encoder=nn.TransformerEncoder(layer, 2), head=nn.Linear(4, 2))
    mask = torch.tensor([[False, False, True], [False, False, False]])
    return model, {"x": draw(2, 3, 4), "mask": mask}


def force(m, x):
    """The derivative of a network in its inputs, as of an energy."""
    return torch.func.vmap(torch.func.grad(lambda x: m.b(m.a(x).tanh()).sum()))(x)


def writing_buffers():
    def forward(m, x):
        h = m.a(x)
        m.count += 1
        m.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
        m.last = h.detach()
        return h * (m.mean + m.count)

    model = build(forward, a=nn.Linear(3, 3))
    model.register_buffer("count", torch.zeros(()))
    model.register_buffer("mean", torch.zeros(3).double())
    model.register_buffer("last", torch.zeros(0))
    return model


def of_normalised_weights(name):
    model = two_layers().train()
    getattr(parametrizations, name)(model.a)
    return model


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


class UnbatchedSquare(Square):
    @staticmethod
    def backward(ctx, u):
        u.sum().item()  # which vmap does not allow
        return 2 * u * ctx.saved_tensors[0]


class OnceSquare(Square):
    backward = staticmethod(torch.autograd.function.once_differentiable(Square.backward))


def repeated():
    def forward(m, x):
        for _ in range(3):
            x = m.inner(x).tanh()
        x = m.kernel(m.kernel(x[..., None].expand(-1, -1, 4)).sin()).sum(-1)
        return m.head(x)

    kernel = nn.Conv1d(3, 3, 3, padding=1)
    return build(forward, inner=nn.Linear(3, 3), head=nn.Linear(3, 2), kernel=kernel)


def positioned(flat):
    def forward(m, ids):
        places = torch.arange(ids.shape[1])
        return m.out((m.words(ids) + m.places(places if flat else places[None])).tanh().mean(1))

    tables = {"words": nn.Embedding(5, 3), "places": nn.Embedding(6, 3)}
    return build(forward, **tables, out=nn.Linear(3, 2))


def mixed():
    """Weights that act by a product, otherwise, in both ways, and not at all."""

    def forward(m, x):
        x = m.both(m.inner(x).tanh() * m.scale) + m.both.weight.sum(0)
        return m.head(m.norm(x))

    head = parametrizations.weight_norm(nn.Linear(4, 2))
    layers = {"inner": nn.Linear(3, 4), "both": nn.Linear(4, 4), "norm": nn.LayerNorm(4)}
    model = build(forward, **layers, head=head, spare=nn.Linear(2, 2))
    model.scale = nn.Parameter(torch.ones(4).double())
    return model


def hooked():
    model = net(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    model[0].register_forward_hook(lambda layer, args, output: output.sin() * args[0].sum(1, True))
    model[2].register_forward_pre_hook(lambda layer, args: (args[0] ** 2,))
    return model


def net(*layers):
    return prepared(nn.Sequential(*layers))


def convolution(layer, *shape):
    x = draw(*shape)
    head = nn.Linear(layer.float()(x.float()).flatten(1).shape[1], 2)
    return net(layer, nn.Tanh(), nn.Flatten(), head), x


NORMS = [
    *(nn.BatchNorm2d(4), nn.BatchNorm2d(4, track_running_stats=False), nn.SyncBatchNorm(4)),
    *(nn.GroupNorm(2, 4), nn.LayerNorm((4, 3, 3)), nn.RMSNorm(3)),
    nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
]
ACTIVATIONS = [
    *(nn.ReLU(True), nn.LeakyReLU(inplace=True), nn.SiLU(True), nn.Hardswish(True)),
    *(nn.ELU(inplace=True), nn.Dropout(inplace=True), nn.AlphaDropout()),
    *(nn.GELU(), nn.Hardsigmoid(), nn.Softplus(), nn.SELU(True)),
]
CONVS = {
    "1d": (nn.Conv1d(2, 3, 3, stride=2, padding=1), 4, 2, 9),
    "2d": (nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=(1, 0)), 4, 2, 7, 5),
    "grouped": (nn.Conv2d(4, 6, 3, groups=2, bias=False), 4, 4, 5, 5),
    "depthwise": (nn.Conv1d(3, 6, 3, groups=3), 4, 3, 5),
    "dilated": (nn.Conv2d(2, 3, 3, dilation=2, padding=2), 4, 2, 6, 6),
    "same": (nn.Conv2d(2, 3, (3, 4), dilation=(2, 1), padding="same"), 4, 2, 5, 4),
    "valid": (nn.Conv1d(2, 3, 2, padding="valid"), 4, 2, 5),
    "reflected": (nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), 4, 2, 5, 5),
    "one place": (nn.Conv2d(2, 30, 3), 4, 2, 3, 3),
}
OF_TWO_LAYERS = {
    "gated linear unit": lambda m, x: F.glu(m.b(m.a(x))),
    "a branch on the data": lambda m, x: m.b(m.a(x)) * (2 if m.a(x).sum().item() > 0 else 3),
    "Fourier transform": lambda m, x: m.b(torch.view_as_real(torch.fft.fft(m.a(x))).square().sum(-1)),
    "unused parameter": lambda m, x: m.a(x),
    "random numbers": lambda m, x: m.b(m.a(x)) + 0 * torch.rand(2),
    "residual added in place": added_in_place,
    "detach": lambda m, x: m.b(m.a(x) * m.a(x).detach()),
    "arguments by name": lambda m, x: F.linear(weight=m.b.weight, input=F.linear(x, bias=m.a.bias, weight=m.a.weight).tanh(), bias=m.b.bias),
}  # fmt: skip
MAPS = {"a": nn.Conv2d(1, 2, 3, padding=1), "b": nn.Conv2d(2, 3, 1)}
WORDS = torch.tensor([[0, 1, 2, 0], [1, 1, 4, 2], [3, 2, 2, 2], [4, 0, 1, 3]])
SEQUENCE = embedded(forward=lambda m, ids: m.head(m.embed(ids).tanh()))
SHARED = nn.Linear(3, 3)
LAST_AXIS = {"memory_format": torch.channels_last}
NARROW = nn.Linear(10, 40), nn.Softmax(-1), nn.Flatten()
LAST = {"pixels": nn.Conv2d(4, 200, 1), "grouped pixels": nn.Conv2d(4, 200, 1, groups=2)}
BY_FACTORS = {
    **{name: lambda f=f: (two_layers(f), X) for name, f in OF_TWO_LAYERS.items()},
    **{f"convolution, {n}": lambda own=own: convolution(*own) for n, own in CONVS.items()},
    **{str(n): lambda n=n: (normalised(n), draw(2, 1, 3, 3)) for n in NORMS if n is not NORMS[1]},
    **{str(layer): lambda a=layer: (net(nn.Linear(3, 4), a, nn.Linear(4, 2)).train(), X) for layer in ACTIVATIONS},
    **{
        f"a head at every place, {name}": lambda h=head: (net(nn.Conv2d(2, 4, 1), nn.Tanh(), h), draw(2, 2, 3, 1), "last_layer", None, 1)
        for name, head in LAST.items()
    },
    **{
        f"part of the weights, {own}": lambda own=own: (net(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), X, own)
        for own in (["2.weight"], ["2.*"], ["0.*"], "last_layer")
    },
    **{
        f"the last layer before {layer}": lambda layer=layer: (mlp(layer), X, ["4.*"])
        for layer in (nn.Softmax(-1), nn.ReLU(True), nn.Unflatten(-1, (2, 1)), nn.LayerNorm(2, elementwise_affine=False))
    },
    "frozen weights": lambda: (mlp().requires_grad_(False), X, ["0.*", "4.*"]),
    "a weight without influence": lambda: (mixed(), X, ["inner.*", "spare.*"]),
    "channels last": lambda: (net(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).to(**LAST_AXIS), draw(4, 2, 6, 6).to(**LAST_AXIS)),
    "modules called several times": lambda: (repeated(), X),
    "hooks": lambda: (hooked(), X),
    "a wide last layer": lambda: (net(nn.Linear(3, 520)), X[:2]),
    "outputs of three axes": lambda: (net(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), draw(3, 5, 3)),
    "embedding": lambda: (embedded(), IDS),
    "padding_idx": lambda: (embedded(padding_idx=0), IDS),
    "padding_idx from the end": lambda: (embedded(padding_idx=-5), IDS),
    "sparse gradients": lambda: (embedded(sparse=True), IDS),
    "tied embedding": lambda: (tied(), IDS),
    "tied last layer": lambda: (tied(), IDS, "last_layer"),
    "tokens alone": lambda: (net(nn.Embedding(5, 3, padding_idx=1), nn.Flatten(), nn.Linear(12, 2)), WORDS),
    "positions": lambda: (positioned(True), WORDS[:, :3]),
    "positions in a batch of one": lambda: (positioned(False), WORDS),
    "outputs of a sequence": lambda: (SEQUENCE, IDS),
    "maps of classes": lambda: (build(lambda m, x: m.b(m.a(x).tanh()), **MAPS), draw(3, 1, 3, 3), None, None, 1),
    "one layer under two names": lambda: (build(lambda m, x: m.head(m.b(m.a(x).tanh())), a=SHARED, b=SHARED, head=nn.Linear(3, 2)), X),
    "checkpointing": lambda: (two_layers(lambda m, x: m.b(checkpoint(m.a, x, use_reentrant=False).tanh())), X),
    "tied padding_idx": lambda: (tied(True, padding_idx=0), IDS),
    "functional padding_idx": lambda: (embedded(forward=lambda m, ids: m.head(F.embedding(ids, m.embed.weight, 0).sin().mean(1))), IDS),
    "no_grad inside": lambda: (two_layers(gated_without_gradient), X),
    "a user's function": lambda: (two_layers(lambda m, x: Square.apply(m.a(x))), X),
    "a single row": lambda: (net(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), X[:1]),
}  # fmt: skip
FORWARD = {
    "GRU": lambda: (recurrent(nn.GRU, False), draw(2, 3, 3)),
    "LSTM": lambda: (recurrent(nn.LSTM, True), draw(2, 3, 3)),
    **{f"{n}, all": lambda n=n: (normalised(n), draw(2, 1, 3, 3), "all") for n in NORMS},
    "rows that depend on each other": lambda: (prepared(Centred(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))), X),
    "convolution, 3d": lambda: convolution(nn.Conv3d(2, 3, (3, 2, 1), dilation=(2, 1, 1)), 4, 2, 6, 3, 2),
    "many outputs before the last": lambda: (net(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 520), nn.Tanh()), X[:2]),
    "many gradients": lambda: (net(*NARROW), draw(2, 6, 10)),
    "sequences with examples on the second axis": lambda: (build(lambda m, x: m.b(m.a(x.transpose(0, 1)).tanh().mean(0)), a=nn.Linear(3, 4), b=nn.Linear(4, 2)), draw(4, 4, 3)),
    "a bias alone": lambda: (two_layers(), X, ["a.bias"]),
    "a weight that acts otherwise": lambda: (mixed(), X, ["inner.*", "both.*"]),
    "PReLU": lambda: (net(nn.Linear(3, 4), nn.PReLU(), nn.Linear(4, 2)), X),
    "buffers that a pass writes to": lambda: (writing_buffers(), X),
    "large max_norm": lambda: (embedded(max_norm=100.0), IDS),
    "transformer encoder with padding": with_padding,
    "orthogonal weights": lambda: (mlp(parametrizations.orthogonal(nn.Linear(2, 2))).double(), X),
    "spectral_norm": lambda: (of_normalised_weights("spectral_norm"), X),
    "derivative inside": lambda: (two_layers(force), X),
}  # fmt: skip
REVERSE = {
    "RReLU": lambda: (net(nn.Linear(3, 4), nn.RReLU(), nn.Linear(4, 2)).train(), X),
    "weight_norm": lambda: (of_normalised_weights("weight_norm"), X),
    "vmap": lambda: (build(lambda m, x: UnbatchedSquare.apply(m.b(m.a(x).tanh())) * m.a.weight.sum(), a=nn.Linear(3, 2), b=nn.Linear(2, 2)), X),
}  # fmt: skip
BY_BOTH = "no_grad inside", "a user's function", "random numbers"
"""With factors, but without forward mode."""


@pytest.mark.parametrize("name", [*BY_FACTORS, *FORWARD, *REVERSE])
def test_products_are_those_of_reverse_mode(name):
    """Of buffers, modes, random state and weights nothing changes, and the probe says which way is used."""
    model, *arguments = {**BY_FACTORS, **FORWARD, **REVERSE}[name]()
    flat = [m._flat_weights for m in model.modules() if isinstance(m, nn.RNNBase)]
    report, factors = check(model, *arguments, defined=name != "checkpointing")
    assert bool(factors) == (name in BY_FACTORS)
    assert report.forward == (name not in REVERSE and name not in BY_BOTH)
    assert getattr(getattr(model, "embed", None), "sparse", False) == (name == "sparse gradients")
    for layer in model.modules():
        if isinstance(layer, nn.RNNBase):
            assert layer._flat_weights is flat[0]


def test_max_norm_shortens_a_copy_of_the_weights():
    model = embedded(max_norm=0.5)
    linear, before = linear_model(model), model.embed.weight.clone()
    linear.probe(IDS)
    linear.leave_factors()
    w, u = torch.ones(2, linear.layout.size).double(), torch.ones(2, 2, 2).double()
    _, Jw, total = products(linear, IDS, w, u)
    assert linear.ways.forward and torch.equal(model.embed.weight, before)
    torch.testing.assert_close((Jw * u).sum((1, 2)), (total * w).sum(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_dimensional_parameters(dtype):
    model = Calls(lambda m, x: (0.5 * m.scale + 1) * m.a(x * m.scale) + m.shift, a=nn.Linear(3, 2))
    model.scale, model.shift = (nn.Parameter(torch.tensor(own)) for own in (2.0, 0.5))
    assert check(model.to(dtype), draw(4, 3).to(dtype), rtol=1e-5)[0].forward


def test_functions_with_one_derivative_raise_and_large_batches_hide_none():
    class Block(nn.Module):
        def forward(self, x):
            return OnceSquare.apply(x)

    model = nn.Sequential(nn.Linear(3, 2), Block(), nn.PReLU()).double()
    # once_differentiable cuts the graph without an error; the adjoint test finds it
    words = r"forward mode: .*; two reverse passes: error"
    with pytest.raises(NotImplementedError, match=words):
        linear_model(model).probe(X)
    gated = build(gated_without_gradient, a=nn.Linear(2, 100), b=nn.Linear(100, 1000))
    assert linear_model(gated).probe(draw(64, 2)).forward is False
    a, b = nn.Linear(3, 5), nn.Linear(3, 5)
    partly = build(lambda m, x: m.c(m.a(x) + OnceSquare.apply(m.b(x))), a=a, b=b, c=nn.PReLU())
    with pytest.raises(NotImplementedError):
        linear_model(partly).probe(draw(512, 3))
    # the last layer of normalised weights has forward mode
    model = of_normalised_weights("weight_norm")
    assert check(model, X, ["b.*"])[0].adjoint_error < 1e-12


def test_autocast_inside_and_hooks_of_the_user():
    def forward(m, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = m.a(x)
        return m.b(h.float().tanh())

    assert linear_model(two_layers(forward).float()).probe(X.float()).adjoint_error < 0.03
    model = two_layers()
    model.a.register_full_backward_hook(lambda *_: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(model, X, defined=False)


# networks of torchvision at reduced sizes, and of transformers with their default attention


@pytest.mark.parametrize("name", ["mobilenet", "swin"])
@pytest.mark.parametrize("selection", [None, "last_layer"])
@pytest.mark.slow
def test_torchvision(name, selection):
    models = pytest.importorskip("torchvision.models")
    torch.manual_seed(0)
    if name == "swin":
        model = models.SwinTransformer([2, 2], 8, [2, 1], [1, 2], [2, 2], num_classes=2)
    else:
        model = models.mobilenet_v3_small(num_classes=2)
    report, factors = check(model.double().train(), draw(2, 3, 32, 32), selection)
    assert report.forward
    assert bool(factors) == (selection is not None or name == "mobilenet")


TOKENS = torch.tensor([[5, 6, 7, 1], [8, 9, 1, 1]])
TEXT = {"input_ids": TOKENS, "attention_mask": (TOKENS != 1).long()}
SINGLE = {"rtol": 1e-5}  # LLaMA's RMSNorm computes in float32, whatever the weights are
WIDTHS = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": 2}
WIDTHS |= {"intermediate_size": 8}
SMALL, ENDS = {"vocab_size": 12, "pad_token_id": 1}, {"bos_token_id": 0, "eos_token_id": 2}
BERT = {**WIDTHS, **SMALL, "max_position_embeddings": 8}
CONFIGS = {"Bert": BERT, "Llama": {**BERT, **ENDS, "num_key_value_heads": 1}}
TASKS = ("Bert", "SequenceClassification"), ("Llama", "CausalLM")


def of_transformers(kind, task, **options):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(**CONFIGS[kind], **options)
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}For{task}")(config).double().train()


@pytest.mark.parametrize("kind, task", daily(*TASKS, rest=[("Llama", "SequenceClassification")]))
def test_transformers(kind, task):
    model = of_transformers(kind, task)
    assert model.config._attn_implementation == "sdpa"
    options = {} if kind == "Bert" else SINGLE
    report, factors = check(model, TEXT, **options)
    assert report.forward
    assert bool(factors) == (kind == "Bert")
    assert check(model, TEXT, "last_layer", **options)[1]
    if kind == "Llama":
        assert not any("norm" in name for name in linear_model(model).layout.names)


@pytest.mark.slow
def test_only_the_adapters_of_lora_and_a_trained_head_are_in_the_posterior():
    peft = pytest.importorskip("peft")
    options = {"lora_dropout": 0.5, "target_modules": ["q_proj", "v_proj"], "task_type": "SEQ_CLS"}
    model = of_transformers("Llama", "SequenceClassification")
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, **options))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero at first, where A moves no output
            parameter.data.normal_()
    names = linear_model(model.double()).layout.names
    assert len(names) == 9 and sum("lora_" in name for name in names) == 8
    assert check(model, TEXT, **SINGLE)[0].forward
    assert check(model, TEXT, ["*score.modules_to_save*"], **SINGLE)[1]
