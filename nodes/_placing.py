"""From an offload setting and a plan to where a model's weights are kept, on this host and at this moment."""

from dataclasses import replace

import torch

from ..fasth3_core.errors import ConfigError
from ..fasth3_core.model.handle import H3Model
from ..fasth3_core.planning import Wanted
from ..fasth3_core.planning_fit import PASSES, fit
from ..fasth3_core.sampling.settings import RunSettings
from ..fasth3_core.vsa.attention import resolve_ops
from ..fasth3_core.weights.placement import RESIDENT, Offload, Placement
from ..fasth3_core.weights.shared import forget_idle
from ..kernels.device import Case
from . import _host


def place(model: H3Model, offload: Offload | None, wanted: Wanted, device: torch.device) -> Wanted:
    """Set where the blocks are kept, and return the request as it then runs: with as many tokens a pass as fit.

    Nothing is read yet; other models are only asked to leave host memory.

    Raises:
        ConfigError: it cannot fit; says what would.
    """
    if offload is None:
        # what does not fit is the host's to refuse, who may know more of its memory than it says
        try:
            fitted, _ = choose_for(model, None, wanted, device)
        except ConfigError:
            fitted = replace(wanted, pass_rows=PASSES[-1])
        placement = RESIDENT
    else:
        fitted, placement = _with_room_made(model, offload, wanted, device)
    model.store.place(placement)
    return fitted


def choose_for(
    model: H3Model, offload: Offload | None, wanted: Wanted, device: torch.device
) -> tuple[Wanted, Placement]:
    """How the request would run and where the blocks would be kept; nothing changes.

    Raises:
        ConfigError: it cannot fit, with or without an offload setting; says what would.
    """
    store, room = model.store, _host.get().room(device)
    # what the store itself has in host memory is there for it
    room = replace(room, host=room.host + store.host_bytes())
    return fit(wanted, offload or Offload(policy="resident"), room, store.placement)


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


def _with_room_made(
    model: H3Model, offload: Offload, wanted: Wanted, device: torch.device
) -> tuple[Wanted, Placement]:
    def chosen() -> tuple[Wanted, Placement]:
        return choose_for(model, offload, wanted, device)

    try:
        fitted, placement = chosen()
        if not placement.mapped or offload.policy == "mmap":
            return fitted, placement
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
