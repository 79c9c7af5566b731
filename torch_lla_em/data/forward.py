"""Calls of a network on the inputs of a batch, and what is wrong with those it does not take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

from torch import Tensor, nn

from torch_lla_em.data.batch import is_sequence, tensors_in


def default_forward(module: nn.Module, inputs: Any) -> Tensor:
    """Call a network on a tensor, a tuple or a dict; return its tensor or ``.logits``."""
    if isinstance(inputs, Mapping):
        outputs = module(**inputs)
    elif is_sequence(inputs):
        _refuse_numbers(inputs)
        try:
            outputs = module(*inputs)
        except TypeError as error:
            _explain_number(module, inputs)
            raise error
    else:
        _refuse_table(inputs)
        outputs = module(inputs)
    outputs = getattr(outputs, "logits", outputs)
    if not isinstance(outputs, Tensor):
        raise TypeError(
            f"The model returned {type(outputs).__name__}, not a tensor or an object with "
            "`.logits`. Pass forward_fn=lambda model, inputs: ... that returns one tensor."
        )
    return outputs


def _refuse_numbers(inputs: Sequence[Any]) -> None:
    numbers = inputs and all(isinstance(part, (int, float, list, tuple)) for part in inputs)
    if numbers and not tensors_in(inputs):
        raise TypeError(
            "The inputs are a list of numbers, not a tensor: pass torch.tensor(x), or an array."
        )


def _refuse_table(inputs: Any) -> None:
    if hasattr(inputs, "to_numpy"):
        raise TypeError(
            f"The inputs are a {type(inputs).__name__}, which a network does not take: pass "
            'torch.tensor(x.to_numpy("float32")).'
        )


def _explain_number(module: nn.Module, inputs: Sequence[Any]) -> None:
    """Raise with the remedy where a network takes fewer inputs than a batch has."""
    try:
        signature(module.forward).bind(*inputs)
    except TypeError as error:
        raise TypeError(
            f"The network was called with {len(inputs)} inputs, which it does not take ({error}): of "
            "a tuple the last entry is the targets, and all others are inputs. For batches (x, y, "
            'weight) call fit(loader, weights="last"). For other entries that are no inputs pass '
            "target_fn=lambda batch: batch[1] and forward_fn=lambda model, inputs: model(inputs[0])."
        ) from error
