"""Store: a folder as a bucket of S3 on loopback, whose answers begin after a set time, and which counts its requests.

Enough of S3 for readers: GET and HEAD of objects, with ranges, and lists. The kernel sends the bytes (`sendfile`), so
the store takes little of the processors' time that readers are measured with.

`python store.py FOLDER MILLISECONDS` prints its port, and answers each line of its input with its counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import json
import pathlib
import sys
import urllib.parse
from dataclasses import dataclass, field

BUCKET = "bucket"


@dataclass
class Store:
    folder: pathlib.Path
    latency: float
    counts: dict[str, int] = field(default_factory=lambda: {"gets": 0, "heads": 0, "lists": 0, "bytes": 0})

    async def serve(self) -> None:
        server = await asyncio.start_server(self.connection, "127.0.0.1", 0, backlog=1024)
        print(server.sockets[0].getsockname()[1], flush=True)
        loop = asyncio.get_running_loop()
        while await loop.run_in_executor(None, sys.stdin.readline):
            print(json.dumps(self.counts), flush=True)

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                method, target, _ = head[0].split(" ")
                headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
                await asyncio.sleep(self.latency)
                await self.answer(writer, (method, target), headers)
        writer.close()

    async def answer(self, writer: asyncio.StreamWriter, asked: tuple[str, str], headers: dict[str, str]) -> None:
        method, target = asked
        path, _, query = target.partition("?")
        key = urllib.parse.unquote(path).removeprefix(f"/{BUCKET}").lstrip("/")
        file = self.folder / key
        if not key:
            await self.list(writer, urllib.parse.parse_qs(query))
        elif not file.is_file():
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        else:
            await self.object(writer, method, (file, headers.get("range")))
        await writer.drain()

    async def object(self, writer: asyncio.StreamWriter, method: str, wanted: tuple[pathlib.Path, str | None]) -> None:
        file, asked_range = wanted
        about = file.stat()
        status, first, end = "200 OK", 0, about.st_size
        lines = [
            f'ETag: "{about.st_mtime_ns:x}"',
            f"Last-Modified: {email.utils.formatdate(about.st_mtime, usegmt=True)}",
            "Accept-Ranges: bytes",
            "Content-Type: binary/octet-stream",
        ]
        if method == "GET" and asked_range is not None:
            begin, _, last = asked_range.removeprefix("bytes=").partition("-")
            first = int(begin) if begin else about.st_size - int(last)
            end = min(int(last) + 1, about.st_size) if begin and last else about.st_size
            status = "206 Partial Content"
            lines.append(f"Content-Range: bytes {first}-{end - 1}/{about.st_size}")
        lines.append(f"Content-Length: {end - first}")
        writer.write("\r\n".join([f"HTTP/1.1 {status}", *lines, "", ""]).encode())
        self.counts["gets" if method == "GET" else "heads"] += 1
        if method == "GET" and end > first:
            self.counts["bytes"] += end - first
            with file.open("rb") as opened:
                await asyncio.get_running_loop().sendfile(writer.transport, opened, first, end - first)

    async def list(self, writer: asyncio.StreamWriter, query: dict[str, list[str]]) -> None:
        self.counts["lists"] += 1
        prefix = query.get("prefix", [""])[0]
        keys = sorted(file.name for file in self.folder.iterdir() if file.name.startswith(prefix))
        parts = [
            f"<Contents><Key>{key}</Key><Size>{(self.folder / key).stat().st_size}</Size>"
            f'<ETag>"x"</ETag><LastModified>2026-11-25T00:00:00.000Z</LastModified></Contents>'
            for key in keys
        ]
        body = (
            '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>{BUCKET}</Name><Prefix>{prefix}</Prefix><KeyCount>{len(keys)}</KeyCount><MaxKeys>1000</MaxKeys>"
            f"<IsTruncated>false</IsTruncated>{''.join(parts)}</ListBucketResult>"
        ).encode()
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)


if __name__ == "__main__":
    asyncio.run(Store(pathlib.Path(sys.argv[1]), float(sys.argv[2]) / 1000).serve())
