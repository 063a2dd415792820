"""Channel permutation in a model: the function stays, N:M keeps more, and undo restores every bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nmsparse.functional import magnitude_mask
from nmsparse.nn._permute import Permuted, permute_channels_
from nmsparse.pattern import Pattern

PATTERN = Pattern("2:4")
FIXED = "the order of its input channels is fixed by "


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Every layer that 2:4 fits."""
    kinds = [(name, m) for name, m in model.named_modules() if type(m) in (nn.Linear, nn.Conv2d)]
    return {name: m for name, m in kinds if m.weight.shape[1] % 4 == 0}


def kept(layers: dict[str, nn.Module]) -> float:
    total = 0.0
    for layer in layers.values():
        magnitude = layer.weight.detach().abs().double().movedim(1, -1)
        total += float(magnitude[magnitude_mask(magnitude, PATTERN)].sum())
    return total


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def is_unchanged(model: nn.Module, before: dict[str, Tensor]) -> bool:
    return all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())


def randomise(model: nn.Module) -> nn.Module:
    """Norms start with equal numbers for all channels, which would hide an order that was not carried along."""
    with torch.no_grad():
        for module in model.modules():
            for key in ("weight", "bias", "running_mean", "running_var"):
                tensor = getattr(module, key, None)
                if tensor is not None and tensor.ndim == 1:
                    tensor.uniform_(0.5, 1.5)
    return model


class Fn(nn.Module):
    """A model of the given modules whose forward is a function of it and its input."""

    def __init__(self, forward: Callable[..., Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self.f = forward
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        return self.f(self, x)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 24), nn.GELU(), nn.Linear(24, 8))


class Residual(nn.Module):
    """A stream that two blocks add to; pre-norm, with an up and a down projection."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 32)
        self.norms = nn.ModuleList([nn.LayerNorm(32), nn.RMSNorm(32)])
        self.ups = nn.ModuleList([nn.Linear(32, 64), nn.Linear(32, 64, bias=False)])
        self.downs = nn.ModuleList([nn.Linear(64, 32), nn.Linear(64, 32)])
        self.last = nn.LayerNorm(32, elementwise_affine=False)
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            x = x + down(F.silu(up(norm(x)))) / x.shape[-1] ** 0.5
        return self.head(self.last(x))


def concatenated() -> nn.Module:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        a, b = F.relu(m.a(x)), torch.tanh(m.b(x))
        return m.out(m.mid(m.norm(torch.cat([a, b, a], dim=-1))))

    return Fn(
        forward, a=nn.Linear(16, 16), b=nn.Linear(16, 32), norm=nn.LayerNorm(64), mid=nn.Linear(64, 16), out=nn.Linear(16, 8)
    )


def shared_consumers() -> nn.Module:
    return Fn(
        lambda m, x: (h := F.gelu(m.up(x))) is not None and m.gate(h) * m.value(h),
        up=nn.Linear(16, 32),
        gate=nn.Linear(32, 8),
        value=nn.Linear(32, 8),
    )


def called_twice() -> nn.Module:
    return Fn(
        lambda m, x: m.out(F.relu(m.loop(F.relu(m.loop(m.up(x)))))),
        up=nn.Linear(16, 32),
        loop=nn.Linear(32, 32),
        out=nn.Linear(32, 8),
    )


def embedded() -> nn.Module:
    return Fn(
        lambda m, x: m.out(m.emb((x[..., 0] > 0).long()) + m.up(x)),
        emb=nn.Embedding(2, 32),
        up=nn.Linear(16, 32),
        out=nn.Linear(32, 8),
    )


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.InstanceNorm2d(32, affine=True),
        nn.Conv2d(32, 16, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 32),
        nn.BatchNorm1d(32),
        nn.Linear(32, 8),
    )


class ConvBlock(nn.Module):
    """Bottleneck with a projected shortcut and channel attention, as in residual networks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 1)
        self.a, self.b, self.skip = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 32, 3, padding=1), nn.Conv2d(16, 32, 1)
        self.squeeze, self.excite = nn.Conv2d(32, 8, 1), nn.Conv2d(8, 32, 1)
        self.relu = nn.ReLU()
        self.out = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.stem(x))
        y = self.b(self.relu(self.a(x)))
        y = y * torch.sigmoid(self.excite(self.relu(self.squeeze(y.mean((2, 3), keepdim=True)))))
        y += self.skip(x)
        return self.out(F.avg_pool2d(self.relu(y), 2).mean([-2, -1]))


def dense_block() -> nn.Module:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        x = m.stem(x)
        x = torch.cat([x, m.a(F.relu(m.norm_a(x)))], 1)
        x = torch.cat([x, m.b(F.relu(m.norm_b(x)))], 1)
        return m.out(x)

    return Fn(
        forward,
        stem=nn.Conv2d(3, 16, 1),
        norm_a=nn.BatchNorm2d(16),
        a=nn.Conv2d(16, 8, 3, padding=1),
        norm_b=nn.BatchNorm2d(24),
        b=nn.Conv2d(24, 8, 3, padding=1),
        out=nn.Conv2d(32, 8, 1),
    )


def grouped_net() -> nn.Module:
    """Groups of 16 and 8 input channels meet in one tensor; a depthwise convolution passes channels on."""
    return Fn(
        lambda m, x: m.out(F.relu(m.two(h := m.depth(F.relu(m.stem(x))))) + m.four(h)),
        stem=nn.Conv2d(3, 32, 1),
        depth=nn.Conv2d(32, 32, 3, padding=1, groups=32),
        two=nn.Conv2d(32, 48, 3, padding=1, groups=2),
        four=nn.Conv2d(32, 48, 1, groups=4),
        out=nn.Conv2d(48, 8, 1),
    )


TOKENS, IMAGES = (4, 5, 16), (2, 3, 6, 6)
MODELS = [
    (mlp, TOKENS),
    (Residual, TOKENS),
    (concatenated, TOKENS),
    (shared_consumers, TOKENS),
    (called_twice, TOKENS),
    (embedded, TOKENS),
    (conv_net, IMAGES),
    (ConvBlock, IMAGES),
    (dense_block, IMAGES),
    (grouped_net, IMAGES),
]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def permuted(model: nn.Module) -> Permuted:
    return permute_channels_(model, layers_of(model), PATTERN)


@pytest.mark.parametrize(("build", "shape"), MODELS)
@pytest.mark.parametrize("is_training", [False, True])
def test_function_stays_and_more_is_kept(build: Callable[[], nn.Module], shape: tuple[int, ...], is_training: bool) -> None:
    # in fp64: norms over a small batch divide by little, and sums in another order then differ by more than fp32's usual rounding
    model = randomise(build()).double().train(is_training)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    x = torch.randn(shape, dtype=torch.float64)
    layers, parameters = layers_of(model), list(model.parameters())
    buffers = snapshot(model)
    before, kept_before = model(x), kept(layers)
    model.load_state_dict(buffers)  # running statistics of the call above
    result = permuted(model)
    torch.testing.assert_close(model(x), before, rtol=1e-9, atol=1e-9)
    assert kept(layers) > kept_before * 1.001
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert all(parameter.requires_grad for parameter in parameters)
    assert model.training is is_training
    assert result.moves


@pytest.mark.parametrize(("build", "shape"), MODELS)
def test_undo_restores_every_bit(build: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    model = randomise(build())
    before = snapshot(model)
    result = permuted(model)
    assert not is_unchanged(model, before)
    result.undo_()
    assert is_unchanged(model, before)
    result.undo_()
    assert is_unchanged(model, before)


@pytest.mark.parametrize(("build", "shape"), MODELS)
def test_gradients_of_the_input_stay(build: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    model = randomise(build()).eval()
    x = torch.randn(shape, requires_grad=True)
    (before,) = torch.autograd.grad(model(x).square().sum(), x)
    permuted(model)
    (after,) = torch.autograd.grad(model(x).square().sum(), x)
    torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-4)


def test_all_free_layers_move_and_the_others_say_why() -> None:
    assert set(permuted(mlp()).skipped) == {"0"}
    assert permuted(mlp()).skipped["0"] == FIXED + "the model's input"
    assert permuted(Residual()).skipped == {"stem": FIXED + "the model's input"}
    assert permuted(conv_net()).skipped == {}
    assert permuted(ConvBlock()).skipped == {}
    assert permuted(dense_block()).skipped == {}
    assert permuted(grouped_net()).skipped == {}
    assert permuted(called_twice()).skipped == {"up": FIXED + "the model's input"}


def test_target_layers_that_share_an_input_decide_its_order_together() -> None:
    model = shared_consumers()
    gate, both = {"gate": model.gate}, {"gate": model.gate, "value": model.value}
    result = permute_channels_(model, both, PATTERN)
    together = kept(gate), kept(both)
    result.undo_()
    permute_channels_(model, gate, PATTERN)
    alone = kept(gate), kept(both)
    assert alone[0] > together[0]
    assert alone[1] < together[1]


def test_moves_name_tensor_dim_and_permutation() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    before = snapshot(model)
    result = permuted(model)
    moved = {(name, dim): p for name, dim, p in result.moves}
    assert set(moved) == {("0.weight", 0), ("0.bias", 0), ("1.weight", 1)}
    order = moved["1.weight", 1]
    assert order.sort().values.equal(torch.arange(16))
    assert model[0].weight.equal(before["0.weight"][order])
    assert model[1].weight.equal(before["1.weight"][:, order])
    assert model[1].bias.equal(before["1.bias"])


def test_search_finds_what_is_hidden() -> None:
    """Large columns side by side: 2:4 must drop half of them, and dealt evenly none."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    with torch.no_grad():
        model[2].weight.copy_(torch.tensor([9.0, 9, 9, 9, 1, 1, 1, 1]).expand(4, 8))
    assert kept({"2": model[2]}) == 4 * (9 * 2 + 1 * 2)
    permuted(model)
    assert kept({"2": model[2]}) == 4 * (9 * 4)


def test_nothing_moves_where_nothing_is_lost() -> None:
    model = mlp()
    with torch.no_grad():
        for layer in layers_of(model).values():
            layer.weight.mul_(magnitude_mask(layer.weight, PATTERN))
    before = snapshot(model)
    result = permuted(model)
    assert not result.moves
    assert is_unchanged(model, before)
    assert result.skipped["3"] == "no other order of its input channels keeps more"


def test_time_limit_of_zero_changes_nothing() -> None:
    model = mlp()
    result = permute_channels_(model, layers_of(model), PATTERN, time_limit=0.0)
    assert not result.moves


def test_dtype_and_memory_format_stay() -> None:
    model = conv_net().to(torch.bfloat16).to(memory_format=torch.channels_last)
    strides = [parameter.stride() for parameter in model.parameters()]
    before = snapshot(model)
    result = permuted(model)
    assert result.moves
    assert [parameter.stride() for parameter in model.parameters()] == strides
    result.undo_()
    assert is_unchanged(model, before)


FROZEN = {
    "flatten of an image": (
        nn.Sequential(nn.Conv2d(3, 16, 3), nn.Flatten(), nn.Linear(256, 8)),
        IMAGES,
        {"2": "Flatten (1)"},
    ),
    "linear on pixels": (nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Linear(6, 8)), IMAGES, {}),
    "group norm": (
        nn.Sequential(nn.Conv2d(3, 16, 1), nn.GroupNorm(4, 16), nn.Conv2d(16, 8, 1)),
        IMAGES,
        {"2": "GroupNorm (1)"},
    ),
    "softmax": (
        nn.Sequential(nn.Linear(16, 16), nn.Softmax(-1), nn.Linear(16, 8)),
        TOKENS,
        {"0": "the model's input", "2": "Softmax (1)"},
    ),
    "norm over more than channels": (
        nn.Sequential(nn.Linear(16, 16), nn.LayerNorm((5, 16)), nn.Linear(16, 8)),
        TOKENS,
        {"0": "the model's input", "2": "LayerNorm (1)"},
    ),
    "gated linear unit": (
        nn.Sequential(nn.Linear(16, 32), nn.GLU(), nn.Linear(16, 8)),
        TOKENS,
        {"0": "the model's input", "2": "GLU (1)"},
    ),
    "heads": (
        Fn(
            lambda m, x: m.b(m.a(x).unflatten(-1, (4, 4)).transpose(1, 2).transpose(1, 2).flatten(2)),
            a=nn.Linear(16, 16),
            b=nn.Linear(16, 8),
        ),
        TOKENS,
        {"a": "the model's input", "b": "unflatten"},
    ),
    "slice": (
        Fn(lambda m, x: m.b(m.a(x)[..., :16]), a=nn.Linear(16, 32), b=nn.Linear(16, 8)),
        TOKENS,
        {"a": "the model's input", "b": "getitem"},
    ),
    "sum with the input": (
        Fn(lambda m, x: m.b(m.a(x) + x), a=nn.Linear(16, 16), b=nn.Linear(16, 8)),
        TOKENS,
        {"a": "the model's input", "b": "the model's input"},
    ),
    "hidden channels returned": (
        Fn(lambda m, x: (m.b(h := m.a(x)), h)[1] + 0, a=nn.Linear(16, 16), b=nn.Linear(16, 8)),
        TOKENS,
        {"a": "the model's input", "b": "the model's output"},
    ),
    "parts that split groups": (
        Fn(lambda m, x: m.c(torch.cat([m.a(x), m.b(x)], -1)), a=nn.Linear(16, 6), b=nn.Linear(16, 10), c=nn.Linear(16, 8)),
        TOKENS,
        {"a": "the model's input", "b": "the model's input", "c": "parts that are not multiples of 4"},
    ),
    "parts that start within a group": (
        Fn(
            lambda m, x: m.d(torch.cat([m.a(x), m.b(x), m.c(x)], -1)),
            a=nn.Linear(16, 6),
            b=nn.Linear(16, 16),
            c=nn.Linear(16, 10),
            d=nn.Linear(32, 8),
        ),
        TOKENS,
        {"d": "parts that are not multiples of 4"},
    ),
    "sum with what is fixed": (
        Fn(
            lambda m, x: m.c(m.a(x) + (h := m.b(x))) + h.softmax(-1)[..., :8],
            a=nn.Linear(16, 16),
            b=nn.Linear(16, 16),
            c=nn.Linear(16, 8),
        ),
        TOKENS,
        {"c": "softmax"},
    ),
    "sum with what was fixed before": (
        Fn(
            lambda m, x: (h := m.b(x)).softmax(-1)[..., :8] + m.c(m.a(x) + h),
            a=nn.Linear(16, 16),
            b=nn.Linear(16, 16),
            c=nn.Linear(16, 8),
        ),
        TOKENS,
        {"c": "softmax"},
    ),
    "tokens side by side": (
        Fn(lambda m, x: m.c(torch.cat([m.a(x), m.b(x)], 1)), a=nn.Linear(16, 16), b=nn.Linear(16, 16), c=nn.Linear(16, 8)),
        TOKENS,
        {"a": "the model's input", "b": "the model's input", "c": "Linear (c)"},
    ),
    "attention": (
        Fn(
            lambda m, x: m.out(m.attention(h := m.up(x), h, h)[0]),
            up=nn.Linear(16, 16),
            attention=nn.MultiheadAttention(16, 2, batch_first=True),
            out=nn.Linear(16, 8),
        ),
        TOKENS,
        {"up": "the model's input", "out": "MultiheadAttention (attention)"},
    ),
    "weight used by hand": (
        Fn(lambda m, x: m.b(m.a(x)) + F.linear(x, m.a.weight)[..., :8], a=nn.Linear(16, 16), b=nn.Linear(16, 8)),
        TOKENS,
        {"a": "the model's input", "b": "a.weight, which is used elsewhere too"},
    ),
}


@pytest.mark.parametrize("case", FROZEN)
def test_what_fixes_the_order_leaves_every_bit(case: str) -> None:
    model, shape, reasons = FROZEN[case]
    model(torch.randn(shape))  # the case itself is a working model
    before = snapshot(model)
    result = permuted(model)
    assert not result.moves
    assert is_unchanged(model, before)
    assert {name: why for name, why in result.skipped.items() if name in reasons} == {
        name: FIXED + why for name, why in reasons.items()
    }
    assert set(result.skipped) >= set(layers_of(model)) - {"attention.out_proj"}


class Named(nn.Linear):
    pass


def test_layer_of_a_subclass_says_so() -> None:
    model = nn.Sequential(nn.Linear(16, 32), Named(32, 8))
    result = permute_channels_(model, {"1": model[1]}, PATTERN)
    assert result.skipped == {"1": "channels are not followed through Named, a subclass"}
    assert not result.moves


def test_layer_inside_a_module_that_is_not_opened_says_so() -> None:
    model = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True))
    result = permuted(model)
    assert result.skipped["0.linear2"] == "forward does not call it by itself"
    assert not result.moves


def test_tied_weights_are_left_alone() -> None:
    model = Fn(
        lambda m, x: m.head(m.down(F.relu(m.up(m.emb((x > 0).long().sum(-1)))))),
        emb=nn.Embedding(17, 16),
        up=nn.Linear(16, 32),
        down=nn.Linear(32, 16),
        head=nn.Linear(16, 17, bias=False),
    )
    model.head.weight = model.emb.weight
    before = snapshot(model)
    x = torch.randn(TOKENS)
    y = model(x)
    result = permuted(model)
    torch.testing.assert_close(model(x), y, rtol=1e-4, atol=1e-5)
    assert model.head.weight is model.emb.weight
    assert model.emb.weight.equal(before["emb.weight"])
    assert result.skipped["up"] == FIXED + "emb.weight, which is used elsewhere too"
    assert "down" not in result.skipped


def test_weights_that_share_memory_are_left_alone() -> None:
    model = mlp()
    model.add_module("spare", nn.Identity())
    model.spare.alias = model[3].weight.detach()
    result = permuted(model)
    assert "3.weight" in result.skipped["3"]
    assert "3.weight" in result.skipped["5"]


class Branches(nn.Module):
    """Paths that depend on the mode and on an optional input: all of them must survive."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.aux, self.other = nn.Linear(16, 32), nn.Linear(32, 8), nn.Linear(32, 8), nn.Linear(16, 32)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        h = self.a(x) if y is None else self.other(y)
        return self.b(h) + self.aux(h) if self.training else self.b(h)


def test_every_path_through_the_model_survives() -> None:
    model = Branches()
    x, y = torch.randn(2, *TOKENS)
    calls = [(mode, args) for mode in (True, False) for args in ((x,), (x, y))]
    before = [model.train(mode)(*args) for mode, args in calls]
    assert permuted(model).moves
    for (mode, args), expected in zip(calls, before, strict=True):
        torch.testing.assert_close(model.train(mode)(*args), expected, rtol=1e-4, atol=1e-5)


def data_dependent() -> nn.Module:
    return Fn(lambda m, x: m.b(m.a(x)) if x.sum() > 0 else m.b(-m.a(x)), a=nn.Linear(16, 32), b=nn.Linear(32, 8))


def hooked() -> nn.Module:
    model = mlp()
    model[0].register_forward_hook(lambda *_: None)
    return model


def patched() -> nn.Module:
    model = mlp()
    model[0].forward = lambda x: F.linear(x, model[0].weight).cumsum(-1)
    return model


def half_used() -> nn.Module:
    model = mlp()
    return Fn(lambda m, x: m.net(x), net=model, probe=nn.Linear(32, 2))


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (data_dependent, "torch.fx cannot trace"),
        (hooked, "has a forward hook"),
        (patched, "a replaced forward"),
        (half_used, "does not use probe.weight"),
    ],
)
def test_model_that_cannot_be_followed_is_unchanged(build: Callable[[], nn.Module], why: str) -> None:
    model = build()
    before = snapshot(model)
    result = permuted(model)
    assert set(result.skipped) == set(layers_of(model))
    assert all(why in reason for reason in result.skipped.values())
    assert not result.moves
    assert is_unchanged(model, before)


class Writes(nn.Module):
    """A forward with side effects of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 8)
        self.register_buffer("calls", torch.zeros(()))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        self.seen.append(x)
        self.last = x
        torch.rand(2)
        return self.b(self.a(x))


def test_tracing_leaves_no_trace() -> None:
    model = Writes().eval()
    model.b.train()
    state = torch.get_rng_state()
    assert permuted(model).moves
    assert torch.get_rng_state().equal(state)
    assert float(model.calls) == 0
    assert model.seen == []
    assert not hasattr(model, "last")
    assert [module.training for module in model.modules()] == [False, False, True]


def test_transformers_conv1d_is_followed() -> None:
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    model = nn.Sequential(conv1d(32, 16), nn.GELU(), conv1d(8, 32))
    nn.init.normal_(model[0].bias)
    x = torch.randn(TOKENS)
    before, bits = model(x), snapshot(model)
    result = permute_channels_(model, {"0": model[0], "2": model[2]}, PATTERN)
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)
    assert set(result.skipped) == {"0"}
    result.undo_()
    assert is_unchanged(model, bits)


def test_transformers_model_is_left_as_it_is() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    layers = {name: module for name, module in model.named_modules() if type(module).__name__ == "Conv1D"}
    before = snapshot(model)
    result = permute_channels_(model, layers, PATTERN)
    assert set(result.skipped) == set(layers)
    assert is_unchanged(model, before)


def test_state_dict_of_a_permuted_model_loads_into_a_new_one() -> None:
    model = Residual()
    permuted(model)
    again = Residual()
    again.load_state_dict(model.state_dict())
    x = torch.randn(TOKENS)
    assert again(x).equal(model(x))


def three_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 4))


class TestASP:
    """The recipe that uses it."""

    def test_permutation_keeps_the_function_and_more_weight_and_is_undone(self) -> None:
        import nmsparse as nm

        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 4))
        before = {key: value.clone() for key, value in model.state_dict().items()}
        x = torch.randn(4, 16)
        expected = model(x)
        plain = (model[2].weight.abs() * nm.functional.magnitude_mask(model[2].weight, "2:4")).sum()
        run = nm.sparsify_(model, nm.ASP("2:4", permute=True))
        assert nm.effective_weight(model[2]).abs().sum() > plain
        assert "0 (permutation)" in run.skipped  # the model's input keeps its order
        nm.densify_(model)
        assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
        torch.testing.assert_close(model(x), expected)

    def test_frozen_model_stays_permuted_and_obeys_the_pattern(self) -> None:
        import nmsparse as nm

        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 4))
        nm.sparsify_(model, nm.ASP("2:4", permute=True))
        model.eval()
        x = torch.randn(4, 16)
        expected = model(x)
        nm.freeze_(model)
        torch.testing.assert_close(model(x), expected)
        assert nm.functional.violations(model[2].weight, "2:4") == 0

    def test_undo_survives_moving_the_model_and_resuming(self) -> None:
        import nmsparse as nm

        def build() -> nn.Module:
            torch.manual_seed(0)
            return nn.Sequential(
                nn.Conv2d(8, 16, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 1), nn.Conv2d(8, 4, 1)
            ).eval()

        model, x = build(), torch.randn(2, 8, 3, 3)
        original = {key: value.clone() for key, value in model.state_dict().items()}
        expected = model(x)
        run = nm.sparsify_(model, nm.ASP("2:4", permute=True), targets=["3"])
        run.attach(torch.optim.SGD(model.parameters(), lr=0.1))
        saved, weights = run.state_dict(), {key: value.clone() for key, value in model.state_dict().items()}
        assert saved["permuted"]
        model.double()
        nm.densify_(model)
        assert all(torch.equal(original[key], value.to(original[key].dtype)) for key, value in model.state_dict().items())
        torch.testing.assert_close(model.float()(x), expected)

        resumed = build()
        with torch.no_grad():
            resumed[3].weight.copy_(resumed[3].weight.flip(1))  # so that its own search finds another order
        again = nm.sparsify_(resumed, nm.ASP("2:4", permute=True), targets=["3"])
        again.attach(torch.optim.SGD(resumed.parameters(), lr=0.1))
        resumed.load_state_dict(weights)
        again.load_state_dict(saved)
        nm.densify_(resumed)
        assert all(torch.equal(original[key], value) for key, value in resumed.state_dict().items())

    def test_moments_from_before_the_permutation_are_refused(self) -> None:
        import nmsparse as nm

        def build() -> nn.Sequential:
            torch.manual_seed(0)
            return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 4))

        def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            optimizer.zero_grad()
            model(torch.randn(4, 16)).square().mean().backward()
            optimizer.step()

        model = build()
        old = torch.optim.AdamW(model.parameters())
        step(model, old)
        run = nm.sparsify_(model, nm.ASP("2:4", permute=True))
        run.attach(old)
        with pytest.raises(RuntimeError, match=r"^0\.weight: its channels were reordered .* AdamW holds state .* from before"):
            step(model, old)
        run.detach(old)
        fresh = torch.optim.AdamW(model.parameters())
        run.attach(fresh)
        step(model, fresh)

        resumed = build()
        again = nm.sparsify_(resumed, nm.ASP("2:4", permute=True))
        optimizer = torch.optim.AdamW(resumed.parameters())
        optimizer.load_state_dict(fresh.state_dict())
        again.attach(optimizer)
        resumed.load_state_dict(model.state_dict())
        again.load_state_dict(run.state_dict())
        step(resumed, optimizer)  # moments in the new order

    def test_densify_does_not_break_a_layer_that_was_frozen_before(self) -> None:
        import nmsparse as nm

        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 4))
        nm.sparsify_(model, nm.ASP("2:4", permute=True))
        nm.freeze_(model[2])
        nm.densify_(model)
        assert nm.functional.violations(model[2].weight, "2:4") == 0

    def test_conversion_that_fails_puts_the_channels_back(self) -> None:
        import nmsparse as nm

        class Fails(nm.ASP):
            def init_state(self, weight: Tensor, groups: int = 1) -> dict[str, Tensor]:
                raise torch.OutOfMemoryError("no room for the mask")

        model = three_layers()
        before = snapshot(model)
        with pytest.raises(torch.OutOfMemoryError):
            nm.sparsify_(model, Fails("2:4", permute=True))
        assert is_unchanged(model, before)

    def test_moments_of_every_optimizer_are_looked_at(self) -> None:
        import nmsparse as nm

        def backward() -> None:
            model(torch.randn(4, 16)).square().mean().backward()

        model = three_layers()
        stale = torch.optim.Adam([*model[2].parameters(), *model[4].parameters()])
        backward()
        stale.step()
        run = nm.sparsify_(model, nm.ASP("2:4", permute=True), targets="all")
        fresh = torch.optim.Adam(model[0].parameters())
        run.attach(fresh)
        run.attach(stale)
        backward()
        fresh.step()  # the run has started
        with pytest.raises(RuntimeError, match=r"its channels were reordered .* Adam holds state .* from before"):
            stale.step()

    def test_layers_restored_without_an_optimizer_know_their_channels(self) -> None:
        import nmsparse as nm

        model = three_layers()
        run = nm.sparsify_(model, nm.ASP("2:4", permute=True))
        other = three_layers()
        with torch.no_grad():
            other[2].weight.copy_(other[2].weight.flip(1))  # so that its own search finds another order
        again = nm.sparsify_(other, nm.ASP("2:4", permute=True))
        other.load_state_dict(model.state_dict())
        again.load_layers(run.state_dict())
        nm.densify_(other)
        assert is_unchanged(other, three_layers().state_dict())
