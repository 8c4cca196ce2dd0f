"""Loader: what processes that load the same remote data cost and save by one cache of their node, beside other ways.

    python frontends/python/bench/loader.py [--mib 1024] [--repeat 5] [--json] [ROW...]

It needs the wheel, and pyarrow, s3fs, obstore, safetensors and torch. A row is named by a part of its name. The store is
`store.py`, its answers begin after 20 ms. Readers are processes, started anew for each repetition, and so is our server,
with an empty cache; alternatives take turns, and their order is rotated. Before each the machine's memory is made
resident. A number is the median of the repetitions, with the quartiles; a ratio is the median of ratios within one
repetition. Resident bytes are proportional set sizes (PSS), which count a page that several processes share once, of the
readers and our server.

| way | what it is |
| --- | --- |
| quinion | `quinion::s3://`, a server of the node |
| s3fs | s3fs bare |
| blockcache, filecache | fsspec's, before s3fs, with a folder that the processes share |
| obstore | the Rust crate object_store by `obstore.fsspec` |

Weights are loaded a second time as by default, when the store is asked once which version they are, and with
`freshness="immutable"`, when it is asked nothing; a load that sends another number of requests is an error.

A process of `filecache` fails that reads a file which another has not finished; then its times are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import pathlib
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

HERE = pathlib.Path(__file__).resolve()
WAYS = ["quinion", "s3fs", "blockcache", "filecache", "obstore"]
PROCESSES = 8
PARTS = 8
LATENCY_MS = 20
READ_BYTES = 64 << 10
READS = 20_000
TENSORS = 64
MIB = 1 << 20


# ---- what readers do, in processes of their own ---------------------------------------------------------------


def file_system(way: str, where: dict[str, str]) -> Any:
    """A file system of fsspec's for the bucket."""
    import fsspec

    bare = {"anon": True, "client_kwargs": {"endpoint_url": where["endpoint"], "region_name": "us-east-1"}}
    if way == "quinion":
        return fsspec.filesystem("quinion", server=where["server"], target_protocol="s3", target_options=bare)
    if way == "obstore":
        from obstore.fsspec import FsspecStore

        client = {"allow_http": True}
        config = {"endpoint": where["endpoint"], "region": "us-east-1", "skip_signature": True}
        return FsspecStore("s3", config=config, client_options=client)
    if way == "s3fs":
        return fsspec.filesystem("s3", **bare)
    folder = {"cache_storage": where["folder"], "check_files": False}
    return fsspec.filesystem(way, target_protocol="s3", target_options=bare, **folder)


def resident() -> int:
    """This process's memory but for files."""
    return data_of("self") * 1024


def pss_of(process: str | int) -> int:
    return parts_of(process)["Pss"]


def data_of(process: str | int) -> int:
    """The same without files, as libraries are: what is the process's own, and its share of caches."""
    parts = parts_of(process)
    return parts["Pss_Anon"] + parts["Pss_Shmem"]


def parts_of(process: str | int) -> dict[str, int]:
    lines = pathlib.Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) for line in lines if line.startswith("Pss")}


def go() -> float:
    """Waits until all are ready; when that is."""
    print("ready", flush=True)
    sys.stdin.readline()
    return time.monotonic()


def end(**found: Any) -> None:
    """Says what was found, and stays until its memory was looked at."""
    print(json.dumps(found), flush=True)
    sys.stdin.readline()


def read_parquet(way: str, where: dict[str, str], number: int) -> None:
    import pyarrow.parquet as parquet

    fs = file_system(way, where)
    began, first = go(), 0.0
    rows = 0
    for epoch in range(2):
        # Each process has another part in each epoch, as a loader that shuffles.
        with fs.open(f"bucket/part-{(number + epoch) % PARTS}.parquet") as file:
            opened = parquet.ParquetFile(file)
            for group in range(opened.num_row_groups):
                rows += opened.read_row_group(group).num_rows
                first = first or time.monotonic()
    end(first=first - began, last=time.monotonic() - began, rows=rows)


def touch(tensors: dict[str, Any]) -> int:
    """Looks at each page of all tensors: the sum of every 512th number of eight bytes."""
    import numpy

    def numbers(tensor: Any) -> Any:
        array = tensor if isinstance(tensor, numpy.ndarray) else tensor.numpy()
        return array.reshape(-1).view("<i8")[::512]

    return sum(int(numbers(tensor).sum()) & 0xFFFF for tensor in tensors.values())


def load_weights(way: str, where: dict[str, str]) -> dict[str, Any]:
    if way in ("quinion", "quinion immutable"):
        import quinion.safetensors

        # Else each load waits for the store to say which version they are.
        client = quinion.connect(where["server"], freshness="immutable" if way == "quinion immutable" else None)
        return quinion.safetensors.load(client, "s3://bucket/m.safetensors", framework="pt")
    if way == "local":
        import safetensors.torch

        return safetensors.torch.load_file(where["data"] + "/m.safetensors")
    import safetensors.torch

    fs = file_system(way, where)
    if way == "filecache":
        with fs.open("bucket/m.safetensors") as file:
            return safetensors.torch.load_file(file.name)
    if way == "blockcache":
        with fs.open("bucket/m.safetensors") as file:
            return safetensors.torch.load(file.read())
    return safetensors.torch.load(fs.cat_file("bucket/m.safetensors"))


def read_weights(way: str, where: dict[str, str], _number: int) -> None:
    import torch  # noqa: F401  (its import is no part of a load)

    if way in ("quinion", "quinion immutable"):
        import quinion.safetensors  # noqa: F401
    elif way == "local":
        import safetensors.torch  # noqa: F401
    else:
        import safetensors.torch  # noqa: F401

        file_system(way, where)
    before, began = resident(), go()
    tensors = load_weights(way, where)
    loaded = time.monotonic()
    checked = touch(tensors)
    end(first=loaded - began, last=time.monotonic() - began, checked=checked, before=before)
    del tensors


def download(_way: str, where: dict[str, str], _number: int) -> None:
    """One GET of all, into memory."""
    import obstore
    from obstore.store import S3Store

    client = {"allow_http": True, "timeout": "300s"}
    config = {"endpoint": where["endpoint"], "region": "us-east-1", "skip_signature": True}
    store = S3Store("bucket", config=config, client_options=client)
    began = go()
    data = obstore.get(store, "m.safetensors").bytes()
    end(last=time.monotonic() - began, bytes=len(data))


def read_random(way: str, where: dict[str, str], number: int) -> None:
    """Ranges of 64 KiB at random places, into one buffer; or each into an object of its own."""
    path, size = where["data"] + "/m.safetensors", os.path.getsize(where["data"] + "/m.safetensors")
    rng = random.Random(number)
    places = [rng.randrange(0, size - READ_BYTES) for _ in range(READS)]
    read = random_reader(way, where, path)
    for place in places[:: READS // 500]:
        read(place)
    began = go()
    for place in places:
        read(place)
    end(rate=READS / (time.monotonic() - began))


def random_reader(way: str, where: dict[str, str], path: str) -> Callable[[int], Any]:
    buffer = bytearray(READ_BYTES)
    if way.startswith("quinion"):
        import quinion

        file = quinion.connect(where["server"]).open("s3://bucket/m.safetensors")
        if way == "quinion readinto":
            return lambda place: file.readinto_at(place, buffer)
        if way == "quinion pin":
            return lambda place: file.pin(place, READ_BYTES)
        return lambda place: file.read_at(place, READ_BYTES)
    if way == "memmap":
        import numpy

        mapped, target = numpy.memmap(path, dtype="u1", mode="r"), numpy.frombuffer(buffer, dtype="u1")

        def copy(place: int) -> None:
            target[:] = mapped[place : place + READ_BYTES]

        return copy
    opened = open(path, "rb", buffering=0)  # noqa: SIM115

    def read(place: int) -> bytes | None:
        opened.seek(place)
        return opened.read(READ_BYTES)

    def readinto(place: int) -> None:
        opened.seek(place)
        opened.readinto(buffer)

    return readinto if way == "open readinto" else read


ROLES = {"parquet": read_parquet, "weights": read_weights, "download": download, "random": read_random}


# ---- the processes --------------------------------------------------------------------------------------------


class Child:
    """A process of this program that has a role, or the store, or a server."""

    def __init__(self, *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process ended: {self.process.args}")
        return line

    def tell(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def stop(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.tell()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()


def serve(where: dict[str, str], memory: int) -> None:
    """Our server, as a process: until its input ends."""
    import quinion

    store = {"endpoint": where["endpoint"], "region": "us-east-1", "allow_http": "true", "skip_signature": "true"}
    with quinion.serve(where["server"], memory=memory, stores={"s3://bucket": store}):
        print("ready", flush=True)
        for _line in sys.stdin:
            pass


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="loader-", dir=options.folder))
        self.data = self.folder / "data"
        self.data.mkdir()
        self.bytes = options.mib * MIB
        self.store: Child | None = None

    def close(self) -> None:
        if self.store is not None:
            self.store.stop()
        shutil.rmtree(self.folder)

    def start_store(self) -> None:
        self.store = Child(str(HERE.with_name("store.py")), str(self.data), str(LATENCY_MS))
        self.endpoint = f"http://127.0.0.1:{int(self.store.line())}"

    def counts(self) -> dict[str, int]:
        assert self.store is not None
        self.store.tell()
        return dict(json.loads(self.store.line()))

    @contextlib.contextmanager
    def place(self, way: str) -> Iterator[tuple[dict[str, str], Child | None]]:
        """An empty cache, of ours or of a folder."""
        folder = pathlib.Path(tempfile.mkdtemp(dir=self.folder))
        (folder / "q").mkdir(mode=0o700)
        where = {
            "endpoint": self.endpoint, "server": str(folder / "q" / "s.sock"), "folder": str(folder / "cache"),
            "data": str(self.data),
        }  # fmt: skip
        server = None
        if way.startswith("quinion"):
            # A process may pin a quarter of a server's memory; what is not filled takes none.
            memory = max(4 * self.bytes + self.bytes // 2, 512 * MIB)
            server = Child(str(HERE), "--role", json.dumps(["serve", where, memory]))
            server.line()
        yield where, server
        if server is not None:
            server.stop()
        shutil.rmtree(folder)

    def readers(self, role: str, way: str, where: dict[str, str], number: int = 1) -> list[Child]:
        made = [Child(str(HERE), "--role", json.dumps([role, way, where, n])) for n in range(number)]
        for child in made:
            child.line()
        return made

    def run(self, children: list[Child]) -> list[dict[str, Any]]:
        self.take_memory()
        for child in children:
            child.tell()
        return [json.loads(child.line()) for child in children]

    def run_what_may_fail(self, children: list[Child]) -> list[dict[str, Any]]:
        """The answers of those that have one."""
        self.take_memory()
        for child in children:
            child.tell()
        answers = []
        for child in children:
            with contextlib.suppress(RuntimeError):
                answers.append(json.loads(child.line()))
        return answers

    def take_memory(self) -> None:
        """Takes as much memory as an alternative needs, and gives it back at once. A virtual machine's host may have
        taken what was free, and whoever is the first to touch it again waits for the host."""
        with mmap.mmap(-1, 3 * self.bytes) as memory:
            memory.madvise(mmap.MADV_HUGEPAGE)  # a cache takes memory by 2 MiB
            zeros = bytes(MIB)
            for _ in range(0, len(memory), MIB):
                memory.write(zeros)

    def turns(self, ways: list[str]) -> Iterator[tuple[int, str]]:
        for repetition in range(self.options.repeat):
            at = repetition % len(ways)
            yield from ((repetition, way) for way in ways[at:] + ways[:at])

    # ---- data

    def make_parquet(self) -> None:
        import numpy
        import pyarrow
        import pyarrow.parquet as parquet

        rng = numpy.random.default_rng(24)
        rows = self.bytes // PARTS // 64
        for part in range(PARTS):
            table = pyarrow.table({f"x{column}": rng.random(rows) for column in range(8)})
            parquet.write_table(
                table, self.data / f"part-{part}.parquet", row_group_size=max(rows // 8, 1), compression="none",
                use_dictionary=False,
            )  # fmt: skip

    def make_weights(self) -> None:
        import numpy
        import safetensors.numpy

        rng = numpy.random.default_rng(25)
        width = self.bytes // TENSORS // 4096
        tensors = {f"layer-{n}": rng.random((width, 512)).view("<i8") for n in range(TENSORS)}
        safetensors.numpy.save_file(tensors, self.data / "m.safetensors")

    # ---- rows

    def cold(self, row: str, role: str) -> None:
        """Eight processes, from an empty cache."""
        found: dict[str, dict[str, list[float]]] = {way: {} for way in WAYS}
        for _, way in self.turns(WAYS):
            with self.place(way) as (where, server):
                children, before = self.readers(role, way, where, PROCESSES), self.counts()
                answers, after = self.run_what_may_fail(children), self.counts()
                failed = len(children) - len(answers)
                memory = sum(pss_of(child.process.pid) for child in children if child.process.poll() is None)
                memory += pss_of(server.process.pid) if server is not None else 0
                for child in children:
                    child.stop()
                disk = sum(file.stat().st_size for file in pathlib.Path(where["folder"]).glob("*"))
            found[way].setdefault("processes that failed", []).append(failed)
            if failed > 0:
                continue
            numbers = {
                "first, s": min(answer["first"] for answer in answers),
                "last, s": max(answer["last"] for answer in answers),
                "GETs": after["gets"] - before["gets"],
                "fetched, MiB": (after["bytes"] - before["bytes"]) / MIB,
                "resident, MiB": memory / 1024,
                "on disk, MiB": disk / MIB,
            }
            for what, number in numbers.items():
                found[way].setdefault(what, []).append(number)
        for way in WAYS:
            for what, numbers_of_way in found[way].items():
                self.say(row, f"{way}: {what}", numbers_of_way)
        for way in WAYS[1:]:
            ours, theirs = found[WAYS[0]].get("last, s", []), found[way].get("last, s", [])
            if not ours or len(ours) != len(theirs):
                continue  # some failed, and the row above says how many
            ratios = [a / b for a, b in zip(theirs, ours, strict=True)]
            self.say(row, f"last batch, {way} / quinion", ratios, "x")

    def random(self, row: str, processes: int) -> None:
        ways = ["quinion read", "open read", "quinion readinto", "open readinto", "memmap", "quinion pin"]
        found: dict[str, list[float]] = {way: [] for way in ways}
        with self.place("quinion") as (where, _):
            for child in self.readers("weights", "quinion", where):  # so that all is cached
                self.run([child])
                child.stop()
            for _, way in self.turns(ways):
                children = self.readers("random", way, where, processes)
                answers = self.run(children)
                for child in children:
                    child.stop()
                found[way].append(statistics.mean(answer["rate"] for answer in answers))
        for way in ways:
            self.say(row, f"{way}: reads/s of a process", found[way])
        for ours, peer in [("read", "open read"), ("readinto", "open readinto"), ("readinto", "memmap")]:
            ratios = [a / b for a, b in zip(found[f"quinion {ours}"], found[peer], strict=True)]
            self.say(row, f"{ours} / {peer}", ratios, "x", 1.0)

    def weights(self, row: str) -> None:
        """One process after the other."""
        found: dict[str, list[float]] = {}
        for repetition in range(self.options.repeat):
            alternatives = [self.weights_of_ours, self.weights_of_others]
            for alternative in alternatives if repetition % 2 else reversed(alternatives):
                for what, number in alternative().items():
                    found.setdefault(what, []).append(number)
        for what in sorted(found):
            self.say(row, f"{what}, s", found[what])

        def ratio(name: str, peer: str, ours: str, at_least: float) -> None:
            self.say(row, name, [a / b for a, b in zip(found[peer], found[ours], strict=True)], "x", at_least)

        ratio("first load beside a sequential download", "download", "first: all", 0.95)
        ratio("second load, and a look at each page", "local mmap: all", "second: all", 1.0)
        ratio("second load alone", "local mmap: load", "second: load", 1.0)
        ratio("immutable, and a look at each page", "local mmap: all", "second, immutable: all", 1.0)
        ratio("immutable, alone", "local mmap: load", "second, immutable: load", 1.0)

    def weights_of_ours(self) -> dict[str, float]:
        numbers = {}
        with self.place("quinion") as (where, _):
            for name, way in [("first", "quinion"), ("second", "quinion"), ("second, immutable", "quinion immutable")]:
                (child,) = self.readers("weights", way, where)
                before = self.counts()
                (answer,) = self.run([child])
                after = self.counts()
                child.stop()
                numbers |= {f"{name}: load": answer["first"], f"{name}: all": answer["last"]}
                requests = sum(after[kind] - before[kind] for kind in ("gets", "heads"))
                if requests != {"second": 1, "second, immutable": 0}.get(name, requests):
                    raise RuntimeError(f"the {name} load sent {requests} requests to the store")
        return numbers

    def weights_of_others(self) -> dict[str, float]:
        numbers = {}
        with self.place("others") as (where, _):
            (child,) = self.readers("download", "", where)
            (answer,) = self.run([child])
            child.stop()
            numbers["download"] = answer["last"]
            (child,) = self.readers("weights", "local", where)
            (answer,) = self.run([child])
            child.stop()
            numbers |= {"local mmap: load": answer["first"], "local mmap: all": answer["last"]}
        return numbers

    def memory(self, row: str) -> None:
        """Four processes that hold the same weights, beside one: the server's memory, and what their own grew by."""
        ratios, sizes = [], {1: [], 4: []}
        for _ in range(self.options.repeat):
            with self.place("quinion") as (where, server):
                assert server is not None
                empty, children, before = data_of(server.process.pid) * 1024, [], 0
                for number in range(1, 5):
                    (child,) = self.readers("weights", "quinion", where)
                    children.append(child)
                    (answer,) = self.run([child])
                    before += answer["before"]
                    if number in sizes:
                        all_of = [*children, server]
                        grown = sum(data_of(one.process.pid) for one in all_of) * 1024 - before - empty
                        sizes[number].append(grown / MIB)
                for child in children:
                    child.stop()
            ratios.append(sizes[4][-1] / sizes[1][-1])
        for number, grown_all in sizes.items():
            self.say(row, f"{number} holding: MiB more than before", grown_all)
        self.say(row, "four / one", ratios, "x", at_most=1.05)

    def say(
        self, row: str, what: str, numbers: list[float], unit: str = "", at_least: float | None = None,
        at_most: float | None = None,
    ) -> None:  # fmt: skip
        low, middle, high = (
            statistics.quantiles(numbers, n=4, method="inclusive") if len(numbers) > 1 else [numbers[0]] * 3
        )
        verdict = ""
        if at_least is not None or at_most is not None:
            is_met = middle >= at_least if at_least is not None else middle <= (at_most or 0)
            verdict = "met" if is_met else "missed"
        if self.options.json:
            found = {"row": row, "what": what, "median": middle, "quartiles": [low, high], "repetitions": len(numbers)}
            bounds = {"at_least": at_least, "at_most": at_most, "verdict": verdict or None}
            print(json.dumps(found | {name: value for name, value in bounds.items() if value is not None}), flush=True)
        else:
            bound = f"at least {at_least}" if at_least is not None else f"at most {at_most}" if at_most else ""
            print(f"{row:28} {what:44} {middle:10.3f}{unit:1} [{low:.3f} {high:.3f}] {bound} {verdict}", flush=True)


def main() -> None:
    if sys.argv[1:2] == ["--role"]:
        name, *arguments = json.loads(sys.argv[2])
        return serve(*arguments) if name == "serve" else ROLES[name](*arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="the data of a row, in MiB")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--folder", help="for data and cache folders; if not given, the system's temporary one")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("rows", nargs="*", help="parts of the names of rows; all, if there are none")
    bench = Bench(parser.parse_args())
    rows: list[tuple[str, Callable[[], None], Callable[[str], None]]] = [
        ("cold parquet, 8 processes", bench.make_parquet, lambda row: bench.cold(row, "parquet")),
        ("cold safetensors, 8 processes", bench.make_weights, lambda row: bench.cold(row, "weights")),
        ("warm 64 KiB, 1 process", bench.make_weights, lambda row: bench.random(row, 1)),
        ("warm 64 KiB, 8 processes", bench.make_weights, lambda row: bench.random(row, 8)),
        ("safetensors, twice", bench.make_weights, bench.weights),
        ("memory of weights", bench.make_weights, bench.memory),
    ]
    wanted = [row for row in rows if not bench.options.rows or any(part in row[0] for part in bench.options.rows)]
    try:
        for make in dict.fromkeys(make for _, make, _ in wanted):
            make()
        bench.start_store()
        for name, _, measure in wanted:
            measure(name)
    finally:
        bench.close()


if __name__ == "__main__":
    main()
