//! The program itself, between real clients and versitygw.
//!
//! ```text
//!   object_store's client, boto3, raw requests --the endpoint's keys--> quinion-s3 --the store's--> versitygw
//!                                                                          '--> a server of this process, at times
//! ```
//!
//! `scripts/setup` installs versitygw and moto, with which boto3 comes, in the target folder. Where it could not, tests
//! say SKIPPED, or fail under `cargo xtask test` (`object/tests/real/skip.rs`).

use std::fs::Permissions;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::Path as FilePath;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use hyper::Method;
use object_store::aws::{AmazonS3, AwsAuthorizer, AwsCredential};
use object_store::client::{HttpRequest, HttpRequestBody};
use object_store::signer::Signer;
use object_store::{ObjectStoreExt, WriteMultipart, integration, path::Path};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use quinion::Cache;
use quinion_object::Options;
use quinion_testing_s3 as s3;
use rustix::process::{Pid, Signal, kill_process};

#[path = "../../serve/tests/certificates/mod.rs"]
mod certificates;
mod common;
#[path = "../../../object/tests/differential/mod.rs"]
mod differential;
#[path = "../../../object/tests/real/mod.rs"]
mod real;

use certificates::Certificates;
use common::{Endpoint, KEY, SECRET, below, command, runtime, versitygw};
use differential::{Call, Condition, calls, is_defined, made};
use real::{Server, or_skipped};

/// Calls of a differential run.
const CALLS: usize = 300;

/// A signed request.
struct Signed<'s> {
    method: &'s str,
    target: &'s str,
    body: &'s str,
    /// The body that the signature covers.
    digest_of: &'s str,
    /// More headers, which it covers as well.
    headers: &'s [(&'static str, &'s str)],
    key: &'s str,
    secret: &'s str,
}

const SIGNED: Signed<'_> =
    Signed { method: "GET", target: "/", body: "", digest_of: "", headers: &[], key: KEY, secret: SECRET };

impl Signed<'_> {
    fn text(&self, address: SocketAddr) -> Vec<u8> {
        let credential =
            AwsCredential { key_id: self.key.into(), secret_key: self.secret.into(), token: None };
        let mut request = HttpRequest::new(HttpRequestBody::from(self.digest_of.to_owned()));
        *request.method_mut() = self.method.parse().unwrap();
        *request.uri_mut() = format!("http://{address}{}", self.target).parse().unwrap();
        for (name, value) in self.headers {
            request.headers_mut().append(*name, value.parse().unwrap());
        }
        AwsAuthorizer::new(&credential, "s3", "us-east-1").try_authorize(&mut request, None).unwrap();
        let Self { method, target, body, .. } = self;
        let mut text = format!("{method} {target} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n");
        text.push_str(&format!("Content-Length: {}\r\n", body.len()));
        for (name, value) in request.headers() {
            text.push_str(&format!("{name}: {}\r\n", value.to_str().unwrap()));
        }
        format!("{text}\r\n{body}").into_bytes()
    }
}

/// A server of caches in this process that has that bucket, by the name of its socket.
fn serve(store: AmazonS3, folder: &FilePath) -> (quinion_service::Server, String) {
    let cache = Cache::builder().memory(32 << 20).build().unwrap();
    let name = folder.join("q/s.sock").to_str().unwrap().to_owned();
    let builder = quinion_service::Server::builder(cache);
    let server = builder.store("s3://bucket", Arc::new(store), Options::new());
    (server.start(&name).unwrap(), name)
}

/// object_store's own tests, but for those that its client does not pass on versitygw itself.
async fn the_crates_own_tests(store: &AmazonS3) {
    integration::put_get_delete_list(store).await;
    integration::list_uses_directories_correctly(store).await;
    integration::list_with_delimiter(store).await;
    integration::rename_and_copy(store).await;
    integration::copy_rename_nonexistent_object(store).await;
    integration::stream_get(store).await;
    integration::put_get_attributes(store).await;
}

/// 1. The endpoint has no credentials for its store.
/// 2. Its clients were told to come again, and the log had an error of a connection to an address of the machine's.
#[test]
fn an_endpoint_without_credentials_tells_its_log_which_to_give_and_its_clients_no_names() {
    let arguments = ["--store", "s3://bucket", "--anonymous", "--memory", "32M", "--json"];
    let endpoint = Endpoint::start_alone(&arguments, |command| {
        command.env("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1");
    });
    for target in ["/bucket/a", "/bucket?list-type=2"] {
        let answer = endpoint.get(target, "");
        assert!(answer.starts_with("HTTP/1.1 403") && answer.contains("AccessDenied"), "{answer}");
        assert!(answer.contains("has no credentials") && !answer.contains("AWS_"), "{answer}");
    }
    let said = endpoint.said.lock().unwrap();
    for part in
        ["\"event\":\"failed\",\"bucket\":\"bucket\"", "AWS_ACCESS_KEY_ID with", "AWS_SKIP_SIGNATURE=true"]
    {
        assert!(said.contains(part), "{part}: {said}");
    }
}

#[test]
fn object_stores_client_passes_its_own_tests_at_the_endpoint() {
    let Some(server) = versitygw("object_stores_client_passes_its_own_tests_at_the_endpoint") else { return };
    let store = below(&server, "bucket");
    runtime().block_on(the_crates_own_tests(&store));
    for freshness in ["always", "3600", "immutable"] {
        let endpoint = Endpoint::start(
            &server,
            &["--store", "s3://bucket", "--memory", "32M", "--freshness", freshness],
        );
        runtime().block_on(the_crates_own_tests(&endpoint.bucket("bucket")));
    }
    let folder = tempfile::tempdir().unwrap();
    let (_server, name) = serve(store, folder.path());
    let endpoint = Endpoint::start(&server, &["--store", "s3://bucket", "--server", &name]);
    runtime().block_on(the_crates_own_tests(&endpoint.bucket("bucket")));
}

/// Whether versitygw treats the call's condition in its own way: it reports whole seconds and compares parts of them,
/// and takes a list of tags for one tag. The cache of the endpoint asks it for conditions, and it answers in that way
/// as well; a server of caches compares by itself, as HTTP has it.
fn is_taken_its_own_way(call: &Call) -> bool {
    use Condition::{ListMatch, ModifiedSince, UnmodifiedSince};
    matches!(call, Call::Get { condition: ModifiedSince(0) | UnmodifiedSince(0) | ListMatch, .. })
}

/// Makes the same calls of a bare bucket, and of one at the endpoint, to which other clients write as well.
async fn compare(stores: [&AmazonS3; 3], is_left_out: impl Fn(&Call) -> bool) {
    let [bare, below, cached] = stores;
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[9; 32]);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    let drawn = calls();
    for at in 0..CALLS {
        let call = drawn.new_tree(&mut runner).unwrap().current();
        if is_left_out(&call) || !is_defined(&call, bare).await {
            continue;
        }
        let one = made(&call, at, bare, Some(bare)).await;
        let other = made(&call, at, cached, Some(below)).await;
        assert_eq!(one, other, "call {at}: {call:?}");
    }
}

#[test]
fn the_endpoint_answers_as_the_store_behind_it() {
    let Some(server) = versitygw("the_endpoint_answers_as_the_store_behind_it") else { return };
    let (bare, through) = (below(&server, "bare"), below(&server, "bucket"));
    let endpoint = Endpoint::start(&server, &["--store", "s3://bucket", "--memory", "32M"]);
    runtime().block_on(compare([&bare, &through, &endpoint.bucket("bucket")], |_| false));
    drop(endpoint);
    let folder = tempfile::tempdir().unwrap();
    let (bare, of_server) = (below(&server, "bare2"), below(&server, "bucket2"));
    let cache = Cache::builder().memory(32 << 20).build().unwrap();
    let name = folder.path().join("q/s.sock").to_str().unwrap().to_owned();
    let builder = quinion_service::Server::builder(cache);
    let builder = builder.store("s3://bucket2", Arc::new(of_server.clone()), Options::new());
    let _server = builder.start(&name).unwrap();
    let endpoint = Endpoint::start(&server, &["--store", "s3://bucket2", "--server", &name]);
    runtime().block_on(compare([&bare, &of_server, &endpoint.bucket("bucket2")], is_taken_its_own_way));
}

#[test]
fn requests_not_signed_by_a_key_of_the_endpoint_are_refused() {
    let Some(server) = versitygw("requests_not_signed_by_a_key_of_the_endpoint_are_refused") else { return };
    let store = below(&server, "bucket");
    runtime().block_on(store.put(&Path::from("a"), "abc".into())).unwrap();
    let endpoint = Endpoint::start(&server, &["--store", "s3://bucket", "--memory", "32M"]);
    let refused = |answer: &str, status: &str, code: &str| {
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{answer}");
        assert!(answer.contains(&format!("<Code>{code}</Code><Message>")), "{answer}");
        assert!(
            !answer.contains(real::KEY) && !answer.contains(real::SECRET) && !answer.contains(SECRET),
            "{answer}"
        );
    };
    for target in ["/bucket/a", "/bucket?list-type=2", "/bucket/a?versionId=1"] {
        refused(&endpoint.get(target, ""), "403", "AccessDenied");
    }
    let send = |signed: Signed<'_>| endpoint.raw(&signed.text(endpoint.address));
    let get = Signed { target: "/bucket/a", ..SIGNED };
    assert!(send(Signed { ..get }).ends_with("\r\n\r\nabc"));
    refused(&send(Signed { secret: "wrong", ..get }), "403", "SignatureDoesNotMatch");
    refused(&send(Signed { key: "unknown", ..get }), "403", "InvalidAccessKeyId");
    refused(&send(Signed { key: real::KEY, secret: real::SECRET, ..get }), "403", "InvalidAccessKeyId");
    refused(&send(Signed { target: "/other/a", ..SIGNED }), "404", "NoSuchBucket");
    refused(&send(Signed { target: "/bucket/none", ..SIGNED }), "404", "NoSuchKey");
    refused(&send(Signed { target: "/bucket?policy=", ..SIGNED }), "501", "NotImplemented");
    let moved = String::from_utf8(get.text(endpoint.address)).unwrap().replace("/bucket/a", "/bucket/b");
    refused(&endpoint.raw(moved.as_bytes()), "403", "SignatureDoesNotMatch");
    // The body differs from the signed one: nothing is written.
    let put = Signed { method: "PUT", target: "/bucket/b", body: "other", digest_of: "signed", ..SIGNED };
    refused(&send(Signed { ..put }), "400", "XAmzContentSHA256Mismatch");
    refused(&send(Signed { target: "/bucket/b", ..SIGNED }), "404", "NoSuchKey");
    assert!(send(Signed { digest_of: "other", ..put }).starts_with("HTTP/1.1 200"));
    assert!(send(Signed { target: "/bucket/b", ..SIGNED }).ends_with("\r\n\r\nother"));
    // versitygw uses the access key as the owner's name.
    let owners = below_list(&server, endpoint.address, (real::KEY, real::SECRET));
    let list = below_list(&server, endpoint.address, (KEY, SECRET));
    assert!(owners.contains("InvalidAccessKeyId") && list.contains("<Key>a</Key>"), "{list}");
    assert!(!list.contains(real::KEY), "{list}");
    let buckets = send(SIGNED);
    assert!(buckets.contains("<Name>bucket</Name>"), "{buckets}");
    let said = endpoint.said.lock().unwrap().clone();
    assert!(said.lines().count() == 1 && !said.contains(real::KEY), "{said}");
}

/// 1. A client signs a URL by which another one may upload one object.
/// 2. The other adds a header: the upload was a copy of an object that it may not read.
#[test]
fn a_signed_url_allows_the_request_that_was_signed_and_no_more() {
    let name = "a_signed_url_allows_the_request_that_was_signed_and_no_more";
    let Some(server) = versitygw(name) else { return };
    let store = below(&server, "bucket");
    let (secret, open) = (Path::from("secret"), Path::from("open"));
    runtime().block_on(store.put(&secret, "hidden".into())).unwrap();
    let endpoint = Endpoint::start(&server, &["--store", "s3://bucket", "--memory", "32M"]);
    let client = endpoint.bucket("bucket");
    let send = |method: Method, lines: &str| {
        let url = client.signed_url(method.clone(), &open, Duration::from_secs(60));
        let url = runtime().block_on(url).unwrap();
        let (path, query, host) = (url.path(), url.query().unwrap(), endpoint.address);
        let head = format!("{method} {path}?{query} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n");
        endpoint.raw(format!("{head}Content-Length: 0\r\n{lines}\r\n").as_bytes())
    };
    for line in
        ["x-amz-copy-source: /bucket/secret", "x-amz-tagging: a=b", "x-amz-meta-a: b", "X-Amz-Acl: private"]
    {
        let answer = send(Method::PUT, &format!("{line}\r\n"));
        assert!(answer.starts_with("HTTP/1.1 403") && answer.contains("is not signed"), "{line}: {answer}");
    }
    assert!(send(Method::GET, "").starts_with("HTTP/1.1 404"), "an upload that was refused is there");
    assert!(send(Method::PUT, "").starts_with("HTTP/1.1 200"));
    assert!(send(Method::GET, "Range: bytes=0-\r\n").starts_with("HTTP/1.1 416"), "it is empty");
    // By a client that signs them they are taken; but not two sources, of which a store might take either.
    let put = Signed { method: "PUT", target: "/bucket/open", ..SIGNED };
    let source = ("x-amz-copy-source", "/bucket/secret");
    let copied = endpoint.raw(&Signed { headers: &[source], ..put }.text(endpoint.address));
    assert!(copied.starts_with("HTTP/1.1 200") && send(Method::GET, "").ends_with("hidden"), "{copied}");
    let two = [source, ("x-amz-copy-source", "/other/secret")];
    let answer = endpoint.raw(&Signed { headers: &two, ..put }.text(endpoint.address));
    assert!(answer.starts_with("HTTP/1.1 400") && answer.contains("InvalidArgument"), "{answer}");
}

/// The list of the bucket with its owners, asked at that address by that key.
fn below_list(_: &Server, address: SocketAddr, (key, secret): (&str, &str)) -> String {
    let signed = Signed { target: "/bucket?fetch-owner=true&list-type=2", key, secret, ..SIGNED };
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(&signed.text(address)).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn ranges_and_conditions_are_answered_as_s3_has_them() {
    let Some(server) = versitygw("ranges_and_conditions_are_answered_as_s3_has_them") else { return };
    let store = below(&server, "bucket");
    let put = runtime().block_on(store.put(&Path::from("a"), "0123456789".into())).unwrap();
    runtime().block_on(store.put(&Path::from("empty"), "".into())).unwrap();
    let tag = put.e_tag.unwrap();
    let bare = tag.trim_matches('"');
    let endpoint = Endpoint::start(&server, &["--store", "s3://bucket", "--memory", "32M", "--anonymous"]);
    let (past, future) = ("Thu, 01 Jan 2015 00:00:00 GMT", "Fri, 01 Jan 2016 00:00:00 GMT");
    for (lines, status, body) in [
        (String::new(), "200", "0123456789"),
        ("Range: bytes=2-4\r\n".into(), "206", "234"),
        ("Range: bytes=7-\r\n".into(), "206", "789"),
        ("Range: bytes=-2\r\n".into(), "206", "89"),
        ("Range: bytes=-99\r\n".into(), "206", "0123456789"),
        ("Range: bytes=8-99\r\n".into(), "206", "89"),
        ("Range: bytes=0-1,4-5\r\n".into(), "200", "0123456789"),
        ("Range: bytes=5-2\r\n".into(), "200", "0123456789"),
        ("Range: bytes=10-\r\n".into(), "416", "<Code>InvalidRange</Code><Message>"),
        ("Range: bytes=-0\r\n".into(), "416", "<Code>InvalidRange</Code><Message>"),
        (format!("If-Match: {tag}\r\nRange: bytes=0-0\r\n"), "206", "0"),
        (format!("If-Match: {bare}\r\n"), "200", "0123456789"),
        ("If-Match: \"other\"\r\n".into(), "412", "<Code>PreconditionFailed</Code><Message>"),
        (format!("If-None-Match: {tag}\r\n"), "304", ""),
        ("If-None-Match: \"other\"\r\n".into(), "200", "0123456789"),
        (format!("If-Modified-Since: {past}\r\n"), "200", "0123456789"),
        (format!("If-Unmodified-Since: {future}\r\n"), "412", "<Code>PreconditionFailed</Code><Message>"),
        // Tags win over dates.
        (format!("If-Match: {tag}\r\nIf-Unmodified-Since: {past}\r\n"), "200", "0123456789"),
        (format!("If-None-Match: \"other\"\r\nIf-Modified-Since: {past}\r\n"), "200", "0123456789"),
        ("If-Modified-Since: yesterday\r\n".into(), "200", "0123456789"),
    ] {
        for _ in 0..2 {
            let answer = endpoint.get("/bucket/a", &lines);
            assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{lines}: {answer}");
            let is = answer.split_once("\r\n\r\n").unwrap().1;
            let as_wanted = if status == "416" || status == "412" { is.contains(body) } else { is == body };
            assert!(as_wanted, "{lines}: {answer}");
        }
    }
    let part = endpoint.get("/bucket/a?response-content-type=a/b", "Range: bytes=2-4\r\n");
    let lower = part.to_lowercase();
    for line in
        ["content-range: bytes 2-4/10", "content-length: 3", "content-type: a/b", "accept-ranges: bytes"]
    {
        assert!(lower.contains(&format!("\r\n{line}\r\n")), "{line}: {part}");
    }
    assert!(part.contains(&tag) && lower.contains("last-modified: "), "{part}");
    // A URL would fold these into another key.
    for key in ["a%2F..%2Fb", "x/../a", "./a"] {
        assert!(endpoint.get(&format!("/bucket/{key}"), "").starts_with("HTTP/1.1 501"), "{key}");
    }
    assert!(endpoint.get("/bucket/empty", "Range: bytes=0-\r\n").starts_with("HTTP/1.1 416"));
    assert!(endpoint.get("/bucket/empty", "Range: bytes=-1\r\n").starts_with("HTTP/1.1 416"));
    let host = endpoint.address;
    let head = format!("HEAD /bucket/a HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
    let head = endpoint.raw(head.as_bytes()).to_lowercase();
    assert!(head.starts_with("http/1.1 200") && head.contains("content-length: 10"), "{head}");
    assert!(head.ends_with("\r\n\r\n"), "{head}");
}

#[test]
fn unsigned_requests_only_read_and_come_from_no_web_page() {
    let Some(server) = versitygw("unsigned_requests_only_read_and_come_from_no_web_page") else { return };
    let store = below(&server, "bucket");
    runtime().block_on(store.put(&Path::from("a"), "abc".into())).unwrap();
    let endpoint = Endpoint::start(
        &server,
        &["--store", "s3://bucket", "--memory", "32M", "--anonymous", "--read-only"],
    );
    assert!(endpoint.get("/bucket/a", "").ends_with("abc"));
    assert!(endpoint.get("/bucket/a", "Origin: http://page.example\r\n").starts_with("HTTP/1.1 403"));
    // Images, scripts and links of a page have no `Origin`, nor have reads by a page that comes from a bucket.
    for site in ["cross-site", "same-site", "same-origin"] {
        let answer = endpoint.get("/bucket/a", &format!("Sec-Fetch-Site: {site}\r\n"));
        assert!(answer.starts_with("HTTP/1.1 403"), "{site}: {answer}");
    }
    assert!(endpoint.get("/bucket/a", "Sec-Fetch-Site: none\r\n").ends_with("abc"), "a user has typed it");
    let named = "GET /bucket/a HTTP/1.1\r\nHost: page.example:9000\r\nConnection: close\r\n\r\n";
    assert!(endpoint.raw(named.as_bytes()).starts_with("HTTP/1.1 403"));
    for method in ["PUT", "DELETE", "POST"] {
        let target = if method == "POST" { "/bucket?delete" } else { "/bucket/a" };
        let host = endpoint.address;
        let text = format!(
            "{method} {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
        );
        assert!(endpoint.raw(text.as_bytes()).starts_with("HTTP/1.1 403"), "{method}");
    }
    let put = Signed { method: "PUT", target: "/bucket/b", body: "b", digest_of: "b", ..SIGNED };
    let answer = endpoint.raw(&put.text(endpoint.address));
    assert!(answer.starts_with("HTTP/1.1 403") && answer.contains("only reads"), "{answer}");
    assert!(endpoint.get("/bucket/b", "").starts_with("HTTP/1.1 404"));
}

#[test]
fn writes_through_the_endpoint_are_seen_at_once_though_older_metadata_is_known() {
    let Some(server) =
        versitygw("writes_through_the_endpoint_are_seen_at_once_though_older_metadata_is_known")
    else {
        return;
    };
    let store = below(&server, "bucket");
    let folder = tempfile::tempdir().unwrap();
    let (_server, name) = serve(store.clone(), folder.path());
    let config = folder.path().join("config.toml").to_str().unwrap().to_owned();
    std::fs::write(&config, "[[store]]\nprefix = 's3://bucket'\nfreshness = 'immutable'\n").unwrap();
    for read_by in [["--memory", "32M"], ["--server", &name]] {
        // The configuration of a bucket wins over the command line.
        let arguments = [&["--config", &config, "--freshness", "always"][..], &read_by].concat();
        let endpoint = Endpoint::start(&server, &arguments);
        let (client, path, other) = (endpoint.bucket("bucket"), Path::from("a"), Path::from("other"));
        runtime().block_on(async {
            let read = async || client.get(&path).await.unwrap().bytes().await.unwrap();
            client.put(&path, "first".into()).await.unwrap();
            assert_eq!(read().await, "first");
            // Changes by other clients are not looked for, which shows that nothing is asked.
            store.put(&path, "outside".into()).await.unwrap();
            assert_eq!(client.head(&path).await.unwrap().size, 5);
            client.put(&path, "second!".into()).await.unwrap();
            assert_eq!(read().await, "second!");
            client.put(&other, "copied..".into()).await.unwrap();
            client.copy(&other, &path).await.unwrap();
            assert_eq!(read().await, "copied..");
            let mut upload =
                WriteMultipart::new_with_chunk_size(client.put_multipart(&path).await.unwrap(), 5 << 20);
            let long = s3::content(1, 11 << 20);
            upload.write(&long);
            upload.finish().await.unwrap();
            assert_eq!(read().await, long);
            client.delete(&path).await.unwrap();
            let error = client.get(&path).await.unwrap_err();
            assert!(matches!(error, object_store::Error::NotFound { .. }), "{error}");
        });
    }
}

#[test]
fn an_object_that_others_replace_is_read_anew_and_never_mixed() {
    let Some(server) = versitygw("an_object_that_others_replace_is_read_anew_and_never_mixed") else {
        return;
    };
    let (store, path) = (below(&server, "bucket"), Path::from("a"));
    let endpoint = Endpoint::start(&server, &["--store", "s3://bucket", "--memory", "32M"]);
    let client = endpoint.bucket("bucket");
    let len = 6 << 20;
    runtime().block_on(async {
        for version in 0..20 {
            store.put(&path, s3::content(version, len).into()).await.unwrap();
            let stream = client.get(&path).await.unwrap();
            let by_others = store.put(&path, s3::content(version + 100, len).into()).await;
            by_others.unwrap();
            // A read that has begun is of its version, or an error.
            if let Ok(bytes) = stream.bytes().await {
                s3::check(version, 0, &bytes);
            }
            let bytes = client.get(&path).await.unwrap().bytes().await.unwrap();
            s3::check(version + 100, 0, &bytes);
        }
    });
}

#[test]
fn a_server_of_the_cache_that_ends_is_told_and_the_next_one_goes_on() {
    let Some(server) = versitygw("a_server_of_the_cache_that_ends_is_told_and_the_next_one_goes_on") else {
        return;
    };
    let (store, path) = (below(&server, "bucket"), Path::from("a"));
    runtime().block_on(store.put(&path, s3::content(1, 1 << 20).into())).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (caches, name) = serve(store.clone(), folder.path());
    let endpoint = Endpoint::start(&server, &["--store", "s3://bucket", "--server", &name]);
    let client = endpoint.bucket("bucket");
    let read = || runtime().block_on(async { client.get(&path).await?.bytes().await });
    s3::check(1, 0, &read().unwrap());
    caches.stop();
    let error = read().unwrap_err().to_string();
    assert!(error.contains("ServiceUnavailable") || error.contains("503"), "{error}");
    let (_next, _) = serve(store, folder.path());
    s3::check(1, 0, &read().unwrap());
    let said = endpoint.said.lock().unwrap().clone();
    assert!(said.contains("failed bucket=\"bucket\"") && !said.contains(real::SECRET), "{said}");
}

#[test]
fn a_store_that_is_away_fails_requests_and_not_the_endpoint() {
    let Some(server) = versitygw("a_store_that_is_away_fails_requests_and_not_the_endpoint") else { return };
    drop(below(&server, "bucket"));
    let folder = tempfile::tempdir().unwrap();
    // Credentials that the store does not take.
    let mut wrong =
        command(&server, folder.path(), &["--store", "s3://bucket", "--memory", "32M", "--anonymous"]);
    let mut process = wrong.env("AWS_SECRET_ACCESS_KEY", "wrong-secret").spawn().unwrap();
    let mut events = BufReader::new(process.stderr.take().unwrap());
    let mut line = String::new();
    events.read_line(&mut line).unwrap();
    let address: SocketAddr =
        line.split("http://").nth(1).expect(&line).trim_end_matches(['"', '\n']).parse().unwrap();
    for target in ["/bucket/a", "/bucket?list-type=2"] {
        let mut stream = TcpStream::connect(address).unwrap();
        write!(stream, "GET {target} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 403") && answer.contains("AccessDenied"), "{answer}");
        assert!(!answer.contains(real::KEY) && !answer.contains("wrong-secret"), "{answer}");
    }
    kill_process(Pid::from_child(&process), Signal::TERM).unwrap();
    assert_eq!(process.wait().unwrap().code(), Some(0));
    let mut said = String::new();
    events.read_to_string(&mut said).unwrap();
    assert!(said.contains("ending signal=\"SIGTERM\"") && !said.contains(real::KEY), "{said}");
}

#[test]
fn more_requests_than_are_taken_are_told_to_slow_down_and_a_slow_client_is_cut() {
    let name = "more_requests_than_are_taken_are_told_to_slow_down_and_a_slow_client_is_cut";
    let Some(server) = versitygw(name) else { return };
    let store = below(&server, "bucket");
    runtime().block_on(store.put(&Path::from("a"), vec![7; 64 << 20].into())).unwrap();
    let arguments =
        ["--store", "s3://bucket", "--memory", "128M", "--anonymous", "--requests", "1", "--stall", "2"];
    let endpoint = Endpoint::start(&server, &arguments);
    let host = endpoint.address;
    let mut slow = TcpStream::connect(host).unwrap();
    write!(slow, "GET /bucket/a HTTP/1.1\r\nHost: {host}\r\n\r\n").unwrap();
    let mut first = [0; 16];
    slow.read_exact(&mut first).unwrap();
    assert!(first.starts_with(b"HTTP/1.1 200"));
    let answer = endpoint.get("/bucket/a", "Range: bytes=0-0\r\n");
    assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("SlowDown"), "{answer}");
    // The slow client is cut: the next one is answered, sooner or later.
    while endpoint.get("/bucket/a", "Range: bytes=0-0\r\n").starts_with("HTTP/1.1 503") {
        std::thread::yield_now();
    }
    // So is one whose headers, or whose body, do not come.
    for text in [
        format!("GET /bucket/a HTTP/1.1\r\nHost: {host}\r\n"),
        format!("PUT /bucket/b HTTP/1.1\r\nHost: {host}\r\nContent-Length: 9\r\n\r\nabc"),
    ] {
        let mut silent = TcpStream::connect(host).unwrap();
        silent.write_all(text.as_bytes()).unwrap();
        let mut all = Vec::new();
        let _ = silent.read_to_end(&mut all);
    }
    assert!(endpoint.get("/bucket/b", "").starts_with("HTTP/1.1 404"));
}

/// A store of one object, whose answers have these lines beside what all have.
fn store_with(lines: &'static [u8]) -> SocketAddr {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            std::thread::spawn(move || {
                let mut reader = BufReader::new(stream.try_clone().unwrap());
                loop {
                    let (mut head, mut line) = (String::new(), String::new());
                    while reader.read_line(&mut line).is_ok_and(|bytes| bytes > 2) {
                        head.push_str(&line.to_lowercase());
                        line.clear();
                    }
                    if head.is_empty() {
                        return;
                    }
                    let is_part = head.contains("\r\nrange:");
                    let status = if is_part { "206 Partial Content" } else { "200 OK" };
                    let mut answer =
                        format!("HTTP/1.1 {status}\r\nContent-Length: 6\r\nETag: \"e\"\r\n").into_bytes();
                    answer.extend(b"Last-Modified: Fri, 01 Jan 2016 00:00:00 GMT\r\n");
                    answer.extend(if is_part { &b"Content-Range: bytes 0-5/6\r\n"[..] } else { b"" });
                    answer.extend([lines, b"\r\n"].concat());
                    answer.extend(if head.starts_with("head") { &b""[..] } else { b"object" });
                    if stream.write_all(&answer).is_err() {
                        return;
                    }
                }
            });
        }
    });
    address
}

/// 1. A store tells of an object what the crate `object_store` has no attribute for, or what is not ASCII.
/// 2. The endpoint left out the first, and answered 503 for the second, for ever.
#[test]
fn all_headers_of_an_object_are_told_by_the_endpoint_as_by_the_store() {
    const LINES: &[u8] = b"expires: Fri, 01 Jan 2027 00:00:00 GMT\r\n\
        cache-control: max-age=5, private\r\n\
        content-disposition: attachment; filename=\"\xc3\xa9.txt\"\r\n\
        content-encoding: gzip\r\n\
        content-language: de, en\r\n\
        content-type: text/plain; charset=utf-8\r\n\
        x-amz-meta-caf: caf\xe9\r\n\
        x-amz-meta-one: two, three\r\n\
        x-amz-meta-quinion-kept-expires: mine\r\n\
        x-amz-missing-meta: 2\r\n\
        x-amz-storage-class: STANDARD_IA\r\n\
        x-amz-version-id: 3/L4kqtJlcpXroDTDmJ+rmSpXd3dIbrHY\r\n\
        x-amz-website-redirect-location: /other\r\n";
    let Some(server) = versitygw("all_headers_of_an_object_are_told_by_the_endpoint_as_by_the_store") else {
        return;
    };
    let _ = rustls::crypto::ring::default_provider().install_default();
    let store = format!("http://{}", store_with(LINES));
    let folder = tempfile::tempdir().unwrap();
    let name = folder.path().join("q/s.sock").to_str().unwrap().to_owned();
    let config = quinion_serve::config::StoreConfig {
        prefix: "s3://bucket".into(),
        endpoint: Some(store.clone()),
        ..Default::default()
    };
    let environment = [("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "b"), ("AWS_REGION", "r")];
    let environment = environment.map(|(name, value)| (name.to_owned(), value.to_owned()));
    let (opened, options) = quinion_serve::stores::open(&config, &environment).unwrap();
    let cache = Cache::builder().memory(32 << 20).build().unwrap();
    let builder = quinion_service::Server::builder(cache).store("s3://bucket", opened, options);
    let _server = builder.start(&name).unwrap();
    for read_by in [["--memory", "32M"], ["--server", &name]] {
        let arguments = [&["--store", "s3://bucket", "--anonymous"][..], &read_by].concat();
        let endpoint = Endpoint::start_with(&server, &arguments, |command| {
            command.env("AWS_ENDPOINT_URL_S3", &store);
        });
        for (method, range) in [("GET", ""), ("GET", "Range: bytes=0-5\r\n"), ("HEAD", ""), ("GET", "")] {
            let host = endpoint.address;
            let mut stream = TcpStream::connect(host).unwrap();
            let text =
                format!("{method} /bucket/a HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{range}\r\n");
            stream.write_all(text.as_bytes()).unwrap();
            let mut answer = Vec::new();
            stream.read_to_end(&mut answer).unwrap();
            let text = answer.escape_ascii().to_string();
            for line in LINES.split_inclusive(|&byte| byte == b'\n') {
                let found =
                    answer.windows(line.len()).filter(|bytes| bytes.eq_ignore_ascii_case(line)).count();
                assert_eq!(found, 1, "{}: {text}", line.escape_ascii());
            }
            assert_eq!(answer.ends_with(b"\r\n\r\nobject"), method == "GET", "{text}");
        }
    }
}

/// The head and the body of the next request of a connection, in lower case.
fn next_request(reader: &mut BufReader<TcpStream>) -> Option<String> {
    let (mut head, mut line) = (String::new(), String::new());
    while reader.read_line(&mut line).is_ok_and(|bytes| bytes > 2) {
        head.push_str(&line.to_lowercase());
        line.clear();
    }
    let len = head.split("\r\ncontent-length: ").nth(1).map_or("0", |rest| rest.lines().next().unwrap());
    let mut body = vec![0; len.parse().unwrap()];
    reader.read_exact(&mut body).ok()?;
    (!head.is_empty()).then(|| head + &String::from_utf8_lossy(&body))
}

/// A store at this address, each of whose connections is served by a thread of its own by `serve`.
fn store_by(serve: impl Fn(TcpStream) + Clone + Send + 'static) -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (stream, serve) = (stream.unwrap(), serve.clone());
            std::thread::spawn(move || serve(stream));
        }
    });
    format!("http://{address}")
}

/// An endpoint over a store at that address.
fn endpoint_over(store: &str, arguments: &[&str]) -> Endpoint {
    let arguments = [&["--store", "s3://bucket", "--anonymous", "--memory", "32M"][..], arguments].concat();
    Endpoint::start_alone(&arguments, |command| {
        command.env("AWS_ACCESS_KEY_ID", "a").env("AWS_SECRET_ACCESS_KEY", "b");
        command.env("AWS_REGION", "us-east-1").env("AWS_ENDPOINT_URL_S3", store);
    })
}

/// 1. A client ends an upload, and goes away while the store still works on it.
/// 2. The endpoint forgot the object at once. Another client read the old version, which was taken for current.
/// 3. The store was done. Clients had the old version as long as the freshness said.
#[test]
fn a_write_whose_client_is_gone_is_known_when_the_store_has_ended_it() {
    let (asked, was_asked) = mpsc::channel();
    let (release, released) = mpsc::channel::<()>();
    let state = Arc::new((Mutex::new((asked, released)), AtomicU64::new(1)));
    let store = store_by(move |mut stream| {
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        while let Some(request) = next_request(&mut reader) {
            let (channels, version) = &*state;
            if request.starts_with("post") {
                let channels = channels.lock().unwrap();
                channels.0.send(()).unwrap();
                channels.1.recv().unwrap();
                version.fetch_add(1, Ordering::SeqCst); // the test sees it after the answer
            }
            let version = version.load(Ordering::SeqCst); // as above
            let is_part = request.contains("\r\nrange:");
            let (status, range) = match is_part {
                true => ("206 Partial Content", "Content-Range: bytes 0-5/6\r\n"),
                false => ("200 OK", ""),
            };
            let body = if request.starts_with("head") {
                String::new()
            } else {
                format!("object{version}")[1..].into()
            };
            let lines = "Last-Modified: Fri, 01 Jan 2016 00:00:00 GMT\r\nContent-Length: 6\r\n";
            let head = format!("HTTP/1.1 {status}\r\nETag: \"{version}\"\r\n{lines}{range}\r\n");
            let _ = stream.write_all((head + &body).as_bytes()); // the endpoint may be gone
        }
    });
    let endpoint = endpoint_over(&store, &["--freshness", "immutable"]);
    let read = || endpoint.get("/bucket/a", "").rsplit("\r\n").next().unwrap().to_owned();
    assert_eq!(read(), "bject1");
    let end =
        Signed { method: "POST", target: "/bucket/a?uploadId=u", body: "<C/>", digest_of: "<C/>", ..SIGNED };
    let mut client = TcpStream::connect(endpoint.address).unwrap();
    client.write_all(&end.text(endpoint.address)).unwrap();
    was_asked.recv().unwrap();
    drop(client);
    // Long enough that the endpoint knows of the client's end; a shorter time would hide the fault, and fail nothing.
    for _ in 0..50 {
        assert_eq!(read(), "bject1");
        std::thread::sleep(Duration::from_millis(5));
    }
    release.send(()).unwrap();
    // As soon as the endpoint has the store's answer.
    let begun = Instant::now();
    while read() != "bject2" {
        assert!(begun.elapsed() < Duration::from_secs(20), "the old version is kept");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// 1. A store does not answer, and a client asks for a range.
/// 2. When the deadline was over, the endpoint asked once more, with a deadline as long.
#[test]
fn a_store_that_does_not_answer_is_not_asked_again_for_a_range() {
    let requests = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&requests);
    let store = store_by(move |stream| {
        let mut reader = BufReader::new(stream);
        while next_request(&mut reader).is_some() {
            counted.fetch_add(1, Ordering::SeqCst); // before the answer, after which it is read
        }
    });
    let endpoint = endpoint_over(&store, &["--deadline", "0.5"]);
    let answer = endpoint.get("/bucket/a", "Range: bytes=0-9\r\n");
    assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");
    assert_eq!(requests.load(Ordering::SeqCst), 1); // as above
}

/// 1. A client takes an answer slowly; others have sent nothing, parts of headers, and a part of a body.
/// 2. SIGTERM.
/// 3. The others were waited for until the time for answers was over, and then the answer was cut, too.
#[test]
fn the_end_waits_for_answers_and_not_for_requests_that_are_half_sent() {
    let name = "the_end_waits_for_answers_and_not_for_requests_that_are_half_sent";
    let Some(server) = versitygw(name) else { return };
    let store = below(&server, "bucket");
    let (path, len) = (Path::from("a"), 64 << 20);
    runtime().block_on(store.put(&path, vec![7; len].into())).unwrap();
    let arguments = ["--store", "s3://bucket", "--memory", "128M", "--anonymous"];
    let mut endpoint = Endpoint::start(&server, &arguments);
    let host = endpoint.address;
    let connected = |text: &str| {
        let mut stream = TcpStream::connect(host).unwrap();
        stream.write_all(text.as_bytes()).unwrap();
        stream
    };
    let mut slow = connected(&format!("GET /bucket/a HTTP/1.1\r\nHost: {host}\r\n\r\n"));
    let mut first = [0; 16];
    slow.read_exact(&mut first).unwrap();
    let half = format!("GET /bucket/a HTTP/1.1\r\nHost: {host}\r\n");
    let head = format!("HEAD /bucket/a HTTP/1.1\r\nHost: {host}\r\n\r\n");
    let mut others = vec![connected(""), connected(&half), connected(&head), connected(&(head + &half))];
    for answered in &mut others[2..] {
        answered.read_exact(&mut first).unwrap();
        assert!(first.starts_with(b"HTTP/1.1 200"));
    }
    let put = Signed { method: "PUT", target: "/bucket/b", body: "abcdef", digest_of: "abcdef", ..SIGNED };
    let put = put.text(host);
    others.push(connected(std::str::from_utf8(&put[..put.len() - 3]).unwrap()));
    // The endpoint has taken all of these connections, which it does in their order, before it is told to end.
    assert!(endpoint.get("/bucket/a", "Range: bytes=0-0\r\n").starts_with("HTTP/1.1 206"));
    kill_process(Pid::from_child(&endpoint.process), Signal::TERM).unwrap();
    for other in &mut others {
        let _ = other.read_to_end(&mut Vec::new()); // also a reset is an end
    }
    let mut answer = Vec::new();
    slow.read_to_end(&mut answer).unwrap();
    let body = answer.windows(4).position(|bytes| bytes == b"\r\n\r\n").unwrap() + 4;
    assert_eq!(answer.len() - body, len, "the answer under way was cut");
    assert_eq!(endpoint.process.wait().unwrap().code(), Some(0));
}

#[test]
fn boto3_reads_and_writes_at_the_endpoint_as_at_s3() {
    let test = "boto3_reads_and_writes_at_the_endpoint_as_at_s3";
    let Some(server) = versitygw(test) else { return };
    // boto3 comes with moto.
    let Some(python) = real::installed("moto-5.2.5", "bin/python") else {
        return real::skip::missing(test, "moto");
    };
    drop(below(&server, "bucket"));
    let endpoint = Endpoint::start(&server, &["--store", "s3://bucket", "--memory", "64M"]);
    let mut client = Command::new(python);
    client.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/boto.py"));
    client.arg(format!("http://{}", endpoint.address));
    client
        .env("AWS_ACCESS_KEY_ID", KEY)
        .env("AWS_SECRET_ACCESS_KEY", SECRET)
        .env("AWS_DEFAULT_REGION", "us-east-1");
    client.env("AWS_EC2_METADATA_DISABLED", "true").env("AWS_CONFIG_FILE", "/dev/null");
    let output = client.env("AWS_SHARED_CREDENTIALS_FILE", "/dev/null").output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && out.ends_with("all went well\n"), "{out}{err}");
}

/// 1. The address of the endpoint, meant for its clients, is in its own environment as that of its store.
/// 2. It asked itself, and each read hung.
#[test]
fn an_endpoint_whose_store_is_itself_does_not_start() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_quinion-s3"));
    command.env("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9").env("AWS_SKIP_SIGNATURE", "true");
    command.args(["serve", "--store", "s3://bucket", "--memory", "32M", "--anonymous"]);
    command.args(["--listen", "127.0.0.1:9"]);
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("it would ask itself; start it with the store's own address"), "{said}");
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn a_start_that_fails_says_why_in_one_line() {
    let Some(server) = versitygw("a_start_that_fails_says_why_in_one_line") else { return };
    let folder = tempfile::tempdir().unwrap();
    let open = folder.path().join("open");
    std::fs::write(&open, "one secret").unwrap();
    std::fs::set_permissions(&open, Permissions::from_mode(0o644)).unwrap();
    let listening = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = listening.local_addr().unwrap().to_string();
    for (arguments, why) in [
        (&[][..], "there is no store"),
        (&["--store", "gs://bucket"], "whole buckets of S3"),
        (&["--store", "s3://bucket/folder"], "whole buckets of S3"),
        (&["--store", "s3://b", "--store", "s3://b/"], "two stores"),
        (&["--store", "s3://bucket", "--server", "/nowhere/s.sock"], "/nowhere/s.sock"),
        (&["--store", "s3://bucket", "--memory", "32M", "--listen", &taken], &taken),
        (&["--store", "s3://bucket", "--key-file", open.to_str().unwrap()], "chmod 600"),
    ] {
        let mut command = command(&server, folder.path(), &[]);
        // An option given twice is an error of the command line: these replace the former ones.
        if arguments.contains(&"--key-file") || arguments.contains(&"--listen") {
            command = bare_command(&server, folder.path());
            command.args(if arguments.contains(&"--listen") { &["--anonymous"][..] } else { &[] });
        }
        let output = command.args(arguments).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.starts_with("quinion-s3: failed") && said.contains(why), "{why}: {said}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }
}

/// The program with the environment of [`command`], and no arguments but the verb.
fn bare_command(server: &Server, folder: &FilePath) -> Command {
    let full = command(server, folder, &[]);
    let mut bare = Command::new(full.get_program());
    bare.arg("serve");
    for (name, value) in full.get_envs() {
        match value {
            Some(value) => bare.env(name, value),
            None => bare.env_remove(name),
        };
    }
    bare
}

/// versitygw behind HTTPS, with a certificate of an authority that nothing knows; the file with that.
fn versitygw_behind_tls(test: &str) -> Option<(Server, std::path::PathBuf)> {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let certificates = Certificates::within(folder.path());
    let server = Server::versitygw_with(folder, &certificates.of_versitygw());
    or_skipped(server, test, "versitygw").map(|server| (server, certificates.authority))
}

#[test]
fn a_store_of_a_private_authority_is_read_and_written_by_an_endpoint_that_trusts_it() {
    let test = "a_store_of_a_private_authority_is_read_and_written_by_an_endpoint_that_trusts_it";
    let Some((server, trusted)) = versitygw_behind_tls(test) else { return };
    server.make_bucket("bucket");
    let url = server.endpoint().replace("http://", "https://");
    let with = |words: &[&str]| {
        let words = [&["--store", "s3://bucket", "--memory", "32M"], words].concat();
        Endpoint::start_with(&server, &words, |command| {
            command.env("AWS_ENDPOINT_URL_S3", &url);
        })
    };
    let (path, data) = (Path::from("a"), s3::content(1, 2 << 20));
    let endpoint = with(&["--ca-certificates", trusted.to_str().unwrap()]);
    let client = endpoint.bucket("bucket");
    runtime().block_on(async {
        client.put(&path, data.clone().into()).await.unwrap();
        assert_eq!(client.get(&path).await.unwrap().bytes().await.unwrap(), data);
    });
    let endpoint = with(&[]);
    let client = endpoint.bucket("bucket");
    let (read, written) =
        runtime().block_on(async { (client.get(&path).await, client.put(&path, "other".into()).await) });
    assert!(read.is_err() && written.is_err(), "nothing has said to trust it");
}
