"""Everything that autograd lets a step do is done by its graph, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import library, nn
from torch.autograd.function import once_differentiable
from twins import Setup, assert_same, compare

import monoflow as mf


def batches(count: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [(torch.randn(6, 4, generator=generator), torch.randint(0, 3, (6,), generator=generator)) for _ in range(count)]


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


Body = Callable[[nn.Module, torch.optim.Optimizer, torch.Tensor, torch.Tensor], Any]


def using(body: Body) -> Callable[[], Setup]:
    """A setup whose step is `body(model, optimizer, x, y)`."""

    def setup() -> Setup:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            return body(model, optimizer, x, y)

        return Setup(step, (model, optimizer))

    return setup


# backward() in all its forms


def two_losses(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    optimizer.zero_grad()
    logits = model(x)
    first = F.cross_entropy(logits, y)
    first.backward(retain_graph=True)
    second = logits.square().mean()
    second.backward()
    optimizer.step()
    return first, second


def backward_twice_through_one_graph(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    loss = F.cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def backward_with_a_gradient(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    logits = model(x)
    logits.backward(torch.ones_like(logits) * 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return logits


def backward_into_some_inputs(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    loss = F.cross_entropy(model(x), y)
    loss.backward(inputs=[model[0].weight])
    optimizer.step()
    optimizer.zero_grad()
    return loss


def accumulation_inside(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    optimizer.zero_grad()
    total = 0.0
    for part, labels in zip(x.chunk(3), y.chunk(3), strict=True):
        loss = F.cross_entropy(model(part), labels) / 3
        loss.backward()
        total = total + loss.detach()
    optimizer.step()
    return total


def gradients_of_a_function(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    loss = F.cross_entropy(model(x), y)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    with torch.no_grad():
        for p, g in zip(model.parameters(), gradients, strict=True):
            p.sub_(g, alpha=0.1)
    return loss, gradients


def gradients_with_unused(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    loss = model[0](x).sum()
    return torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, grad_outputs=[torch.tensor(2.0)])


def gradient_penalty(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    optimizer.zero_grad()
    x = x.clone().requires_grad_()
    score = model(x).sum()
    (gradient,) = torch.autograd.grad(score, x, create_graph=True)
    penalty = (gradient.norm(2, dim=1) - 1).square().mean()
    (score + 10 * penalty).backward()
    optimizer.step()
    return score, penalty


def hessian_vector_product(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(F.cross_entropy(model(x), y), parameters, create_graph=True)
    product = sum((g * torch.ones_like(g)).sum() for g in gradients)
    product.backward()
    optimizer.step()
    optimizer.zero_grad()
    return product


def inner_loop_of_maml(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    fast = dict(model.named_parameters())
    loss = F.cross_entropy(torch.func.functional_call(model, fast, (x,)), y)
    gradients = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
    fast = {name: p - 0.1 * g for (name, p), g in zip(fast.items(), gradients, strict=True)}
    outer = F.cross_entropy(torch.func.functional_call(model, fast, (x.flip(0),)), y.flip(0))
    outer.backward()
    optimizer.step()
    optimizer.zero_grad()
    return outer


def per_sample_gradients(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    def loss_of(weights: Any, row: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(torch.func.functional_call(model, weights, (row[None],)), label[None])

    weights = {name: p.detach() for name, p in model.named_parameters()}
    return torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0, 0))(weights, x, y)


def forward_mode(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    return torch.func.jvp(model, (x,), (torch.ones_like(x),))


def functional_gradient(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    def loss_of(weights: Any) -> torch.Tensor:
        return F.cross_entropy(torch.func.functional_call(model, weights, (x,)), y)

    weights = {name: p.detach() for name, p in model.named_parameters()}
    return torch.func.grad(loss_of)(weights)


BODIES = [
    two_losses,
    backward_twice_through_one_graph,
    backward_with_a_gradient,
    backward_into_some_inputs,
    accumulation_inside,
    gradients_of_a_function,
    gradients_with_unused,
    gradient_penalty,
    hessian_vector_product,
    inner_loop_of_maml,
    functional_gradient,
    per_sample_gradients,
    forward_mode,
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_one_graph(body: Body) -> None:
    compare(using(body), batches())


# .grad before and after


def zero_grad_first(set_to_none: bool) -> Body:
    def body(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad(set_to_none=set_to_none)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return body


def zero_grad_last(set_to_none: bool) -> Body:
    def body(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        model.zero_grad(set_to_none=set_to_none)
        return loss

    return body


@pytest.mark.parametrize("when", [zero_grad_first, zero_grad_last], ids=lambda when: when.__name__)
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("alternate", [False, True])
def test_zero_grad(when: Callable[[bool], Body], set_to_none: bool, alternate: bool) -> None:
    """With `set_to_none=False` gradients stay, filled with zeros: their presence on entry is another graph."""
    compare(using(when(set_to_none)), batches(5), graphs=1 if set_to_none else 2, alternate=alternate)


def test_gradients_accumulate_over_calls() -> None:
    def setup() -> Setup:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = F.cross_entropy(model(x), y) / 2
            loss.backward()
            return loss

        def after(i: int) -> None:
            if i % 2 == 1:
                optimizer.step()
                optimizer.zero_grad()

        return Setup(step, (model,), after)

    compare(setup, batches(6), graphs=2)


def test_an_update_by_hand() -> None:
    def body(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        for p in model.parameters():
            p.grad = None
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
        return loss

    compare(using(body), batches())


def test_gradients_changed_by_hand() -> None:
    def body(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        for p in model.parameters():
            p.grad.mul_(0.5).add_(torch.randn_like(p) * 0.01)
            p.grad = p.grad / p.grad.norm()
        model[0].bias.grad = None
        optimizer.step()
        return loss

    compare(using(body), batches())


def test_gradients_read_before_backward() -> None:
    """The first call has no gradients on entry, and the step looks whether there are some."""

    def body(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        old = [p.grad.norm() for p in model.parameters() if p.grad is not None]
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        return old

    compare(using(body), batches(), graphs=2)


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm", [2.0, 1.0, float("inf")])
def test_clip_grad_norm(foreach: bool | None, norm: float) -> None:
    def body(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        total = nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=norm, foreach=foreach)
        optimizer.step()
        return total

    compare(using(body), batches(3))


def test_clip_grad_value_and_total_norm() -> None:
    def body(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        total = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.005, total)
        optimizer.step()
        optimizer.zero_grad()
        return total

    compare(using(body), batches(3))


# Steps without an optimizer


@pytest.mark.parametrize("inside", [True, False])
def test_an_evaluation_step(inside: bool) -> None:
    def setup() -> Setup:
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)).eval()

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            with torch.set_grad_enabled(not inside):
                logits = model(x)
                return F.cross_entropy(logits, y), (logits.argmax(-1) == y).float().mean()

        return Setup(step if inside else torch.no_grad()(step), (model,))

    compare(setup, batches(3))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_grad_mode_around_a_call_is_part_of_its_signature(mode: Any) -> None:
    model = network()

    @mf.graph(model, backend="aten", progress=False)
    def step(x: torch.Tensor) -> torch.Tensor:
        return model(x).sum()

    x = batches(1)[0][0]
    with mode():
        assert_same(step(x), model(x).sum())
    assert_same(step(x), model(x).sum().detach())
    assert step.graphs_made == (1 if mode is torch.enable_grad else 2)


def test_a_function_of_tensors_alone() -> None:
    @mf.graph()
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x @ y).relu() + 1

    x, y = torch.randn(3, 4), torch.randn(4, 5)
    assert_same(step(x, y), (x @ y).relu() + 1)


# Arguments with gradients


def test_adversarial_inputs() -> None:
    def body(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return (x + 0.1 * x.grad.sign()).detach(), x.grad

    calls = [(x.requires_grad_(), y) for x, y in batches(3)]
    plain, other, _ = compare(using(body), calls, graphs=2)  # without gradients of the model on entry, then with
    del plain, other


def test_the_gradient_of_an_argument_accumulates() -> None:
    model = network()

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        loss.backward()
        return loss

    graph = mf.graph(model, backend="aten", progress=False)(step)
    x, wanted = torch.ones(2, 4, requires_grad=True), torch.ones(2, 4, requires_grad=True)
    for _ in range(3):
        graph(x)
    model.zero_grad()
    for _ in range(3):
        step(wanted)
    assert_same(x.grad, wanted.grad)


def test_signed_gradient_descent_in_a_loop() -> None:
    def body(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        attack = torch.zeros_like(x, requires_grad=True)
        for _ in range(3):
            loss = F.cross_entropy(model(x + attack), y)
            (gradient,) = torch.autograd.grad(loss, attack)
            attack = (attack + 0.05 * gradient.sign()).clamp(-0.1, 0.1).detach().requires_grad_()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x + attack.detach()), y)
        loss.backward()
        optimizer.step()
        return loss, attack

    compare(using(body), batches(3))


# Modes


def exponential_moving_average(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for p in model[2].parameters():
            p.lerp_(torch.zeros_like(p), 0.01)
    return loss


def detached_part(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    optimizer.zero_grad()
    with torch.no_grad():
        target = model(x).softmax(-1)
    loss = F.cross_entropy(model(x + 0.1), target) + model[0](x).detach().sum()
    loss.backward()
    optimizer.step()
    return loss, target


@pytest.mark.parametrize("body", [exponential_moving_average, detached_part], ids=lambda body: body.__name__)
def test_no_grad_inside(body: Body) -> None:
    compare(using(body), batches())


def teacher_and_student() -> Setup:
    teacher, student = network(), network()
    teacher.requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(student(x), teacher(x))
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
        return loss

    return Setup(step, (teacher, student, optimizer))


def test_a_teacher_that_follows_its_student() -> None:
    compare(teacher_and_student, [(x,) for x, _ in batches()])


def test_autocast_inside() -> None:
    def body(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(x)
            loss = F.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        return loss, logits

    _, _, step = compare(using(body), batches())
    assert any(getattr(n.meta.get("val"), "dtype", None) == torch.bfloat16 for n in step.graph_for(*batches()[0]).graph.nodes)


def test_autocast_outside() -> None:
    setup = using(two_losses)()
    torch.manual_seed(0)
    plain, other = using(two_losses)(), using(two_losses)()
    for mine, theirs in zip(plain.state, other.state, strict=True):
        mine.load_state_dict(theirs.state_dict())
    step = other.graph()
    for enabled in (True, False, True):
        x, y = batches(1)[0]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            assert_same(step(x, y), plain.step(x, y))
    assert step.graphs_made == 2
    del setup


def test_anomaly_mode_is_left_alone() -> None:
    with torch.autograd.set_detect_anomaly(False):
        compare(using(two_losses), batches(2))


# The user's own differentiable ops


class Clamp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, low: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.low = low
        return x.clamp(min=low)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradient * (x >= ctx.low).to(gradient.dtype) * 0.5, None


class Square(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * 3


def test_custom_autograd_functions() -> None:
    def body(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        hidden = Square.apply(Clamp.apply(model[0](x), -0.2))
        loss = F.cross_entropy(model[2](InPlace.apply(hidden + 0)), y)
        loss.backward()
        optimizer.step()
        return loss

    compare(using(body), batches())


@library.custom_op("monoflow_tests::scaled_sine", mutates_args=())
def scaled_sine(x: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.from_numpy(x.detach().numpy().copy()).sin_().mul_(scale)


@scaled_sine.register_fake
def _(x: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.scale = inputs[1]


scaled_sine.register_autograd(lambda ctx, g: (g * ctx.saved_tensors[0].cos() * ctx.scale, None), setup_context=_save)


@library.custom_op("monoflow_tests::count_up", mutates_args=("counter",))
def count_up(counter: torch.Tensor) -> None:
    counter += 1


def test_custom_ops() -> None:
    def setup() -> Setup:
        model = network()
        model.register_buffer("counter", torch.zeros(()))

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            model.zero_grad()
            count_up(model.counter)
            loss = F.cross_entropy(scaled_sine(model(x), 1.5) + model.counter, y)
            loss.backward()
            return loss

        return Setup(step, (model,))

    _, _, step = compare(setup, batches())
    targets = {str(n.target) for n in step.graph_for(*batches()[0]).graph.nodes}
    assert {"monoflow_tests.scaled_sine.default", "monoflow_tests.count_up.default"} <= targets


# Hooks


def test_tensor_hooks_that_compute() -> None:
    def body(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        hidden = model[0](x)
        hidden.register_hook(lambda g: g.clamp(-0.01, 0.01))
        hidden.retain_grad()
        F.cross_entropy(model[2](hidden.tanh()), y).backward()
        optimizer.step()
        return hidden.grad

    compare(using(body), batches())


def test_hooks_on_parameters_registered_before() -> None:
    def setup() -> Setup:
        made = using(two_losses)()
        made.state[0][0].weight.register_hook(lambda g: g * 2)
        return made

    compare(setup, batches())


def test_hooks_after_accumulation_registered_before() -> None:
    """One optimizer per parameter, run as soon as its gradient is there."""

    def setup() -> Setup:
        model = network()
        optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

        def update(p: torch.Tensor) -> None:
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(update)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        return Setup(step, (model, *optimizers.values()))

    compare(setup, batches())


def test_module_hooks_that_compute() -> None:
    def setup() -> Setup:
        made = using(two_losses)()
        model = made.state[0]
        model[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        model[1].register_forward_hook(lambda module, args, output: output + 0.5)
        model[2].register_full_backward_hook(lambda module, given, gradient: (given[0] * 0.5,))
        model[2].register_full_backward_pre_hook(lambda module, gradient: (gradient[0] * 3,))
        return made

    compare(setup, batches())


def test_a_hook_replaced_between_calls_is_noticed() -> None:
    def setup() -> Setup:
        made = using(two_losses)()
        layer = made.state[0][0]
        handle = layer.register_forward_hook(lambda module, args, output: output + 1)

        def after(i: int) -> None:
            if i == 1:
                handle.remove()
                layer.register_forward_hook(lambda module, args, output: output + 2)

        made.after = after
        return made

    compare(setup, batches(), graphs=2)


# Views and in-place changes


def test_in_place_changes_through_views() -> None:
    def body(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        logits = model(x)
        logits[:, 0].add_(1.0)
        logits.view(-1)[3:6].mul_(2.0)
        rows = list(logits.unbind(0))
        out = torch.stack([row * (i + 1) for i, row in enumerate(rows)])
        out[y == 1] = 0.0
        out.masked_fill_(out > 5, 5.0)
        loss = F.cross_entropy(out, y)
        loss.backward()
        optimizer.step()
        return loss, out

    compare(using(body), batches())


def test_results_that_share_memory() -> None:
    @mf.graph()
    def step(x: torch.Tensor) -> Any:
        base = x * 2
        return base, base[0], base.t()

    base, row, turned = step(torch.ones(2, 3))
    base.zero_()
    assert row.sum() == 0 and turned.sum() == 0
