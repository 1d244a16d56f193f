"""Weights of one transformer: on disk until they are asked for, then resident on one device."""

import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from types import MappingProxyType

import torch

from ..checkpoint.component import Component
from ..checkpoint.dtypes import TORCH
from ..checkpoint.kinds import Entry, Plan
from ..checkpoint.quant import QuantAssembly, QuantizedWeight
from ..checkpoint.reading import FileReader
from ..config import DiTConfig
from ..model.handle import BuildTable, Tables
from . import policy
from .blocks import by_block

Weight = torch.Tensor | QuantizedWeight

_GATE = "blocks.{}.attn.to_gate_compress.weight"

_ADALN = ".adaln_proj."
"""In the name of a block's AdaLN weights: two fifths of the released model, read once for each schedule."""

_KEPT_TABLES = 2
"""Schedules whose AdaLN tables are kept: 0.2 GB each for four steps at the released size."""


class ResidentStore:
    """A `WeightStore` over the files of one component. Names are canonical; quantised weights stay quantised.

    AdaLN of the main blocks is never resident. A schedule is known before sampling starts, so its tables are made block
    by block from weights that are read for the purpose and dropped, and the tables are kept for the next request.
    """

    def __init__(self, component: Component, plan: Plan, config: DiTConfig, dtype: str = "auto") -> None:
        """`dtype`: "auto" or a name of policy.DTYPES, for every weight that is not pinned to a dtype of its own."""
        policy.check_dtype(dtype)
        self.config = config
        self.plan = plan
        self.component = component
        self._requested = dtype
        self._stored_dtype = policy.stored_dtype(plan.entries, config.adaln)
        self._lock = threading.RLock()
        self._resident: _Resident | None = None
        self._gates_zero: bool | None = None

    @property
    def location(self) -> torch.device | None:
        """Where the weights are, or None while they are only on disk."""
        resident = self._resident
        return None if resident is None else resident.device

    device = location

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

    def nbytes(self, device: torch.device | str = "cpu") -> int:
        """Bytes that the resident weights take on a device."""
        run = self.dtype_on(device)
        return sum(entry.nbytes(self._dtype_of(name, run)) for name, entry in self._resident_entries())

    def _resident_entries(self) -> Iterator[tuple[str, Entry]]:
        return ((n, entry) for n, entry in self.plan.entries.items() if not (n.startswith("blocks.") and _ADALN in n))

    def _dtype_of(self, name: str, run: torch.dtype) -> torch.dtype:
        return policy.weight_dtype(name, self.config.adaln, run)

    def materialise(
        self,
        device: torch.device | str,
        progress: Callable[[int, int], None] | None = None,
        check_interrupt: Callable[[], None] | None = None,
    ) -> None:
        """Read every resident weight from the files into its place on `device`; nothing happens if it is there.

        Args:
            progress: (bytes done, bytes in all), called after each piece of at most 32 MiB.
            check_interrupt: called as often; raises to stop. Whatever was loaded until then is released.

        Raises:
            CheckpointError: a file changed since it was opened, or holds a scale that is no scale.
        """
        device = _indexed(torch.device(device))
        with self._lock:
            if self.location != device:
                self.release()
                self._resident = self._load(device, progress, check_interrupt)

    def _load(self, device, progress, check_interrupt) -> "_Resident":
        run, total, done = self.dtype_on(device), self.nbytes(device), 0

        def on_piece(count: int) -> None:
            nonlocal done
            if check_interrupt is not None:
                check_interrupt()
            done += count
            if progress is not None:
                progress(done, total)

        weights: dict[str, Weight] = {}
        # a run may ask from within inference mode, but the weights outlive it
        with torch.inference_mode(False), torch.no_grad(), self.component.open(device, on_piece) as reader:
            try:
                for name, entry in self._resident_entries():
                    weights[name] = entry.load(reader, self._dtype_of(name, run))
            except BaseException:
                weights.clear()  # the traceback keeps this frame, and with it everything loaded so far
                raise
        return _Resident(weights, self.config.num_layers, device, run)

    def top(self) -> Mapping[str, Weight]:
        """Everything outside the main blocks."""
        return self._loaded().top

    def block(self, index: int) -> Mapping[str, Weight]:
        """One main block without its AdaLN, names relative to it."""
        return self._loaded().blocks[index]

    def block_tables(self, key: Hashable, build: BuildTable) -> Tables:
        """AdaLN tables of every block, from weights read one block at a time; those of the last schedules are kept."""
        resident = self._loaded()
        with self._lock:
            if key not in resident.tables:
                built = tuple(build(self._adaln(i, resident)) for i in range(self.config.num_layers))
                while len(resident.tables) >= _KEPT_TABLES:
                    del resident.tables[next(iter(resident.tables))]
                resident.tables[key] = built
            return resident.tables[key]

    def _adaln(self, index: int, resident: "_Resident") -> dict[str, Weight]:
        prefix = f"blocks.{index}"
        names = [f"{prefix}{_ADALN}linear.{leaf}" for leaf in ("weight", "bias")]
        with torch.inference_mode(False), torch.no_grad(), self.component.open(resident.device) as reader:
            return {
                name.removeprefix(f"{prefix}."): self.plan.entries[name].load(
                    reader, self._dtype_of(name, resident.dtype)
                )
                for name in names
            }

    def release(self) -> None:
        """Let go of the weights in memory; the next `materialise` reads them again."""
        with self._lock:
            self._resident = None

    def _loaded(self) -> "_Resident":
        resident = self._resident
        if resident is None:
            raise RuntimeError("the weights are not in memory: call materialise(device) first")
        return resident

    def gates_all_zero(self) -> bool | None:
        """Whether every gate of the file is zero; None when there are no gates. Reads no further than the first value
        that is not, so a trained student takes one piece."""
        if not self.config.has_gates:
            return None
        with self._lock:
            if self._gates_zero is None:
                with self.component.open() as reader:
                    gates = (self.plan.entries[_GATE.format(i)] for i in range(self.config.num_layers))
                    self._gates_zero = all(_is_zero(reader, entry) for entry in gates)
            return self._gates_zero


class _Resident:
    """What is in memory. Replaced as a whole, so a reader without the lock sees all of it or none."""

    def __init__(self, weights: Mapping[str, Weight], num_layers: int, device: torch.device, dtype: torch.dtype):
        self.device, self.dtype = device, dtype
        self.tables: dict[Hashable, Tables] = {}
        top, blocks = by_block(weights, num_layers)
        self.top = MappingProxyType(top)
        self.blocks = tuple(MappingProxyType(block) for block in blocks)


_PROBE_ROWS = 512
"""Rows that are looked at together: 5.5 MB in bf16 at the released width."""


def _is_zero(reader: FileReader, entry: Entry) -> bool:
    assembly = entry.data if isinstance(entry, QuantAssembly) else entry
    # as stored, which is read without a copy; float8 has no test for zero of its own
    dtype = torch.float32 if assembly.dtype.startswith("F8") else TORCH[assembly.dtype]
    for piece in assembly.pieces:
        for start in range(0, piece.count, _PROBE_ROWS):
            rows = torch.empty(min(_PROBE_ROWS, piece.count - start), *assembly.shape[1:], dtype=dtype, device="cpu")
            reader.rows(piece.source, piece.start + start, rows)
            if rows.any():
                return False
    return True


def _indexed(device: torch.device) -> torch.device:
    """cuda -> cuda:0 (the current one), so that equal places compare equal."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


_STORES: weakref.WeakValueDictionary[Hashable, ResidentStore] = weakref.WeakValueDictionary()
_STORES_LOCK = threading.Lock()


def shared(key: Hashable, make: Callable[[], ResidentStore]) -> ResidentStore:
    """The store made for `key` as long as anybody holds it, else a new one: one copy of the same weights in memory."""
    with _STORES_LOCK:
        store = _STORES.get(key)
        if store is None:
            store = _STORES[key] = make()
        return store
