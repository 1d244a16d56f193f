"""Weights of one transformer: on disk until they are asked for, then on a device: all, or a few blocks at a time."""

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType

import torch

from ..checkpoint.component import Component
from ..checkpoint.kinds import Plan
from ..config import DiTConfig
from ..model.handle import BuildTable, Tables
from .contents import GATE, Contents
from .loading import load
from .parts import Weight
from .placement import RESIDENT, Placement, Sizes, describe
from .places import Hosts, Placed, indexed, to_device
from .tables import KeptTables
from .zeros import is_zero


class FileStore:
    """A `WeightStore` over the files of one component. Names are canonical; quantised weights stay quantised.

    Where the blocks are kept is set by `place`: on the device, or in host memory, from where a few at a time visit it,
    and the weights that refine a prompt once a request.

    AdaLN of the main blocks is never kept. A schedule is known before sampling starts, so its tables are made block by
    block from weights that are read for the purpose and dropped, and the tables are kept for the next request.
    """

    def __init__(self, component: Component, plan: Plan, config: DiTConfig, dtype: str = "auto") -> None:
        """`dtype`: "auto" or a name of policy.DTYPES, for every weight that is not pinned to a dtype of its own; or
        "fp8", which quantises the blocks' projections as they are read. Raises ConfigError if it is none of these."""
        self.config = config
        self.plan = plan
        self.component = component
        self._contents = Contents(plan, config, dtype)
        self._lock = threading.RLock()
        self._placement = RESIDENT
        self._placed: Placed | None = None
        self._hosts = Hosts()
        self._tables = KeptTables()
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

    @property
    def fp8(self) -> bool:
        """Whether the products of the blocks take both sides in fp8."""
        return self._contents.fp8

    def dtype_on(self, device: torch.device | str) -> torch.dtype:
        """What `dtype` will be on this device."""
        return self._contents.run_dtype(torch.device(device))

    def sizes(self, device: torch.device | str = "cpu") -> Sizes:
        """Bytes of the weights on a device, from the headers."""
        return self._contents.sizes(self.dtype_on(device))

    def nbytes(self, device: torch.device | str = "cpu") -> int:
        """Bytes that the weights take on a device as they are placed."""
        return self.sizes(device).device(self._placement)

    def widened_bytes(self) -> int:
        """Bytes that a value of a quantised weight takes while it is dequantised for a product; 0 without any."""
        return self._contents.widened_bytes

    def host_bytes(self) -> int:
        """Memory of the process that streamed weights take; what is in a mapped file is not counted."""
        return 0 if self._placement.mapped else sum(block.nbytes for block in self._hosts.all)

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
                    self._placed = load(
                        self._contents, self.component, self._placement, self._hosts, device, progress, check_interrupt
                    )

    def top(self) -> Mapping[str, Weight]:
        """Everything outside the main blocks and `text`."""
        return MappingProxyType(self._loaded().top)

    @contextmanager
    def text(self) -> Iterator[Mapping[str, Weight]]:
        """What refines a prompt, on the device for the length of a `with`; it stays there while no block streams."""
        placed, kept = self._loaded(), self._hosts.text
        if kept is None:
            yield placed.text
            return
        visiting = to_device(kept, placed.device)
        try:
            yield visiting
        finally:
            visiting.clear()
            if placed.device.type == "cuda":
                torch.cuda.empty_cache()  # as after the tables: its room is needed in other pieces

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
        """AdaLN tables of every block, from weights read one block at a time; see `KeptTables`."""
        placed = self._loaded()

        def adaln(index: int) -> dict[str, Weight]:
            entries, run = self._contents.adaln[index], placed.dtype
            with torch.inference_mode(False), torch.no_grad(), self.component.open(placed.device) as reader:
                return {n: entry.load(reader, self._contents.dtype_of(n, run)) for n, entry in entries.items()}

        with self._lock:
            return self._tables.get(key, build, placed, self.config.num_layers, adaln)

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
                "host_bytes": sum(block.nbytes for block in self._hosts.all),
                "pinned_bytes": sum(block.pinned_bytes for block in self._hosts.all),
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
                    gates = (self.plan.entries[f"blocks.{i}.{GATE}"] for i in range(self.config.num_layers))
                    self._gates_zero = all(is_zero(reader, entry) for entry in gates)
            return self._gates_zero
