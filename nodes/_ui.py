"""What a node tells the user: on the node while the graph runs, in the history after it, and in the log."""

import logging
from typing import Any

from . import _host

log = logging.getLogger("fasth3")


def tell(node: type, text: str, *, logged: str | None = None, **ui: Any) -> dict[str, Any]:
    """Show and log `text`; returns the node's ui, with what else it has: files for the interface ("images")
    or for those who fetch them ("latents", "prompts"), ...

    Args:
        node: the class that `execute` was called on, with `unique_id` among its hidden inputs.
        logged: what to log instead, where another node has logged the rest.
    """
    line = text if logged is None else logged
    name = node.__name__.removesuffix("Clone")  # ComfyUI executes a locked clone of the class
    log.log(logging.WARNING if "warning:" in line else logging.INFO, "%s: %s", name, line)
    _host.get().show_text(node.hidden.unique_id, text)
    return {**ui, "text": (text,)}
