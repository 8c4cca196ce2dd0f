"""What a user of boto3 does, at an endpoint that is given: each answer is compared with what was written.

Uploads whose checksum comes behind the body (a trailer) are made by hand, since boto3 has them over TLS alone.
"""

import base64
import datetime
import http.client
import sys
import urllib.error
import urllib.request
import zlib

import boto3
import botocore.auth
import botocore.awsrequest
import botocore.exceptions
from botocore.config import Config

endpoint, bucket = sys.argv[1], "bucket"
config = Config(retries={"max_attempts": 1}, s3={"addressing_style": "path"})
s3 = boto3.client("s3", endpoint_url=endpoint, config=config)


def refused(code, call, **arguments):
    """The call fails with that code."""
    try:
        call(Bucket=bucket, **arguments)
    except botocore.exceptions.ClientError as error:
        assert error.response["Error"]["Code"] == code, error
    else:
        raise AssertionError(f"{call.__name__} did not fail with {code}")


def read(key, **arguments):
    return s3.get_object(Bucket=bucket, Key=key, **arguments)["Body"].read()


# Objects.
data = bytes(range(256)) * 1024
put = s3.put_object(Bucket=bucket, Key="a b/\u00fc+?", Body=data, ContentType="text/x", Metadata={"one": "two"})
got = s3.get_object(Bucket=bucket, Key="a b/\u00fc+?")
assert got["Body"].read() == data and got["ContentType"] == "text/x" and got["Metadata"] == {"one": "two"}
assert got["ETag"] == put["ETag"] and got["ContentLength"] == len(data)
part = s3.get_object(Bucket=bucket, Key="a b/\u00fc+?", Range="bytes=100-199")
assert part["Body"].read() == data[100:200] and part["ContentRange"] == f"bytes 100-199/{len(data)}"
head = s3.head_object(Bucket=bucket, Key="a b/\u00fc+?")
assert head["ContentLength"] == len(data) and head["ETag"] == put["ETag"]
refused("NoSuchKey", s3.get_object, Key="none")
refused("404", s3.head_object, Key="none")
refused("InvalidRange", s3.get_object, Key="a b/\u00fc+?", Range=f"bytes={len(data)}-")
refused("PreconditionFailed", s3.get_object, Key="a b/\u00fc+?", IfMatch='"other"')
refused("304", s3.get_object, Key="a b/\u00fc+?", IfNoneMatch=put["ETag"])
refused("PreconditionFailed", s3.put_object, Key="a b/\u00fc+?", Body=b"x", IfNoneMatch="*")
assert read("a b/\u00fc+?") == data

# A key that the crate object_store would write otherwise.
s3.put_object(Bucket=bucket, Key="folder//", Body=b"")
assert read("folder//") == b""
s3.delete_object(Bucket=bucket, Key="folder//")

# Lists, in pages, of both versions.
for number in range(7):
    s3.put_object(Bucket=bucket, Key=f"list/{number}/x", Body=str(number).encode())
pages = s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix="list/", PaginationConfig={"PageSize": 3})
assert [o["Key"] for page in pages for o in page["Contents"]] == [f"list/{n}/x" for n in range(7)]
listed = s3.list_objects_v2(Bucket=bucket, Prefix="list/", Delimiter="/", StartAfter="list/2/x")
assert [p["Prefix"] for p in listed["CommonPrefixes"]][-4:] == [f"list/{n}/" for n in range(3, 7)]
assert len(s3.list_objects(Bucket=bucket, Prefix="list/", MaxKeys=2)["Contents"]) == 2
assert [b["Name"] for b in s3.list_buckets()["Buckets"]] == [bucket]
s3.head_bucket(Bucket=bucket)

# Uploads in parts, of which one is copied.
upload = s3.create_multipart_upload(Bucket=bucket, Key="parts", ContentType="type/parts")["UploadId"]
assert [u["UploadId"] for u in s3.list_multipart_uploads(Bucket=bucket)["Uploads"]] == [upload]
big = data * 24
first = s3.upload_part(Bucket=bucket, Key="parts", UploadId=upload, PartNumber=1, Body=big)
source = {"Bucket": bucket, "Key": "a b/\u00fc+?"}
second = s3.upload_part_copy(Bucket=bucket, Key="parts", UploadId=upload, PartNumber=2, CopySource=source)
assert len(s3.list_parts(Bucket=bucket, Key="parts", UploadId=upload)["Parts"]) == 2
etags = [first["ETag"], second["CopyPartResult"]["ETag"]]
parts = [{"ETag": tag, "PartNumber": number + 1} for number, tag in enumerate(etags)]
s3.complete_multipart_upload(Bucket=bucket, Key="parts", UploadId=upload, MultipartUpload={"Parts": parts})
assert read("parts") == big + data
upload = s3.create_multipart_upload(Bucket=bucket, Key="parts")["UploadId"]
s3.abort_multipart_upload(Bucket=bucket, Key="parts", UploadId=upload)
refused("NoSuchUpload", s3.list_parts, Key="parts", UploadId=upload)

# Copies, replacements and deletions are seen at once.
s3.copy_object(Bucket=bucket, Key="copy", CopySource=source)
assert read("copy") == data
refused("AccessDenied", s3.copy_object, Key="copy", CopySource={"Bucket": "other", "Key": "x"})
s3.put_object(Bucket=bucket, Key="copy", Body=b"new")
assert read("copy") == b"new"
gone = s3.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": "copy"}, {"Key": "parts"}]})
assert len(gone["Deleted"]) == 2
refused("NoSuchKey", s3.get_object, Key="copy")
s3.delete_object(Bucket=bucket, Key="list/0/x")
refused("NoSuchKey", s3.get_object, Key="list/0/x")
refused("NotImplemented", s3.get_bucket_policy)
refused("NotImplemented", s3.put_object_acl, Key="a b/\u00fc+?", ACL="public-read")

# URLs that are signed, and one that was changed.
url = s3.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": "list/1/x"}, ExpiresIn=60)
assert "X-Amz-Signature" in url or "Signature" in url
newer = boto3.client("s3", endpoint_url=endpoint, config=config.merge(Config(signature_version="s3v4")))
url = newer.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": "list/1/x"}, ExpiresIn=60)
assert urllib.request.urlopen(url).read() == b"1"
try:
    urllib.request.urlopen(url.replace("list/1/x", "list/2/x"))
except urllib.error.HTTPError as error:
    assert error.code == 403, error
else:
    raise AssertionError("a URL that was changed is answered")
# A signature of version 2 is none, whatever is written beside it.
older = boto3.client("s3", endpoint_url=endpoint, config=config.merge(Config(signature_version="s3")))
url = older.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": "list/1/x"}, ExpiresIn=60)
assert "&Signature=" in url, url
for added in ("", "&X-Amz-Algorithm=AWS4-HMAC-SHA256", "&X-Amz-Signature=a&X-Amz-SignedHeaders=host"):
    try:
        urllib.request.urlopen(url + added)
    except urllib.error.HTTPError as error:
        assert error.code == 403, error
    else:
        raise AssertionError(f"a URL that is signed by version 2 is answered with {added!r}")
# A form's signature covers its fields, and not the URL: one for an object begins no upload of another.
fields = newer.generate_presigned_post(bucket, "mine", ExpiresIn=60)["fields"]
parts = "".join(f'--b\r\nContent-Disposition: form-data; name="{k}"\r\n\r\n{v}\r\n' for k, v in fields.items())
parts += '--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\nx\r\n--b--\r\n'
form = urllib.request.Request(f"{endpoint}/{bucket}/other?uploads&X-Amz-Algorithm=AWS4-HMAC-SHA256", parts.encode())
form.add_header("Content-Type", "multipart/form-data; boundary=b")
try:
    urllib.request.urlopen(form)
except urllib.error.HTTPError as error:
    assert error.code == 403, error
else:
    raise AssertionError("a form has begun an upload of another object")


def with_trailer(body, checksum, announced=None):
    """A PUT of `body` in two chunks, with a CRC32 behind it; the status of the answer."""
    half = len(body) // 2
    pieces = [piece for piece in (body[:half], body[half:]) if piece]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    whole = chunks + b"0\r\nx-amz-checksum-crc32:" + base64.b64encode(checksum.to_bytes(4, "big")) + b"\r\n\r\n"
    headers = {
        "Content-Encoding": "aws-chunked",
        "X-Amz-Decoded-Content-Length": str(len(body) if announced is None else announced),
        "X-Amz-Trailer": "x-amz-checksum-crc32",
        "X-Amz-Sdk-Checksum-Algorithm": "CRC32",
        "Content-Length": str(len(whole)),
    }
    request = botocore.awsrequest.AWSRequest("PUT", f"{endpoint}/{bucket}/trailer", headers, whole)
    request.context["checksum"] = {"request_algorithm": {"in": "trailer", "algorithm": "crc32"}}
    request.context["payload_signing_enabled"] = False
    credentials = boto3.Session().get_credentials()
    botocore.auth.S3SigV4Auth(credentials, "s3", "us-east-1").add_auth(request)
    sent = urllib.request.Request(request.url, whole, dict(request.headers.items()), method="PUT")
    try:
        return urllib.request.urlopen(sent).status
    except urllib.error.HTTPError as error:
        return error.code


body = data * 3
assert with_trailer(body, zlib.crc32(body)) == 200
assert read("trailer") == body
assert with_trailer(b"x" * 1000, zlib.crc32(b"y")) == 400
assert read("trailer") == body, "a body with a wrong checksum was written"
# Bodies that are announced as empty, of which an HTTP client would read nothing.
assert with_trailer(b"x" * 1000, zlib.crc32(b"x" * 1000), announced=0) == 400
assert with_trailer(b"x" * 1000, zlib.crc32(b""), announced=0) == 400
assert with_trailer(b"", zlib.crc32(b"y")) == 400
assert read("trailer") == body, "an empty object was written in place of a body that is not empty"
assert with_trailer(b"", zlib.crc32(b"")) == 200
assert read("trailer") == b""
assert with_trailer(body, zlib.crc32(body)) == 200

# Chunks that are longer than what the endpoint gives to its decoder at a time.
assert with_trailer(big, zlib.crc32(big)) == 200
assert read("trailer") == big
assert with_trailer(big, zlib.crc32(body)) == 400
assert with_trailer(body, zlib.crc32(body)) == 200


class ChunkSigner(botocore.auth.S3SigV4Auth):
    """Signs a request whose chunks are signed each."""

    def payload(self, request):
        return "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"


# A signed chunk that is too long is refused before a byte of it comes.
path = f"/{bucket}/trailer"
request = botocore.awsrequest.AWSRequest("PUT", endpoint + path, {"X-Amz-Decoded-Content-Length": str(32 << 20)})
ChunkSigner(boto3.Session().get_credentials(), "s3", "us-east-1").add_auth(request)
connection = http.client.HTTPConnection(endpoint.removeprefix("http://"))
connection.putrequest("PUT", path, skip_accept_encoding=True)
for name, value in [*request.headers.items(), ("Content-Length", str(33 << 20))]:
    connection.putheader(name, value)
connection.endheaders(b"%x;chunk-signature=%b\r\n" % ((16 << 20) + 1, b"0" * 64))
answer = connection.getresponse()
text = answer.read()
assert answer.status == 400 and b"<Code>InvalidRequest</Code>" in text and b"16 MiB" in text, (answer.status, text)
connection.close()
assert read("trailer") == body


# SDKs for JavaScript and Go put headers into the query of a URL that they sign.
def answer_to_url(method, target, body=None):
    """The status and the body of the answer to a request by a signed URL."""
    request = botocore.awsrequest.AWSRequest(method, f"{endpoint}/{bucket}/{target}")
    credentials = boto3.Session().get_credentials()
    botocore.auth.S3SigV4QueryAuth(credentials, "s3", "us-east-1", expires=60).add_auth(request)
    try:
        answer = urllib.request.urlopen(urllib.request.Request(request.url, body, method=method))
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    return answer.status, answer.read()


assert answer_to_url("GET", "list/1/x?x-amz-checksum-mode=ENABLED&x-id=GetObject") == (200, b"1")
assert answer_to_url("PUT", "url?x-amz-meta-one=two&X-Amz-Storage-Class=STANDARD&x-id=PutObject", b"abc")[0] == 200
assert s3.head_object(Bucket=bucket, Key="url")["Metadata"] == {"one": "two"}
status, text = answer_to_url("PUT", "url?x-amz-sdk-checksum-algorithm=CRC32&x-amz-checksum-crc32=AAAAAA%3D%3D", b"x")
assert status == 400, (status, text)
assert read("url") == b"abc", "a body with a wrong checksum was written"
status, text = answer_to_url("PUT", "url?x-amz-copy-source=other%2Fx", b"")
assert status == 403 and b"AccessDenied" in text, (status, text)

# The time of an object, as conditions take it.
time = s3.head_object(Bucket=bucket, Key="trailer")["LastModified"]
day = datetime.timedelta(days=1)
assert read("trailer", IfModifiedSince=time - day) == body
refused("PreconditionFailed", s3.get_object, Key="trailer", IfUnmodifiedSince=time - day)
print("all went well")
