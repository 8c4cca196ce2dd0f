"""Torch: its tensors are views of the cache, also in the workers of a DataLoader."""

import json
import struct

import numpy
import pytest
import quinion
from conftest import DATA, engine, permissions_at
from quinion import safetensors

torch = engine("torch", module=True)  # `cargo xtask nightly python-heavy` installs it
ROWS, ROW_BYTES = 512, 4096
KINDS = {"float32": "F32", "bfloat16": "BF16", "int64": "I64", "bool": "BOOL", "float8_e5m2": "F8_E5M2"}


def file_of(tensors):
    header, data = {}, b""
    for name, tensor in tensors.items():
        raw = bytes(tensor.contiguous().flatten().view(torch.uint8).numpy()) if tensor.numel() else b""
        kind = KINDS[str(tensor.dtype).removeprefix("torch.")]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_a_tensor_of_a_pin_is_a_view(client):
    pin = client.open("data://s/a").pin(0, 8192)
    assert not pin.is_copied
    tensor = torch.frombuffer(pin, dtype=torch.uint8)
    assert tensor.data_ptr() == numpy.frombuffer(pin, dtype="u1").ctypes.data
    assert bytes(tensor.numpy()) == DATA[:8192]


def test_tensors_of_a_file_are_views_that_processes_share(opener, server):
    tensors = {
        "weights": torch.arange(3_000_000, dtype=torch.float32).reshape(3000, 1000),
        "half": torch.arange(1000, dtype=torch.float32).to(torch.bfloat16),
        "small": torch.arange(64, dtype=torch.float32).to(torch.float8_e5m2),
        "none": torch.zeros((0, 3), dtype=torch.float32),
        "flags": torch.tensor([True, False]),
        "counts": torch.arange(5),
    }
    (server.objects / "m").write_bytes(file_of(tensors))
    found = safetensors.load(opener, "data://s/m", framework="pt")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name
        assert tensor.numel() == 0 or permissions_at(found[name].data_ptr()).endswith("s")
    # All of them are of one pin, so of one range of addresses.
    first = min(found[name].data_ptr() for name in tensors if tensors[name].numel())
    last = max(found[name].data_ptr() + found[name].nbytes for name in tensors if tensors[name].numel())
    assert last - first == sum(tensor.nbytes for tensor in tensors.values())
    if isinstance(opener, quinion.Client):
        server.wait_for("pins", 1)
        del found
        server.wait_for("pins", 0)
    else:
        assert opener.stats()["pinned_bytes"] >= 12_000_000


def test_frameworks_are_named(client):
    with pytest.raises(ValueError, match="pt"):
        safetensors.load(client, "data://s/a", framework="jax")


class Rows(torch.utils.data.Dataset):
    """Rows of an object; each process opens it by the client that it was given."""

    def __init__(self, client):
        self.file = client.open("data://s/a")

    def __len__(self):
        return ROWS

    def __getitem__(self, row):
        return row, torch.frombuffer(self.file.pin(row * ROW_BYTES, ROW_BYTES), dtype=torch.uint8).clone()


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_reads_each_row_once_for_all_workers(server, client, method, workers):
    rows = Rows(client)
    context = method if workers else None
    loader = torch.utils.data.DataLoader(rows, batch_size=32, num_workers=workers, multiprocessing_context=context)
    found = {}
    for _epoch in range(2):
        for numbers, data in loader:
            found.update((int(number), bytes(row.numpy())) for number, row in zip(numbers, data, strict=True))
    assert found == {row: DATA[row * ROW_BYTES : (row + 1) * ROW_BYTES] for row in range(ROWS)}
    # Two rounds with caches of the workers' own would fetch all of it twice.
    assert server.stats()["fetched_bytes"] < 2 * ROWS * ROW_BYTES
