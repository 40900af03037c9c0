"""The layout rules, by execution: a slice of PyTorch's operators, and whether the check sees a wrong rule."""

from __future__ import annotations

import warnings

import pytest

from monoflow._torch import operator_entries, unfrozen_generators
from monoflow.errors import RuleError
from monoflow.layout.notation import parse
from monoflow.testing.mutations import mutations
from monoflow.testing.opinfo import check_entry, entry_name

_NAMES = """
addmm add amax any argmax bernoulli cat cumsum diagonal fft.rfft gather index_add index_select linalg.solve
logsumexp mm masked_fill nn.functional.avg_pool2d nn.functional.batch_norm nn.functional.conv2d
nn.functional.cross_entropy nn.functional.dropout nn.functional.embedding nn.functional.layer_norm
nn.functional.max_pool2d nn.functional.scaled_dot_product_attention reshape scatter_add softmax sort split squeeze
stack sum topk transpose var where
"""

ENTRIES = {entry_name(e): e for e in operator_entries() if entry_name(e) in _NAMES.split()}


@pytest.mark.parametrize("name", ENTRIES)
def test_pieces_give_what_the_whole_gives(name: str) -> None:
    with unfrozen_generators(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = check_entry(ENTRIES[name], samples=1, layouts=3)
    assert result.cases and result.verdict == "right", "\n".join(result.reasons[:3])


def test_changed_rules_are_noticed() -> None:
    with unfrozen_generators(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = list(mutations(rules=20, entries=60, seed=0))
    assert len(found) == 20
    assert [m for m in found if not m.caught] == []


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("m k, k n", "exactly one `->`"),
        ("m k -> m; linear 3", "counts more arguments"),
        ("m k -> m; max z", "no argument has it"),
        ("m k -> m; most k", "unknown option"),
        ("m ... -> m", "stands first"),
        ("m, , k -> m", "an empty term"),
        ("m-k -> m", "is not a factor"),
    ],
)
def test_a_line_that_cannot_be_read_is_repeated(line: str, why: str) -> None:
    with pytest.raises(RuleError, match=why) as caught:
        parse(line)
    assert repr(line) in str(caught.value)
