"""One main block at full size with its sparse attention, in every form of its projections; then the projections alone.

    python3 bench/block.py --out DIR
    python3 bench/block.py --out DIR --forward

768 x 1344, 124 frames, 256 text tokens, preview-4, random weights, one GPU. Forms: bf16; fp8, both sides of each
product in 8 bits; int8, ConvRot rows of 8 bits and activations in bf16. Prints nothing but the fault, and exits 1, when
a form is further from bf16 than its rounding explains. `--forward`: instead, how far a whole forward of all 50 blocks
is from bf16 in each form; holds 65 GiB.
"""

import argparse
import json
import statistics
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from _package import environment, package

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
GROUP = 256
LIMITS = {"fp8": 0.16, "int8": 0.06}
"""Largest relative difference from bf16 of what a block adds to the stream: 3 and 7 bits in four products in a row."""
LOAD_LAUNCHES, ROUNDS = 3, 12


def to_int8(weight: torch.Tensor):
    """ConvRot int8: rotated in groups of input features, one scale a row."""
    rotation = package("kernels.int8_linear").hadamard(GROUP, weight.device)
    data = torch.empty(weight.shape, dtype=torch.int8, device=DEVICE)
    scale = torch.empty(weight.shape[0], 1, device=DEVICE)
    for rows in (slice(i, i + 1024) for i in range(0, weight.shape[0], 1024)):
        turned = (weight[rows].float().view(-1, GROUP) @ rotation).view(-1, weight.shape[1])
        scale[rows] = turned.abs().amax(1, keepdim=True) / 127
        data[rows] = (turned / scale[rows]).round().to(torch.int8)
    return package("fasth3_core.checkpoint.quant").QuantizedWeight(data, scale, "int8_tensorwise", GROUP)


FORMS = {
    "bf16": lambda weight: weight,
    "fp8": lambda weight: package("fasth3_core.weights.fp8").to_fp8(weight),
    "int8": to_int8,
}


def in_form(form: str, weights: dict) -> dict:
    """The weights of a block, its projections in a form."""
    is_projection = package("fasth3_core.weights.fp8").is_projection
    return {n: FORMS[form](w) if is_projection(f"blocks.0.{n}") else w for n, w in weights.items()}


class Block:
    """The blocks of a request; the first of them is ready to run on a residual stream."""

    def __init__(self, attention: str, frames: int = 124, layers: int = 1) -> None:
        weights = package("fasth3_core.selftest.random_weights")
        tensors = weights.random_transformer(**weights.FULL_SIZE | {"num_layers": layers}, dtype=DTYPE, device=DEVICE)
        store = package("fasth3_core.weights.tensors").TensorStore(tensors)
        geometry, dit = package("fasth3_core.packing.geometry"), package("fasth3_core.model.dit")
        size = geometry.latent_frames(frames), 768 // 16, 1344 // 16, geometry.audio_latents(frames)
        layout = package("fasth3_core.packing.layout").build_layout(torch.ones(256, dtype=torch.long), *size)
        contract = package("fasth3_core.contracts").CONTRACTS["preview-4"]
        config = package("fasth3_core.config").VSAConfig(backend=attention)
        config = config.resolved(sparsity=contract.sparsity, tile_size=contract.tile_size)
        case = package("kernels.device").Case(device=DEVICE, dtype=DTYPE)
        vsa = package("fasth3_core.vsa.attention")
        plan = package("fasth3_core.vsa.tiles").tile_plan(layout.prefix, layout.grid, config.tile_size, DEVICE)
        self.vsa_ops = vsa.resolve_ops(attention, case)
        self.attend = lambda q, k, v, gate: vsa.attention(
            q, k, v, gate, plan, config, ops=self.vsa_ops, in_place=True
        )
        self.ops = package("fasth3_core.model.ops").resolve_token_ops("auto", case)
        step = dit.step_rows(layout, 0.3, 0.1, 1.0)
        text = torch.randn(layout.prefix[0], store.config.text_dim)
        self.prepared = dit.prepare(
            store, layout, plan.order, text, [], [step], DEVICE, self.ops, lambda: None, use_gates=True
        )
        self.segments = package("kernels.segments").Segments.of(step.segments, DEVICE)
        self.store, self.config, self.weights = store, store.config, dict(store.block(0))
        self.stream = torch.randn(layout.num_tokens, store.config.hidden_size, device=DEVICE, dtype=DTYPE)

    def run(self, x: torch.Tensor, weights: dict) -> None:
        package("fasth3_core.model.blocks").main_block(
            x, weights, self.config, self.ops, self.prepared.tables[0][0], self.segments, self.prepared.rope,
            self.attend, True, lambda: None,
        )

    def added(self, weights: dict) -> torch.Tensor:
        x = self.stream.clone()
        self.run(x, weights)
        return x.float() - self.stream.float()


class Formed:
    """A store that puts each block into a form when it is its turn."""

    def __init__(self, store, form: str) -> None:
        self._store, self._form = store, form

    def __getattr__(self, name: str):
        return getattr(self._store, name)

    def use(self, index: int):
        return nullcontext(in_form(self._form, self._store.block(index)))


def forward(blocks: Block, form: str) -> dict[str, torch.Tensor]:
    """Velocities of one forward of all blocks."""
    layout = blocks.prepared.layout
    random = torch.Generator(DEVICE).manual_seed(1)
    video = torch.randn(layout.num_tokens - layout.video.start, 96, device=DEVICE, generator=random)
    audio = torch.randn(layout.audio.stop - layout.audio.start, 32, device=DEVICE, generator=random)
    store, velocity = Formed(blocks.store, form), package("fasth3_core.model.dit").velocity
    found = velocity(store, blocks.prepared, 0, video, audio, lambda step, i: blocks.attend, lambda: None)
    return dict(zip(("video", "audio"), found, strict=True))


def compare_forwards(attention: str, env: dict) -> list[dict]:
    """A row per form and stream: relative difference of the velocities from those in bf16."""
    blocks, rows = Block(attention, layers=50), []
    plain = forward(blocks, "bf16")
    for form in LIMITS:
        for stream, found in forward(blocks, form).items():
            apart = ((found - plain[stream]).norm() / plain[stream].norm()).item()
            if not apart < 1:
                sys.exit(f"a forward in {form}: {stream} is {apart:.1e} from bf16")
            rows.append(env | {"what": f"forward of {len(blocks.prepared.gated)} blocks, {stream}", "form": form,
                               "from_bf16": apart})  # fmt: skip
            print(f"forward, {stream:<26} {form:<5} differs from bf16 by {apart:.2e}", flush=True)
    return rows


def milliseconds(functions: dict) -> dict[tuple, list[float]]:
    """Each function in turn, after a launch or more of its own so that it is read under load."""
    times = {key: [] for key in functions}
    for _ in range(ROUNDS):
        for key, function in functions.items():
            for _ in range(LOAD_LAUNCHES - 1):
                function()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            function()
            end.record()
            end.synchronize()
            times[key].append(start.elapsed_time(end))
    return {key: found[2:] for key, found in times.items()}


def extra_gib(function) -> float:
    """Most memory beside what is held: the weights, the stream and the tables."""
    function()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    function()
    return round((torch.cuda.max_memory_allocated() - held) / 2**30, 3)


def projections(block: Block, forms: dict[str, dict]) -> dict[tuple, object]:
    linear = package("fasth3_core.model.linear").linear
    rows = {name: torch.randn(block.stream.shape[0], w.shape[1], device=DEVICE, dtype=DTYPE)
            for name, w in forms["bf16"].items() if w.ndim == 2 and w.shape[1] in (5376, 7168, 14336)}  # fmt: skip
    return {
        (name, form): partial(linear, x, weights[name], ops=block.ops)
        for name, x in rows.items()
        for form, weights in forms.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    parser.add_argument("--attention", default="auto", help="VSA backend (%(default)s)")
    parser.add_argument("--forward", action="store_true")
    parser.add_argument("--commit", help="recorded where git is not at hand; default: HEAD")
    args = parser.parse_args()
    env = environment() | ({"commit": args.commit} if args.commit else {})
    args.out.mkdir(parents=True, exist_ok=True)
    if args.forward:
        rows = compare_forwards(args.attention, env)
        (args.out / "block_forward.json").write_text(json.dumps(rows, indent=1))
        return
    block = Block(args.attention)
    forms = {form: in_form(form, block.weights) for form in FORMS}
    plain, apart = block.added(forms["bf16"]), {"bf16": 0.0}
    for form, limit in LIMITS.items():
        apart[form] = ((block.added(forms[form]) - plain).norm() / plain.norm()).item()
        if not apart[form] <= limit:
            sys.exit(f"a block in {form} is {apart[form]:.1e} from bf16, at most {limit} was expected")
    del plain
    x = block.stream.clone()
    functions = {("block", form): partial(block.run, x, weights) for form, weights in forms.items()}
    extra = {form: extra_gib(function) for (_, form), function in functions.items()}
    rows = []
    for group in (functions, projections(block, forms)):
        for (what, form), times in milliseconds(group).items():
            cuts = statistics.quantiles(times, n=5, method="inclusive")
            row = {"what": what, "form": form, "p20_ms": cuts[0], "p50_ms": statistics.median(times), "p80_ms": cuts[3]}
            more = {"from_bf16": apart[form], "extra_gib": extra[form]} if what == "block" else {}
            rows.append(env | row | more)
            said = f"{apart[form]:.1e} from bf16, {extra[form]:.2f} GiB" if more else ""
            print(f"{what:<34} {form:<5} {row['p50_ms']:8.3f} ms ({cuts[0]:.3f} to {cuts[3]:.3f})  {said}", flush=True)
    for row in rows:
        row["attention"] = block.vsa_ops.block_sparse_attention.name
    (args.out / "block.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
