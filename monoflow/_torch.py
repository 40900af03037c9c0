"""The one place that imports private names of PyTorch. Each import says why no public name serves.

Pinned to PyTorch 2.13 by pyproject.toml; a new release is checked here first.
"""

# ruff: noqa: F401
from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

# C++ guard that dispatches below autograd: the executed graph is a finished program, so no op of it may pay for or
# record autograd. Public torch.no_grad still walks the autograd keys of every op.
from torch._C import _AutoDispatchBelowAutograd as below_autograd

# The autograd node now executing: ties a backward op to the forward op it differentiates. No public twin.
from torch._C import _current_autograd_node as current_autograd_node

# The Python bindings of ATen functions: the cheapest way to call an op from Python; torch.mm is the same object,
# but ops such as native_layer_norm or _foreach_mul_ are in no public namespace.
from torch._C import _nn as nn_functions
from torch._C import _VariableFunctions as variable_functions

# True for what torch.func's transforms put around a tensor; its type is plain torch.Tensor, so that nothing public tells.
from torch._C._functorch import is_functorch_wrapped_tensor as is_transformed

# The type of torch.ops.aten.mm.default: what the targets of a graph are.
from torch._ops import OpOverload

# Tensors with metadata and no storage: what a step is traced on. torch.export uses them; there is no public name.
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    in_kernel_invocation_manager,
)

# Autograd's counter of created nodes: the number that a forward op leaves behind for its gradient to be found by.
from torch.autograd import _get_sequence_nr as next_sequence_number

# The modules of two optimizers, to replace names in; their classes say they are from torch.optim.
from torch.optim import _adafactor, asgd
from torch.utils import _pytree as pytree

# Interception of every ATen op below autograd, and of Python-level calls above it (the latter is public).
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

value_comparing_optimizers = (_adafactor, asgd)
"""Optimizer modules whose code calls Python's min and max on values computed on the device (Adafactor's norms)."""


def module_tables(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """(parameters, buffers, children) of one module: the dictionaries themselves, which nn.Module keeps private.

    Replacing an entry swaps a parameter without nn.Module.__setattr__'s checks.
    """
    return module._parameters, module._buffers, module._modules


def hook_tables(module: torch.nn.Module) -> tuple[dict[int, Any], ...]:
    """The module's own hooks: forward-pre, forward, backward-pre, backward."""
    return (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)


def tensor_hooks(tensor: torch.Tensor) -> tuple[dict[int, Any] | None, dict[int, Any] | None]:
    """The hooks registered on a leaf: by register_hook, and by register_post_accumulate_grad_hook. None where there never was one."""
    return tensor._backward_hooks, tensor._post_accumulate_grad_hooks


def copy_hooks(real: torch.Tensor, fake: torch.Tensor) -> None:
    """Registers the hooks of one leaf on another. Those that are given the leaf itself go on being given `real`."""
    on_gradient, after = tensor_hooks(real)
    for hook in (on_gradient or {}).values():
        fake.register_hook(hook)
    for hook in (after or {}).values():
        fake.register_post_accumulate_grad_hook(lambda _, hook=hook: hook(real))


FLAT_WEIGHTS = "_flat_weights"
"""Where nn.RNN, LSTM and GRU keep a second list of their weights."""


@contextlib.contextmanager
def flat_weights(module: torch.nn.Module) -> Iterator[None]:
    """nn.RNN, LSTM and GRU keep a second list of their weights; rebuild it for the swapped parameters, then restore it."""
    if not isinstance(module, torch.nn.RNNBase):
        yield
        return
    kept = module._flat_weights
    module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]
    try:
        yield
    finally:
        module._flat_weights = kept


def has_lazy_parameters(module: torch.nn.Module) -> bool:
    """True when a parameter of the module has no shape yet (torch.nn.Lazy*)."""
    return any(torch.nn.parameter.is_lazy(p) for p in module.parameters(recurse=True))


def init_group(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """Creates the missing state of one group by the optimizer's own routine, where it has one.

    Every optimizer of PyTorch has `_init_group(group, *lists)`; it fills the lists and creates state for each parameter with a gradient.
    """
    routine = getattr(optimizer, "_init_group", None)
    if routine is not None:
        lists = len(inspect.signature(routine).parameters) - 1
        routine(group, *([] for _ in range(lists)))


def storage_id(tensor: torch.Tensor) -> int:
    """Identity of the tensor's storage: equal for two strided tensors that share memory. Sparse tensors have no storage to ask."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


@contextlib.contextmanager
def bare_mode(mode: TorchDispatchMode) -> Iterator[None]:
    """Ops see `mode` alone, whatever modes are active."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), mode:
        yield


def fake_alias(mode: FakeTensorMode, fake: torch.Tensor) -> torch.Tensor:
    """A fake tensor with the metadata and the storage of another, outside autograd: `fake.detach()` in a third of the time."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad(), in_kernel_invocation_manager(mode):
        elem = torch.ops.aten.detach.default(fake)
    return FakeTensor(mode, elem, fake.fake_device)  # type: ignore[attr-defined]


@contextlib.contextmanager
def real_tensors() -> Iterator[None]:
    """Ops run for real, outside every mode and outside autograd."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


def fake_mode_of(values: list[Any]) -> FakeTensorMode | None:
    """The mode of the first fake tensor among the values."""
    return next((v.fake_mode for v in values if isinstance(v, FakeTensor)), None)


def inductor_compile(module: fx.GraphModule, examples: list[Any], strides: list[tuple[int, ...]]) -> Callable[[list[Any]], Any]:
    """Compiles a graph of ATen ops with Inductor. The callable takes a list of inputs, which it empties; outputs have the given strides.

    torch._inductor.standalone_compile, which is public, goes through AOTAutograd: a second of tracing for every region and
    microseconds of wrapper for every call, to find out what is known here (no autograd, which outputs). So its parts are
    used: functionalization, decompositions, code generation.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = fake_mode_of(examples) or FakeTensorMode()
    options = {"fallback_random": True, "emulate_precision_casts": False}
    with config.patch(options), torch.no_grad(), V.set_fake_mode(mode), tracing(TracingContext(mode)):
        with mode:
            functional = torch.func.functionalize(module, remove="mutations")
            decomposed = make_fx(functional, decomposition_table=select_decomp_table())(*examples)
        (output,) = decomposed.graph.find_nodes(op="output")
        output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
        output.meta["original_output_strides"] = strides
        return compile_fx_inner(decomposed, examples, is_inference=True)


def decompositions() -> dict[Any, Callable[..., Any]]:
    """PyTorch's own decompositions of ops into simpler ones, by overload.

    `torch.export` gives a curated part; the whole table has no public name.
    """
    from torch._decomp import decomposition_table

    return decomposition_table


def operator_entries() -> list[Any]:
    """PyTorch's list of operators with sample inputs, from its own test suite; no public package has it."""
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


@contextlib.contextmanager
def unfrozen_generators() -> Iterator[None]:
    """Inside, random entries of PyTorch's list draw from the generator as it stands.

    Outside, each of them sets the seed and restores the generator around its op, which no graph can hold.
    """
    from unittest import mock

    from torch.testing._internal import common_methods_invocations

    with mock.patch.object(common_methods_invocations, "wrapper_set_seed", lambda op, *args, **kwargs: op(*args, **kwargs)):
        yield


def has_sharding_rule(target: OpOverload) -> bool:
    """Whether DTensor knows how to lay out an op; only its propagator knows for which ops it does."""
    from torch.distributed.tensor import DTensor

    propagator = DTensor._op_dispatcher.sharding_propagator
    tables = (propagator.op_to_rules, propagator.op_strategy_funcs, propagator.op_single_dim_strategy_funcs)
    return any(target in table for table in tables)
