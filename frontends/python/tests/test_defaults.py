"""Defaults: calls that name no server mean that of the node."""

import io

import numpy
import pytest
import quinion
from conftest import DATA
from quinion import safetensors
from test_safetensors import TENSORS, file_of


def test_calls_that_name_no_server_use_the_nodes(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "r"))  # the names of this test alone
    (tmp_path / "r").mkdir(mode=0o700)
    with pytest.raises(ConnectionRefusedError):
        quinion.connect()
    weights = file_of(TENSORS)
    with quinion.serve("node", memory=32 << 20, stores={"mem://t": {"a": DATA, "m": weights}}):
        client = quinion.connect()
        assert client.name == "node" and client.open("mem://t/a").read() == DATA
        assert quinion.residency("mem://t/a").cached == len(DATA)
        found = safetensors.load("mem://t/m")
        assert found.keys() == TENSORS.keys() and numpy.array_equal(found["weights"], TENSORS["weights"])
        (tmp_path / "m").write_bytes(weights)
        assert safetensors.load(tmp_path / "m").keys() == TENSORS.keys()
        for wrong in [(client,), (None, "mem://t/m"), ("mem://t/m", "mem://t/m")]:
            with pytest.raises(TypeError):
                safetensors.load(*wrong)
        out = io.StringIO()
        quinion.top(every=0.01, times=1, file=out)
        assert out.getvalue().splitlines()[1].split()[:2] == ["Client", "1"]
