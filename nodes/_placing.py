"""From an offload setting and a plan to where a model's weights are kept, on this host and at this moment."""

from dataclasses import replace

import torch

from ..fasth3_core.errors import ConfigError
from ..fasth3_core.model.handle import H3Model
from ..fasth3_core.planning import Wanted, alternatives
from ..fasth3_core.weights.placement import RESIDENT, Offload, Placement, choose
from ..fasth3_core.weights.store import forget_idle
from . import _host


def place(model: H3Model, offload: Offload | None, wanted: Wanted, working: int, device: torch.device) -> None:
    """Set where the blocks are kept. Nothing is read yet; other models are only asked to leave host memory.

    Raises:
        ConfigError: it cannot fit; says what would.
    """
    store = model.store
    store.place(RESIDENT if offload is None else _choose(store, offload, wanted, working, device))


def _choose(store, offload: Offload, wanted: Wanted, working: int, device: torch.device) -> Placement:
    host = _host.get()

    def chosen() -> Placement:
        room = host.room(device)
        # what the store itself has in host memory is there for it
        room = replace(room, host=room.host + store.host_bytes())
        return choose(
            offload, wanted.sizes, room, working, now=store.placement,
            what_fits=lambda budget: alternatives(wanted, budget),
        )

    try:
        placement = chosen()
        if not placement.mapped or offload.policy == "mmap":
            return placement
    except ConfigError:
        forget_idle(store)
        return chosen()
    forget_idle(store)  # others may be all that stands in the way of memory of the process
    return chosen()


def check(offload: object) -> Offload | None:
    """Raises ConfigError for what is no offload setting."""
    if offload is None or isinstance(offload, Offload):
        return offload
    raise ConfigError("offload", type(offload).__name__, "FastH3 Offload, or nothing", "Disconnect it.")
