"""Headers: a file that is not what it should be is named, with its sizes, before anything is allocated."""

import json
import os
import struct
import zipfile

import pytest
import torch
from comfyui_fasth3.fasth3_core.checkpoint import reading
from comfyui_fasth3.fasth3_core.checkpoint.component import open_component
from comfyui_fasth3.fasth3_core.checkpoint.dtypes import TORCH
from comfyui_fasth3.fasth3_core.checkpoint.files import read_header
from comfyui_fasth3.fasth3_core.errors import CheckpointError
from safetensors.torch import save_file


def write(path, header, data=b""):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def entry(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_reads_what_the_format_library_wrote(tmp_path):
    dtypes = [dtype for dtype in TORCH.values() if dtype != torch.bool]
    tensors = {f"t{i}": torch.randn(3, 5).mul(9).to(dtype) for i, dtype in enumerate(dtypes)}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4), "flag": torch.tensor([True, False])}
    save_file(tensors, tmp_path / "a.safetensors", metadata={"note": "x"})
    component = open_component(tmp_path / "a.safetensors")
    assert component.metadata == {"note": "x"}
    assert component.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        read = component.read(name)
        assert read.dtype == tensor.dtype and read.shape == tensor.shape
        assert torch.equal(read.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


def test_read_converts_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "PIECE", 64)
    tensor = torch.randn(7, 13).bfloat16()  # rows of 26 bytes: pieces end inside rows
    save_file({"t": tensor}, tmp_path / "a.safetensors")
    component = open_component(tmp_path / "a.safetensors")
    pieces = []
    with component.open("cpu", pieces.append) as reader:
        assert torch.equal(reader.read("t", torch.float32), tensor.float())
        assert torch.equal(reader.read("t"), tensor)
        part = torch.empty(2, 13)
        reader.rows("t", 3, part)
        assert torch.equal(part, tensor[3:5].float())
    assert max(pieces) <= 2 * 64 and sum(pieces) == 91 * 4 + 91 * 2 + 26 * 4  # bytes of what was filled


@pytest.mark.parametrize("cut", [1, 100, 2000])
def test_truncated(tmp_path, cut):
    path = tmp_path / "a.safetensors"
    save_file({"t": torch.zeros(16, 32)}, path)
    size = path.stat().st_size
    os.truncate(path, size - cut)
    with pytest.raises(CheckpointError, match=f"truncated: it has {size - cut} bytes and needs {size} "):
        read_header(path)


def test_truncated_inside_the_header(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({f"tensor{i}": torch.zeros(1) for i in range(50)}, path)
    header = struct.unpack("<Q", path.read_bytes()[:8])[0]
    os.truncate(path, 600)
    with pytest.raises(CheckpointError, match=f"has 600 bytes and needs {8 + header} for its header alone"):
        read_header(path)


def test_longer_than_its_header_says(tmp_path):
    path = write(tmp_path / "a.safetensors", {"t": entry("F32", [2], 0, 8)}, b"\0" * 11)
    with pytest.raises(CheckpointError, match="3 more than its header describes"):
        read_header(path)


@pytest.mark.parametrize(
    ("start", "said"),
    [
        (b"", r"empty \(0 bytes\)"),
        (b"abc", r"too short \(3 bytes\)"),
        (b"\x80\x02}q\x00X\x05", "PyTorch pickle"),
        (b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00", "PyTorch pickle"),
        (b"GGUF\x03\x00\x00\x00\x10\x00", "GGUF file"),
        (b"<!DOCTYPE html><html>", "web page"),
        (b"\n <html>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00", "Git LFS pointer"),
        (bytes(range(1, 200)), "not a safetensors file"),
        (struct.pack("<Q", 12) + b"hello, world", "not a safetensors file"),
    ],
    ids=["empty", "short", "pickle2", "pickle4", "gguf", "html", "html-late", "lfs", "noise", "no-json"],
)
def test_foreign_files(tmp_path, start, said):
    path = tmp_path / "model.safetensors"
    path.write_bytes(start)
    with pytest.raises(CheckpointError, match=f"model.safetensors is .*{said}"):
        read_header(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "config.json"])
def test_a_pipe_is_refused_before_it_is_read(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match=f"{name} is a pipe, socket or device, not a file"):
        open_component(tmp_path / name)
    if name == "config.json":  # beside weights, where it is not asked for by name
        save_file({"t": torch.zeros(2)}, tmp_path / "model.safetensors")
        assert open_component(tmp_path).config is None
        return
    with pytest.raises(CheckpointError, match="is a pipe"):
        open_component(tmp_path)


def test_torch_archive(tmp_path):
    path = tmp_path / "model.safetensors"
    torch.save({"t": torch.zeros(2)}, path)
    assert zipfile.is_zipfile(path)
    with pytest.raises(CheckpointError, match=r"PyTorch pickle .* refused"):
        read_header(path)


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ({"t": entry("F32", [3], 0, 8)}, "damaged: 't'"),
        ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 4, 12)}, "damaged: 'b'"),
        ({"a": entry("F32", [2], 8, 16)}, "damaged: 'a'"),
        ({"t": entry("F99", [2], 0, 8)}, "'t' is .*F99"),
        ({"t": entry("F32", [-2], 0, 8)}, "'t' is .*describes no tensor"),
        ({"t": entry("F32", [True], 0, 8)}, "'t' is .*describes no tensor"),
        ({"t": {"dtype": "F32", "shape": [2]}}, "'t' is .*describes no tensor"),
        ({"t": [1, 2]}, "'t' is .*describes no tensor"),
        (b'{"t": 1, "t": 2}', "lists 't' twice"),
        (b"{not json", "header is not readable"),
        (b'{"a":' * 50_000, "header is not readable"),
        ({"__metadata__": {"step": 3}}, "no table of texts"),
        (b'{"t": "\xff\xfe"}', "header is not readable"),
    ],
)
def test_damaged_headers(tmp_path, header, said):
    path = write(tmp_path / "a.safetensors", header, b"\0" * 16)
    with pytest.raises(CheckpointError, match=said):
        read_header(path)


def test_any_damage_to_a_header_is_an_error_of_ours(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({f"blocks.{i}.weight": torch.zeros(3, i + 1) for i in range(4)}, path, metadata={"note": "x"})
    whole = path.read_bytes()
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    random = torch.Generator().manual_seed(0)
    refused = 0
    for _ in range(400):
        at, value = (int(torch.randint(n, (1,), generator=random)) for n in (header, 256))
        path.write_bytes(whole[:at] + bytes([value]) + whole[at + 1 :])
        try:
            read_header(path)
        except CheckpointError:
            refused += 1
    assert refused > 200  # the others changed a letter of a name, or nothing


@pytest.mark.parametrize("others", [{"u": torch.zeros(4)}, {}], ids=["larger", "of the same size"])
def test_changed_while_loaded(tmp_path, others):
    path = tmp_path / "a.safetensors"
    save_file({"t": torch.zeros(4)}, path)
    os.utime(path, ns=(0, 0))
    component = open_component(path)
    save_file({"t": torch.ones(4), **others}, path)
    with pytest.raises(CheckpointError, match="changed on disk"):
        component.read("t")


def test_gone_while_loaded(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"t": torch.zeros(4)}, path)
    component = open_component(path)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"a\.safetensors cannot be read any more \(No such file or directory\)"):
        component.read("t")


def test_no_handle_stays_open(tmp_path):
    for i in range(3):
        save_file({f"t{i}": torch.zeros(4)}, tmp_path / f"m{i}.safetensors")
    index = {"weight_map": {f"t{i}": f"m{i}.safetensors" for i in range(3)}}
    (tmp_path / "m.safetensors.index.json").write_text(json.dumps(index))
    before = len(os.listdir("/proc/self/fd"))
    component = open_component(tmp_path)
    kept = [component.read(f"t{i}") for i in range(3)]
    with pytest.raises(ZeroDivisionError), component.open("cpu", lambda count: 1 // 0) as reader:
        reader.read("t1")
    assert len(os.listdir("/proc/self/fd")) == before
    del kept
