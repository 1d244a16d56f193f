"""How an operator is made of an op of the registry."""

import re
from collections.abc import Callable
from typing import Any

import torch

from .. import registry

NAMESPACE = "comfyui_fasth3"


def operator(op: str, schema: str, fake: Callable[..., Any], function: Callable[..., Any] | None = None) -> Any:
    """Register `comfyui_fasth3::<op>`.

    Args:
        schema: as torch.library writes it, without a name. The first argument is `str backend`.
        fake: result for arguments without values.
        function: (implementation, *the other arguments) -> result; None calls the implementation with them.
    """

    def run(backend: str, *args: Any) -> Any:
        implementation = registry.loaded(op, backend)
        return implementation(*args) if function is None else function(implementation, *args)

    mutated = re.findall(r"Tensor\(\w!\) (\w+)", schema)
    made = torch.library.custom_op(f"{NAMESPACE}::{op}", run, mutates_args=mutated, schema=schema)
    made.register_fake(lambda backend, *args: fake(*args))
    return made
