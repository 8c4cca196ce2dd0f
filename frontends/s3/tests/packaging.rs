//! Packaging: the endpoint's container in the manifest for Kubernetes has options that the endpoint takes.
//!
//! The other containers are compared in `frontends/serve/tests/packaging.rs`.

use std::path::Path;
use std::process::Command;

use yaml_rust2::{Yaml, YamlLoader};

fn manifest() -> Vec<Yaml> {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
    let text = std::fs::read_to_string(repository.join("packaging/kubernetes/quinion.yaml")).unwrap();
    YamlLoader::load_from_str(&text).unwrap()
}

fn of_kind<'m>(manifest: &'m [Yaml], kind: &str) -> &'m Yaml {
    manifest.iter().find(|one| one["kind"].as_str() == Some(kind)).unwrap_or_else(|| panic!("no {kind}"))
}

#[test]
fn the_endpoints_container_says_what_the_endpoint_takes() {
    let manifest = manifest();
    let pod = &of_kind(&manifest, "DaemonSet")["spec"]["template"]["spec"];
    let containers = pod["containers"].as_vec().unwrap();
    let s3 = containers.iter().find(|one| one["name"].as_str() == Some("s3")).unwrap();
    assert_eq!(s3["command"][0].as_str(), Some("/usr/bin/quinion-s3"));
    let words: Vec<&str> = s3["args"].as_vec().unwrap().iter().map(|word| word.as_str().unwrap()).collect();
    let help = Command::new(env!("CARGO_BIN_EXE_quinion-s3")).args([words[0], "--help"]).output().unwrap();
    assert!(help.status.success(), "there is no verb {}", words[0]);
    let help = String::from_utf8(help.stdout).unwrap();
    for option in words[1..].iter().map(|word| word.split('=').next().unwrap()) {
        assert!(
            help.contains(&format!("{option} ")) || help.contains(&format!("{option}\n")),
            "{option}: {help}"
        );
    }
    let value =
        |option: &str| words.iter().find_map(|word| word.strip_prefix(option)?.strip_prefix('=')).unwrap();
    // The server is the one beside it, and so is the bucket.
    let config = of_kind(&manifest, "ConfigMap")["data"]["serve.toml"].as_str().unwrap();
    assert!(config.contains(&format!("name = \"{}\"", value("--server"))), "{config}");
    assert!(config.contains(&format!("prefix = \"{}\"", value("--store"))), "{config}");
    for option in ["--server", "--key-file"] {
        let mounts = s3["volumeMounts"].as_vec().unwrap();
        let is_mounted =
            mounts.iter().any(|one| Path::new(value(option)).starts_with(one["mountPath"].as_str().unwrap()));
        assert!(is_mounted, "{option} is on no volume");
    }
    let port: i64 = value("--listen").rsplit(':').next().unwrap().parse().unwrap();
    assert_eq!(s3["ports"][0]["containerPort"].as_i64(), Some(port));
    let service = &of_kind(&manifest, "Service")["spec"]["ports"][0];
    assert_eq!(service["port"].as_i64(), Some(port));
    assert_eq!(service["targetPort"].as_str(), s3["ports"][0]["name"].as_str());
}
