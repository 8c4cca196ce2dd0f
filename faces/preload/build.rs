//! Says how the object is linked.

fn main() {
    // The object takes the addresses of its own wrappers, to send the C library's callers there. Without this an
    // object in front of ours that has a function of the same name would be meant.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic-functions");
    println!("cargo::rerun-if-changed=build.rs");
}
