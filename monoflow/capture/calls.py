"""What a step does above ATen: `.grad`, `.item()`, printing, fused optimizers, random state.

A function mode sees Python-level calls with the arguments as the user wrote them. It redirects the user's real parameters to their
traced twins (code may hold them from before), and turns what a graph cannot do into an error that names the line.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from monoflow._torch import FakeTensor, bare_mode, module_tables, value_comparing_optimizers
from monoflow.capture.gradients import Gradients
from monoflow.capture.numbers import GraphFloat, GraphInt, symbolic_max, symbolic_min
from monoflow.capture.recorder import Recorder, node_of
from monoflow.rng import get_rng_state, set_rng_state

_aten = torch.ops.aten

_FUSED = {
    torch._fused_adam_: _aten._fused_adam_,
    torch._fused_adamw_: _aten._fused_adamw_,
    torch._fused_sgd_: _aten._fused_sgd_,
    torch._fused_adagrad_: _aten._fused_adagrad_,
}
"""Python bindings that would turn a number of the graph into a constant, and the ops to record in their place."""

_BRANCH_FIX = (
    "for a choice by value use torch.where, torch.clamp, or torch.cond outside the step; or return the tensor and branch after the call"
)
_VALUE_FIX = "return the tensor from the step and read it there"

_VALUE_READERS: dict[str, tuple[str, str]] = {
    "__bool__": ("Python branches on the value of a tensor", _BRANCH_FIX),
    "__float__": ("Python asks for the value of a tensor with float()", _VALUE_FIX),
    "__int__": ("Python asks for the value of a tensor with int()", _VALUE_FIX),
    "__index__": ("a tensor is used as a Python index or size", "use a tensor op such as torch.gather or index_select"),
    "__complex__": ("Python asks for the value of a tensor with complex()", _VALUE_FIX),
    "__contains__": ("`in` asks for the values of a tensor", "use (tensor == value).any() and torch.where"),
    "tolist": ("Tensor.tolist() asks for the values of a tensor", _VALUE_FIX),
    "numpy": ("Tensor.numpy() asks for the values of a tensor", "stay in PyTorch inside the step; call .numpy() on what the step returns"),
    "__array__": ("NumPy asks for the values of a tensor", "stay in PyTorch inside the step; call .numpy() on what the step returns"),
    "__dlpack__": ("another library asks for the memory of a tensor", "stay in PyTorch inside the step"),
    "data_ptr": ("the address of a tensor is asked for", "stay in PyTorch inside the step"),
    "__repr__": ("a tensor is printed, but has no value while the graph is captured", "return the tensor from the step and print it there"),
    "__format__": (
        "a tensor is printed, but has no value while the graph is captured",
        "return the tensor from the step and print it there",
    ),
    "equal": ("torch.equal asks for the values of two tensors", "use (a == b).all() and torch.where"),
    "allclose": ("torch.allclose asks for the values of two tensors", "use torch.isclose(a, b).all() and torch.where"),
    "_nested_tensor_from_mask_left_aligned": (
        "nn.TransformerEncoder looks at the values of its padding mask, to leave padding out",
        "make it with enable_nested_tensor=False",
    ),
    "is_nonzero": ("Python branches on the value of a tensor", _BRANCH_FIX),
}
"""Name of a call that needs values -> (why it cannot be captured, what to write instead)."""

_GRAD: Any = torch.Tensor.grad
_GET_GRAD, _SET_GRAD = _GRAD.__get__, _GRAD.__set__


class PythonCalls(TorchFunctionMode):
    """The function mode under which a step is captured."""

    def __init__(self, recorder: Recorder, gradients: Gradients) -> None:
        super().__init__()
        self.recorder = recorder
        self.gradients = gradients

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = [self._traced(value) for value in args]
        kwargs = {key: self._traced(value) for key, value in kwargs.items()} if kwargs else {}
        name = getattr(func, "__name__", "")
        if name == "__get__" and func == _GET_GRAD:
            return self.gradients.read(args[0])
        if name == "__set__" and func == _SET_GRAD:
            self.gradients.assigned(args[0])
        elif name == "item" and isinstance(args[0], torch.Tensor):
            return self.recorder.item(args[0])
        elif name in _VALUE_READERS and any(isinstance(a, FakeTensor) for a in args):
            self._refuse(name, args)
        elif name in ("tensor", "as_tensor", "scalar_tensor") and args and isinstance(args[0], GraphFloat | GraphInt):
            return self._number_tensor(*args, **kwargs)
        elif name == "__setitem__" and _is_bool_scalar(args[1]):
            args[0].masked_fill_(args[1], args[2])  # the same, without asking for the value of the mask
            return None
        elif func in _FUSED:
            return self._fused(_FUSED[func], args, kwargs)
        elif func is torch.nn.functional.batch_norm and isinstance(kwargs.get("momentum"), GraphFloat):
            kwargs["momentum"] = self.recorder.token(kwargs["momentum"])
        return func(*args, **kwargs)

    def _traced(self, value: Any) -> Any:
        """The user's own tensors, also in lists and tuples, replaced by the traced ones."""
        if isinstance(value, torch.Tensor):
            return value if type(value) is FakeTensor else self.recorder.traced(value)
        if type(value) in (list, tuple) and any(isinstance(v, torch.Tensor) and type(v) is not FakeTensor for v in value):
            return type(value)([self._traced(v) for v in value])
        return value

    def _refuse(self, name: str, args: list[Any]) -> None:
        tensor = next(a for a in args if isinstance(a, FakeTensor))
        if name in ("__bool__", "__float__", "__int__", "__index__") and node_of(tensor) in self.recorder.known:
            return
        why, fix = _VALUE_READERS[name]
        raise self.recorder.error(why, op=f"Tensor.{name}", fix=fix)

    def _number_tensor(self, value: Any, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
        kind = dtype or (torch.get_default_dtype() if isinstance(value, GraphFloat) else torch.int64)
        return self.recorder.call(_aten.scalar_tensor.default, value, dtype=kind, device=torch.device(device or "cpu"))

    def _fused(self, packet: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
        overload = packet.tensor_lr if isinstance(kwargs.get("lr"), torch.Tensor) else packet.default
        self.recorder.call(overload, *args, **kwargs)


def _is_bool_scalar(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dim() == 0 and index.dtype == torch.bool


@contextlib.contextmanager
def _replaced(owner: Any, **values: Any) -> Iterator[None]:
    missing = object()
    kept = {name: owner.__dict__.get(name, missing) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in kept.items():
            if value is missing:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


@contextlib.contextmanager
def python_calls(recorder: Recorder, gradients: Gradients, module_paths: dict[int, str]) -> Iterator[None]:
    """Everything that must be arranged around a step in Python while it is captured, and undone after."""
    with contextlib.ExitStack() as exits:
        _module_hooks(exits, recorder, module_paths)
        _optimizer_hooks(exits, recorder)
        for module in value_comparing_optimizers:
            exits.enter_context(_replaced(module, max=symbolic_max, min=symbolic_min))
        exits.enter_context(_replaced(torch.overrides, has_torch_function=_overrides))
        exits.enter_context(_replaced(torch.nn.modules.batchnorm, float=_number_reader(recorder)))
        _random_state(exits, recorder)
        exits.enter_context(torch.compiler.set_stance("force_eager"))
        exits.enter_context(torch.autograd.set_multithreading_enabled(False))
        exits.enter_context(PythonCalls(recorder, gradients))
        yield


def _overrides(tensors: Iterable[Any]) -> bool:
    """`has_torch_function` as without our mode: attention layers ask it whether they may run their fused kernels."""
    plain = (torch.Tensor, torch.nn.Parameter, FakeTensor)
    return any(type(t) not in plain and getattr(t, "__torch_function__", None) is not None for t in tensors)


def _number_reader(recorder: Recorder) -> Callable[[Any], Any]:
    """`float` that makes a tensor a number of the graph: a batch norm without momentum averages by its count of batches."""

    def read(value: Any) -> Any:
        return recorder.number_of(recorder.traced(value)) if isinstance(value, torch.Tensor) else float(value)

    return read


def _module_hooks(exits: contextlib.ExitStack, recorder: Recorder, paths: dict[int, str]) -> None:
    def enter(module: torch.nn.Module, args: Any) -> None:
        if id(module) not in paths and any(tensor is not None for table in module_tables(module)[:2] for tensor in table.values()):
            raise recorder.error(
                f"a {type(module).__name__} is used in the step that was not given to mf.graph, and is in none of the modules that were",
                fix="give it: @mf.graph(model, other_module, optimizer)",
            )
        recorder.origins.module_stack.append(paths.get(id(module), type(module).__name__))

    def leave(module: torch.nn.Module, args: Any, output: Any) -> None:
        if recorder.origins.module_stack:  # empty if `enter` has refused the module
            recorder.origins.module_stack.pop()

    hooks = torch.nn.modules.module
    exits.callback(hooks.register_module_forward_pre_hook(enter).remove)
    exits.callback(hooks.register_module_forward_hook(leave, always_call=True).remove)


def _optimizer_hooks(exits: contextlib.ExitStack, recorder: Recorder) -> None:
    def change_depth(by: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            recorder.origins.optimizer_depth += by

        return hook

    exits.callback(register_optimizer_step_pre_hook(change_depth(1)).remove)
    exits.callback(register_optimizer_step_post_hook(change_depth(-1)).remove)


def _random_state(exits: contextlib.ExitStack, recorder: Recorder) -> None:
    """Reading and setting the state of the random generator become ops (torch.utils.checkpoint replays dropout by them)."""
    size = torch.get_rng_state().shape

    def read() -> torch.Tensor:
        return recorder.record(get_rng_state, (), {}, made)

    def made() -> torch.Tensor:
        with bare_mode(recorder.fake_mode):
            return torch.empty(size, dtype=torch.uint8)

    def write(state: torch.Tensor) -> None:
        recorder.record(set_rng_state, (state,), {}, lambda _: None)

    def refuse(*_: Any) -> None:
        raise recorder.error("seeding inside of a step would fix the random numbers of the graph", fix="seed before the first call")

    for module in (torch, torch.random):
        exits.enter_context(_replaced(module, get_rng_state=read, set_rng_state=write, manual_seed=refuse, seed=refuse))
