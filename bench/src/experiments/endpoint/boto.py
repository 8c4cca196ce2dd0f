"""A client of S3 by boto3: writes objects, signs URLs of them, or reads them when it is told to."""

import sys
import threading
import time

import boto3
from botocore.config import Config

endpoint, bucket, objects, size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
verb, numbers = sys.argv[5], [int(word) for word in sys.argv[6:]]


def key(number):
    return f"object-{number}"


def content(number):
    """Bytes that no other object has at the same place."""
    line = f"{number:015}\n".encode()
    return line * (size // len(line))


def client(connections):
    config = Config(
        max_pool_connections=connections,
        parameter_validation=False,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        retries={"max_attempts": 1},
        s3={"addressing_style": "path"},
        signature_version="s3v4",
        tcp_keepalive=True,
    )
    return boto3.client("s3", endpoint_url=endpoint, config=config)


def read(s3, number):
    body = s3.get_object(Bucket=bucket, Key=key(number))["Body"].read()
    line = f"{number:015}\n".encode()
    if len(body) != size or body[:16] != line or body[-16:] != line:
        sys.exit(f"object {number} is not what was written")


def get(gets, connections):
    s3 = client(connections)
    for number in range(objects):
        if s3.get_object(Bucket=bucket, Key=key(number))["Body"].read() != content(number):
            sys.exit(f"object {number} is not what was written")
    started, failed = threading.Barrier(connections + 1), []

    def work(first):
        try:
            read(s3, first)
            started.wait()
            for number in range(first, gets, connections):
                read(s3, number % objects)
        except BaseException as error:
            failed.append(error)
            started.abort()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(connections)]
    for thread in threads:
        thread.start()
    print("ready", flush=True)
    sys.stdin.readline()
    started.wait()
    begun = time.monotonic()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - begun
    if failed:
        raise failed[0]
    print(seconds, flush=True)


if verb == "put":
    s3 = client(1)
    for number in range(objects):
        s3.put_object(Bucket=bucket, Key=key(number), Body=content(number))
elif verb == "urls":
    s3 = client(1)
    for number in range(objects):
        params = {"Bucket": bucket, "Key": key(number)}
        print(s3.generate_presigned_url("get_object", Params=params, ExpiresIn=24 * 3600))
else:
    get(*numbers)
