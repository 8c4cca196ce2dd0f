//! Says how the object is linked: its own functions are its own. Nothing is built or looked for here. That the
//! object exports what it should, and no more, is for a test of the command's, which carries it; that its wrappers
//! are reached, too.

fn main() {
    // The object takes the addresses of its own wrappers, to send the C library's callers there. Without this an
    // object in front of ours that has a function of the same name would be meant.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic-functions");
    println!("cargo::rerun-if-changed=build.rs");
}
