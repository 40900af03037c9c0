"""A step that uses modules of every kind leaves the same behind as plain PyTorch, to the bit."""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from twins import Setup, assert_same, assert_same_state, compare

import monoflow as mf


def batches(count: int = 4, size: int = 6, width: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [(torch.randn(size, width, generator=generator), torch.randint(0, 3, (size,), generator=generator)) for _ in range(count)]


def classifier(make: Callable[[], nn.Module], lr: float = 0.1) -> Callable[[], Setup]:
    """A setup that trains `make()`, a module from (n, 4) to (n, 3), with momentum."""

    def setup() -> Setup:
        model = make()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, momentum=0.9)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return Setup(step, (model, optimizer))

    return setup


class Lambda(nn.Module):
    """A module whose forward is a function of itself and the input, with attributes given by name."""

    def __init__(self, function: Callable[..., Any], **attributes: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def tied() -> nn.Module:
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), last, nn.Linear(4, 3))


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    model[0].requires_grad_(False)
    return model


def unused() -> nn.Module:
    return Lambda(lambda m, x: m.used(x), used=nn.Linear(4, 3), never=nn.Linear(5, 5))


def shared_module() -> nn.Module:
    block = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    return nn.Sequential(block, block, nn.Linear(4, 3))


def parameter_list() -> nn.Module:
    def forward(module: Any, x: torch.Tensor) -> torch.Tensor:
        for weight in module.weights:
            x = torch.tanh(x @ weight)
        return x @ module.by_name["last"]

    return Lambda(
        forward,
        weights=nn.ParameterList([torch.randn(4, 4) for _ in range(3)]),
        by_name=nn.ParameterDict({"last": nn.Parameter(torch.randn(4, 3))}),
    )


def rebound_buffer() -> nn.Module:
    def forward(module: Any, x: torch.Tensor) -> torch.Tensor:
        module.mean = 0.9 * module.mean + 0.1 * x.detach().mean(0)
        module.count += 1
        return module.layer(x - module.mean / module.count)

    model = Lambda(forward, layer=nn.Linear(4, 3))
    model.register_buffer("mean", torch.zeros(4))
    model.register_buffer("count", torch.tensor(0))
    model.register_buffer("nothing", None)
    return model


def hidden_buffer() -> nn.Module:
    def forward(module: Any, x: torch.Tensor) -> torch.Tensor:
        module.seen.add_(x.detach().sum(0))
        return module.layer(x * module.seen.sigmoid())

    model = Lambda(forward, layer=nn.Linear(4, 3))
    model.register_buffer("seen", torch.zeros(4), persistent=False)
    return model


def writes_into_a_view() -> nn.Module:
    def forward(module: Any, x: torch.Tensor) -> torch.Tensor:
        module.table[1].copy_(x.detach()[0])
        module.table.view(-1)[:4].mul_(0.5).add_(1.0)
        hidden = module.layer(x)
        hidden[:, 0] *= 2
        hidden[:, 1:].relu_()
        return hidden + module.table.sum()

    model = Lambda(forward, layer=nn.Linear(4, 3))
    model.register_buffer("table", torch.zeros(3, 4))
    return model


def recurrent(kind: type[nn.RNNBase], **options: Any) -> Callable[[], nn.Module]:
    def forward(module: Any, x: torch.Tensor) -> torch.Tensor:
        out, hidden = module.rnn(x.reshape(2, 3, 4))
        extra = hidden[0] if isinstance(hidden, tuple) else hidden
        return module.last(out.reshape(6, -1)) + extra.sum()

    width = 5 * (2 if options.get("bidirectional") else 1)
    return lambda: Lambda(forward, rnn=kind(4, 5, batch_first=True, **options), last=nn.Linear(width, 3))


def cell() -> nn.Module:
    def forward(module: Any, x: torch.Tensor) -> torch.Tensor:
        state = None
        for _ in range(3):
            state = module.cell(x, state)
        return module.last(state[0])

    return Lambda(forward, cell=nn.LSTMCell(4, 5), last=nn.Linear(5, 3))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)),
        nn.Conv2d(1, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.BatchNorm1d(4, momentum=0.3),
        nn.Dropout(0.3, inplace=True),
        nn.Linear(4, 3),
    )


def attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2)
    return Lambda(lambda m, x: m.last(m.encoder(x[None])[0]), encoder=encoder, last=nn.Linear(4, 3))


def weight_normed() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 3))


def spectral_normed() -> nn.Module:
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 3))


def orthogonal() -> nn.Module:
    return nn.Sequential(parametrizations.orthogonal(nn.Linear(4, 4), orthogonal_map="cayley"), nn.Tanh(), nn.Linear(4, 3))


def old_weight_normed() -> nn.Module:
    with pytest.warns(FutureWarning):
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 3))


def old_spectral_normed() -> nn.Module:
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 3))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)),
    "batch norm": lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)),
    "layer norm, dropout": lambda: nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Dropout(0.5), nn.Linear(8, 3)),
    "group, rms, instance norm": lambda: nn.Sequential(
        nn.Linear(4, 8),
        nn.GroupNorm(2, 8),
        nn.RMSNorm(8),
        nn.Unflatten(1, (2, 4)),
        nn.InstanceNorm1d(2, affine=True),
        nn.Flatten(),
        nn.Linear(8, 3),
    ),
    "in-place activations": lambda: nn.Sequential(
        nn.Linear(4, 8),
        nn.ReLU(inplace=True),
        nn.Linear(8, 8),
        nn.ELU(inplace=True),
        nn.Linear(8, 8),
        nn.Hardtanh(inplace=True),
        nn.Linear(8, 3),
    ),
    "tied": tied,
    "frozen": frozen,
    "unused": unused,
    "shared module": shared_module,
    "parameter list": parameter_list,
    "rebound buffer": rebound_buffer,
    "hidden buffer": hidden_buffer,
    "writes into a view": writes_into_a_view,
    "RNN": recurrent(nn.RNN),
    "LSTM": recurrent(nn.LSTM),
    "LSTM, 2 layers, both ways": recurrent(nn.LSTM, num_layers=2, bidirectional=True, dropout=0.2),
    "GRU": recurrent(nn.GRU),
    "LSTM cell": cell,
    "convolutional": convolutional,
    "attention": attention,
    "weight norm": weight_normed,
    "spectral norm": spectral_normed,
    "orthogonal": orthogonal,
    "weight norm, old": old_weight_normed,
    "spectral norm, old": old_spectral_normed,
    "double": lambda: nn.Sequential(nn.Linear(4, 8), nn.Softplus(), nn.Linear(8, 3)).double(),
}


@pytest.mark.parametrize("name", MODULES)
def test_training_step(name: str) -> None:
    calls = batches()
    if name == "double":
        calls = [(x.double(), y) for x, y in calls]
    compare(
        classifier(MODULES[name]), calls, graphs=2 if name == "weight norm, old" else 1
    )  # its weight, an attribute, has history at first


@pytest.mark.parametrize("name", ["batch norm", "convolutional", "spectral norm", "attention", "weight norm"])
def test_train_and_eval_modes_each_have_their_graph(name: str) -> None:
    """Changing mode makes a graph; going back uses the first again."""

    def setup() -> Setup:
        made = classifier(MODULES[name])()
        model = made.state[0]
        made.after = lambda i: model.train(i % 2 == 1)  # type: ignore[union-attr]
        return made

    compare(setup, batches(5), graphs=2)


@pytest.mark.parametrize("options", [{"padding_idx": 0}, {"max_norm": 1.0}, {"scale_grad_by_freq": True}], ids=str)
def test_embedding(options: dict[str, Any]) -> None:
    def make() -> nn.Module:
        return Lambda(lambda m, x: m.last(m.table(x).mean(1)), table=nn.Embedding(7, 4, **options), last=nn.Linear(4, 3))

    generator = torch.Generator().manual_seed(1)
    calls = [(torch.randint(0, 7, (6, 5), generator=generator), torch.randint(0, 3, (6,), generator=generator)) for _ in range(4)]
    compare(classifier(make), calls)


def test_embedding_bag() -> None:
    def make() -> nn.Module:
        return Lambda(lambda m, x: m.last(m.table(x)), table=nn.EmbeddingBag(7, 4, mode="mean"), last=nn.Linear(4, 3))

    generator = torch.Generator().manual_seed(1)
    compare(classifier(make), [(torch.randint(0, 7, (6, 5), generator=generator), torch.tensor([0, 1, 2, 0, 1, 2])) for _ in range(3)])


def test_batch_norm_that_averages_over_all_batches() -> None:
    """The count of batches, a tensor, becomes a number of the graph."""
    compare(classifier(lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 3))), batches(5))


@pytest.mark.parametrize("masked", [False, True])
def test_fused_attention_in_evaluation(masked: bool) -> None:
    """PyTorch's attention layers run other kernels without gradients, and ask whether anybody overrides torch functions before."""

    def setup() -> Setup:
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False).eval()
        attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()

        def step(x: torch.Tensor, mask: torch.Tensor | None) -> Any:
            with torch.no_grad():
                return encoder(x, src_key_padding_mask=mask), attention(x, x, x, key_padding_mask=mask)

        return Setup(step, (encoder, attention))

    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2]) if masked else None
    compare(setup, [(torch.randn(2, 5, 8), mask) for _ in range(2)])


def test_modes_switched_inside_the_step() -> None:
    def setup() -> Setup:
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 3))

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            model.eval()
            with torch.no_grad():
                target = model(x).softmax(-1)
            model.train()
            loss = F.cross_entropy(model(x), target)
            model.zero_grad()
            loss.backward()
            return loss

        return Setup(step, (model,))

    compare(setup, batches(3))


def test_a_compiled_model() -> None:
    """What torch.compile has wrapped is captured as if it were not."""

    def setup() -> Setup:
        model = nn.Linear(4, 3)
        compiled = torch.compile(model)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = F.cross_entropy(compiled(x), y)
            model.zero_grad()
            loss.backward()
            return loss

        return Setup(step, (compiled,))

    torch.manual_seed(0)
    plain, other = setup(), setup()
    other.state[0].load_state_dict(plain.state[0].state_dict())
    step = other.graph()
    for x, y in batches(2):
        with torch.compiler.set_stance("force_eager"):
            assert_same(step(x, y), plain.step(x, y))


# What a step takes and returns


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor
    extra: dict[str, Any] | None = None


Pair = collections.namedtuple("Pair", ["first", "second"])


@pytest.mark.parametrize("kind", ["dict", "ordered dict", "dataclass", "named tuple", "list", "nested", "none", "model output", "scalars"])
def test_results_keep_their_structure(kind: str) -> None:
    def setup() -> Setup:
        model = nn.Linear(4, 3)

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            logits = model(x)
            loss = F.cross_entropy(logits, y)
            loss.backward()
            if kind == "dict":
                return {"loss": loss, "logits": logits, "nothing": None}
            if kind == "ordered dict":
                return collections.OrderedDict(logits=logits, loss=loss)
            if kind == "dataclass":
                return Output(loss, logits, {"sum": logits.sum()})
            if kind == "named tuple":
                return Pair(loss, Pair(logits, None))
            if kind == "list":
                return [loss, [logits]]
            if kind == "nested":
                return (Output(loss, logits), [{"a": (loss, Output(loss, logits))}], None)
            if kind == "model output":
                from transformers.modeling_outputs import SequenceClassifierOutput

                return SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=(logits, loss))
            if kind == "scalars":
                return loss, 3, "text", 0.5, True, x.shape, torch.float32
            return None

        return Setup(step, (model,))

    compare(setup, batches(4), graphs=2)  # without gradients on entry, then with


def test_keyword_and_nested_arguments() -> None:
    def setup() -> Setup:
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(batch: dict[str, Any], *, weight: float = 1.0, output: Output | None = None, both: Any = (None, None)) -> torch.Tensor:
            loss = F.cross_entropy(model(batch["x"][0]), batch["y"]) * weight
            if output is not None:
                loss = loss + output.loss * output.logits.sum()
            if both[1] is not None:
                loss = loss + both[1].mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss

        return Setup(step, (model, optimizer))

    calls: list[Any] = []
    for i, (x, y) in enumerate(batches(3)):
        batch = {"x": [x], "y": y}
        calls += [{"batch": batch, "weight": 0.5 + i}, {"batch": batch, "output": Output(x[0, 0], x)}, {"batch": batch, "both": (None, x)}]
    compare(setup, calls, graphs=3)


def test_the_same_tensor_given_twice_is_one_tensor_or_two() -> None:
    def setup() -> Setup:
        model = nn.Linear(4, 4)

        def step(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            a = a.add_(1)
            return model(a * b).sum()

        return Setup(step, (model,))

    x, y = torch.randn(2, 4), torch.randn(2, 4)
    plain, other = setup(), setup()
    other.state[0].load_state_dict(plain.state[0].state_dict())
    step = other.graph()
    for pair in [(x, x), (x, y), (x, x)]:
        eager = copy.deepcopy(pair)
        graph = copy.deepcopy(pair)
        assert_same(step(*graph), plain.step(*eager))
        assert_same(graph, eager)
    assert step.graphs_made == 2


def test_an_argument_changed_in_place_is_changed() -> None:
    def setup() -> Setup:
        model = nn.Linear(4, 4)

        def step(x: torch.Tensor) -> torch.Tensor:
            x.mul_(2)
            x[0] = 1.0
            x.t()[1].zero_()
            return model(x).sum()

        return Setup(step, (model,))

    compare(setup, [(torch.randn(2, 4),) for _ in range(2)])


def test_a_result_that_is_an_input_or_a_parameter() -> None:
    model = nn.Linear(4, 4)

    @mf.graph(model, backend="aten", progress=False)
    def step(x: torch.Tensor) -> Any:
        return x, model.weight, model(x), x.view(2, 2, 2)

    x = torch.randn(2, 4)
    for _ in range(2):
        same, weight, y, view = step(x)
        assert same is x
        assert weight is model.weight
        assert_same(y, model(x).detach())
        assert view.data_ptr() == x.data_ptr()


def test_a_detached_parameter_is_no_parameter() -> None:
    model = nn.Linear(4, 4)

    @mf.graph(model, backend="aten", progress=False)
    def step(x: torch.Tensor) -> Any:
        return model.weight.detach(), model.weight.data, x.detach(), model(x)

    x = torch.ones(1, 4, requires_grad=True)
    for _ in range(2):
        for value in step(x):
            assert type(value) is torch.Tensor and not value.requires_grad and value.is_leaf


# Several modules, references from outside


def test_several_modules() -> None:
    def setup() -> Setup:
        encoder, decoder = nn.Linear(4, 6), nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))
        optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(decoder(encoder(x)), y)
            loss.backward()
            optimizer.step()
            return loss

        return Setup(step, (encoder, decoder, optimizer))

    compare(setup, batches())


def test_parameters_held_outside_of_the_module() -> None:
    def setup() -> Setup:
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
        parameters = list(model.parameters())
        weight = model[0].weight

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = F.cross_entropy(model(x), y) + 0.1 * weight.square().sum() + 0.01 * sum(p.abs().sum() for p in parameters)
            loss.backward()
            with torch.no_grad():
                for p in parameters:
                    p -= 0.1 * p.grad
                    p.grad = None
            return loss

        return Setup(step, (model,))

    compare(setup, batches())


def test_parameters_of_an_optimizer_without_their_module() -> None:
    def setup() -> Setup:
        weight = nn.Parameter(torch.randn(4, 3))
        optimizer = torch.optim.AdamW([weight], lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(x @ weight, y)
            loss.backward()
            optimizer.step()
            return loss

        return Setup(step, (optimizer,))

    compare(setup, batches())


# Changes between calls


def test_a_changed_attribute_makes_a_new_graph() -> None:
    def setup() -> Setup:
        made = classifier(lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 3)))()
        dropout = made.state[0][1]  # type: ignore[index]

        def after(i: int) -> None:
            dropout.p = 0.5 if i == 1 else 0.1

        made.after = after
        return made

    compare(setup, batches(5), graphs=2)


def test_load_state_dict_between_steps() -> None:
    def setup() -> Setup:
        made = classifier(lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))()
        model, optimizer = made.state
        kept: list[Any] = []

        def after(i: int) -> None:
            if i == 0:
                kept.extend([copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())])
            if i == 2:
                model.load_state_dict(kept[0])
                optimizer.load_state_dict(kept[1])
            if i == 3:
                model.load_state_dict(kept[0], assign=True)

        made.after = after
        return made

    compare(setup, batches(4))


def test_unfreezing_between_steps() -> None:
    def setup() -> Setup:
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        model[0].requires_grad_(False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        def after(i: int) -> None:
            if i in (1, 3):
                model[0].requires_grad_(i == 1)

        return Setup(step, (model, optimizer), after)

    compare(setup, batches(6), graphs=3)


def test_a_group_added_between_steps() -> None:
    def setup() -> Setup:
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        optimizer = torch.optim.AdamW(model[2].parameters(), lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        def after(i: int) -> None:
            if i == 1:
                optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01, "weight_decay": 0.0})
                model.zero_grad()

        return Setup(step, (model, optimizer), after)

    compare(setup, batches(4), graphs=3)


def test_another_dtype_between_steps() -> None:
    def setup() -> Setup:
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = F.cross_entropy(model(x.to(model[0].weight.dtype)), y)
            model.zero_grad()
            loss.backward()
            return loss

        return Setup(step, (model,), lambda i: model.to(torch.float64 if i == 1 else torch.float32) and None)

    compare(setup, batches(4), graphs=2)


def test_a_replaced_module_and_a_replaced_parameter() -> None:
    def setup() -> Setup:
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = F.cross_entropy(model(x), y)
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad  # type: ignore[operator]
            return loss

        def after(i: int) -> None:
            if i == 0:
                model[2].weight = nn.Parameter(torch.ones(3, 8))
            if i == 1:
                model[1] = nn.Sequential(nn.ReLU(), nn.Linear(8, 8))
            if i == 2:
                model[2] = copy.deepcopy(model[2])

        return Setup(step, (model,), after)

    compare(setup, batches(4), graphs=2)


def test_two_steps_on_the_same_objects() -> None:
    """A training and an evaluation step share a model; each sees what the other leaves."""
    made = []
    for graph in (False, True):
        torch.manual_seed(0)
        setup = classifier(MODULES["batch norm"])()
        model = setup.state[0]

        def evaluate(x: torch.Tensor, y: torch.Tensor, model: Any = model) -> torch.Tensor:
            with torch.no_grad():
                return F.cross_entropy(model(x), y)

        train = setup.graph() if graph else setup.step
        test = mf.graph(model, backend="aten", progress=False)(evaluate) if graph else evaluate
        losses = []
        for x, y in batches(4):
            losses.append(train(x, y))
            model.eval()  # type: ignore[union-attr]
            losses.append(test(x, y))
            model.train()  # type: ignore[union-attr]
        made.append((losses, setup.state))
    assert_same(made[1][0], made[0][0])
    assert_same_state(made[1][1], made[0][1])
