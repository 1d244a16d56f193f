"""Weights of one transformer: on disk until they are asked for, then on a device: all, or a few blocks at a time."""

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType

import torch

from ..checkpoint.component import Component
from ..checkpoint.kinds import Entry, Plan
from ..checkpoint.quant import QuantAssembly
from ..checkpoint.rows import Assembly
from ..config import DiTConfig
from ..model.handle import BuildTable, Tables
from . import policy
from .blocks import by_block
from .fp8 import FP8, fp8_entries
from .masters import HostBlock, mapped
from .parts import Weight, any_nonzero, tensors_of, with_tensors
from .placement import RESIDENT, Placement, Sizes, describe
from .places import Hosts, Placed, indexed, moved, to_host
from .slots import SlotRing
from .zeros import is_zero

_GATE = "attn.to_gate_compress.weight"

_ADALN = ".adaln_proj."
"""In the name of a block's AdaLN weights: two fifths of the released model, read once for each schedule."""

_KEPT_TABLES = 2
"""Schedules whose AdaLN tables are kept: 0.1 GB each for four steps at the released size."""

_TRANSCRIPTS = (Assembly, QuantAssembly)
"""Entries whose loading copies and rounds, which every device does alike. What others compute is computed on the
device that will use it, whether it stays there or not: so a streamed weight has the bits of a resident one."""


class FileStore:
    """A `WeightStore` over the files of one component. Names are canonical; quantised weights stay quantised.

    Where the blocks are kept is set by `place`: on the device, or in host memory, from where a few at a time visit it.

    AdaLN of the main blocks is never kept. A schedule is known before sampling starts, so its tables are made block by
    block from weights that are read for the purpose and dropped, and the tables are kept for the next request.
    """

    def __init__(self, component: Component, plan: Plan, config: DiTConfig, dtype: str = "auto") -> None:
        """`dtype`: "auto" or a name of policy.DTYPES, for every weight that is not pinned to a dtype of its own; or
        "fp8", which quantises the blocks' projections as they are read."""
        policy.check_dtype(dtype)
        self.config = config
        self.plan = plan
        self.component = component
        self._requested = dtype
        self._entries = fp8_entries(plan.entries) if dtype == FP8 else plan.entries
        self._stored_dtype = policy.stored_dtype(plan.entries, config.adaln)
        self._lock = threading.RLock()
        self._placement = RESIDENT
        self._placed: Placed | None = None
        self._hosts = Hosts()
        self._tables: dict[Hashable, Tables] = {}
        self._gates_zero: bool | None = None

    @property
    def location(self) -> torch.device | None:
        """The device that the weights are placed for, or None while they have no memory on it."""
        placed = self._placed
        return None if placed is None else placed.device

    @property
    def placement(self) -> Placement:
        return self._placement

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the residual stream, once materialised."""
        return self._loaded().dtype

    @property
    def head_form(self) -> str:
        """How a bank of output heads is stored: "absolute" in diffusers files, else "residual": head 0 and what the
        others differ from it by."""
        return "absolute" if self.plan.layout == "diffusers" else "residual"

    def dtype_on(self, device: torch.device | str) -> torch.dtype:
        """What `dtype` will be on this device."""
        return policy.run_dtype(self._requested, self._stored_dtype, torch.device(device))

    def sizes(self, device: torch.device | str = "cpu") -> Sizes:
        """Bytes of the weights on a device, from the headers."""
        run = self.dtype_on(device)
        top, blocks = 0, [0] * self.config.num_layers
        for name, entry in self._kept_entries():
            nbytes = entry.nbytes(self._dtype_of(name, run))
            if name.startswith("blocks."):
                blocks[int(name.split(".")[1])] += nbytes
            else:
                top += nbytes
        return Sizes(top=top, blocks=tuple(blocks))

    def nbytes(self, device: torch.device | str = "cpu") -> int:
        """Bytes that the weights take on a device as they are placed."""
        return self.sizes(device).device(self._placement)

    @property
    def fp8(self) -> bool:
        """Whether the products of the blocks take both sides in fp8."""
        return self._requested == FP8

    def widened_bytes(self) -> int:
        """Bytes that a value of a quantised weight takes while it is dequantised for a product; 0 without any."""
        # float8 files go through fp32 as a whole, int8 weights are never wide as a whole
        wide = any(spec.format.startswith("float8") for spec in self.plan.quantised.values()) and not self.fp8
        return 8 if wide else 0

    def host_bytes(self) -> int:
        """Memory of the process that streamed blocks take; what is in a mapped file is not counted."""
        return 0 if self._placement.mapped else sum(block.nbytes for block in self._hosts.blocks.values())

    def _kept_entries(self) -> Iterator[tuple[str, Entry]]:
        return ((n, entry) for n, entry in self._entries.items() if not (n.startswith("blocks.") and _ADALN in n))

    def _dtype_of(self, name: str, run: torch.dtype) -> torch.dtype:
        return policy.weight_dtype(name, self.config.adaln, run)

    def place(self, placement: Placement) -> None:
        """From now on keep the blocks there. What is placed otherwise leaves the device; `materialise` brings it back,
        from host memory where it has been kept."""
        with self._lock:
            if placement != self._placement:
                self.release()
                if placement.mapped != self._placement.mapped:
                    self._hosts.drop()
                self._placement = placement

    def materialise(
        self,
        device: torch.device | str,
        progress: Callable[[int, int], None] | None = None,
        check_interrupt: Callable[[], None] | None = None,
    ) -> None:
        """Read every weight from the files into its place; nothing happens if it is there.

        Args:
            progress: (bytes done, bytes in all), called after each piece of at most 32 MiB.
            check_interrupt: called as often; raises to stop. Whatever was loaded until then is released.

        Raises:
            CheckpointError: a file changed since it was opened, or holds a scale that is no scale.
        """
        device = indexed(torch.device(device))
        with self._lock:
            if self.location != device:
                self.release()
                self._hosts.check(device, self.dtype_on(device))
                # a run may ask from within inference mode, but the weights outlive it
                with torch.inference_mode(False), torch.no_grad():
                    self._placed = self._load(device, progress, check_interrupt)

    def _load(self, device, progress, check_interrupt) -> Placed:
        run, placement, hosts = self.dtype_on(device), self._placement, self._hosts
        total, done = self._bytes_to_read(run), 0

        def on_piece(count: int) -> None:
            nonlocal done
            if check_interrupt is not None:
                check_interrupt()
            done += count
            if progress is not None:
                progress(done, total)

        top, entries = self._split_entries()
        placed = Placed(device, run)
        pool = hosts.pool_for(placement.pinned_bytes, device)
        weights: dict[str, Weight] = {}
        try:
            with self.component.open(device, on_piece) as on_device, self.component.open("cpu", on_piece) as on_host:
                for name, entry in top.items():
                    placed.top[name] = entry.load(on_device, self._dtype_of(name, run))
                for i, block in enumerate(entries):
                    prefix = f"blocks.{i}."
                    if i not in hosts.blocks:
                        streamed = i in placement.streamed
                        weights = {}
                        for name, entry in block.items():
                            direct = on_host if streamed and isinstance(entry, _TRANSCRIPTS) else on_device
                            weight = entry.load(direct, self._dtype_of(prefix + name, run))
                            weights[name] = to_host(weight) if streamed else weight
                        if _GATE in weights and i not in hosts.gated:
                            hosts.gated[i] = any_nonzero(weights[_GATE])
                        if streamed:
                            host = HostBlock(weights)
                            hosts.blocks[i] = mapped(host, placement.folder) if placement.mapped else host
                            pool.pin(hosts.blocks[i])
                        else:
                            placed.blocks[i] = MappingProxyType(weights)
                    elif i not in placement.streamed:
                        placed.blocks[i] = {
                            name: with_tensors(weight, [t.to(device) for t in tensors_of(weight)])
                            for name, weight in hosts.blocks[i].weights.items()
                        }
            for i in hosts.blocks.keys() - set(placement.streamed):
                del hosts.blocks[i]
            if hosts.blocks:
                placed.ring = SlotRing(hosts.blocks, device, placement.slots)
        except BaseException:
            # the traceback keeps this frame, and with it everything loaded so far
            weights.clear()
            placed.clear()
            hosts.drop()
            raise
        return placed

    def _bytes_to_read(self, run: torch.dtype) -> int:
        here = {f"blocks.{i}." for i in self._hosts.blocks}
        return sum(
            entry.nbytes(self._dtype_of(name, run))
            for name, entry in self._kept_entries()
            if not (name.startswith("blocks.") and name[: name.index(".", 7) + 1] in here)
        )

    def _split_entries(self) -> tuple[dict[str, Entry], list[dict[str, Entry]]]:
        return by_block(dict(self._kept_entries()), self.config.num_layers)

    def top(self) -> Mapping[str, Weight]:
        """Everything outside the main blocks."""
        return MappingProxyType(self._loaded().top)

    def block(self, index: int) -> Mapping[str, Weight]:
        """One main block without its AdaLN, names relative to it, where it is kept."""
        kept = self._loaded().blocks.get(index)
        return self._hosts.blocks[index].weights if kept is None else kept

    def use(self, index: int) -> AbstractContextManager[Mapping[str, Weight]]:
        """The same on the device, for the length of a `with`."""
        placed = self._loaded()
        kept = placed.blocks.get(index)
        return placed.ring.use(index) if kept is None else nullcontext(kept)

    def gated(self) -> tuple[bool, ...]:
        """Per block: whether it has a gate that is not all zero."""
        self._loaded()
        return tuple(self._hosts.gated.get(i, False) for i in range(self.config.num_layers))

    def block_tables(self, key: Hashable, build: BuildTable) -> Tables:
        """AdaLN tables of every block, from weights read one block at a time.

        Those of the last schedules are kept in host memory, so that they outlive the weights on the device.
        """
        placed = self._loaded()
        with self._lock:
            if key not in placed.tables:
                kept = (placed.device, placed.dtype, key)
                if kept not in self._tables:
                    built = tuple(build(self._adaln(i, placed)) for i in range(self.config.num_layers))
                    while len(self._tables) >= _KEPT_TABLES:
                        del self._tables[next(iter(self._tables))]
                    self._tables[kept] = moved(built, torch.device("cpu"))
                    del built
                    if placed.device.type == "cuda":
                        # else the run's tensors settle in the room of AdaLN weights and keep torch from giving it up
                        torch.cuda.empty_cache()
                placed.tables.clear()
                placed.tables[key] = moved(self._tables[kept], placed.device)
            return placed.tables[key]

    def _adaln(self, index: int, placed: Placed) -> dict[str, Weight]:
        prefix = f"blocks.{index}"
        names = [f"{prefix}{_ADALN}linear.{leaf}" for leaf in ("weight", "bias")]
        with torch.inference_mode(False), torch.no_grad(), self.component.open(placed.device) as reader:
            return {
                name.removeprefix(f"{prefix}."): self.plan.entries[name].load(
                    reader, self._dtype_of(name, placed.dtype)
                )
                for name in names
            }

    def traffic(self) -> dict[str, object]:
        """For the report: how the weights are placed, and what was streamed since the last call. Ask when the device
        is idle."""
        placed = self._loaded()
        said: dict[str, object] = {"placement": describe(self._placement, self.sizes(placed.device))}
        if placed.ring is not None:
            traffic = placed.ring.take_traffic()
            said |= {
                "policy": "mmap" if self._placement.mapped else "stream",
                "slots": self._placement.slots,
                "streamed_blocks": len(self._placement.streamed),
                "resident_blocks": self.config.num_layers - len(self._placement.streamed),
                "host_bytes": sum(block.nbytes for block in self._hosts.blocks.values()),
                "pinned_bytes": sum(block.pinned_bytes for block in self._hosts.blocks.values()),
                "copies": traffic.copies,
                "streamed_bytes": traffic.nbytes,
                "wait_seconds": traffic.wait_seconds,
            }
        return said

    def release(self) -> None:
        """Let go of the device memory; the next `materialise` brings the weights back, those of streamed blocks from
        host memory."""
        with self._lock:
            if self._placed is not None:
                self._placed.clear()
                self._placed = None

    def forget(self) -> None:
        """Let go of the copies in host memory, too; the next `materialise` reads the files again."""
        with self._lock:
            self.release()
            self._hosts.drop()

    def _loaded(self) -> Placed:
        placed = self._placed
        if placed is None:
            raise RuntimeError("the weights are not in memory: call materialise(device) first")
        return placed

    def gates_all_zero(self) -> bool | None:
        """Whether every gate of the file is zero; None when there are no gates. Reads no further than the first value
        that is not, so a trained student takes one piece."""
        if not self.config.has_gates:
            return None
        with self._lock:
            if self._gates_zero is None:
                with self.component.open() as reader:
                    gates = (self.plan.entries[f"blocks.{i}.{_GATE}"] for i in range(self.config.num_layers))
                    self._gates_zero = all(is_zero(reader, entry) for entry in gates)
            return self._gates_zero
