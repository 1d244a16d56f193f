"""Mirrors fasth3_core/media/images.py: pictures from files to the canvas."""

import struct

import numpy as np
import pytest
import torch
from comfyui_fasth3.fasth3_core.errors import FastH3Error
from comfyui_fasth3.fasth3_core.media import images
from PIL import Image


def turned_picture(path):
    """Red above blue when upright, stored on its side with the EXIF tag that says so."""
    upright = Image.new("RGB", (40, 80), (0, 0, 255))
    upright.paste((255, 0, 0), (0, 0, 40, 40))
    stored = upright.transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[0x0112] = 6
    stored.save(path, exif=exif)


def test_load_rgb_turns_upright_and_drops_alpha(tmp_path):
    turned_picture(tmp_path / "a.png")
    image = images.load_rgb(tmp_path / "a.png")
    assert image.size == (40, 80)
    assert image.getpixel((20, 10)) == (255, 0, 0)
    Image.new("RGBA", (4, 4), (1, 2, 3, 0)).save(tmp_path / "b.png")
    assert images.to_tensor(images.load_rgb(tmp_path / "b.png")).shape == (4, 4, 3)


def test_load_rgb_of_16_bits(tmp_path):
    grey = np.array([[0, 257 * 7, 257 * 200, 65535]], np.uint16)
    Image.fromarray(grey).save(tmp_path / "a.png")
    assert np.asarray(images.load_rgb(tmp_path / "a.png"))[0, :, 1].tolist() == [0, 7, 200, 255]


def test_load_rgb_refuses_a_picture_of_more_pixels_than_there_are(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.bmp")
    data = bytearray((tmp_path / "a.bmp").read_bytes())
    data[18:26] = struct.pack("<2i", 100_000, 100_000)
    (tmp_path / "a.bmp").write_bytes(data)
    with pytest.raises(FastH3Error, match="cannot be read as a picture"):
        images.load_rgb(tmp_path / "a.bmp")


def test_load_rgb_refuses_what_is_no_picture(tmp_path):
    (tmp_path / "a.png").write_text("no picture")
    with pytest.raises(FastH3Error, match="cannot be read as a picture"):
        images.load_rgb(tmp_path / "a.png")


@pytest.mark.parametrize("size", [(100, 40), (40, 100), (64, 32), (7, 5)], ids="{0[0]}x{0[1]}".format)
def test_fit_to_canvas(size):
    image = Image.new("RGB", size, (10, 20, 30))
    for fit in (images.stretch, images.cover_crop):
        assert fit(image, 32, 64).size == (64, 32)


def test_cover_crop_keeps_the_centre_and_the_aspect():
    image = Image.new("RGB", (300, 100), (0, 0, 0))
    image.paste((255, 255, 255), (100, 0, 200, 100))  # the centre third
    cropped = images.to_tensor(images.cover_crop(image, 100, 100))
    assert cropped[50, 10:90].min() > 0.99
    stretched = images.to_tensor(images.stretch(image, 100, 100))
    assert stretched[50, 10].max() < 0.01


def test_picture_round_trip():
    pixels = torch.rand(8, 9, 3).mul(255).round() / 255
    torch.testing.assert_close(images.to_tensor(images.to_image(pixels)), pixels, rtol=0, atol=1e-6)
