"""Mirrors fasth3_core/report/environment.py."""

import re

from comfyui_fasth3.fasth3_core.report import environment


def test_the_version_is_that_of_the_project_file():
    assert re.fullmatch(r"\d+\.\d+\.\d+", environment.own_version())


def test_a_folder_without_its_project_file_stops_no_run(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "_PROJECT", tmp_path / "pyproject.toml")
    monkeypatch.setattr(environment, "version_of", lambda package: None)
    assert environment.own_version() == "unknown"
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    assert environment.own_version() == "unknown"
