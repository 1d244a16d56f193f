"""Mirrors nodes/decoding.py: frames and sound of the right length, room made first, and a second try without memory."""

import shutil

import pytest
import torch
from comfyui_fasth3.fasth3_core.errors import CheckpointError, ConfigError, ContractError, FastH3Error, Interrupted
from comfyui_fasth3.nodes import _decode, _latents
from comfyui_fasth3.nodes._decode import _usable
from comfyui_fasth3.nodes._host import does_not_fit


@pytest.fixture
def sampled():
    generator = torch.Generator().manual_seed(0)
    return _latents.join(torch.randn(1, 24, 7, 4, 6, generator=generator),
                         torch.randn(1, 32, 2, 37, generator=generator))


def test_images_and_audio(run, vae, sampled):
    output = run("FastH3Decode", vae=vae, latent=sampled, tile_batch=0)
    images, audio = output.args
    assert images.shape == (22, 64, 96, 3) and images.dtype == torch.float32
    assert images.min() >= 0 and images.max() <= 1
    assert audio["sample_rate"] == 32000
    assert audio["waveform"].shape == (1, 2, round(22 / 24 * 32000))
    assert output.ui["text"][0].startswith("22 frames, sound peak ")


def test_same_pixels_whatever_the_batch(run, vae, sampled):
    one, four = (run("FastH3Decode", vae=vae, latent=sampled, tile_batch=n).args[0] for n in (1, 4))
    assert torch.equal(one, four)


def test_result_is_that_of_the_vaes(run, vae, sampled):
    images, audio = run("FastH3Decode", vae=vae, latent=sampled, tile_batch=0).args
    video_latent, audio_latent = _latents.split(sampled)
    assert torch.equal(images, vae.video.decode(video_latent)[0].movedim(0, -1))
    assert torch.equal(audio["waveform"], vae.audio.to_waveform(audio_latent, 22))


def test_wrong_latent(run, vae):
    with pytest.raises(ContractError, match="one stream"):
        run("FastH3Decode", vae=vae, latent={"samples": torch.zeros(1, 24, 7, 4, 6)}, tile_batch=0)


def test_negative_batch(run, vae, sampled):
    with pytest.raises(FastH3Error, match="tile_batch=-1"):
        run("FastH3Decode", vae=vae, latent=sampled, tile_batch=-1)


def test_transformer_is_sent_away_when_there_is_no_room(run, vae, sampled, model, positive, latent, host, monkeypatch):
    """The order in the node: room for weights and canvas is asked for before anything is decoded."""
    asked = []

    def acquire(resident, device, working):
        asked.append((resident, working))
        model.store.release()  # as a host does that has no room for both
        resident.materialise(device)

    run("FastH3Sampler", model=model, positive=positive, latent=latent, seed=0)
    assert model.store.location is not None
    monkeypatch.setattr(host, "acquire", acquire)
    run("FastH3Decode", vae=vae, latent=sampled, tile_batch=0)
    assert model.store.location is None
    assert asked == [(vae, vae.working_bytes(0, 64, 96))] * 2  # once for the sound, once for the frames


class Starved:
    """A video VAE that runs out of memory on its first calls."""

    def __init__(self, real, failures, error):
        self.real, self.left, self.error, self.batches, self.device = real, failures, error, [], real.device

    def decode(self, latent, *, tile_batch, **rest):
        self.batches.append(tile_batch)
        if self.left:
            self.left -= 1
            raise self.error
        return self.real.decode(latent, tile_batch=tile_batch, **rest)


def starve(vae, monkeypatch, failures, error):
    vae.materialise(torch.device("cpu"))
    starved = Starved(vae.video, failures, error)
    monkeypatch.setattr(type(vae), "video", property(lambda pair: starved))
    monkeypatch.setattr(type(vae), "materialise", lambda *args: None)
    monkeypatch.setattr(type(vae), "release", lambda *args: None)
    return starved


NO_MEMORY = {
    "cuda": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    "cpu": RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    "python": MemoryError(),
    "cublas": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
}


@pytest.mark.parametrize("name", NO_MEMORY)
def test_out_of_memory_frees_everything_and_decodes_tile_by_tile(run, vae, sampled, model, positive, latent, host,
                                                                 monkeypatch, caplog, name):
    expected = run("FastH3Decode", vae=vae, latent=sampled, tile_batch=0).args[0]
    run("FastH3Sampler", model=model, positive=positive, latent=latent, seed=0)
    starved = starve(vae, monkeypatch, 1, NO_MEMORY[name])
    output = run("FastH3Decode", vae=vae, latent=sampled, tile_batch=0)
    assert torch.equal(output.args[0], expected)
    assert starved.batches == [0, 1]
    assert model.store.location is None
    assert "all models were sent away" in caplog.text
    assert "warning: out of memory on cpu" in output.ui["text"][0]


def test_out_of_memory_everywhere_keeps_the_latent(run, vae, sampled, folders, monkeypatch):
    starve(vae, monkeypatch, 2, NO_MEMORY["cuda"])
    with pytest.raises(FastH3Error, match="not enough memory to decode: out of memory on cpu") as caught:
        run("FastH3Decode", vae=vae, latent=sampled, tile_batch=0)
    kept = next((folders / "output" / "latents").glob("*.latent.safetensors"))
    assert str(kept) in str(caught.value) and "FastH3 Load Latent" in str(caught.value)
    choice = str(caught.value).split("loads it as '")[1].split("'")[0]
    again = _latents.split(run("FastH3LoadLatent", file=choice).args[0])
    assert all(torch.equal(a, b) for a, b in zip(again, _latents.split(sampled), strict=True))


def test_vae_file_damaged_after_loading_keeps_the_latent(run, sampled, folders, bundle):
    """The header was fine when the graph began; the values are cut short when they are needed."""
    names = bundle.names
    real = folders / "models"
    copied = folders / "copied"
    shutil.copytree(real, copied, symlinks=False)
    real.unlink()
    copied.rename(real)
    vae = run("FastH3LoadVAE", video_vae=names.video_vae, audio_vae=names.audio_vae, dtype="auto").args[0]
    path = vae.video_path
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(FastH3Error, match=path.name) as caught:
        run("FastH3Decode", vae=vae, latent=sampled, tile_batch=0)
    assert "The sampled latent is kept in" in str(caught.value)


def test_vae_file_damaged_before_loading_is_refused(run, folders, bundle):
    names = bundle.names
    (folders / "models").unlink()
    shutil.copytree(bundle.root / "models", folders / "models")
    path = folders / "models" / "vae" / names.video_vae
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=path.name):
        run("FastH3LoadVAE", video_vae=names.video_vae, audio_vae=names.audio_vae, dtype="auto")


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), Interrupted("stop")], ids=["ctrl-c", "core"])
def test_an_interrupt_keeps_nothing(run, vae, sampled, host, folders, monkeypatch, stop):
    def interrupt():
        raise stop

    monkeypatch.setattr(host, "check_interrupt", interrupt)
    with pytest.raises(type(stop)):
        run("FastH3Decode", vae=vae, latent=sampled, tile_batch=0)
    assert list((folders / "output").rglob("*.safetensors")) == []


def test_places_in_order(vae, monkeypatch):
    """The device, the device tile by tile, the other devices, the CPU; after each failure everything is sent away."""
    gone, tried = [], []

    class Host:
        device = staticmethod(lambda: torch.device("cuda:0"))
        release_all = staticmethod(lambda: gone.append(len(tried)))

        def acquire(self, resident, device, working):
            tried.append(str(device))
            if device.type == "cuda":
                raise does_not_fit(4 << 30, 1 << 30, device) if device.index else NO_MEMORY["cuda"]

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    decoder = _decode.Decoder(Host(), vae, torch.zeros(1, 24, 2, 4, 4), torch.zeros(1, 32, 2, 8), 0)
    batches = []
    decoder.somewhere(batches.append)
    assert tried == ["cuda:0", "cuda:0", "cuda:1", "cpu"] and batches == [1]
    assert gone == [1, 2, 3]
    assert "out of memory on cuda:0" in decoder.notes[0] and "on cuda:0, tile by tile" in decoder.notes[0]
    assert "1.0 GiB that are free on cuda:1" in decoder.notes[2] and "on cpu" in decoder.notes[2]


def test_fp8_goes_on_without_where_there_is_none(run, bundle, folders, host, monkeypatch):
    """A GPU with fp8 runs out of memory; the CPU has no such product, and decodes all the same."""
    names, loaded = bundle.names, []
    monkeypatch.setattr(host, "device", lambda: torch.device("cuda:0"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    pair = run("FastH3LoadVAE", video_vae=names.video_vae, audio_vae=names.audio_vae, dtype="fp8").args[0]

    class Host:
        device = staticmethod(lambda: torch.device("cuda:0"))
        release_all = staticmethod(lambda: None)

        def acquire(self, resident, device, working):
            if device.type == "cuda":
                raise NO_MEMORY["cuda"]
            resident.materialise(device)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    decoder = _decode.Decoder(Host(), pair, torch.zeros(1, 24, 2, 4, 4), torch.zeros(1, 32, 2, 8), 0)
    decoder.somewhere(lambda tiles: loaded.append(decoder.vae.video.dtype))
    assert loaded == [torch.float32]


@pytest.mark.parametrize(
    ("capability", "why"), [(None, "needs an NVIDIA GPU, got cpu"), ((8, 6), "needs compute capability 8.9 .*, got 8")]
)
def test_fp8_is_refused_by_the_loader_where_there_is_none(run, bundle, host, monkeypatch, capability, why):
    if capability is not None:
        monkeypatch.setattr(host, "device", lambda: torch.device("cuda:0"))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    names = bundle.names
    with pytest.raises(ConfigError, match=f"dtype='fp8': expected 'auto' or one of .* There is no fp8 on it: {why}"):
        run("FastH3LoadVAE", video_vae=names.video_vae, audio_vae=names.audio_vae, dtype="fp8")


@pytest.mark.parametrize("free", [[1 << 40], [0, 1 << 40], [0, 0]], ids=["enough", "not-at-first", "never"])
def test_room_is_looked_for_before_decoding(vae, monkeypatch, free):
    """A host that says it made room, and a device that says it did not: then all models go."""
    calls, left = [], list(free)

    class Host:
        device = staticmethod(lambda: torch.device("cuda:0"))
        release_all = staticmethod(lambda: calls.append("all go"))
        acquire = staticmethod(lambda resident, device, working: calls.append("room"))

    monkeypatch.setattr(_decode, "_usable", lambda device: left.pop(0))
    decoder = _decode.Decoder(Host(), vae, torch.zeros(1, 24, 2, 4, 4), torch.zeros(1, 32, 2, 8), 0)
    decoder.somewhere(lambda tiles: calls.append("decode"))
    assert calls == (["room", "decode"] if free[0] else ["room", "all go", "room", "decode"])
    assert _usable(torch.device("cpu")) is None


def test_interrupt_passes_through_and_the_next_decode_works(run, vae, sampled, host, monkeypatch):
    class Stop(BaseException):
        pass

    def interrupt():
        raise Stop

    monkeypatch.setattr(host, "check_interrupt", interrupt)
    with pytest.raises(Stop):
        run("FastH3Decode", vae=vae, latent=sampled, tile_batch=0)
    monkeypatch.undo()
    assert run("FastH3Decode", vae=vae, latent=sampled, tile_batch=0).args[0].shape[0] == 22


def test_bar_counts_tiles(run, vae, host, monkeypatch):
    shown = []
    monkeypatch.setattr(host, "progress", lambda total: lambda done, picture=None: shown.append((done, total)))
    wide = _latents.join(torch.randn(1, 24, 2, 4, 20), torch.randn(1, 32, 2, 8))
    run("FastH3Decode", vae=vae, latent=wide, tile_batch=1)
    assert shown == [(1, 2), (2, 2)]


def test_broken_sound_is_said_on_the_node_and_in_the_log(run, vae, sampled, monkeypatch, caplog):
    vae.materialise(torch.device("cpu"))
    monkeypatch.setattr(type(vae.audio), "to_waveform", lambda self, latent, frames: torch.zeros(1, 2, 100))
    text = run("FastH3Decode", vae=vae, latent=sampled, tile_batch=0).ui["text"][0]
    assert "warning: the sound track is silent" in text
    assert "silent" in caplog.text


def test_another_error_keeps_the_latent_and_its_cause(run, vae, sampled, folders, monkeypatch):
    monkeypatch.setattr(_decode.Decoder, "waveform", lambda decoder: 1 / 0)
    with pytest.raises(FastH3Error, match="division by zero\nThe sampled latent is kept in ") as caught:
        run("FastH3Decode", vae=vae, latent=sampled, tile_batch=0)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert len(list((folders / "output").rglob("*.latent.safetensors"))) == 1


def test_the_first_error_is_told_when_the_latent_cannot_be_saved_either(run, vae, sampled, host, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_decode.Decoder, "waveform", lambda decoder: 1 / 0)
    monkeypatch.setattr(host, "output_file", full)
    with pytest.raises(FastH3Error, match=r"division by zero\nThe sampled latent could not be saved either: .*No sp"):
        run("FastH3Decode", vae=vae, latent=sampled, tile_batch=0)
