"""Records every ATen op of a running step as a node of an fx graph, with its `OpInfo`.

The step runs on fake tensors (metadata without storage). `Recorder` sits below autograd and sees forward, backward
and optimizer ops alike; values of the graph are the fake tensors that came out of recorded ops.
"""

from __future__ import annotations

import keyword
import math
import operator
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from monoflow._torch import (
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    UnsupportedFakeTensorException,
    bare_mode,
    copy_hooks,
    fake_alias,
    is_transformed,
    real_tensors,
)
from monoflow.capture.graph import Input, describe_value, target_name
from monoflow.capture.known import KnownValues, Number
from monoflow.capture.numbers import GraphFloat, GraphInt, graph_number
from monoflow.capture.origin import Origins
from monoflow.errors import CaptureError
from monoflow.progress import Report
from monoflow.source import OpInfo
from monoflow.tree import is_global

_OPTIMIZERS = os.path.join(os.path.dirname(torch.__file__), "optim", "")

_NODE = "_monoflow_node"

_FRESH_CONSTANTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default, torch.ops.aten.lift.default)
_ITEM = torch.ops.aten._local_scalar_dense.default


_STATIC_FIX = "write it with a static shape: torch.where(mask, x, 0) in place of x[mask], sums over a mask in place of selecting"
_STATIC_FIXES = {
    "aten._ctc_loss.Tensor": "pass input_lengths and target_lengths as tuples of ints",
    "aten._pack_padded_sequence.default": "run the layer on the padded batch, and mask its output",
}
"""What to write instead of an op whose result has a shape that depends on values."""


class Recorder(TorchDispatchMode):
    """A dispatch mode that builds `graph`.

    inputs      where the value of each placeholder comes from
    results     (weak reference, origin, op) of every tensor that an op made
    attributes  (name, fake, its Python attributes) of every tensor that came from outside
    failed      (exception, error that names the op) of the last op that failed
    """

    def __init__(self, fake_mode: FakeTensorMode, report: Report) -> None:
        super().__init__()
        self.report = report
        self.fake_mode = fake_mode
        self.origins = Origins()
        self.known = KnownValues()
        self.graph = fx.Graph()
        self.inputs: list[Input] = []
        self.results: list[tuple[weakref.ref[torch.Tensor], OpInfo, str]] = []
        self.attributes: list[tuple[str, torch.Tensor, dict[str, Any]]] = []
        self.failed: tuple[BaseException, CaptureError] | None = None
        self._twins: dict[int, torch.Tensor] = {}
        self._constants: dict[int, torch.Tensor] = {}
        self._kept: list[torch.Tensor] = []
        self._tokens: dict[float, fx.Node] = {}
        self._last_placeholder: fx.Node | None = None

    def error(self, reason: str, *, op: str = "", fix: str = "") -> CaptureError:
        """See `Origins.error`."""
        return self.origins.error(reason, op=op, fix=fix)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """PyTorch would wrap `__torch_dispatch__` against torch.compile, a Python frame for each op; nothing is compiled here."""
        return False

    # Inputs

    def tensor_input(self, source: Input, real: torch.Tensor) -> torch.Tensor:
        """A placeholder for `real`; later uses of `real` itself mean its fake twin, which is returned."""
        fake = self._fake(real)
        node = self._placeholder(source)
        node.meta["val"] = self.snapshot(fake)
        set_node(fake, node)
        self.attributes.append((source.name, fake, dict(vars(fake))))
        (self._constants if source.kind == "constant" else self._twins)[id(real)] = fake
        self._kept.append(real)
        return fake

    def _fake(self, real: torch.Tensor) -> torch.Tensor:
        """A leaf with the metadata of `real`, and its Python attributes: what user code may look at."""
        with real_tensors():
            wrapped = is_global(real) or isinstance(real, FakeTensor)
            if wrapped:  # a global tensor, or one without memory: the graph is over plain tensors of its whole shape
                with self.fake_mode:
                    fake = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=real.device)
            else:
                fake = self.fake_mode.from_tensor(real.detach())  # detached: else its .grad and its base would be made too
            fake.requires_grad = real.requires_grad
            if isinstance(real, torch.nn.Parameter):
                fake._is_param = True
        fake.__dict__.update({k: v for k, v in vars(real).items() if not wrapped or k not in vars(fake)})
        if real.requires_grad and real.is_leaf:
            copy_hooks(real, fake)
        return fake

    def number_input(self, source: Input, value: Number) -> GraphFloat | GraphInt:
        """A placeholder for a number whose value is known now."""
        node = self._placeholder(source)
        node.meta["val"] = value
        self.known.number(node, value)
        return graph_number(self, node, type(value))

    def twin_of(self, real: torch.Tensor) -> torch.Tensor | None:
        """The fake twin of a tensor of the state or an argument."""
        return self._twins.get(id(real))

    def traced(self, tensor: torch.Tensor) -> torch.Tensor:
        """What stands for `tensor` while the step runs: itself, its twin, or a constant of the graph."""
        twin = self._twins.get(id(tensor))
        if twin is not None:
            return twin
        if isinstance(tensor, FakeTensor) or is_transformed(tensor) or (tensor.requires_grad and torch.is_grad_enabled()):
            return tensor  # the last is an error if an op uses it; see _constant
        return self._constant(tensor)

    def _placeholder(self, source: Input) -> fx.Node:
        after = self._last_placeholder
        first = next(iter(self.graph.nodes), None)
        with self.graph.inserting_after(after) if after is not None else self.graph.inserting_before(first):
            node = self.graph.create_node("placeholder", source.name, name=_identifier(source.name))
            node.target = node.name  # names that differ in punctuation only must not become the same argument
        self._last_placeholder = node
        self.inputs.append(source)
        return node

    def _constant(self, real: torch.Tensor) -> torch.Tensor:
        """The fake of a tensor from outside that belongs to no module or optimizer of the step."""
        if real.requires_grad and torch.is_grad_enabled():
            raise self.error(
                f"a tensor of shape {tuple(real.shape)} that requires gradients is used in the step, but belongs to none of the "
                "modules and optimizers given to mf.graph",
                fix="pass its module too: @mf.graph(model, other_module, optimizer), or use tensor.detach()",
            )
        known = self._constants.get(id(real))
        if known is not None:
            return known
        if real.layout is not torch.strided:
            raise self.error("sparse tensors cannot be captured", fix="use dense tensors: tensor.to_dense()")
        return self.tensor_input(Input(f"constant_{len(self.inputs)}", "constant", value=real), real)

    def value_node(self, tensor: torch.Tensor) -> fx.Node:
        """The node whose value `tensor` is; a tensor from outside the step becomes a constant."""
        node = node_of(self._known(tensor))
        assert node is not None
        return node

    def forget_tensors(self) -> None:
        """Drops every tensor of the capture, so that whatever is still alive is held by somebody else."""
        self.origins.boundary = None
        self.attributes.clear()
        self._twins.clear()
        self._constants.clear()
        self.known.forget_tensors()

    # Ops

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in ("profiler", "prim"):
            return func(*args, **kwargs)
        if func is _ITEM:
            return self.item(args[0])
        return self.record(func, args, kwargs)

    def call(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Records a call made from Python rather than by PyTorch's dispatcher; `func` runs on fake tensors unrecorded."""

        def run(*fake_args: Any, **fake_kwargs: Any) -> Any:
            with bare_mode(self.fake_mode):
                return func(*fake_args, **fake_kwargs)

        return self.record(func, args, kwargs, run)

    def record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any] | None = None) -> Any:
        """Runs one op on the fake tensors (or `run` in its place) and appends its node. Returns the fake result."""
        inputs: list[fx.Node] = []
        operands = [self._operand(value, inputs) for value in args]
        named = {key: self._operand(value, inputs) for key, value in kwargs.items()}
        if func in _FRESH_CONSTANTS:
            func = torch.ops.aten.lift_fresh_copy.default
            self.known.tensor(inputs[0], args[0])
        info = self.origins.info(inputs)
        try:
            result = (run or func)(*[fake for fake, _ in operands], **{key: fake for key, (fake, _) in named.items()})
        except (DynamicOutputShapeException, UnsupportedFakeTensorException) as exc:
            raise self.error(
                f"the shape of the result of {target_name(func)} depends on the values in its input",
                op=str(func),
                fix=_STATIC_FIXES.get(target_name(func), _STATIC_FIX),
            ) from exc
        except Exception as exc:
            reason, op = f"{target_name(func)} failed: {exc}", _describe_call(func, args, kwargs)
            self.failed = (exc, CaptureError(reason, op=op, module=self.origins.module, frames=self.origins.stack()))
            raise
        node_args = tuple([node for _, node in operands])
        node = self.graph.create_node("call_function", func, node_args, {key: node for key, (_, node) in named.items()})
        node.meta["op"] = info
        self.report(info.phase, len(self.graph.nodes), 0)
        self.origins.recorded(node)
        self.known.follow(node)
        self._bind(node, result, func, info)
        return result

    def _operand(self, value: Any, inputs: list[fx.Node]) -> tuple[Any, Any]:
        """(what to trace with, argument of the node); the nodes among the arguments are added to `inputs`."""
        if isinstance(value, torch.Tensor):
            value = self._known(value)
            node = node_of(value)
            assert node is not None
            inputs.append(node)
            return value, node
        if isinstance(value, torch.SymFloat | torch.SymInt):
            node = value.node.fx_node
            inputs.append(node)
            return self.known.stand_in(node), node
        if isinstance(value, list | tuple):
            pairs = [self._operand(v, inputs) for v in value]
            return type(value)([fake for fake, _ in pairs]), type(value)([node for _, node in pairs])
        if self._tokens and isinstance(value, float) and value in self._tokens:
            node = self._tokens[value]
            inputs.append(node)
            return value, node
        return value, value

    def _known(self, tensor: torch.Tensor) -> torch.Tensor:
        if node_of(tensor) is not None:
            return tensor
        if isinstance(tensor, FakeTensor):
            raise self.error(
                "a tensor of an earlier, already ended capture is used in the step",
                fix="do not keep tensors between calls in lists or attributes; return them from the step",
            )
        twin = self._twins.get(id(tensor))
        return self._constant(tensor) if twin is None else twin

    def _bind(self, node: fx.Node, result: Any, func: Any, info: OpInfo) -> None:
        """Ties the fake results to nodes, and leaves a snapshot of their metadata in `meta["val"]`."""
        if isinstance(result, torch.Tensor):
            if result.layout is not torch.strided:
                raise self.error(
                    f"{target_name(func)} makes a sparse tensor", op=str(func), fix="use dense gradients: Embedding(sparse=False)"
                )
            previous = node_of(result)
            node.meta["val"] = previous.meta["val"] if previous is not None and _keeps_metadata(func) else self.snapshot(result)
            if previous is None:
                self.results.append((weakref.ref(result), info, target_name(func)))
            set_node(result, node)
        elif isinstance(result, list | tuple):
            values = []
            for index, item in enumerate(result):
                if not isinstance(item, torch.Tensor):
                    values.append(item)
                    continue
                part = self.graph.call_function(operator.getitem, (node, index))
                part.meta["op"] = info
                self.known.part(part, node, index)
                self._bind(part, item, func, info)
                values.append(part.meta["val"])
            node.meta["val"] = type(result)(values) if isinstance(result, list) else tuple(values)
        else:
            node.meta["val"] = result

    def snapshot(self, fake: torch.Tensor) -> torch.Tensor:
        """A tensor with the same metadata and storage identity, outside autograd."""
        return fake_alias(self.fake_mode, fake)

    # Numbers

    def number_op(self, function: Callable[..., Any], operands: tuple[Any, ...]) -> GraphFloat | GraphInt:
        """Records arithmetic on numbers."""
        node = self.graph.create_node("call_function", function, operands, {})
        node.meta["op"] = self.origins.info([])
        node.meta["val"] = value = self.known.arithmetic(node)
        return graph_number(self, node, type(value))

    def item(self, tensor: torch.Tensor) -> GraphFloat | GraphInt:
        """`.item()`: a number of the graph for optimizers and their small state tensors, an error anywhere else."""
        frames = self.origins.stack()
        if self.value_node(tensor) not in self.known and not (frames and frames[0].file.startswith(_OPTIMIZERS)):
            raise self.error(
                "Python asks for the value of a tensor, which does not exist before the graph runs",
                op="Tensor.item()",
                fix="return the tensor from the step and read it there; for a choice by value use torch.where",
            )
        return self.number_of(tensor)

    def number_of(self, tensor: torch.Tensor) -> GraphFloat | GraphInt:
        """The value of a tensor as a number of the graph, known now or only when it runs."""
        of = self.value_node(tensor)
        node = self.graph.create_node("call_function", _ITEM, (of,), {})
        node.meta["op"] = self.origins.info([of])
        value = self.known.item(node, of)
        if value is None:
            value = 1.0 if tensor.dtype.is_floating_point else 1
        node.meta["val"] = value
        return graph_number(self, node, type(value))

    def token(self, number: GraphFloat) -> float:
        """A float that stands for a number which is only known when the graph runs, in an op that takes plain floats alone."""
        token = 1e-3 + 1e-9 * math.pi * (1 + len(self._tokens))
        self._tokens[token] = number.node.fx_node
        return token

    def concrete(self, node: fx.Node) -> Number:
        """The value of a number that Python needs to go on; the graph is valid for this value only."""
        self._need(node)
        return self.known.take(node)

    def compare(self, function: Callable[[Any, Any], bool], left: Any, right: Any) -> bool:
        """The answer to a comparison that Python makes; the graph is valid as long as it is the same."""
        for operand in (left, right):
            if isinstance(operand, fx.Node):
                self._need(operand)
        return self.known.compare(function, left, right)

    def _need(self, node: fx.Node) -> None:
        if node not in self.known:
            raise self.error(
                "Python needs the value of a number that is computed on the device in the step",
                fix="use torch.where, torch.clamp or another tensor op in place of Python's if, min or max",
            )


def node_of(tensor: torch.Tensor) -> fx.Node | None:
    """The node that a fake tensor is the value of."""
    return tensor.__dict__.get(_NODE)


def set_node(tensor: torch.Tensor, node: fx.Node) -> None:
    """`tensor` is from now on the value of `node`."""
    tensor.__dict__[_NODE] = node


def _identifier(name: str) -> str:
    """`name` as a Python name: "0.weight" is `_0_weight`."""
    text = "".join(c if c.isalnum() else "_" for c in name)
    return f"_{text}" if text[:1].isdigit() or keyword.iskeyword(text) else text


def _keeps_metadata(func: Any) -> bool:
    """True for an op that writes into its argument without changing the argument's shape or strides."""
    return isinstance(func, OpOverload) and func._schema.is_mutable and torch.Tag.inplace_view not in func.tags


def _describe_call(func: Any, args: Any, kwargs: Any) -> str:
    def show(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return describe_value(value)
        if isinstance(value, list | tuple):
            return "[" + ", ".join(map(show, value)) + "]"
        return repr(value)

    return f"{target_name(func)}({', '.join([*map(show, args), *(f'{k}={show(v)}' for k, v in kwargs.items())])})"
