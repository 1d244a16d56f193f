"""The token-wise ops at full size on one GPU (124 frames of 768 x 1344: 37,966 tokens), and one whole block, in bf16.

    python bench/token_ops.py --out bench/results

Every Triton op is first compared with its reference, and beyond 2^31 elements; on a failed check nothing is timed and
the exit status is 1. GB/s counts each input read once and each output written once; a device copy stands beside it.
"""

import argparse
import json
import statistics
import sys
from functools import partial
from pathlib import Path

import torch
from _package import environment, package

ops = {
    name: package(f"kernels.{name}")
    for name in ("rms_modulate", "gated_residual", "residual_rms_modulate", "qk_norm_rope", "swiglu")
}
Segments = package("kernels.segments").Segments

SPANS = ((0, 256, 1), (256, 670, 2), (670, 37966, 0))
"""Text, sound, video."""
S, C, F, H, D, R = SPANS[-1][1], 5376, 14336, 56, 128, 48
FF_ROWS = 16384
EPS = 1e-5
DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
SAME = 5e-4
"""Relative L2 between two results that are each rounded once: a few elements fall on the other side of a tie."""


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=DTYPE)


def inputs(rows: int) -> dict[str, tuple]:
    """Op -> its arguments on the first `rows` tokens of a full-size run."""
    segments = Segments.of([(a, min(b, rows), r) for a, b, r in SPANS if a < rows], DEVICE)
    gate, scale, shift = normal(3, 3, C).unbind(1)
    norm, q_norm, k_norm = normal(C).mul_(0.1).add_(1), *normal(2, D).mul_(0.1).add_(1)
    x, y = normal(2, rows, C)
    q, k, _ = normal(rows, 3, H, D).unbind(1)
    angles = torch.randn(rows, R, device=DEVICE) * 10
    return {
        "rms_modulate": (x, norm, scale, shift, segments, EPS),
        "gated_residual": (x, y, gate, segments),
        "residual_rms_modulate": (x, y, gate, norm, scale, shift, segments, EPS),
        "qk_norm_rope": (q, k, q_norm, k_norm, angles.cos().to(DTYPE), angles.sin().to(DTYPE), EPS),
        "swiglu": normal(min(rows, FF_ROWS), 2 * F).chunk(2, dim=-1)[::-1],
    }


def moved(name: str, args: tuple) -> int:
    """Bytes that the op must read and write."""
    tokens = {"rms_modulate": 2, "gated_residual": 3, "residual_rms_modulate": 4}
    if name in tokens:
        return tokens[name] * args[0].numel() * args[0].element_size()
    if name == "swiglu":
        return args[0].numel() * args[0].element_size() * 3
    return 4 * args[0].numel() * args[0].element_size()


def run(name: str, backend: str, args: tuple) -> list[torch.Tensor]:
    """The op's results: what it returns and what it overwrites."""
    function = getattr(ops[name], name)
    out = function(*args, backend=backend)
    overwritten = {"gated_residual": 1, "residual_rms_modulate": 1, "qk_norm_rope": 2}.get(name, 0)
    return [t for t in (out, *args[:overwritten]) if t is not None]


def copied(args: tuple) -> tuple:
    return tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args)


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


def check(rows: int) -> list[str]:
    """What is wrong with the Triton ops."""
    wrong = []
    for name, args in inputs(rows).items():
        out = run(name, "triton", copied(args))
        for a, b in zip(out, run(name, "reference", copied(args)), strict=True):
            error = relative_error(a, b)
            if not error <= SAME:
                wrong.append(f"{name} on {rows} tokens: relative error {error:.2e}, allowed {SAME:.0e}")
    return wrong


def check_beyond_31_bits() -> list[str]:
    """The last rows of a fused projection of more than 2^31 elements, against the same rows alone."""
    rows, tail = 2**31 // (3 * H * D) + 200, 64
    fused = normal(rows, 3, H, D)
    angles = torch.randn(rows, R, device=DEVICE)
    cos, sin, norm = angles.cos().to(DTYPE), angles.sin().to(DTYPE), normal(D)
    alone = fused[-tail:].clone()
    for rows_of, c, s in ((fused, cos, sin), (alone, cos[-tail:], sin[-tail:])):
        ops["qk_norm_rope"].qk_norm_rope(rows_of[:, 0], rows_of[:, 1], norm, norm, c, s, EPS, backend="triton")
    return [] if torch.equal(fused[-tail:], alone) else ["qk_norm_rope is wrong beyond 2^31 elements"]


def milliseconds(*functions, rounds: int = 30) -> list[list[float]]:
    """Times of each, taken in turn, so that clocks and heat are the same for all.

    Before each a write of 1 GiB empties the cache and gives the host time to queue the launch.
    """
    flush = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    times: list[list[float]] = [[] for _ in functions]
    for i in range(rounds + 3):
        for function, kept in zip(functions, times, strict=True):
            flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            function()
            end.record()
            torch.cuda.synchronize()
            if i >= 3:
                kept.append(start.elapsed_time(end))
    return times


def row(case: str, backend: str, times: list[float], **more) -> dict:
    tenths = statistics.quantiles(times, n=10)
    spread = {"ms_p20": tenths[1], "ms_p50": statistics.median(times), "ms_p80": tenths[7]}
    return {"case": case, "backend": backend, **spread, **more}


def time_ops() -> list[dict]:
    source, target = normal(2, 1 << 29)
    (times,) = milliseconds(lambda: target.copy_(source))
    copy_rate = 2 * source.nbytes / statistics.median(times) / 1e6
    rows = [row("copy of 1 GiB", "torch", times, gb_per_s=copy_rate)]
    for name, args in inputs(S).items():
        backends = ("eager", "triton")
        both = milliseconds(*(partial(run, name, backend, args) for backend in backends))
        for backend, times in zip(backends, both, strict=True):
            rate = moved(name, args) / statistics.median(times) / 1e6
            rows.append(row(name, backend, times, gb_per_s=rate, of_copy=rate / copy_rate, tokens=args[0].shape[0]))
    return rows


def time_block(attention: str) -> list[dict]:
    """One main block with random weights: with its sparse attention, and without: linears and token ops alone."""
    blocks, dit = package("fasth3_core.model.blocks"), package("fasth3_core.model.dit")
    contract = package("fasth3_core.contracts").CONTRACTS["preview-4"]
    store, layout = one_block(), full_size_layout()
    config = package("fasth3_core.config").VSAConfig()
    config = config.resolved(sparsity=contract.sparsity, tile_size=contract.tile_size)
    case = package("kernels.device").Case(device=DEVICE, dtype=DTYPE)
    plan = package("fasth3_core.vsa.tiles").tile_plan(layout.prefix, layout.grid, config.tile_size, DEVICE)
    vsa = package("fasth3_core.vsa.attention")
    vsa_ops = vsa.resolve_ops(attention, case)
    step = dit.step_rows(layout, 0.3, 0.1, 1.0)
    text = torch.randn(layout.prefix[0], store.config.text_dim)

    def sparse(q, k, v, gate):
        return vsa.attention(q, k, v, gate, plan, config, ops=vsa_ops, in_place=True)

    def passes(q, k, v, gate):
        return v

    x0, outs, functions = normal(layout.num_tokens, C), {}, {}
    for backend in ("eager", "triton"):
        token_ops = package("fasth3_core.model.ops").resolve_token_ops(backend, case)
        prepared = dit.prepare(
            store, layout, plan.order, text, [], [step], DEVICE, token_ops, lambda: None, use_gates=True
        )
        segments = Segments.of(step.segments, DEVICE)
        for case_name, attend in (("block without attention", passes), ("block", sparse)):
            def block(x, attend=attend, prepared=prepared, token_ops=token_ops, segments=segments):
                blocks.main_block(
                    x, store.block(0), store.config, token_ops, prepared.tables[0][0], segments, prepared.rope,
                    attend, prepared.gated[0], lambda: None,
                )

            if attend is passes:
                block(outs.setdefault(backend, x0.clone()))
            functions[case_name, backend] = block
    error = relative_error(outs["triton"], outs["eager"])
    if not error <= 1e-2:
        sys.exit(f"a block with Triton ops is {error:.1e} from one with eager ops")
    times = milliseconds(*(lambda f=f: f(x0) for f in functions.values()), rounds=12)
    name = vsa_ops.block_sparse_attention.name
    return [row(case, backend, t, attention=name) for (case, backend), t in zip(functions, times, strict=True)]


def one_block():
    weights = package("fasth3_core.selftest.random_weights")
    tensors = weights.random_transformer(**weights.FULL_SIZE | {"num_layers": 1}, dtype=DTYPE, device=DEVICE)
    return package("fasth3_core.weights.tensors").TensorStore(tensors)


def full_size_layout():
    geometry = package("fasth3_core.packing.geometry")
    build = package("fasth3_core.packing.layout").build_layout
    tags = torch.ones(256, dtype=torch.long)
    return build(tags, geometry.latent_frames(124), 768 // 16, 1344 // 16, geometry.audio_latents(124))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    parser.add_argument("--attention", default="auto", help="VSA backend of the whole block (%(default)s)")
    parser.add_argument("--commit", help="recorded where git is not at hand; default: HEAD")
    args = parser.parse_args()
    wrong = [*check(111), *check(5000), *check_beyond_31_bits()]
    if wrong:
        sys.exit("\n".join(wrong))
    torch.cuda.empty_cache()
    env = environment() | ({"commit": args.commit} if args.commit else {})
    rows = [env | r for r in time_ops() + time_block(args.attention)]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "token_ops.json").write_text(json.dumps(rows, indent=1))
    for r in rows:
        rate = f"{r['gb_per_s']:7.0f} GB/s" if "gb_per_s" in r else f"attention {r['attention']}"
        spread = f"({r['ms_p20']:.3f} to {r['ms_p80']:.3f})"
        print(f"{r['case']:<26} {r['backend']:<8} {r['ms_p50']:8.3f} ms {spread:<18}  {rate}")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
