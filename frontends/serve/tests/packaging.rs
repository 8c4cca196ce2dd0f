//! Packaging: the manifest for Kubernetes and the recipe of the image have options that the programs take.
//!
//! Neither is run here, which takes a cluster and a container engine. What the endpoint's container says is compared in
//! `frontends/s3/tests/packaging.rs`.

use std::path::Path;
use std::process::Command;

use quinion_serve::config::Config;
use yaml_rust2::{Yaml, YamlLoader};

fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap()
}

fn manifest() -> Vec<Yaml> {
    let text = std::fs::read_to_string(repository().join("packaging/kubernetes/quinion.yaml")).unwrap();
    YamlLoader::load_from_str(&text).unwrap()
}

fn of_kind<'m>(manifest: &'m [Yaml], kind: &str) -> &'m Yaml {
    manifest.iter().find(|one| one["kind"].as_str() == Some(kind)).unwrap_or_else(|| panic!("no {kind}"))
}

fn pod(manifest: &[Yaml]) -> &Yaml {
    &of_kind(manifest, "DaemonSet")["spec"]["template"]["spec"]
}

fn container<'p>(pod: &'p Yaml, name: &str) -> &'p Yaml {
    let all = ["containers", "initContainers"].into_iter().flat_map(|key| pod[key].as_vec().unwrap());
    all.into_iter()
        .find(|one| one["name"].as_str() == Some(name))
        .unwrap_or_else(|| panic!("no container {name}"))
}

fn words(list: &Yaml) -> Vec<&str> {
    list.as_vec().unwrap().iter().map(|word| word.as_str().unwrap()).collect()
}

/// The folders that a container sees, each with the volume behind it.
fn mounts(container: &Yaml) -> Vec<(&str, &str)> {
    let mounts = container["volumeMounts"].as_vec().unwrap().iter();
    mounts.map(|mount| (mount["mountPath"].as_str().unwrap(), mount["name"].as_str().unwrap())).collect()
}

fn config(manifest: &[Yaml]) -> Config {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("serve.toml");
    std::fs::write(&path, of_kind(manifest, "ConfigMap")["data"]["serve.toml"].as_str().unwrap()).unwrap();
    Config::read(&path).unwrap()
}

#[test]
fn the_servers_container_says_what_the_server_takes() {
    let manifest = manifest();
    let serve = container(pod(&manifest), "serve");
    assert_eq!(words(&serve["command"]), ["/usr/bin/quinion-serve"]);
    let help = Command::new(env!("CARGO_BIN_EXE_quinion-serve")).arg("--help").output().unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    let words = words(&serve["args"]);
    for option in words.iter().filter(|word| word.starts_with("--")) {
        let option = option.split('=').next().unwrap();
        assert!(
            help.contains(&format!("{option} ")) || help.contains(&format!("{option}\n")),
            "{option}: {help}"
        );
    }
    let file = words[words.iter().position(|word| *word == "--config").unwrap() + 1];
    assert!(
        mounts(serve).iter().any(|(path, name)| Path::new(file).starts_with(path) && *name == "config"),
        "{file}"
    );
    assert!(file.ends_with("/serve.toml"), "the ConfigMap has that file alone");
}

#[test]
fn the_configuration_is_read_and_its_paths_are_mounted() {
    let manifest = manifest();
    let (config, serve) = (config(&manifest), container(pod(&manifest), "serve"));
    let (name, disk) = (config.name.unwrap(), config.disk.unwrap());
    let is_mounted = |path: &Path, volume: &str| {
        mounts(serve).iter().any(|(mount, name)| path.starts_with(mount) && *name == volume)
    };
    assert!(is_mounted(Path::new(&name), "sockets") && is_mounted(&disk.folder, "disk"), "{name} {disk:?}");
    let script = words(&container(pod(&manifest), "folders")["args"])[0].to_owned();
    for folder in [Path::new(&name).parent().unwrap(), &disk.folder] {
        assert!(script.contains(folder.to_str().unwrap()), "{folder:?} is not made: {script}");
    }
    let port = i64::from(config.metrics.unwrap().port());
    let ports = serve["ports"].as_vec().unwrap();
    let is_metrics = |one: &Yaml| one["name"].as_str() == Some("metrics");
    assert!(ports.iter().any(|one| one["containerPort"].as_i64() == Some(port) && is_metrics(one)));
    assert_eq!(serve["readinessProbe"]["httpGet"]["path"].as_str(), Some("/healthz"));
    // The limit has room for the cache and the program.
    let limit = serve["resources"]["limits"]["memory"].as_str().unwrap().strip_suffix("Gi").unwrap();
    assert!(
        limit.parse::<u64>().unwrap() << 30 > config.memory.unwrap().0,
        "the limit is below the cache's bound"
    );
}

#[test]
fn every_mount_has_its_volume_and_every_process_the_same_user_without_capabilities() {
    let manifest = manifest();
    let pod = pod(&manifest);
    assert_eq!(pod["hostPID"].as_bool(), Some(true), "clients share the server's PID namespace");
    assert!(pod["hostUsers"].is_badvalue() && pod["securityContext"]["fsGroup"].is_badvalue());
    let user = pod["securityContext"]["runAsUser"].as_i64().unwrap();
    assert_eq!(pod["securityContext"]["runAsGroup"].as_i64(), Some(user));
    let names: Vec<_> =
        pod["volumes"].as_vec().unwrap().iter().map(|one| one["name"].as_str().unwrap()).collect();
    for name in ["folders", "serve", "s3"] {
        let one = container(pod, name);
        for (path, volume) in mounts(one) {
            assert!(names.contains(&volume), "{path} of {name} is of no volume");
        }
        assert_eq!(words(&one["securityContext"]["capabilities"]["drop"]), ["ALL"], "{name}");
        if name != "folders" {
            assert!(one["securityContext"]["runAsUser"].is_badvalue(), "{name} is another user");
            assert!(one["securityContext"]["capabilities"]["add"].is_badvalue(), "{name} has capabilities");
        }
    }
    let script = words(&container(pod, "folders")["args"])[0].to_owned();
    let owned = format!("-o {user} -g {user}");
    assert_eq!(script.matches("install ").count(), script.matches(&owned).count(), "{script}");
    let recipe = std::fs::read_to_string(repository().join("packaging/Containerfile")).unwrap();
    assert!(recipe.contains(&format!("USER {user}:{user}\n")), "{recipe}");
}

#[test]
fn the_recipe_builds_the_programs_that_it_copies_by_a_compiler_that_can() {
    let recipe = std::fs::read_to_string(repository().join("packaging/Containerfile")).unwrap();
    for (package, programs) in [
        ("quinion-cli", &["quinion"][..]),
        ("quinion-serve", &["quinion-serve", "quinion-object"]),
        ("quinion-s3", &["quinion-s3"]),
    ] {
        assert!(recipe.contains(&format!("-p {package}")), "{package} is not built");
        for program in programs {
            assert!(
                recipe.contains(&format!("/source/target/release/{program} ")),
                "{program} is not copied"
            );
        }
    }
    let version = recipe.split("/rust:1.").nth(1).and_then(|rest| rest.split('-').next()).unwrap();
    let manifest = std::fs::read_to_string(repository().join("frontends/s3/Cargo.toml")).unwrap();
    let least = manifest.split("rust-version = \"1.").nth(1).and_then(|rest| rest.split('"').next()).unwrap();
    assert!(
        version.parse::<u32>().unwrap() >= least.parse().unwrap(),
        "1.{version} does not build 1.{least}"
    );
}
