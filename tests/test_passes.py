"""User passes: the example of docs/passes.md, and what the verifier catches."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import monoflow as mf

DOC = Path(__file__).parent.parent / "docs" / "passes.md"

aten = torch.ops.aten


def example(tmp_path: Path) -> dict[str, Any]:
    """Runs the document's worked example as a script."""
    blocks = re.findall(r"```python\n(.*?)```", DOC.read_text(), re.S)
    script = tmp_path / "example.py"
    script.write_text(next(b for b in blocks if b.startswith("import torch")))
    torch.manual_seed(0)
    namespace: dict[str, Any] = {"__name__": "example"}
    exec(compile(script.read_text(), str(script), "exec"), namespace)
    return namespace


def test_worked_example_equals_plain_pytorch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran = example(tmp_path)
    assert "aten.clamp.default" in capsys.readouterr().out
    torch.manual_seed(0)
    twin = nn.Sequential(nn.Linear(8, 16), nn.GELU(approximate="tanh"), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2, fused=True)
    for step in range(3):
        if step:
            ran["train"](ran["x"], ran["y"])
        nn.functional.cross_entropy(twin(ran["x"]), ran["y"]).backward()
        for parameter in twin.parameters():
            if parameter.dim() == 2:
                parameter.grad.clamp_(-0.01, 0.01)
        optimizer.step()
        optimizer.zero_grad()
        for ours, plain in zip(ran["model"].parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-7)


def test_new_ops_have_inherited_a_source(tmp_path: Path) -> None:
    ran = example(tmp_path)
    clamps = ran["train"].graph_for(ran["x"], ran["y"]).graph.find_nodes(op="call_function", target=aten.clamp.default)
    assert len(clamps) == 2
    for node in clamps:
        assert node.meta["op"].phase == "update"
        assert node.meta["op"].user.text == "optimizer.step()"
        assert node.meta["val"].shape == node.args[0].meta["val"].shape


def step_with(user_pass: Any) -> mf.Step[..., torch.Tensor]:
    model = nn.Linear(4, 4)

    @mf.graph(model, backend="aten", passes=[user_pass])
    def evaluate(x: torch.Tensor) -> torch.Tensor:
        return model(x).relu()

    return evaluate


def add_placeholder(graph: mf.StepGraph) -> mf.StepGraph:
    first = next(iter(graph.graph.nodes))
    with graph.graph.inserting_before(first):
        graph.graph.placeholder("surplus")
    return graph


def drop_output(graph: mf.StepGraph) -> mf.StepGraph:
    next(iter(reversed(graph.graph.nodes))).args = ((),)
    return graph


def wrong_shapes(graph: mf.StepGraph) -> mf.StepGraph:
    (node,) = graph.graph.find_nodes(op="call_function", target=aten.relu.default)
    with graph.graph.inserting_before(node):
        node.args = (graph.graph.call_function(aten.mm.default, (node.args[0], node.args[0])),)
    return graph


def use_before_definition(graph: mf.StepGraph) -> mf.StepGraph:
    (node,) = graph.graph.find_nodes(op="call_function", target=aten.relu.default)
    next(iter(graph.graph.nodes)).append(node)
    return graph


def drop_source(graph: mf.StepGraph) -> mf.StepGraph:
    for node in graph.graph.nodes:
        node.meta.pop("op", None)
    return graph


def not_a_graph(graph: mf.StepGraph) -> Any:
    return torch.nn.Linear(1, 1)


@pytest.mark.parametrize(
    ("user_pass", "words"),
    [
        (add_placeholder, "may not add or remove"),
        (drop_output, "one output node"),
        (wrong_shapes, "mm"),
        (use_before_definition, "not well-formed"),
        (drop_source, "has no OpInfo"),
        (not_a_graph, "StepGraph"),
    ],
)
def test_verifier_names_the_pass_that_broke_the_graph(user_pass: Any, words: str) -> None:
    with pytest.raises(mf.errors.GraphError) as caught:
        step_with(user_pass)(torch.zeros(2, 4))
    assert f"after pass {user_pass.__name__}" in str(caught.value)
    assert re.search(words, str(caught.value))
