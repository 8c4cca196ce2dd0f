//! Clouds: the programs over stores of Google's and of Azure's protocol, by users' URLs and environment.
//!
//! ```text
//!   fake-gcs-server, Azurite   <-- quinion-object cat, stat; quinion-serve, as processes -->   Client, here
//! ```
//!
//! `scripts/setup` installs both servers; where it could not, tests say SKIPPED, or fail under `cargo xtask test`.

use std::io::{BufRead, BufReader};
use std::path::Path as FilePath;
use std::process::{Child, Command, Output, Stdio};

use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use quinion_service::{Client, ErrorKind};
use quinion_testing_s3 as s3;

#[path = "../../../object/tests/clouds/mod.rs"]
mod clouds;
#[path = "../../../object/tests/real/mod.rs"]
mod real;

use clouds::{azure, azure_endpoint, google};
use real::{ACCOUNT, ACCOUNT_KEY, Server, or_skipped};

const LEN: usize = 3 << 20;
const KEY: &str = "folder/with a space";
const KEY_IN_URLS: &str = "folder/with%20a%20space";

/// A process that ends with the test.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A program with no variables of stores but these.
fn program(path: &str, variables: &[(&str, &str)]) -> Command {
    let mut command = Command::new(path);
    let names = std::env::vars_os().map(|(name, _)| name);
    let is_of_stores = |name: &std::ffi::OsString| {
        ["AWS_", "GOOGLE_", "AZURE_", "AZURITE_"]
            .iter()
            .any(|start| name.to_string_lossy().starts_with(start))
    };
    names.filter(is_of_stores).for_each(|name| {
        command.env_remove(name);
    });
    command.env_remove("NOTIFY_SOCKET").env_remove("HOME").envs(variables.iter().copied());
    command.stdin(Stdio::null());
    command
}

fn object(variables: &[(&str, &str)], arguments: &[&str]) -> Output {
    program(env!("CARGO_BIN_EXE_quinion-object"), variables).args(arguments).output().unwrap()
}

fn serve(folder: &FilePath, variables: &[(&str, &str)], prefix: &str) -> Process {
    let mut command = program(env!("CARGO_BIN_EXE_quinion-serve"), variables);
    command.args(["--memory", "32M", "--store", prefix, "--name"]).arg(folder.join("q/s.sock"));
    let mut process = Process(command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap());
    let mut line = String::new();
    BufReader::new(process.0.stderr.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.contains("listening"), "{line}");
    process
}

fn put(store: &dyn ObjectStore, version: u32) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(store.put(&Path::from(KEY), s3::content(version, LEN).into())).unwrap();
}

/// An object of `store`, whose URL begins with `prefix`, is read by each way of the programs that `variables` allow.
fn read_by_programs(store: &dyn ObjectStore, prefix: &str, variables: &[(&str, &str)]) {
    put(store, 1);
    let url = format!("{prefix}/{KEY_IN_URLS}");
    let cat = object(variables, &["cat", "--range", "5..", &url]);
    assert!(cat.status.success(), "{}", String::from_utf8_lossy(&cat.stderr));
    assert_eq!(cat.stdout.len(), LEN - 5);
    s3::check(1, 5, &cat.stdout);
    let stat = object(variables, &["stat", "--json", &url]);
    let told = String::from_utf8_lossy(&stat.stdout);
    assert!(stat.status.success() && told.contains(&LEN.to_string()), "{told}");
    let none = object(variables, &["cat", &format!("{prefix}/none")]);
    assert_eq!((none.status.code(), none.stdout.len()), (Some(1), 0));
    let folder = tempfile::tempdir().unwrap();
    let _server = serve(folder.path(), variables, prefix);
    let client = Client::connect(folder.path().join("q/s.sock").to_str().unwrap()).unwrap();
    let first = client.open(&url).unwrap();
    let mut bytes = vec![0; LEN];
    first.read_exact_at(&mut bytes, 0).unwrap();
    s3::check(1, 0, &bytes);
    put(store, 2);
    first.read_exact_at(&mut bytes, 0).unwrap();
    s3::check(1, 0, &bytes);
    let second = client.open(&url).unwrap();
    assert_ne!((second.e_tag(), second.version()), (first.e_tag(), first.version()));
    second.read_exact_at(&mut bytes, 0).unwrap();
    s3::check(2, 0, &bytes);
    assert_eq!(client.open(&format!("{prefix}/none")).unwrap_err().kind(), ErrorKind::Open);
}

#[test]
fn objects_of_gs_urls_are_read_from_the_base_url_of_the_environment() {
    let name = "objects_of_gs_urls_are_read_from_the_base_url_of_the_environment";
    let Some(server) = or_skipped(Server::fake_gcs_server(), name, "fake-gcs-server") else { return };
    let (store, endpoint) = (google(&server, "bucket"), server.endpoint());
    let variables = [("GOOGLE_BASE_URL", &*endpoint), ("GOOGLE_SKIP_SIGNATURE", "true")];
    read_by_programs(&*store, "gs://bucket", &variables);
}

#[test]
fn objects_of_az_urls_are_read_from_the_endpoint_of_the_environment() {
    let name = "objects_of_az_urls_are_read_from_the_endpoint_of_the_environment";
    let Some(server) = or_skipped(Server::azurite(), name, "azurite") else { return };
    let account = [("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT), ("AZURE_STORAGE_ACCOUNT_KEY", ACCOUNT_KEY)];
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (endpoint, root) = (azure_endpoint(&server), server.endpoint());
    for (container, further) in [
        ("one", &[("AZURE_STORAGE_ENDPOINT", &*endpoint)][..]),
        ("two", &[("AZURE_ENDPOINT", &*endpoint)]),
        ("emulated", &[("AZURE_STORAGE_USE_EMULATOR", "true"), ("AZURITE_BLOB_STORAGE_URL", &*root)]),
    ] {
        let store = runtime.block_on(azure(&server, container));
        read_by_programs(&*store, &format!("az://{container}"), &[&account[..], further].concat());
    }
    // Another key than the account's opens nothing.
    let wrong = [account[0], ("AZURE_STORAGE_ACCOUNT_KEY", "d3Jvbmc="), ("AZURE_ENDPOINT", &*endpoint)];
    let refused = object(&wrong, &["cat", &format!("az://two/{KEY_IN_URLS}")]);
    assert_eq!((refused.status.code(), refused.stdout.len()), (Some(1), 0));
}
