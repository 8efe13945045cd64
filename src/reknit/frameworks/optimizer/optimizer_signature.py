"""The states and options of an optimizer of torch, read without the names of its parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from reknit.frameworks.optimizer import optimizer_protocol, param_options
from reknit.frameworks.optimizer.step_barrier import barriers
from reknit.frameworks.torch import torch_private
from reknit.frameworks.walk.walk import Place
from reknit.types.shard import Blob

_is_contiguous = torch.Tensor.is_contiguous

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from reknit.frameworks.walk.save_walk import Saving
    from reknit.frameworks.walk.state_signature import Signature


def sign(optimizer: Any, signature: Signature) -> int | None:
    """Add the facts that decide names and places of the states, and return the number of values.

    These are the options of each parameter and empty group.  None, except for a plain optimizer of torch
    with no states other than tensors of parameters.  Its parameters are among the tensors of the signature
    again, which identifies them with those of modules.
    """
    if not optimizer_protocol.is_plain(optimizer):
        return None
    facts, tensors = signature.facts, signature.tensors
    states, num_found = optimizer.state, 0
    forms: set[tuple[Any, ...]] = set()
    facts.append(type(optimizer))
    for group in optimizer.param_groups:
        parameters, names = group["params"], group.get("param_names")
        flattened = None if names is None else [*map(torch_private.is_flattened, parameters)]
        if names is not None and {*map(type, names)} - {str}:
            return None
        facts += (len(parameters), None if names is None else [*names], flattened)
        tensors += parameters
        for parameter in parameters:
            state = states.get(parameter)
            if state is None:
                facts.append(None)
            elif type(state) is not dict:
                return None
            else:
                if not _is_usual(state.values(), parameter):
                    return None
                num_found += 1
                form = (*state,)
                forms.add(form)
                facts.append(form)
                tensors += state.values()
    if num_found != len(states) or {type(key) for form in forms for key in form} - {str}:
        return None  # states without a parameter, or without a plain name
    return sum(len(group["params"]) or 1 for group in optimizer.param_groups)


def _is_usual(states: Iterable[Any], parameter: Any) -> bool:
    """Return whether the memory of states is in an order that needs no note beside them."""
    return all(map(_is_contiguous, states)) or all(
        state.is_contiguous() or state.stride() == parameter.stride() for state in states
    )


def add_values(optimizer: Any, saving: Saving, before: Sequence[Blob]) -> None:
    """Add the options of all parameters and empty groups, under the names of the last walk."""
    names = iter(before)
    plain = before[0].value.get(param_options.PLAIN, ()) if before else ()
    kind = optimizer_protocol.kind(optimizer)
    for group in optimizer.param_groups:
        value: Any = None
        for _ in group["params"]:
            blob = next(names)
            if value is None:
                value = param_options.of_group(group, kind, plain, Place(blob.item, blob.fqn))
            saving.blobs.append(Blob(blob.item, blob.fqn, value))
    for group in optimizer.param_groups:
        if not group["params"]:
            blob = next(names)
            value = param_options.of_group(group, kind, (), Place(blob.item, blob.fqn))
            saving.blobs.append(Blob(blob.item, blob.fqn, value))
    saving.barriers.extend(barriers(optimizer))
