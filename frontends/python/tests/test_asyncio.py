"""Asyncio: reads overlap, the loop goes on, and what is cancelled leaves nothing behind."""

import asyncio
import errno
import gc
import os

import pytest
import quinion
from conftest import DATA, SIZE, in_child


async def until_stalled(web, requests=1):
    await asyncio.to_thread(web.wait_until_stalled, requests)


def test_answers_are_those_of_the_calls_that_wait(web, web_opener):
    async def main():
        file = await web_opener.aopen(f"{web.url}/a")
        for _round in range(2):  # cold, then warm
            assert await file.aread_at(100, 50_000) == DATA[100:50_100]
            assert await file.aread_at(SIZE - 3, 10) == DATA[-3:] and await file.aread_at(SIZE, 10) == b""
            assert await file.aread_ranges([(0, 5), (SIZE - 5, 5), (7, 0)]) == [DATA[:5], DATA[-5:], b""]
            pin = await file.apin(4096, 100_000)
            assert memoryview(pin).readonly and memoryview(pin) == DATA[4096:104_096]
            buffer = bytearray(10)
            assert await file.areadinto_at(SIZE - 4, buffer) == 4 and buffer == DATA[-4:] + bytes(6)
        with pytest.raises(EOFError):
            await file.aread_ranges([(SIZE, 1)])
        with pytest.raises(FileNotFoundError):
            await web_opener.aopen(f"{web.url}/none")
        assert file.tell() == 0
        file.close()
        with pytest.raises(ValueError):
            await file.aread_at(0, 1)

    asyncio.run(main())


def test_local_files_are_read_as_well(opener, tmp_path):
    path = tmp_path / "local"
    path.write_bytes(DATA)

    async def main():
        for name in (str(path), "/proc/self/status"):
            file = await opener.aopen(name)
            whole = await file.aread_at(0, 1 << 40)
            assert whole[:5] == (b"Name:" if name.startswith("/proc") else DATA[:5])
        file = await opener.aopen(str(path))
        for _round in range(2):
            assert await file.aread_at(SIZE - 3, 10) == DATA[-3:]
            assert await file.aread_ranges([(5, 5)]) == [DATA[5:10]]
            assert bytes(await file.apin(SIZE - 3, 10)) == DATA[-3:]

    asyncio.run(main())


def test_reads_overlap_and_the_loop_goes_on(web, web_opener):
    count = 8  # a server waits for no more at a time
    for n in range(count):
        web.objects[f"o{n}"] = DATA[n : n + 5000]

    async def main():
        files = await asyncio.gather(*(web_opener.aopen(f"{web.url}/o{n}") for n in range(count)))
        web.stall()
        reads = [asyncio.ensure_future(file.aread_at(0, 5000)) for file in files]
        # All of them wait in the web server at a time: one after the other they would never do.
        await until_stalled(web, count)
        assert not any(read.done() for read in reads)
        web.flow()
        assert await asyncio.gather(*reads) == [DATA[n : n + 5000] for n in range(count)]

    asyncio.run(main())


def test_more_calls_than_threads_all_have_their_answer(web, web_opener):
    async def main():
        file = await web_opener.aopen(f"{web.url}/a")
        offsets = [n * 9973 % (SIZE - 100) for n in range(500)]
        assert await asyncio.gather(*(file.aread_at(o, 100) for o in offsets)) == [DATA[o : o + 100] for o in offsets]

    asyncio.run(main())


@pytest.mark.parametrize("call", ["aread_at", "areadinto_at", "apin", "aread_ranges", "aopen"])
def test_a_call_that_is_cancelled_leaves_nothing_behind(web, web_opener, call):
    buffer = bytearray(1000)

    async def main():
        file = await web_opener.aopen(f"{web.url}/a")
        calls = {
            "aread_at": lambda: file.aread_at(0, 1000),
            "areadinto_at": lambda: file.areadinto_at(0, buffer),
            "apin": lambda: file.apin(0, 100_000),
            "aread_ranges": lambda: file.aread_ranges([(0, 5)]),
            "aopen": lambda: web_opener.aopen(f"{web.url}/a"),
        }
        web.stall()
        task = asyncio.ensure_future(calls[call]())
        await until_stalled(web)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(calls[call](), 0.01)
        buffer.append(1)  # it is the caller's again
        web.flow()
        assert await file.aread_at(0, 1000) == DATA[:1000]

    asyncio.run(main())
    assert not any(buffer[:1000])
    if isinstance(web_opener, quinion.Cache):
        gc.collect()
        assert web_opener.stats()["pinned_bytes"] == 0


def test_a_loop_that_ends_early_takes_nothing_with_it(web, web_opener):
    file = web_opener.open(f"{web.url}/a")
    web.stall()

    async def main():
        asyncio.ensure_future(file.aread_at(0, 100))
        await until_stalled(web)

    asyncio.run(main())
    web.flow()
    assert asyncio.run(file.aread_at(0, 100)) == DATA[:100]


def test_loops_leave_no_descriptors(web, web_opener):
    file = web_opener.open(f"{web.url}/a")

    def descriptors():
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    async def main(n):
        offset = n * 50_000
        assert await file.aread_at(offset, 10) == DATA[offset : offset + 10]

    asyncio.run(main(0))
    before = descriptors()
    for n in range(1, 40):
        asyncio.run(main(n))
    # The web server of this test has some more or less; 39 loops that leave theirs would have 78.
    assert descriptors() < before + 20


def test_a_forked_child_has_loops_of_its_own(web, web_opener):
    file = web_opener.open(f"{web.url}/a")
    assert asyncio.run(file.aread_at(0, 5)) == DATA[:5]

    def use():
        try:
            return asyncio.run(file.aread_at(2 << 20, 5))
        except RuntimeError as error:
            return str(error)

    async def fork():
        web.stall()
        waiting = asyncio.ensure_future(file.aread_at(1 << 20, 5))
        await until_stalled(web)
        web.flowing.set()
        found = await asyncio.to_thread(in_child, use)
        return await waiting, found

    waited, found = asyncio.run(fork())
    assert waited == DATA[1 << 20 : (1 << 20) + 5]
    if isinstance(web_opener, quinion.Cache):
        assert "fork" in found
    else:
        assert found == DATA[2 << 20 : (2 << 20) + 5]


def test_an_object_that_was_replaced_is_an_error(web, web_opener):
    async def main():
        file = await web_opener.aopen(f"{web.url}/a")
        web.objects["a"] = bytes(SIZE)
        with pytest.raises(OSError) as failed:
            await file.aread_at(0, SIZE)
        assert failed.value.errno == errno.ESTALE

    asyncio.run(main())
