"""cupynorm.torch.replace_norms: norms of torch.nn, norms like transformers', and whole models."""

from __future__ import annotations

import copy
import importlib.util
import io
import re
from typing import Any

import pytest

torch = pytest.importorskip("torch", minversion="2.11")
# ruff: noqa: E402 - what follows needs torch

from torch import nn
from torch._subclasses import FakeTensorMode
from torch_checks import SIZES_OF_MODELS

from cupynorm.torch import LayerNorm, RMSNorm, replace_norms

# torch itself still uses what it deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


@pytest.fixture(autouse=True)
def begin_anew() -> None:
    """Let no test find what others compiled, or the numbers that they drew."""
    torch._dynamo.reset()
    torch.manual_seed(0)


class LlamaLikeRMSNorm(nn.Module):
    def __init__(self, n: int = 8, eps: Any = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))
        self.variance_epsilon = eps

    def forward(self, hidden_states: Any) -> Any:
        wide = hidden_states.to(torch.float32)
        variance = wide.pow(2).mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * wide.to(hidden_states.dtype)


class GemmaLikeRMSNorm(nn.Module):
    def __init__(self, n: int = 8) -> None:
        super().__init__()
        self.eps = 1e-6
        self.weight = nn.Parameter(torch.zeros(n))

    def forward(self, x: Any) -> Any:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight.float())).type_as(x)


class CohereLikeLayerNorm(nn.Module):
    def __init__(self, n: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))
        self.variance_epsilon = 1e-5

    def forward(self, x: Any) -> Any:
        wide = x.to(torch.float32)
        wide = wide - wide.mean(-1, keepdim=True)
        variance = wide.pow(2).mean(-1, keepdim=True)
        return (self.weight * wide * torch.rsqrt(variance + self.variance_epsilon)).to(x.dtype)


class RMSNormWithAttributes(nn.Module):
    """Its attributes mean something else in a norm of this package."""

    def __init__(self, n: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))
        self.variance_epsilon, self.eps, self.normalized_shape = 1e-6, 0.1, (n, n)
        self.bias, self.elementwise_affine, self.zero_centered = False, False, True

    def forward(self, x: Any) -> Any:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(x.dtype)


class LayerNormOfAFloat32Weight(nn.Module):
    """On the CPU it takes no bfloat16 weight."""

    def __init__(self, n: int = 8) -> None:
        super().__init__()
        self.weight, self.eps, self.hidden_size = nn.Parameter(torch.ones(n)), 1e-6, n

    def forward(self, x: Any) -> Any:
        y = nn.functional.layer_norm(x.float(), self.weight.shape, self.weight, None, self.eps)
        return y.type_as(x)


NORMS = [
    pytest.param(lambda: nn.RMSNorm(8, 1e-6), id="RMSNorm"),
    pytest.param(lambda: nn.RMSNorm(8), id="RMSNorm-eps-by-dtype"),
    pytest.param(lambda: nn.RMSNorm((4, 2), 1e-3), id="RMSNorm-two-axes"),
    pytest.param(lambda: nn.RMSNorm(8, elementwise_affine=False), id="RMSNorm-plain"),
    pytest.param(lambda: nn.LayerNorm(8), id="LayerNorm"),
    pytest.param(lambda: nn.LayerNorm((4, 2), 1e-3), id="LayerNorm-two-axes"),
    pytest.param(lambda: nn.LayerNorm(8, bias=False), id="LayerNorm-no-bias"),
    pytest.param(lambda: nn.LayerNorm(8, elementwise_affine=False), id="LayerNorm-plain"),
    pytest.param(LlamaLikeRMSNorm, id="Llama"),
    pytest.param(GemmaLikeRMSNorm, id="Gemma"),
    pytest.param(CohereLikeLayerNorm, id="Cohere"),
    pytest.param(RMSNormWithAttributes, id="attributes-of-the-same-names"),
]


def with_drawn_weights(module: Any, dtype: Any = torch.float32) -> Any:
    generator = torch.Generator().manual_seed(4)
    for parameter in module.parameters():
        nn.init.normal_(parameter, generator=generator)
    return module.to(dtype)


def drawn(module: Any, dtype: Any = torch.float32) -> Any:
    """Rows for the module, so small that eps has an effect."""
    of_torch = isinstance(module, nn.RMSNorm | nn.LayerNorm)
    shape = (5, *(module.normalized_shape if of_torch else (8,)))
    return 1e-3 * torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)


def results(module: Any, x: Any) -> list[Any]:
    leaf = x.clone().requires_grad_()
    y = module(leaf)
    dy = torch.linspace(-1, 1, y.numel()).reshape(y.shape).to(y.dtype)
    return [y, *torch.autograd.grad(y, (leaf, *module.parameters()), dy)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", NORMS)
def test_a_norm_computes_what_it_did(make: Any, dtype: Any) -> None:
    norm = with_drawn_weights(make(), dtype)
    before, x = copy.deepcopy(norm), drawn(norm, dtype)
    norms = replace_norms(norm)
    assert list(norms.replaced) == [""]
    assert not norms.left
    assert type(norm) in (RMSNorm, LayerNorm)
    # A float32 sum of 8 has 7 roundings, and its surroundings have as many. In bfloat16 only values
    # that are stored between operations are rounded. torch's LayerNorm stores mean and
    # rstd that way too.
    share = {torch.float32: 16 * 2.0**-24, torch.bfloat16: 8 * 2.0**-8}[dtype]
    for ours, theirs in zip(results(norm, x), results(before, x), strict=True):
        assert ours.dtype is theirs.dtype
        assert (ours.double() - theirs.double()).abs().max() <= share * theirs.double().abs().max()


@pytest.mark.parametrize("make", NORMS)
def test_copies_pickles_and_compiled_norms(make: Any) -> None:
    norm = with_drawn_weights(make())
    x = drawn(norm)
    replace_norms(norm)
    expected = results(norm, x)
    saved = io.BytesIO()
    torch.save(norm, saved)
    saved.seek(0)
    again = torch.load(saved, weights_only=False)
    compiled = torch.compile(copy.deepcopy(norm), backend="aot_eager", fullgraph=True)
    for other in (copy.deepcopy(norm), again, compiled):
        torch.testing.assert_close(results(other, x), expected, rtol=0, atol=0)
    assert repr(again) == repr(norm)


@pytest.mark.parametrize("make", NORMS)
def test_a_norm_keeps_what_it_had_and_undo_leaves_no_trace(make: Any) -> None:
    norm = make().to(torch.bfloat16).eval()
    norm.of_a_user = 1
    cls, had, parameters = type(norm), dict(vars(norm)), dict(norm._parameters)
    values, seen = {k: v.clone() for k, v in norm.state_dict().items()}, torch.get_rng_state()
    norms = replace_norms(norm)
    assert torch.equal(torch.get_rng_state(), seen)
    assert list(norm.state_dict()) == list(values)
    assert all(norm._parameters[name] is p for name, p in parameters.items())
    assert all(p.dtype is torch.bfloat16 for p in norm.parameters())
    changed = {"eps", "normalized_shape", "bias", "elementwise_affine", "zero_centered"}
    changed &= had.keys() if cls is RMSNormWithAttributes else set()
    assert vars(norm).items() >= {k: v for k, v in had.items() if k not in changed}.items()
    norm.load_state_dict({name: value + 1 for name, value in values.items()})
    norms.undo()
    assert type(norm) is cls
    assert vars(norm) == had
    assert dict(norm._parameters) == parameters
    for name, value in norm.state_dict().items():
        assert torch.equal(value, values[name] + 1)
    norms.undo()
    assert type(norm) is cls


class Shared(nn.Module):
    """A norm in two places, between layers. One of the layers holds a list."""

    def __init__(self, make: Any = nn.LayerNorm) -> None:
        super().__init__()
        self.first = make(8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Sequential(self.first, nn.Tanh())])
        self.last = self.first

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


@pytest.mark.parametrize("make", [nn.LayerNorm, nn.RMSNorm, LlamaLikeRMSNorm])
def test_a_norm_at_two_places_is_one(make: Any) -> None:
    model = Shared(make)
    before, x = copy.deepcopy(model), torch.randn(3, 8)
    norms = replace_norms(model)
    assert list(norms.replaced) == ["first"]
    assert model.first is model.last is model.blocks[1][0]
    torch.testing.assert_close(results(model, x), results(before, x))
    assert list(model.state_dict()) == list(before.state_dict())
    norms.undo()
    assert type(model.last) is make
    torch.testing.assert_close(results(model, x), results(before, x), rtol=0, atol=0)


def test_hooks_are_called_as_before() -> None:
    model = Shared()
    called: list[str] = []

    def note(name: str) -> Any:
        return lambda *_: called.append(name)

    norm = model.first
    norm.register_forward_pre_hook(note("forward_pre"))
    norm.register_forward_hook(note("forward"))
    norm.register_full_backward_pre_hook(note("backward_pre"))
    norm.register_full_backward_hook(note("backward"))
    norm.register_state_dict_pre_hook(note("state_dict_pre"))
    norm._register_state_dict_hook(note("state_dict"))
    norm._register_load_state_dict_pre_hook(note("load_pre"))
    norm.register_load_state_dict_post_hook(note("load"))
    norm.weight.register_hook(note("gradient"))
    passes = []
    for _ in range(2):
        model(torch.randn(3, 8, requires_grad=True)).sum().backward()
        model.load_state_dict(model.state_dict())
        passes.append(called.copy())
        called.clear()
        replace_norms(model)
    assert len(set(passes[0])) == 9
    assert passes[0] == passes[1]


def test_an_optimizer_goes_on_with_its_parameters() -> None:
    x, losses = torch.randn(4, 8), []
    for replaced in (False, True):
        torch.manual_seed(0)
        model = with_drawn_weights(Shared())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for step in range(4):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            if replaced and step == 1:
                replace_norms(model)
    torch.testing.assert_close(losses[:4], losses[4:])
    assert losses[-1] < losses[-2] < losses[0]


@pytest.mark.parametrize("of_the_norm", [False, True])
def test_what_was_compiled_before_is_compiled_again(of_the_norm: bool) -> None:
    seen: list[bool] = []

    def backend(graph: Any, _: Any) -> Any:
        seen.append("cupynorm" in str(graph.graph))
        return graph

    model, x = Shared(LlamaLikeRMSNorm), torch.randn(3, 8)
    (model.first if of_the_norm else model).compile(backend=backend)
    expected = model(x)
    norms = replace_norms(model)
    torch.testing.assert_close(model(x), expected)
    norms.undo()
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
    assert seen[:2] == [False, True]  # the third graph is the first one again


def test_again_replaces_nothing() -> None:
    model = nn.Sequential(nn.LayerNorm(8), LlamaLikeRMSNorm(), RMSNorm(8))
    first = replace_norms(model)
    assert list(first.replaced) == ["0", "1"]
    assert first.left == {"2": "RMSNorm: already of cupynorm.torch"}
    norm = model[0]
    second = replace_norms(model)
    assert not second.replaced
    assert list(second.left) == ["0", "1", "2"]
    assert model[0] is norm
    second.undo()
    assert type(model[0]) is LayerNorm
    first.undo()
    assert [type(m) for m in model] == [nn.LayerNorm, LlamaLikeRMSNorm, RMSNorm]


def test_undo_refuses_what_something_else_has_changed() -> None:
    model = nn.Sequential(nn.LayerNorm(8), nn.LayerNorm(8))
    norms = replace_norms(model)
    nn.utils.parametrize.register_parametrization(model[1], "weight", nn.Tanh())
    words = "1 was made a LayerNorm, and is a ParametrizedLayerNorm now"
    with pytest.raises(RuntimeError, match=words):
        norms.undo()
    assert type(model[0]) is LayerNorm
    nn.utils.parametrize.remove_parametrizations(model[1], "weight")
    norms.undo()
    assert [type(m) for m in model] == [nn.LayerNorm] * 2


def test_undo_goes_past_what_a_class_calls_by_another_name() -> None:
    """A class may have a property of a name that a replaced norm has an attribute of."""
    eps = property(lambda self: self.variance_epsilon)
    model = nn.Sequential(like_llama(eps=eps), nn.RMSNorm(8), nn.LayerNorm(8))
    before = [(type(norm), dict(vars(norm))) for norm in model]
    norms = replace_norms(model)
    assert len(norms.replaced) == 3
    del model[1].bias
    norms.undo()
    assert [(type(norm), vars(norm)) for norm in model] == before


def test_an_eps_that_only_float64_has() -> None:
    norm = nn.LayerNorm(8, eps=1e-40, dtype=torch.float64)
    assert replace_norms(norm).replaced
    assert torch.isfinite(norm(torch.randn(3, 8, dtype=torch.float64))).all()


def test_where_chooses() -> None:
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), LlamaLikeRMSNorm())
    asked: list[Any] = []
    norms = replace_norms(model, where=lambda *given: asked.append(given) or given[0] == "2")
    assert asked == [("0", model[0]), ("2", model[2])]
    assert list(norms.replaced) == ["2"]
    assert norms.left == {"0": "LayerNorm: not chosen by where"}
    assert type(model[0]) is nn.LayerNorm


def test_an_error_of_where_changes_nothing() -> None:
    model = nn.Sequential(nn.LayerNorm(8), nn.LayerNorm(8))
    with pytest.raises(ZeroDivisionError):
        replace_norms(model, where=lambda name, _: 1 / (1 - int(name)))
    assert [type(m) for m in model] == [nn.LayerNorm] * 2


def test_repr_is_short_and_says_all() -> None:
    model = nn.Sequential(*(nn.LayerNorm(8) for _ in range(5)), LlamaLikeRMSNorm(), nn.RMSNorm(4))
    norms = replace_norms(model, where=lambda name, _: name != "6")
    assert repr(norms) == (
        "6 norms replaced\n"
        f"  LayerNorm -> cupynorm.torch.{nn.LayerNorm(8)!r}\n"  # shows its bias from torch 2.12 on
        "    0, 1, 2 and 2 more\n"
        "  LlamaLikeRMSNorm -> cupynorm.torch.RMSNorm((8,), eps=1e-06, elementwise_affine=True)\n"
        "    5\n"
        "1 norm left\n"
        "  RMSNorm: not chosen by where\n"
        "    6"
    )
    assert repr(replace_norms(nn.Linear(8, 8))) == "0 norms replaced"
    assert "the model itself" in repr(replace_norms(nn.LayerNorm(8)))


# ---- what is left --------------------------------------------------------------------------------


def like_llama(**functions: Any) -> Any:
    """Make a norm of a class with other functions than LlamaLikeRMSNorm."""
    norm = type("OtherRMSNorm", (nn.Module,), {"forward": normalized} | functions)()
    norm.weight, norm.variance_epsilon = nn.Parameter(torch.ones(8)), 1e-6
    return norm


def normalized(self: Any, x: Any) -> Any:
    return nn.functional.rms_norm(x, (8,), self.weight, self.variance_epsilon)


def with_its_eps_outside(self: Any, x: Any) -> Any:
    return self.weight * x / (x.square().mean(-1, keepdim=True).sqrt() + self.variance_epsilon)


def in_groups(self: Any, x: Any) -> Any:
    y = nn.functional.rms_norm(x.unflatten(-1, (2, 4)), (4,), None, self.variance_epsilon)
    return self.weight * y.flatten(-2)


def images_by_channels(self: Any, x: Any) -> Any:
    by_channels = x.ndim == 4
    y = normalized(self, x.movedim(1, -1) if by_channels else x)
    return y.movedim(-1, 1) if by_channels else y


def changed(module: Any, **attributes: Any) -> Any:
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def on_another_device() -> Any:
    with FakeTensorMode():
        return nn.LayerNorm(8, device="mps")


def and_then(after: Any) -> Any:
    """Make a norm whose forward does more."""
    return like_llama(forward=lambda self, x: after(self, normalized(self, x)))


def of_a_frozen_weight(self: Any, x: Any) -> Any:
    return nn.functional.rms_norm(x, (8,), self.weight.detach(), self.variance_epsilon)


def of_a_detached_rstd(self: Any, x: Any) -> Any:
    mean_square = x.square().mean(-1, keepdim=True)
    return x * torch.rsqrt(mean_square + self.variance_epsilon).detach() * self.weight


def in_place(self: Any, x: Any) -> Any:
    return x.mul_(torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon).detach())


def writing_into_its_weight(self: Any, x: Any) -> Any:
    self.weight.data.clamp_(min=0)
    return normalized(self, x)


def with_a_dropout(self: Any, y: Any) -> Any:
    return nn.functional.dropout(y, 0.5, self.training)


LEFT = {
    "a subclass of LayerNorm": type("Channels", (nn.LayerNorm,), {}),
    "a subclass of LlamaLikeRMSNorm": lambda: type("MyRMSNorm", (LlamaLikeRMSNorm,), {})(),
    "forward does not take x alone": lambda: like_llama(
        forward=lambda self, x, gate=None: normalized(self, x)
    ),
    "computes neither norm": lambda: like_llama(forward=with_its_eps_outside),
    "computes neither": lambda: like_llama(forward=lambda self, x: normalized(self, x) + 1e-3),
    "computes neither norm from x": lambda: like_llama(forward=in_groups),
    "fails on the CPU: RuntimeError": lambda: like_llama(forward=images_by_channels),
    "fails on the CPU: AttributeError": lambda: like_llama(forward=lambda self, x: x.no_such_thing),
    "neither norm from x and weight": lambda: and_then(with_a_dropout),
    "neither norm from x": lambda: and_then(with_a_dropout).eval(),
    "its gain may be a part": lambda: changed(
        and_then(lambda self, y: y * (1 + self.gain)), gain=0.0
    ),
    "its calls may be a part": lambda: changed(LlamaLikeRMSNorm(), calls=0),
    "its offset may be a part": lambda: changed(LlamaLikeRMSNorm(), offset=torch.zeros(())),
    "has other gradients": lambda: like_llama(forward=of_a_frozen_weight),
    "computes a norm, but has other gradients": lambda: like_llama(forward=of_a_detached_rstd),
    "but has other gradients": lambda: like_llama(forward=torch.no_grad()(normalized)),
    "writes into x": lambda: like_llama(forward=in_place),
    "or its weight": lambda: like_llama(forward=writing_into_its_weight),
    "returns torch.float32 for torch.bfloat16": lambda: and_then(lambda self, y: y.float()),
    "has a _load_from_state_dict of its own": lambda: like_llama(
        _load_from_state_dict=lambda self, *args: None
    ),
    "not have a weight, and only that": lambda: changed(
        LlamaLikeRMSNorm(), bias=nn.Parameter(torch.zeros(8))
    ),
    "does not have a weight": lambda: changed(LlamaLikeRMSNorm(), count=nn.Buffer(torch.zeros(1))),
    r"the shape \(2, 8\)": lambda: changed(
        LlamaLikeRMSNorm(), weight=nn.Parameter(torch.ones(2, 8))
    ),
    r"the shape \(0,\)": lambda: LlamaLikeRMSNorm(0),
    "its eps must be a real number, got '1e-6'": lambda: LlamaLikeRMSNorm(eps="1e-6"),
    "its eps must be a real number, got True": lambda: nn.LayerNorm(8, eps=True),
    "its eps must be a finite number of at least 0": lambda: nn.LayerNorm(8, eps=-1.0),
    "its eps must be 0 or a normal float32 number": lambda: nn.LayerNorm(8, eps=1e-40),
    "it has __slots__": lambda: like_llama(__slots__=("of_a_user",)),
    "forward was replaced on the module": lambda: changed(nn.LayerNorm(8), forward=abs),
    "weight is on mps:0": on_another_device,
    "weight is of torch.float8_e5m2": lambda: nn.LayerNorm(8, dtype=torch.float8_e5m2),
}


@pytest.mark.parametrize(("reason", "make"), LEFT.items(), ids=map(str, range(len(LEFT))))
def test_left_with_the_reason(reason: str, make: Any) -> None:
    norm = make(8) if isinstance(make, type) else make()
    cls, had, drawn_next = type(norm), dict(vars(norm)), torch.get_rng_state()
    norms = replace_norms(nn.Sequential(norm))
    assert not norms.replaced
    assert re.search(f"^{cls.__name__}: .*{reason}", norms.left["0"]), norms.left
    assert type(norm) is cls
    assert vars(norm) == had
    assert torch.equal(torch.get_rng_state(), drawn_next)


def test_what_does_not_concern_norms_of_rows_is_not_spoken_of() -> None:
    block = type("PreLayerNorm", (nn.Sequential,), {})(nn.Linear(8, 8))
    model = nn.Sequential(
        nn.BatchNorm1d(8), nn.GroupNorm(2, 8), nn.TransformerEncoderLayer(8, 2), block
    )
    norms = replace_norms(model)
    assert list(norms.replaced) == ["2.norm1", "2.norm2"]
    assert not norms.left


def test_a_norm_on_the_meta_device() -> None:
    norm = LlamaLikeRMSNorm().to("meta")
    assert replace_norms(norm).replaced
    assert norm.weight.is_meta
    assert norm(torch.ones(3, 8, device="meta")).shape == (3, 8)


def test_in_inference_mode() -> None:
    with torch.inference_mode():
        assert replace_norms(LlamaLikeRMSNorm()).replaced


def test_a_norm_that_takes_no_bfloat16_weight_on_the_cpu() -> None:
    assert replace_norms(LayerNormOfAFloat32Weight()).replaced


def test_an_eps_of_zero_and_a_width_of_one() -> None:
    for norm in (LlamaLikeRMSNorm(8, eps=0.0), LlamaLikeRMSNorm(1)):
        assert "RMSNorm" in replace_norms(norm).replaced[""]


# ---- models of transformers ----------------------------------------------------------------------

SIZES = SIZES_OF_MODELS | {"num_hidden_layers": 2}
# The number of norms of two layers and the last, and whether their weights are zero-centred.
MODELS = {
    "llama": (5, False),
    "mistral": (5, False),
    "qwen2": (5, False),
    "qwen3": (9, False),  # one each for queries and keys
    "olmo2": (9, False),
    "gemma": (5, True),
    "gemma2": (9, True),
    "gemma3_text": (13, True),
}


@pytest.fixture
def transformers(monkeypatch: pytest.MonkeyPatch) -> Any:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers: pip install transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers


def language_model(transformers: Any, kind: str) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter, parameter.detach().mean().item(), 0.2)
    return model.eval()


def tokens() -> Any:
    return torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(1))


def loss_and_gradients(model: Any) -> list[Any]:
    model.zero_grad()
    loss = model(input_ids=tokens(), labels=tokens()).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def distances(some: list[Any], others: list[Any]) -> Any:
    pairs = zip(some, others, strict=True)
    return torch.stack([(a.double() - b.double()).norm() for a, b in pairs])


def moved(model: Any, unit: float) -> Any:
    """Return how far loss and gradients move if each result of a module is off by a unit.

    The gradients of these results are off too. Signs are drawn. All else is computed in float64.
    """
    exact = copy.deepcopy(model).double()
    replace_norms(exact)  # transformers' own norms would compute in float32
    expected = loss_and_gradients(exact)
    generator = torch.Generator().manual_seed(2)

    def off(x: Any) -> Any:
        signs = torch.randint(0, 2, x.shape, generator=generator) * 2 - 1
        return x * (1 + unit * signs)

    def disturb(module: Any, given: Any, result: Any) -> Any:
        if not isinstance(result, torch.Tensor) or not result.is_floating_point():
            return None
        result.register_hook(off)
        return off(result)

    for module in exact.modules():
        module.register_forward_hook(disturb)
    draws = [distances(loss_and_gradients(exact), expected) for _ in range(4)]
    stored = unit * torch.stack([t.norm() for t in expected])
    return torch.stack(draws).amax(0) + stored


# A norm of transformers rounds up to 8 times on the way to a result, a float32 sum included. Its
# neighbours do too. A rounding is a third of a squared unit on average, and each of two models has
# its own: sqrt(2 * 8 / 3) units in all. The rest is for chance.
UNITS = 4


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_learns_what_it_did(transformers: Any, kind: str) -> None:
    model = language_model(transformers, kind)
    before, bound = loss_and_gradients(model), UNITS * moved(model, 2.0**-24)
    norms = replace_norms(model)
    count, zero_centered = MODELS[kind]
    assert len(norms.replaced) == count
    assert not norms.left
    for name in norms.replaced:
        norm = model.get_submodule(name)
        assert type(norm) is RMSNorm
        assert norm.zero_centered is zero_centered
    assert (distances(loss_and_gradients(model), before) <= bound).all()


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma"])
def test_a_model_learns_what_it_did_in_bfloat16(transformers: Any, kind: str) -> None:
    model = language_model(transformers, kind).bfloat16()
    before, bound = loss_and_gradients(model), UNITS * moved(model, 2.0**-8)
    norms = replace_norms(model)
    assert (distances(loss_and_gradients(model), before) <= bound).all()
    norms.undo()
    assert not distances(loss_and_gradients(model), before).any()


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_generates_the_same_tokens(transformers: Any, kind: str) -> None:
    model = language_model(transformers, kind)
    written = []
    for replace in (False, True):
        if replace:
            assert replace_norms(model).replaced
        written.append(model.generate(tokens(), max_new_tokens=8, do_sample=False))
    assert torch.equal(*written)
    assert written[0].shape[1] > 12


def test_a_model_is_checkpointed_compiled_copied_saved_and_restored(
    transformers: Any, tmp_path: Any
) -> None:
    model = language_model(transformers, "qwen3")
    keys, before = list(model.state_dict()), loss_and_gradients(model)
    norms = replace_norms(model)
    assert list(model.state_dict()) == keys
    expected = loss_and_gradients(model)
    assert not distances(loss_and_gradients(copy.deepcopy(model)), expected).any()
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    assert not distances(loss_and_gradients(torch.load(saved, weights_only=False)), expected).any()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert not distances(loss_and_gradients(loaded), before).any()
    loaded.load_state_dict(model.state_dict())
    replace_norms(loaded)
    assert not distances(loss_and_gradients(loaded), expected).any()
    compiled = torch.compile(loaded, backend="aot_eager")
    torch.testing.assert_close(loss_and_gradients(compiled), expected)
    model.gradient_checkpointing_enable()
    model.train()
    calls: list[Any] = []
    hook = model.model.layers[0].input_layernorm.register_forward_hook(lambda *_: calls.append(0))
    assert not distances(loss_and_gradients(model), expected).any()
    assert len(calls) == 2  # the second pass is computed for the gradients
    hook.remove()
    model.gradient_checkpointing_disable()
    norms.undo()
    assert not distances(loss_and_gradients(model.eval()), before).any()


def test_an_optimizer_trains_a_model_whose_norms_were_replaced_between_steps(
    transformers: Any,
) -> None:
    model = language_model(transformers, "llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(4):
        losses.append(loss_and_gradients(model)[0])
        optimizer.step()
        if step == 1:
            weight = model.model.norm.weight.detach().clone()
            replace_norms(model)
    assert losses == sorted(losses, reverse=True)
    assert (model.model.norm.weight - weight).abs().max() > 1e-3


def test_classes_of_transformers_that_are_known_to_differ(transformers: Any) -> None:
    from transformers.models.cohere.modeling_cohere import CohereLayerNorm
    from transformers.models.convnext.modeling_convnext import ConvNextLayerNorm
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    model = nn.Sequential(
        T5LayerNorm(8),
        CohereLayerNorm(8),
        CohereLayerNorm((2, 8)),
        qwen.Qwen3NextRMSNorm(8),
        qwen.Qwen3NextRMSNormGated(8),
        ConvNextLayerNorm(8, data_format="channels_first"),
    )
    norms = replace_norms(model)
    assert list(norms.replaced) == ["0", "1", "3"]
    assert [type(model[i]) for i in (0, 1, 3)] == [RMSNorm, LayerNorm, RMSNorm]
    assert [m.zero_centered for m in (model[0], model[3])] == [False, True]
    assert list(norms.left.values()) == [
        "CohereLayerNorm: its weight has the shape (2, 8), and not one axis",
        "Qwen3NextRMSNormGated: its forward does not take x alone",
        "ConvNextLayerNorm: a subclass of LayerNorm, which may differ from it",
    ]
