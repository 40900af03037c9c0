"""`mf.nn.Graph`: the class form of `mf.graph`, with the names of OneFlow's nn.Graph.

class Train(mf.nn.Graph):
    def __init__(self):
        super().__init__()
        self.model = model
        self.loss = torch.nn.CrossEntropyLoss()
        self.add_optimizer(optimizer, lr_sch=scheduler)

    def build(self, x, y):
        loss = self.loss(self.model(x), y)
        loss.backward()
        return loss

train = Train()
loss = train(x, y)          # forward, loss, backward, optimizer.step(), zero_grad(), scheduler.step()
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from monoflow.capture import StepGraph
from monoflow.errors import StepError
from monoflow.placement import Placement
from monoflow.rewrite import OnLayout, Pass
from monoflow.sbp import LayoutLike
from monoflow.state import State
from monoflow.step import Step, StepOptions, make_step


class Config:
    """Options of one graph, set before its first call; each means what it means for `mf.graph`."""

    def __init__(self) -> None:
        self.placement: Placement | None = None
        self.layout: Mapping[str, LayoutLike] = {}
        self.inputs: LayoutLike | Mapping[str, LayoutLike] | None = None
        self.sync: Literal["rank0", "error"] = "rank0"
        self.random: Literal["exact", "fast"] = "exact"
        self.backend = "auto"
        self.passes: list[Pass | OnLayout] = []
        self.progress = True

    def options(self) -> StepOptions:
        """They as `mf.graph` takes them."""
        return StepOptions(**{**vars(self), "passes": tuple(self.passes)})


class Graph:
    """A step as a class: modules are attributes, `build` is the step, optimizers are added.

    With optimizers the graph is for training: after `build`, which calls `backward()` itself, each call runs every optimizer's `step()` and
    `zero_grad()`, and then every scheduler's `step()`. Modules keep their own train/eval mode.
    """

    _serial = itertools.count()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._serial = itertools.count()

    def __init__(self) -> None:
        name = f"{type(self).__name__}_{next(self._serial)}"
        self.__dict__.update(_modules={}, _optimizers=[], _schedulers=[], _step=None, _level=-1, _name=name, config=Config())

    # What a user overrides or calls

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """The step: override it. Called once for each graph that is captured."""
        raise NotImplementedError(f"{type(self).__name__}.build() must be overridden: it is the step that becomes a graph")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        step = self._compiled_step()
        first = not step.is_compiled
        result = step(*args, **kwargs)
        for scheduler in self._schedulers:
            scheduler.step()
        if first and self._level >= 0:
            self._report(step.graph_for(*args, **kwargs))
        return result

    def add_optimizer(self, optim: Optimizer, *, lr_sch: LRScheduler | None = None) -> None:
        """Adds an optimizer, and optionally the scheduler of its learning rate, before the first call.

        Raises: StepError after the first call, or if `lr_sch` schedules another optimizer.
        """
        if self._step is not None:
            raise StepError("add_optimizer() must come before the first call of the graph")
        if not isinstance(optim, Optimizer):
            raise StepError(f"add_optimizer() takes a torch.optim.Optimizer, got {type(optim).__name__}")
        if lr_sch is not None and lr_sch.optimizer is not optim:
            raise StepError("add_optimizer(): lr_sch schedules another optimizer than the one added")
        State([optim])
        self._optimizers.append(optim)
        if lr_sch is not None:
            self._schedulers.append(lr_sch)

    def debug(self, v_level: int = -1) -> None:
        """What to print after the first call: -1 nothing, 0 the graph's size, 1 also the modules, 2 also each op under the user's line."""
        self._level = v_level

    def graph_for(self, *args: Any, **kwargs: Any) -> StepGraph:
        """The captured graph for these arguments; see `Step.graph_for`."""
        return self._compiled_step().graph_for(*args, **kwargs)

    @property
    def name(self) -> str:
        """`ClassName_N`, N counting the graphs of the class."""
        return str(self._name)

    @property
    def training(self) -> bool:
        """True if the graph has an optimizer."""
        return bool(self._optimizers)

    @property
    def is_compiled(self) -> bool:
        """True after the first call."""
        return self._step is not None and self._step.is_compiled

    # State

    def state_dict(self) -> dict[str, Any]:
        """{attribute: its module's state_dict, ..., "optimizers": [...], "lr_schedulers": [...]}; plain PyTorch loads each part."""
        state: dict[str, Any] = {name: module.state_dict() for name, module in self._modules.items()}
        state["optimizers"] = [optimizer.state_dict() for optimizer in self._optimizers]
        state["lr_schedulers"] = [scheduler.state_dict() for scheduler in self._schedulers]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` returned, before the first call or after any. Raises: StepError if parts are missing or left over."""
        expected = [*self._modules, "optimizers", "lr_schedulers"]
        if sorted(state_dict) != sorted(expected):
            raise StepError(f"load_state_dict(): expected the parts {sorted(expected)}, got {sorted(state_dict)}")
        for part, owners in (("optimizers", self._optimizers), ("lr_schedulers", self._schedulers)):
            if len(state_dict[part]) != len(owners):
                raise StepError(f"load_state_dict(): {len(state_dict[part])} {part} for a graph that has {len(owners)}")
        for name, module in self._modules.items():
            module.load_state_dict(state_dict[name])
        for owner, saved in zip(
            itertools.chain(self._optimizers, self._schedulers),
            itertools.chain(state_dict["optimizers"], state_dict["lr_schedulers"]),
            strict=True,
        ):
            owner.load_state_dict(saved)

    # Attributes

    def __setattr__(self, name: str, value: Any) -> None:
        if "_modules" not in self.__dict__:
            raise StepError(f"call super().__init__() before assigning {name}")
        if isinstance(value, nn.Module):
            if self._step is not None:
                raise StepError(f"module {name} is assigned after the first call of the graph; assign modules in __init__")
            if name in ("optimizers", "lr_schedulers"):
                raise StepError(f"{name} is a part of state_dict(); give the module another name")
            self._modules[name] = value
        elif isinstance(value, Optimizer):
            raise StepError(f"optimizer {name}: use self.add_optimizer(optimizer)")
        elif isinstance(value, torch.Tensor):
            raise StepError(f"tensor {name}: hold tensors in a module (a parameter or a buffer), so that the graph can update them")
        else:
            self.__dict__[name] = value

    def __getattr__(self, name: str) -> Any:
        modules = self.__dict__.get("_modules", {})
        if name in modules:
            return modules[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    # Inside

    def _compiled_step(self) -> Step[..., Any]:
        if self._step is None:
            state = State([*self._modules.values(), *self._optimizers], [*self._modules, *[""] * len(self._optimizers)])
            step: Step[..., Any] = make_step(self._whole_step, state, self.config.options())
            step.name = self.name
            self.__dict__["_step"] = step
        found: Step[..., Any] = self._step
        return found

    def _whole_step(self, *args: Any, **kwargs: Any) -> Any:
        result = self.build(*args, **kwargs)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return result

    def _report(self, graph: StepGraph) -> None:
        print(f"{self.name}: {sum(node.op == 'call_function' for node in graph.graph.nodes)} ops")
        if self._level >= 1:
            print(self)
        if self._level >= 2:
            graph.print_readable()

    def __repr__(self) -> str:
        lines = [f"{self.name}(training={self.training}, compiled={self.is_compiled})"]
        for name, module in self._modules.items():
            lines.extend(_describe_module(name, module, 1))
        lines.extend(f"  (optimizer): {type(optimizer).__name__}" for optimizer in self._optimizers)
        return "\n".join(lines)


def _describe_module(name: str, module: nn.Module, depth: int) -> list[str]:
    indent = "  " * depth
    lines = [f"{indent}({name}): {type(module).__name__}"]
    lines += [f"{indent}  {n}: Parameter{_describe_tensor(p)}" for n, p in module.named_parameters(recurse=False)]
    lines += [f"{indent}  {n}: Buffer{_describe_tensor(b)}" for n, b in module.named_buffers(recurse=False)]
    for child, inner in module.named_children():
        lines += _describe_module(child, inner, depth + 1)
    return lines


def _describe_tensor(tensor: torch.Tensor) -> str:
    frozen = "" if tensor.requires_grad or not tensor.is_floating_point() else ", frozen"
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}{frozen if isinstance(tensor, nn.Parameter) else ''}"
