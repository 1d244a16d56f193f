"""From an offload setting and a plan to where a model's weights are kept, on this host and at this moment."""

from dataclasses import replace

import torch

from ..fasth3_core.errors import ConfigError
from ..fasth3_core.model.handle import H3Model
from ..fasth3_core.planning import Wanted, alternatives, plan
from ..fasth3_core.sampling.settings import RunSettings
from ..fasth3_core.vsa.attention import resolve_ops
from ..fasth3_core.weights.placement import RESIDENT, Offload, Placement, choose
from ..fasth3_core.weights.shared import forget_idle
from ..kernels.device import Case
from . import _host


def place(model: H3Model, offload: Offload | None, wanted: Wanted, device: torch.device) -> None:
    """Set where the blocks are kept. Nothing is read yet; other models are only asked to leave host memory.

    Raises:
        ConfigError: it cannot fit; says what would.
    """
    model.store.place(RESIDENT if offload is None else _with_room_made(model, offload, wanted, device))


def choose_for(model: H3Model, offload: Offload | None, wanted: Wanted, device: torch.device) -> Placement:
    """Where the blocks would be kept; nothing changes.

    Raises:
        ConfigError: it cannot fit, with or without an offload setting; says what would.
    """
    store, room = model.store, _host.get().room(device)
    # what the store itself has in host memory is there for it
    room = replace(room, host=room.host + store.host_bytes())
    return choose(
        offload or Offload(policy="resident"), wanted.sizes, room, plan(wanted).run.working, now=store.placement,
        what_fits=lambda budget: alternatives(wanted, budget),
    )


def gathers(model: H3Model, settings: RunSettings, device: torch.device) -> bool:
    """Whether the sparse op of a run gathers keys and values on a CUDA device, which takes more memory.

    Raises:
        BackendUnavailable: a named backend cannot run there.
    """
    if settings.vsa is None:
        return False
    dtype = model.store.dtype_on(device)
    case = Case(device=device, dtype=dtype, head_dim=model.config.head_dim, tile_size=settings.vsa.tile_size)
    ops = resolve_ops(settings.vsa.backend, case)
    return device.type == "cuda" and ops.block_sparse_attention.name == "eager"


def _with_room_made(model: H3Model, offload: Offload, wanted: Wanted, device: torch.device) -> Placement:
    def chosen() -> Placement:
        return choose_for(model, offload, wanted, device)

    try:
        placement = chosen()
        if not placement.mapped or offload.policy == "mmap":
            return placement
    except ConfigError:
        forget_idle(model.store)
        return chosen()
    forget_idle(model.store)  # others may be all that stands in the way of memory of the process
    return chosen()


def check(offload: object) -> Offload | None:
    """Raises ConfigError for what is no offload setting."""
    if offload is None or isinstance(offload, Offload):
        return offload
    raise ConfigError("offload", type(offload).__name__, "FastH3 Offload, or nothing", "Disconnect it.")
