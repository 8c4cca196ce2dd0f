"""Engines: what they read through the cache is what the bare store has, and a second time it costs no GET.

The store is moto, a real S3 server, which `scripts/setup` installs. Where it or an engine is not, a test says SKIPPED and
why, if it was started by hand or `QUINION_TEST_WITHOUT` allows it, and else fails.
"""

import io
import itertools
import os
import pathlib
import socket
import subprocess
import tarfile
import time

import fsspec
import pytest
import quinion
from conftest import ServerProcess, engine

numpy = engine("numpy", module=True)
ROWS = 200_000
PARTS = 4


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory):
    python = pathlib.Path(os.environ.get("QUINION_TOOLS", "none")) / "moto-5.2.5" / "bin" / "python"
    if "moto" in os.environ.get("QUINION_TEST_WITHOUT", "").split(","):
        pytest.skip("SKIPPED: QUINION_TEST_WITHOUT says so")
    if not python.exists():
        text = f"moto is not at {python}; scripts/setup installs it, and QUINION_TOOLS names the folder"
        pytest.skip(f"SKIPPED: {text}") if "QUINION_TOOLS" not in os.environ else pytest.fail(text)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = (tmp_path_factory.mktemp("moto") / "log").open("wb")
    command = [python, "-m", "moto.server", "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(command, stdout=log, stderr=log)
    until = time.monotonic() + 300
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except ConnectionRefusedError:
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.05)
    yield f"http://127.0.0.1:{port}"
    process.kill()
    process.wait()


def frame():
    pandas = engine("pandas")
    rng = numpy.random.default_rng(24)
    names = numpy.array(["folio", "quire", "quinion"])
    columns = {"n": numpy.arange(ROWS), "x": rng.random(ROWS), "name": names[rng.integers(0, 3, ROWS)]}
    return pandas.DataFrame(columns)


class Bucket:
    """A bucket with a table, bare and through a server."""

    def __init__(self, endpoint, folder):
        engine("s3fs")
        self.options = {"key": "k", "secret": "s", "client_kwargs": {"endpoint_url": endpoint}}
        self.bare = fsspec.filesystem("s3", **self.options)
        stores = {
            "s3://bucket": {
                "endpoint": endpoint, "allow_http": "true", "region": "us-east-1",
                "access_key_id": "k", "secret_access_key": "s",
            }
        }  # fmt: skip
        self.stores = stores
        self.server = ServerProcess(folder, memory=128 << 20, stores=stores)
        self.storage = {"quinion": {"server": self.server.name}, "s3": self.options}
        chained = {"target_protocol": "s3", "target_options": self.options}
        self.fs = fsspec.filesystem("quinion", server=self.server.name, **chained)
        self.client = quinion.connect(self.server.name)

    def gets(self):
        return self.server.stats()["gets"]

    def twice(self, read):
        """What `read` returns the first time. It costs GETs, and none the second time."""
        before = self.gets()
        found = read()
        assert (once := self.gets()) > before
        read()
        assert self.gets() == once
        return found


@pytest.fixture(scope="module")
def table(endpoint, tmp_path_factory):
    parquet, arrow = engine("pyarrow.parquet"), engine("pyarrow")
    bucket = Bucket(endpoint, tmp_path_factory.mktemp("server"))
    bucket.bare.mkdir("bucket")
    whole = arrow.Table.from_pandas(frame())
    for part in range(PARTS):
        rows = whole.slice(part * ROWS // PARTS, ROWS // PARTS)
        with bucket.bare.open(f"bucket/table/part-{part}.parquet", "wb") as file:
            parquet.write_table(rows, file, row_group_size=10_000)
    yield bucket
    bucket.server.kill()


@pytest.fixture
def fresh(table, endpoint, tmp_path):
    """The same bucket through a server that has cached nothing yet."""
    bucket = Bucket(endpoint, tmp_path)
    yield bucket
    bucket.server.kill()


def test_pandas_reads_parquet_by_a_chained_url(fresh):
    pandas = engine("pandas")
    path = "bucket/table/part-1.parquet"

    def read():
        return pandas.read_parquet(f"quinion::s3://{path}", storage_options=fresh.storage)

    found = fresh.twice(read)
    with fresh.bare.open(path) as bare:
        pandas.testing.assert_frame_equal(found, pandas.read_parquet(bare))
    size = fresh.bare.size(path)
    assert fresh.server.stats()["fetched_bytes"] <= size


def test_pandas_reads_csv_by_a_chained_url(fresh):
    pandas = engine("pandas")
    rows = frame().head(5000)
    with fresh.bare.open("bucket/rows.csv", "w") as file:
        rows.to_csv(file, index=False)
    found = fresh.twice(lambda: pandas.read_csv("quinion::s3://bucket/rows.csv", storage_options=fresh.storage))
    pandas.testing.assert_frame_equal(found, rows)


def test_pyarrow_scans_a_dataset(fresh):
    dataset, fs = engine("pyarrow.dataset"), engine("pyarrow.fs")

    def scan(of, **what):
        filesystem = fs.PyFileSystem(fs.FSSpecHandler(of))
        return dataset.dataset("bucket/table", filesystem=filesystem).to_table(**what)

    found = fresh.twice(lambda: scan(fresh.fs))
    bare = scan(fresh.bare)
    assert found.equals(bare) and found.num_rows == ROWS
    before = fresh.gets()
    where = dataset.field("n") > ROWS - 5
    assert scan(fresh.fs, columns=["n"], filter=where)["n"].to_pylist() == list(range(ROWS - 4, ROWS))
    assert fresh.gets() == before


def test_a_column_costs_less_than_its_file(fresh):
    dataset, fs = engine("pyarrow.dataset"), engine("pyarrow.fs")
    rng = numpy.random.default_rng(1)
    arrow, parquet = engine("pyarrow"), engine("pyarrow.parquet")
    wide = arrow.table({name: rng.random(400_000) for name in "abcdefgh"})
    with fresh.bare.open("bucket/wide.parquet", "wb") as file:
        parquet.write_table(wide, file, row_group_size=400_000, compression="none", use_dictionary=False)
    filesystem = fs.PyFileSystem(fs.FSSpecHandler(fresh.fs))
    found = dataset.dataset("bucket/wide.parquet", filesystem=filesystem).to_table(columns=["d"])
    assert found["d"].equals(wide["d"])
    assert fresh.server.stats()["fetched_bytes"] < fresh.bare.size("bucket/wide.parquet") / 2


def test_pyarrow_reads_a_pin_without_a_copy(fresh):
    arrow, parquet = engine("pyarrow"), engine("pyarrow.parquet")
    file = fresh.client.open("s3://bucket/table/part-0.parquet")
    pin = file.pin(0, file.size)
    buffer = arrow.py_buffer(pin)
    assert buffer.size == file.size and not buffer.is_mutable
    if not pin.is_copied:
        assert buffer.address == numpy.frombuffer(file.pin(0, file.size), dtype="u1").ctypes.data
    del pin
    table = parquet.read_table(arrow.BufferReader(buffer))
    assert table["n"].to_pylist() == list(range(ROWS // PARTS))
    fresh.server.wait_for("pins", 1)
    del buffer, table
    fresh.server.wait_for("pins", 0)


def test_duckdb_reads_by_the_registered_file_system(fresh):
    duckdb = engine("duckdb")
    with duckdb.connect() as connection:
        connection.register_filesystem(fresh.fs)

        def ask():
            paths = "quinion://bucket/table/part-*.parquet"
            return connection.execute(f"select count(*), sum(n), min(name) from read_parquet('{paths}')").fetchall()

        assert fresh.twice(ask) == [(ROWS, ROWS * (ROWS - 1) // 2, "folio")]


def test_polars_reads_parquet(fresh):
    polars = engine("polars")

    def read():
        with fresh.fs.open("bucket/table/part-2.parquet") as file:
            return polars.read_parquet(file)

    found = fresh.twice(read)
    assert found["n"].to_list() == list(range(2 * ROWS // PARTS, 3 * ROWS // PARTS))
    dataset, fs = engine("pyarrow.dataset"), engine("pyarrow.fs")
    of_all = dataset.dataset("bucket/table", filesystem=fs.PyFileSystem(fs.FSSpecHandler(fresh.fs)))
    lazily = polars.scan_pyarrow_dataset(of_all).filter(polars.col("n") < 3).select("n").collect()
    assert lazily["n"].to_list() == [0, 1, 2]


def test_zarr_reads_chunks(fresh):
    zarr = engine("zarr")
    values = numpy.arange(250_000, dtype="f8").reshape(500, 500)
    bare = zarr.storage.FsspecStore(fsspec.filesystem("s3", asynchronous=True, **fresh.options), path="bucket/z")
    written = zarr.create_array(store=bare, shape=values.shape, chunks=(100, 100), dtype="f8")
    written[:] = values
    ours = zarr.storage.FsspecStore.from_url("quinion::s3://bucket/z", storage_options=fresh.storage, read_only=True)
    assert ours.fs.asynchronous and type(ours.fs).__name__ == "QuinionFileSystem"  # its coroutines, and no wrapper
    array = zarr.open_array(store=ours, mode="r")
    assert (fresh.twice(lambda: array[:]) == values).all()
    assert (array[150:250, 150:250] == values[150:250, 150:250]).all()


def shard_of(samples):
    """A tar file as webdataset has them: the members of a sample stand together, and have one name before the dot."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for key, members in samples:
            for kind, data in members.items():
                about = tarfile.TarInfo(f"{key}.{kind}")
                about.size = len(data)
                tar.addfile(about, io.BytesIO(data))
    return raw.getvalue()


def samples_of(file):
    """Reads a shard from its beginning to its end, as a loader does that cannot seek: a sample at a time."""
    with tarfile.open(fileobj=file, mode="r|") as tar:
        of_sample = itertools.groupby(tar, lambda about: about.name.split(".")[0])
        for key, members in of_sample:
            yield key, {about.name.split(".")[1]: tar.extractfile(about).read() for about in members}


def test_shards_of_tar_files_are_streamed(fresh):
    rng = numpy.random.default_rng(13)
    shards = {}
    for shard in range(3):
        keys = [f"{shard:03}-{number:05}" for number in range(40)]
        samples = [(key, {"bin": rng.bytes(int(rng.integers(1, 90_000))), "cls": key.encode()}) for key in keys]
        shards[f"bucket/shards/{shard:03}.tar"] = samples
        fresh.bare.pipe_file(f"bucket/shards/{shard:03}.tar", shard_of(samples))

    def stream():
        urls = [f"quinion::s3://{path}" for path in shards]
        found = []
        for opened in fsspec.open_files(urls, "rb", **fresh.storage):
            with opened as file:
                found.append(list(samples_of(file)))
        return found

    assert fresh.twice(stream) == list(shards.values())
    # Each byte comes once, though no read of the loader says how long the shard is.
    assert fresh.server.stats()["fetched_bytes"] == sum(fresh.bare.size(path) for path in shards)


def test_xarray_reads_chunks_of_a_dataset(fresh):
    xarray = engine("xarray")
    engine("zarr")
    rng = numpy.random.default_rng(7)
    of_time = numpy.arange(48)
    values = rng.random((48, 60, 80))
    written = xarray.Dataset(
        {"temperature": (("time", "y", "x"), values, {"units": "K"})},
        coords={"time": of_time, "y": numpy.arange(60), "x": numpy.arange(80)},
    )
    chunks = {"temperature": {"chunks": (12, 60, 80)}}
    written.to_zarr("s3://bucket/weather.zarr", storage_options=fresh.options, encoding=chunks)

    def opened():
        return xarray.open_zarr("quinion::s3://bucket/weather.zarr", storage_options=fresh.storage, chunks=None)

    found = fresh.twice(lambda: opened().load())
    assert found.identical(xarray.open_zarr("s3://bucket/weather.zarr", storage_options=fresh.options).load())
    mean = opened()["temperature"].sel(time=slice(13, 14)).mean("time")
    assert numpy.allclose(mean, values[13:15].mean(axis=0))


def test_numpy_loads_and_views(fresh):
    values = numpy.random.default_rng(5).random(100_000)
    raw = io.BytesIO()
    numpy.save(raw, values)
    fresh.bare.pipe_file("bucket/values.npy", raw.getvalue())
    assert (fresh.twice(lambda: numpy.load(fresh.client.open("s3://bucket/values.npy"))) == values).all()
    offset = len(raw.getvalue()) - values.nbytes
    pin = fresh.client.open("s3://bucket/values.npy").pin(offset, values.nbytes)
    view = numpy.frombuffer(pin, dtype="f8")
    assert (view == values).all() and not view.flags.writeable


def test_a_cache_of_the_process_reads_the_same_bucket(fresh):
    with quinion.Cache(memory=64 << 20, stores=fresh.stores) as cache:
        for part in range(PARTS):
            path = f"bucket/table/part-{part}.parquet"
            assert cache.open(f"s3://{path}").read() == fresh.bare.cat_file(path)
        fetched = cache.stats()["fetched_bytes"]
        assert fetched == sum(fresh.bare.size(f"bucket/table/part-{part}.parquet") for part in range(PARTS))
