"""Weights from files into their places: on the device, or in host memory for those that visit it."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from ..checkpoint.component import Component
from ..checkpoint.kinds import Entry
from ..checkpoint.quant import QuantAssembly
from ..checkpoint.rows import Assembly
from .contents import GATE, Contents
from .masters import HostBlock, mapped
from .parts import Weight, any_nonzero
from .placement import Placement
from .places import Hosts, Placed, to_device, to_host
from .slots import SlotRing

_TRANSCRIPTS = (Assembly, QuantAssembly)
"""Entries whose loading copies and rounds, which every device does alike. What others compute is computed on the
device that will use it, whether it stays there or not: so a streamed weight has the bits of a resident one."""


def load(
    contents: Contents,
    component: Component,
    placement: Placement,
    hosts: Hosts,
    device: torch.device,
    progress: Callable[[int, int], None] | None,
    check_interrupt: Callable[[], None] | None,
) -> Placed:
    """Read what is not there yet. Whatever was loaded is let go on an exception; arguments as of `materialise`."""
    run, streamed = contents.run_dtype(device), frozenset(placement.streamed)
    placed, pool = Placed(device, run), hosts.pool_for(placement.pinned_bytes, device)
    groups = [contents.top, *(block for i, block in enumerate(contents.blocks) if i not in hosts.blocks)]
    groups += [contents.text] if hosts.text is None else []
    total, done = sum(contents.nbytes(group, run) for group in groups), 0
    weights: dict[str, Weight] = {}  # of the group that is being read

    def on_piece(count: int) -> None:
        nonlocal done
        if check_interrupt is not None:
            check_interrupt()
        done += count
        if progress is not None:
            progress(done, total)

    def read(entries: Mapping[str, Entry], to_keep_on_host: bool) -> dict[str, Weight]:
        nonlocal weights
        weights = {}
        for name, entry in entries.items():
            direct = on_host if to_keep_on_host and isinstance(entry, _TRANSCRIPTS) else on_device
            weight = entry.load(direct, contents.dtype_of(name, run))
            weights[name] = to_host(weight) if to_keep_on_host else weight
        return weights

    def kept_on_host(read_weights: dict[str, Weight]) -> HostBlock:
        host = HostBlock(read_weights)
        host = mapped(host, placement.folder) if placement.mapped else host
        pool.pin(host)
        return host

    try:
        with component.open(device, on_piece) as on_device, component.open("cpu", on_piece) as on_host:
            placed.top = read(contents.top, False)
            if hosts.text is None and streamed:
                hosts.text = kept_on_host(read(contents.text, True))
            elif not streamed:
                placed.text = read(contents.text, False) if hosts.text is None else to_device(hosts.text, device)
            for i, block in enumerate(contents.blocks):
                if i in hosts.blocks:
                    if i not in streamed:
                        placed.blocks[i] = to_device(hosts.blocks[i], device)
                    continue
                held = read(block, i in streamed)
                if GATE in held and i not in hosts.gated:
                    hosts.gated[i] = any_nonzero(held[GATE])
                if i in streamed:
                    hosts.blocks[i] = kept_on_host(held)
                else:
                    placed.blocks[i] = MappingProxyType(held)
        hosts.keep_only(streamed)
        if streamed:
            placed.ring = SlotRing(hosts.blocks, device, placement.slots)
    except BaseException:
        # the traceback keeps these frames, and with them everything loaded so far
        weights.clear()
        placed.clear()
        hosts.drop()
        raise
    return placed
